"""Hugging Face folder <-> Megatron distributed checkpoint, both ways, bit for bit.

python -m tools.convert_checkpoint to-megatron Qwen2.5-32B checkpoints/base --tensor 8 --verify
python -m tools.convert_checkpoint to-hf runs/dapo/checkpoints/step_100 exported/step_100 --verify

Weights are streamed by several processes; what one holds depends on the largest parameter, not on the model. A target
is written aside and renamed.

`to-megatron` writes the model, a folder or `hf://OWNER/NAME`, without an optimizer. A checkpoint has no pipeline in it
and loads at any layout, uneven splits of the layers too; --tensor pads the vocabulary and cuts the tensors so that each
of that many tensor-parallel ranks reads only its own. `to-hf` takes the model part of a run's checkpoint (its `step_N`
folder) or of a converted one, after comparing every file with the manifest. LoRA adapters are merged into the model
that they were trained on, and also written for PEFT, to `adapter`.

Exit code 0: done, 1: --verify found a difference, 2: the source is wrong or partial, an option is, or the disk is full;
130: interrupted. Whatever fails leaves a target that was there as it was.
"""

import argparse
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_dapo.actor.model.hf_config import HFModelConfig, check_layout
from megatron_dapo.actor.step_data import CheckpointError
from megatron_dapo.config.base import ConfigError
from megatron_dapo.data.hub import local_path
from tools.arguments import positive, positive_count
from tools.rank_pool import RankError, RankPool

if TYPE_CHECKING:
    import torch

EXIT_OK, EXIT_DIFFERENT, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130

MARKS = {"to-megatron": ".metadata", "to-hf": "config.json"}
"""A file of every folder that a command writes: --overwrite replaces no folder without it."""

_ENVIRONMENT_ERRORS = ("OSError", "WeightsError", "FileNotFoundError", "PermissionError")
"""Of a worker: their last line says all; of others the whole traceback is shown."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Convert as the arguments say; the exit code."""
    options = _parser().parse_args(arguments)
    # Like an interrupt from the keyboard: workers are ended and what was written is removed on the way out.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # a bar holds a semaphore, which its ended process would leave
    import_megatron()
    from megatron_dapo.actor.weights.hf_files import WeightsError
    from tools.conversion.verify import VerifyError
    from tools.conversion.workers import start_workers

    done = "not written"
    try:
        _check_paths(options)
        with RankPool() as pool:
            start_workers(pool, options.processes)
            written = convert(options, pool)
            done = "written, but not verified"
            if options.verify:
                verify(options, pool, written)
    except VerifyError as error:
        print(error, file=sys.stderr)
        return EXIT_DIFFERENT
    except RankError as error:
        print(f"{options.target} was {done}: {_reason(str(error))}", file=sys.stderr)
        return EXIT_USAGE
    except (ConfigError, CheckpointError, WeightsError, OSError) as error:
        print(error, file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        print(f"interrupted: {options.target} was {done}", file=sys.stderr)
        return EXIT_INTERRUPTED
    return EXIT_OK


def _reason(text: str) -> str:
    last = text.strip().splitlines()[-1]
    kind = last.split(":")[0].rpartition(".")[2]
    return last.partition(": ")[2] if kind in _ENVIRONMENT_ERRORS else text


def convert(options: argparse.Namespace, pool: RankPool) -> "torch.dtype":
    """The conversion; the type of the weights written."""
    import torch

    from tools.conversion.directions import actor_folder, adapters_in, base_of, layout_for, to_hf, to_megatron

    there = options.command == "to-megatron"
    if options.verify:  # before the hours of a conversion
        if not there and adapters_in(actor_folder(options.source)):
            raise ConfigError(f"{options.source}: --verify compares no LoRA adapters; leave it out")
        config = options.source if there else options.base or base_of(actor_folder(options.source))
        hf = HFModelConfig.load(config)
        check_layout(hf, layout_for(hf, options.tensor, options.pipeline))
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}.get(options.dtype)
    common = {"dtype": dtype, "workers": options.processes, "pool": pool}
    if there:
        return to_megatron(options.source, options.target, tensor=options.tensor, **common)
    max_bytes = int(options.max_file_gb * 1e9)
    return to_hf(options.source, options.target, base=options.base, max_file_bytes=max_bytes, **common)


def verify(options: argparse.Namespace, pool: RankPool, written: "torch.dtype") -> None:
    """The comparison of --verify."""
    from tools.conversion.directions import actor_folder, layout_for
    from tools.conversion.verify import verify_logits, verify_tensors

    folder, checkpoint = options.source, options.target
    if options.command == "to-hf":
        folder, checkpoint = options.target, actor_folder(options.source)
    verify_tensors(folder, checkpoint, dtype=written, workers=options.processes, pool=pool)
    layout = layout_for(HFModelConfig.load(folder), options.tensor, options.pipeline)
    verify_logits(folder, checkpoint, layout=layout, pool=pool, dtype=written)


def import_megatron() -> None:
    """Make Megatron importable without a GPU, and import it without its warnings of what is not installed."""
    from megatron_dapo.actor.device import prepare

    prepare("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import tools.conversion.verify  # noqa: F401


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, source, target in (("to-megatron", "MODEL", "CHECKPOINT"), ("to-hf", "CHECKPOINT", "MODEL")):
        command = commands.add_parser(name, help=f"{source} -> {target}")
        # Of an address `hf://OWNER/NAME` a path would keep one slash.
        command.add_argument("source", type=str if name == "to-megatron" else Path, metavar=source)
        command.add_argument("target", type=Path, metavar=target)
        command.add_argument(
            "--processes", type=positive_count, default=min(16, os.cpu_count() or 1), help="how many copy"
        )
        command.add_argument("--dtype", choices=("float32", "bfloat16"), help="type written (default: the source's)")
        command.add_argument("--overwrite", action="store_true", help="replace a target that is there")
        command.add_argument(
            "--verify",
            action="store_true",
            help="compare every tensor's bytes and the logits of random tokens; the latter need the model in float32 "
            "in memory, in TENSOR x PIPELINE processes",
        )
        what = "tensor-parallel size" + (" of --verify" if name == "to-hf" else "")
        command.add_argument("--tensor", type=positive_count, default=1, help=what)
        command.add_argument("--pipeline", type=positive_count, default=1, help="pipeline stages of --verify")
        if name == "to-hf":
            _add_folder_options(command)
    return parser


def _add_folder_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--base", help="the model that was trained, a folder or hf://OWNER/NAME (default: the run's)")
    command.add_argument("--max-file-gb", type=positive, default=5.0, help="largest safetensors file, 1e9 bytes")


def _check_paths(options: argparse.Namespace) -> None:
    """What is replaced is deleted: never the source, nor a folder that is something else. A model is fetched."""
    there = options.command == "to-megatron"
    for name in ["pipeline"] if there else ["tensor", "pipeline"]:
        if (size := getattr(options, name)) > 1 and not options.verify:
            raise ConfigError(f"--{name} {size}: is the layout that --verify loads; give --verify too, or leave it out")
    name, setting = ("source", "MODEL") if there else ("base", "--base")
    if text := getattr(options, name):
        setattr(options, name, Path(local_path(text, setting)))
    source, target = options.source.resolve(), options.target.resolve()
    if not source.is_dir():
        raise ConfigError(f"{options.source}: no such folder")
    if target == source:
        raise ConfigError(f"{options.target}: source and target are the same folder")
    if source in target.parents or target in source.parents:
        raise ConfigError(f"{options.target}: source and target lie in one another; name a target beside {source}")
    if not options.target.exists():
        return
    if not options.overwrite:
        raise ConfigError(f"{options.target} is there already; give --overwrite to replace it")
    mark = MARKS[options.command]
    if not target.is_dir() or (any(target.iterdir()) and not (target / mark).is_file()):
        raise ConfigError(
            f"{options.target}: is no folder that {options.command} wrote (it has no {mark}), so --overwrite does not "
            "replace it; name another target or remove it yourself"
        )


if __name__ == "__main__":
    sys.exit(main())
