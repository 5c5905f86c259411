"""The stages from engine to trainer with their real parts, on the quickstart's base: SGLang, transformers, Megatron."""

import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_dapo.config import load_config
from megatron_dapo.diagnostics.log_prob_gap import (
    DECODE,
    LAYOUT,
    ONE_RANK,
    PREFILL,
    REFERENCE,
    STAGES,
    BisectRequest,
    StageGap,
    find_gaps,
    first_gap,
)
from tests.processes import ROOT

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the parts are started for the CPU"),
]
PERTURBED = "model.layers.1.mlp.down_proj.weight"


def request_with(weights: dict[str, Path]) -> BisectRequest:
    config = load_config(
        ROOT / "examples" / "quickstart" / "dapo.yaml", [f"model.path={ROOT}/examples/quickstart/base"]
    )
    draw = np.random.default_rng(1)
    return BisectRequest(
        config=config,
        prompts=[draw.integers(5, 60, size).astype(np.int32) for size in (3, 9, 30)],
        stop_token_ids=(),
        max_new_tokens=24,
        deadline_s=300.0,
        weights=weights,
    )


@pytest.fixture
def perturbed(tmp_path: Path) -> Path:
    """The base with one tensor changed by a tenth."""
    folder = tmp_path / "perturbed"
    shutil.copytree(ROOT / "examples" / "quickstart" / "base", folder)
    tensors = load_file(folder / "model.safetensors")
    tensors[PERTURBED] = tensors[PERTURBED] * 1.1
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ((), []),
        ((DECODE, PREFILL), [(PREFILL, REFERENCE)]),
        ((LAYOUT,), [(ONE_RANK, LAYOUT)]),
        ((ONE_RANK,), [(REFERENCE, ONE_RANK), (ONE_RANK, LAYOUT)]),
    ],
    ids=["none", "engine", "layout", "one rank"],
)
def test_a_gap_is_found_where_it_was_planted(
    perturbed: Path, parts: tuple[str, ...], expected: list[tuple[str, str]]
) -> None:
    said: list[str] = []
    gaps = find_gaps(request_with(dict.fromkeys(parts, perturbed)), said.append)
    assert [(gap.before, gap.after) for gap in gaps] == list(pairwise(STAGES))
    above = [gap for gap in gaps if gap.mean_abs > 1e-3]
    assert [(gap.before, gap.after) for gap in above] == expected
    assert all(gap.max_abs < 2e-4 for gap in gaps if gap not in above)
    assert first_gap(gaps, 1e-3) == (above[0] if above else None)
    assert len(said) == 4


def test_a_gap_that_is_no_number_is_a_gap() -> None:
    gaps = [
        StageGap(before=DECODE, after=PREFILL, mean_abs=1e-6, max_abs=1e-5, response=0, token=0),
        StageGap(before=PREFILL, after=REFERENCE, mean_abs=float("nan"), max_abs=float("nan"), response=1, token=2),
    ]
    assert first_gap(gaps, 1e-3) is gaps[1]
    assert first_gap(gaps[:1], 1e-3) is None
