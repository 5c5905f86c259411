"""Servers that draft tokens: what they answer is what the model would have drawn, with its log-probs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollout.config import SpeculativeConfig
from rollout.generation import Generation
from tests.actor.tiny import load_reference
from tests.gpu.place import DTYPES, ON_CPU, VOCABULARY, answers, requests, save_small, serve
from tests.gpu.test_server_on_gpu import NEAR, compare

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(ON_CPU, reason="SGLang draws the likeliest token alone when it speculates on a CPU"),
]

DRAWN = 4096


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("algorithm", ["ngram", "standalone"])
def test_drafted_tokens_are_those_of_the_model(
    algorithm: str, dtype: str, record: Callable[[str, Any], None], tmp_path: Path
) -> None:
    folder, draft = save_small(tmp_path / "model"), None
    if algorithm == "standalone":
        draft = save_small(tmp_path / "draft", seed=1)
    name = str(draft) if draft else None
    speculative = SpeculativeConfig(algorithm=algorithm, draft_model=name, draft_tokens=4)  # type: ignore[arg-type]
    greedy, sampled = requests(4, 64, temperature=0.0), requests(16, 64)
    one = requests(1, 2)[0]

    async def work(fleet: Any) -> tuple[list[Generation], list[Generation], list[Generation]]:
        same = requests(DRAWN, 2)
        for each in same:
            object.__setattr__(each, "prompt_ids", one.prompt_ids)
        return await answers(fleet, greedy), await answers(fleet, sampled), await answers(fleet, same)

    log = tmp_path / "server.log"
    first, second, third = serve(folder, log, dtype, work, speculative=speculative, draft_model=draft)
    found = {"greedy": compare(folder, greedy, first), "sampled": compare(folder, sampled, second)}
    found["distance of the second token's distribution"] = distance(folder, one.prompt_ids, third)
    record(f"speculative {algorithm}, {dtype}", found)
    assert found["greedy"]["furthest behind the most likely"] < 8 * NEAR[dtype]
    assert found["sampled"]["mean gap"] < NEAR[dtype]
    assert found["sampled"]["share of the most likely token"] < 0.8, "drawn, not greedy"
    assert found["distance of the second token's distribution"] < 0.05


def distance(folder: Path, prompt: np.ndarray, drawn: list[Generation]) -> float:
    """Total variation, over 16 classes of equal probability, between the second tokens drawn and the model's own mean
    over the first tokens drawn."""
    model, first = load_reference(folder), np.array([each.token_ids[0] for each in drawn])
    tokens, counts = np.unique(first, return_counts=True)
    rows = torch.tensor(np.stack([np.append(prompt, token) for token in tokens])).long()
    with torch.no_grad():
        probabilities = model(rows).logits[:, -1].double().softmax(-1).numpy()
    expected = (probabilities * (counts / counts.sum())[:, None]).sum(0)
    order = np.argsort(expected)
    classes = np.zeros(VOCABULARY, int)
    classes[order] = np.minimum(np.cumsum(expected[order]) * 16, 15).astype(int)
    seen = np.bincount(classes[[each.token_ids[1] for each in drawn]], minlength=16) / len(drawn)
    wanted = np.bincount(classes, weights=expected, minlength=16)
    return float(np.abs(seen - wanted).sum() / 2)
