"""The shape annotations are checked, not only written: wrong shapes and types are refused when the hook is on."""

import subprocess
import sys

CALLS = {
    "clipped_surrogate(two, two, low=0.2, high=0.28)": "accepted",
    "clipped_surrogate(two, three, low=0.2, high=0.28)": "refused",
    "clipped_surrogate(two, two, low='0.2', high=0.28)": "refused",
    "group_advantages(two[None], epsilon=0.0, ddof=1)": "accepted",
    "group_advantages(two, epsilon=0.0, ddof=1)": "refused",
    "token_weights(index, index, 'token_mean')": "accepted",
    "token_weights(two, index, 'token_mean')": "refused",
    "token_weights(index, index, 'mean')": "refused",
    "LossColumns(advantages=two, old_log_probs=two, sequence_index=index, sequence_lengths=index)": "accepted",
    "LossColumns(advantages=three, old_log_probs=two, sequence_index=index, sequence_lengths=index)": "refused",
}

SCRIPT = f"""
import torch
from jaxtyping import TypeCheckError, install_import_hook
install_import_hook("megatron_dapo.algorithm", "beartype.beartype")
from megatron_dapo.algorithm.advantage import group_advantages
from megatron_dapo.algorithm.aggregation import token_weights
from megatron_dapo.algorithm.losses.clipped import clipped_surrogate
from megatron_dapo.algorithm.token_loss import LossColumns
two, three, index = torch.zeros(2), torch.zeros(3), torch.zeros(2, dtype=torch.int64)
for call in {list(CALLS)!r}:
    try:
        eval(call)
    except TypeCheckError:
        print("refused")
    else:
        print("accepted")
"""


def test_wrong_shapes_and_types_are_refused():
    result = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=False)
    assert dict(zip(CALLS, result.stdout.split(), strict=True)) == CALLS, result.stderr
