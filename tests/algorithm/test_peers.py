"""Losses, advantages and aggregations against what verl's and TRL's own functions gave (peers.json, by peer_values.py).

Where they differ from the papers, or from each other, the difference is stated: it is the test."""

import json
import math
from pathlib import Path

import pytest
import torch

from megatron_dapo.algorithm.advantage import step_advantages
from megatron_dapo.algorithm.aggregation import token_weights
from megatron_dapo.algorithm.kl import kl_estimate
from megatron_dapo.algorithm.losses.cispo import CISPO
from megatron_dapo.algorithm.losses.clipped import Clipped
from megatron_dapo.algorithm.losses.gmpo import GMPO
from megatron_dapo.algorithm.losses.gspo import GSPO
from megatron_dapo.algorithm.losses.sapo import SAPO
from megatron_dapo.algorithm.policy_loss import PolicyObjective
from megatron_dapo.algorithm.token_loss import LossColumns

PEERS = json.loads(Path(__file__).with_name("peers.json").read_text())
GIVEN = PEERS["inputs"]
LENGTHS, CARRIES = torch.tensor(GIVEN["lengths"]), torch.tensor(GIVEN["carries"])
GROUP, LIMIT = 4, 10
WIDE = math.exp(0.4)

DAPO = Clipped(low=0.2, high=0.28)
GSPO_LOSS = GSPO(low=0.2, high=0.28)
LOSSES = {
    ("verl", "vanilla, token-mean"): (DAPO, "token_mean"),
    ("verl", "vanilla, dual"): (Clipped(low=0.2, high=0.28, dual=1.5), "token_mean"),
    ("verl", "vanilla, seq-mean-token-mean"): (DAPO, "sequence_mean"),
    ("verl", "vanilla, seq-mean-token-sum-norm"): (DAPO, "sequence_sum_constant"),
    ("verl", "gspo, seq-mean-token-mean"): (GSPO_LOSS, "sequence_mean"),
    ("verl", "gspo, token-mean"): (GSPO_LOSS, "token_mean"),
    ("verl", "sapo"): (SAPO(), "sequence_mean"),
    ("verl", "geo_mean"): (GMPO(low=1 - 1 / WIDE, high=WIDE - 1), "sequence_mean"),
    ("verl", "cispo, token-mean"): (CISPO(low=0.3, high=0.5), "token_mean"),
    ("verl", "vanilla, token-mean, masked"): (DAPO, "token_mean"),
    ("verl", "vanilla, seq-mean-token-mean, masked"): (DAPO, "sequence_mean"),
    ("verl", "vanilla, seq-mean-token-sum-norm, masked"): (DAPO, "sequence_sum_constant"),
    ("trl", "grpo"): (DAPO, "sequence_mean"),
    ("trl", "bnpo"): (DAPO, "token_mean"),
    ("trl", "dr_grpo"): (DAPO, "sequence_sum_constant"),
    ("trl", "dapo"): (DAPO, "token_mean"),
    ("trl", "dapo, delta"): (Clipped(low=0.2, high=0.28, dual=1.5), "token_mean"),
    ("trl", "dapo, beta"): (DAPO, "token_mean"),
    ("trl", "cispo"): (CISPO(low=1.0, high=0.5), "token_mean"),
    ("trl", "sapo"): (SAPO(), "sequence_mean"),
    ("trl", "grpo, sequence"): (GSPO_LOSS, "sequence_mean"),
    ("trl", "dapo, sequence"): (GSPO_LOSS, "token_mean"),
    ("trl", "grpo, masked"): (DAPO, "sequence_mean"),
    ("trl", "dr_grpo, masked"): (DAPO, "sequence_sum_constant"),
    ("trl", "dapo, masked"): (DAPO, "token_mean"),
}
"""Peer and name of its loss -> ours."""

KEPT = CARRIES.sum().item() / len(CARRIES)
FACTORS = {("trl", "grpo, masked"): KEPT, ("trl", "dr_grpo, masked"): KEPT}
"""Theirs over ours. TRL divides by all responses, also by those whose loss is masked; here and in verl a truncated
response is as if it were not there (overlong filtering, section 3.4), so that filtering leaves the step's size."""


def test_every_value_is_compared():
    assert {(peer, name) for peer in ("verl", "trl") for name in PEERS[peer]["losses"]} == LOSSES.keys()


@pytest.mark.parametrize(("peer", "name"), LOSSES)
def test_the_loss_and_its_gradient_are_theirs(peer, name):
    loss, aggregation = LOSSES[peer, name]
    log_probs = torch.tensor(GIVEN["log_probs"], dtype=torch.float64, requires_grad=True)
    columns = LossColumns(
        advantages=torch.tensor(GIVEN["advantages"], dtype=torch.float64).repeat_interleave(LENGTHS),
        old_log_probs=torch.tensor(GIVEN["old_log_probs"], dtype=torch.float64),
        reference_log_probs=torch.tensor(GIVEN["reference_log_probs"], dtype=torch.float64),
        sequence_index=torch.arange(len(LENGTHS)).repeat_interleave(LENGTHS),
        sequence_lengths=LENGTHS,
    )
    weights = token_weights(
        LENGTHS,
        torch.arange(len(LENGTHS)) // GROUP,
        aggregation,
        mask=CARRIES if name.endswith("masked") else None,
        constant_length=LIMIT,
        dtype=torch.float64,
    )
    objective = PolicyObjective(loss=loss, kl_coefficient=0.1 if name.endswith("beta") else 0.0)
    total = (weights * objective(log_probs, torch.zeros_like(log_probs), columns).loss).sum()
    total.backward()
    theirs, factor = PEERS[peer]["losses"][name], FACTORS.get((peer, name), 1.0)
    # verl adds 1e-8 to a response's length, TRL holds SAPO's temperatures in float32.
    assert factor * total.item() == pytest.approx(theirs["loss"], rel=3e-7)
    assert (factor * log_probs.grad).tolist() == pytest.approx(theirs["gradient"], rel=1e-6, abs=1e-12)


@pytest.mark.parametrize(
    ("peer", "name", "estimator", "epsilon"),
    [
        ("verl", "grpo", "group_std", 1e-6),
        ("verl", "grpo, no std", "no_std", 0.0),
        ("verl", "rloo", "rloo", 0.0),
        ("verl", "reinforce++ baseline", "reinforce_pp_baseline", 0.0),  # theirs is 1e-8, added to the variance
        ("trl", "group", "group_std", 1e-4),
        ("trl", "none", "no_std", 0.0),
    ],
)
def test_the_advantages_are_theirs(peer, name, estimator, epsilon):
    assert advantages(estimator, epsilon) == pytest.approx(PEERS[peer]["advantages"][name], rel=1e-7, abs=1e-12)


def advantages(estimator, epsilon):
    rewards = torch.tensor(GIVEN["rewards"], dtype=torch.float64).view(-1, GROUP)
    return step_advantages(rewards, LENGTHS, epsilon=epsilon, ddof=1, estimator=estimator).tolist()


def test_trls_batch_scale_divides_by_the_spread_of_rewards_and_batch_std_by_that_of_advantages():
    """ScaleRL normalises by the standard deviation of the advantages over the batch (`batch_std`). TRL's `batch` is
    of another paper (arXiv 2508.08221), in which it is that of the rewards: larger if the prompts' means differ."""
    rewards = torch.tensor(GIVEN["rewards"], dtype=torch.float64)
    deviations = torch.tensor(advantages("no_std", 0.0), dtype=torch.float64)
    assert PEERS["trl"]["advantages"]["batch"] == pytest.approx(
        (deviations / (rewards.std() + 1e-4)).tolist(), rel=1e-7
    )
    assert advantages("batch_std", 1e-4) == pytest.approx((deviations / (deviations.std() + 1e-4)).tolist(), rel=1e-9)
    assert rewards.std() > 1.05 * deviations.std()


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_kl_estimates_are_verls(estimator):
    log_probs, reference = (
        torch.tensor(GIVEN[name], dtype=torch.float64) for name in ("log_probs", "reference_log_probs")
    )
    assert kl_estimate(log_probs, reference, estimator).tolist() == pytest.approx(
        PEERS["verl"]["kl"][estimator], rel=1e-9
    )
