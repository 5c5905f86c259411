"""The model of the actor computes what transformers computes: every family, every layout, packed."""

import pytest
import torch

from tests.actor.ranks import assemble, logits_of
from tests.actor.tiny import FAMILIES, random_sequences, reference_logits, save_tiny

TOLERANCE = 1e-4
# Ragged, with several attention buckets, a sequence of one token, and micro-batches of different sizes (pipeline ranks
# must tell each other shapes).
MICRO_BATCHES = [
    random_sequences(lengths, seed=i) for i, lengths in enumerate([[5, 150, 33, 1, 70], [64], [3, 90], [17]])
]

LAYOUTS = {
    "tensor + sequence": {"tensor": 2, "sequence_parallel": True},
    "virtual pipeline": {"pipeline": 2, "virtual_pipeline": 2},
    "context": {"context": 2},
}
MORE_LAYOUTS = {
    "one process": {},
    "tensor": {"tensor": 2},
    "pipeline": {"pipeline": 2},
    "tensor x pipeline": {"tensor": 2, "pipeline": 2},
    "tensor + sequence x context": {"tensor": 2, "sequence_parallel": True, "context": 2},
    "pipeline x context": {"pipeline": 2, "context": 2},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """(folder, reference logits by micro-batch) of each family, tied and untied."""
    found = []
    for family in FAMILIES:
        for tied in (False, True):
            folder = save_tiny(tmp_path_factory.mktemp(f"{family}-{tied}"), family, tied=tied)
            found.append((folder, [reference_logits(folder, sequences) for sequences in MICRO_BATCHES]))
    return found


def largest_difference(results: list, models: list) -> float:
    worst = 0.0
    for number, (_, expected) in enumerate(models):
        got = assemble([result[number] for result in results], MICRO_BATCHES)
        for got_batch, expected_batch in zip(got, expected, strict=True):
            for ours, theirs in zip(got_batch, expected_batch, strict=True):
                worst = max(worst, (ours[:, : theirs.shape[1]] - theirs).abs().max().item())
    return worst


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_logits_equal_transformers(gloo, models, layout):
    ranks = layout.get("tensor", 1) * layout.get("pipeline", 1) * layout.get("context", 1)
    results = gloo(ranks, logits_of, [folder for folder, _ in models], layout, MICRO_BATCHES)
    assert largest_difference(results, models) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("layout", MORE_LAYOUTS.values(), ids=MORE_LAYOUTS.keys())
def test_logits_equal_transformers_on_more_layouts(gloo, models, layout):
    results = gloo(4, logits_of, [folder for folder, _ in models], layout, MICRO_BATCHES, timeout_s=280)
    assert largest_difference(results, models) <= TOLERANCE


def test_padded_columns_are_zero_and_true_ones_are_not(gloo, models):
    folder, _ = models[0]
    layout = {"tensor": 2}
    got = assemble([result[0] for result in gloo(2, logits_of, [folder], layout, MICRO_BATCHES)], MICRO_BATCHES)
    logits = torch.cat([rows for batch in got for rows in batch])
    assert logits.shape[1] == 102  # 101 is odd
    assert logits[:, 101].abs().max() == 0
    assert logits[:, 100].abs().min() > 0


def test_a_packed_sequence_does_not_see_its_neighbours(gloo, models):
    folder, _ = models[0]
    packed = random_sequences([40, 7, 90, 90, 1, 64, 30, 31, 32, 88], seed=5)
    alone = [[sequence] for sequence in packed]
    [[parts]] = gloo(1, logits_of, [folder], {}, [packed, *alone])
    together, *separate = assemble([parts], [packed, *alone])
    for ours, (by_itself,) in zip(together, separate, strict=True):
        assert (ours - by_itself).abs().max() <= 1e-6 * by_itself.abs().max()
