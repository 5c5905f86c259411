"""Requests refuse what a server would choke on."""

import numpy as np
import pytest

from rollout.generation import GenerationRequest, SamplingParams


def request(**changes: object) -> GenerationRequest:
    given = {
        "request_id": "r",
        "group_id": "g",
        "prompt_ids": np.array([5, 17, 9], np.int32),
        "sampling": SamplingParams(max_new_tokens=4),
        "seed": 1,
    }
    return GenerationRequest(**(given | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt_ids": np.array([], np.int32)}, "prompt is empty"),
        ({"prompt_ids": np.array([3, -1], np.int32)}, "-1"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"request_id": ""}, "empty"),
    ],
)
def test_bad_values_are_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        request(**changes)


@pytest.mark.parametrize("ids", [[1, 2], np.array([1, 2], np.int64), np.array([[1, 2]], np.int32)])
def test_a_prompt_of_another_type_is_refused(ids: object) -> None:
    with pytest.raises(TypeError, match="int32"):
        request(prompt_ids=ids)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"stop_token_ids": (-1,)}, "token ids"),
        ({"logit_bias": {3: float("-inf")}}, "finite"),
    ],
)
def test_bad_sampling_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SamplingParams(**({"max_new_tokens": 4} | changes))  # type: ignore[arg-type]


def test_the_largest_seed_is_accepted() -> None:
    assert request(seed=2**63 - 1).seed == 2**63 - 1
