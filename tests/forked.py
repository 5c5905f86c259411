"""What the processes of `fork_server` have imported when they begin."""

import warnings

from megatron_dapo.actor.device import prepare

warnings.simplefilter("ignore")
prepare("cpu")  # before Megatron is imported

import megatron.core.optimizer  # noqa: E402, F401

import megatron_dapo.actor.actor  # noqa: E402, F401
import tests.emulated.played_server  # noqa: E402
import tests.emulated.played_trainer  # noqa: E402, F401
