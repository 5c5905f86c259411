"""What the processes of `fork_server` have imported when they begin."""

import gc
import os
import warnings

from megatron_dapo.actor.device import prepare

warnings.simplefilter("ignore")
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # forks of a process that has asked a driver for its GPUs cannot ask again
prepare("cpu")  # before Megatron is imported

import megatron.core.optimizer  # noqa: E402, F401
import torch._dynamo  # noqa: E402, F401

import megatron_dapo.actor.actor  # noqa: E402

# What the constructor of an actor imports, and with it most of Megatron-Core: else each fork pays 0.7 CPU seconds.
import megatron_dapo.actor.checkpoint.checkpoint  # noqa: E402
import megatron_dapo.actor.device.process_groups  # noqa: E402
import megatron_dapo.actor.model.model_chunks  # noqa: E402
import megatron_dapo.actor.optimizer  # noqa: E402
import megatron_dapo.actor.step  # noqa: E402
import megatron_dapo.actor.weights.hf_weights  # noqa: E402
import megatron_dapo.actor.weights.lora  # noqa: E402, F401
import tests.emulated.played_server  # noqa: E402
import tests.emulated.played_trainer  # noqa: E402
import tests.rollout.peer  # noqa: E402, F401

gc.freeze()  # what is imported stays: each fork's collections would look through it, and copy its pages
