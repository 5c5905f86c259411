"""For traces at true size. SYMBOLIC_PAGE names the page to write."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import tests.symbolic
from megatron_dapo.config import ConfigError
from tests.symbolic.findings import CLOSE, SMALL
from tests.symbolic.rank_processes import stub_environment

NO_MACHINE = {"paper", "verl"}
"""Recipes that name no layout: compared with the others, not run."""

TITLES = """# Ranks traced without a GPU

Written by `make test-symbolic SYMBOLIC_PAGE=symbolic.md`; one config by
`python -m tests.symbolic CONFIG.yaml`. {versions}. **No GPU took part, and nothing here says how fast anything is.**

A trace runs a rank's own code on its CUDA path with tensors that have shapes and no numbers: model, first update (it
makes the moments), log-probs, update, plan of the checkpoint, weight stream. Of each recipe: one rank of every pipeline
stage and, on the last, its neighbours in the tensor- and data-parallel groups. Rows are full. Over the traced ranks all
calls of every shared group agree in kind, order, type and shape, sends match receives, and no CPU tensor is in an NCCL
group.

Peaks are GB (10^9 bytes) by phase, in brackets how far they are from `megatron-dapo plan` without its shares for the
framework and for fragmentation, which a trace cannot see. A difference above both {close} % and {small} GB is a fault.
`calls` counts collectives, `s` is seconds.

## What a trace cannot see

{blind}
"""


@pytest.fixture(scope="session")
def cuda_wheels(tmp_path_factory: pytest.TempPathFactory) -> None:
    try:
        stub_environment(tmp_path_factory.mktemp("stub"))
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def page() -> Iterator[dict[str, str]]:
    """Section by recipe; written at the end where SYMBOLIC_PAGE asks for it."""
    sections: dict[str, str] = {}
    yield sections
    target = os.environ.get("SYMBOLIC_PAGE")
    if target and sections:
        write_page(Path(target), sections)


def write_page(target: Path, sections: dict[str, str]) -> None:
    blind = (tests.symbolic.__doc__ or "").partition("What it cannot see:\n")[2].strip()
    text = TITLES.format(
        versions=sections.pop("versions"), blind=blind, close=f"{CLOSE * 100:g}", small=f"{SMALL / 1e9:g}"
    )
    folder = Path(__file__).parents[2] / "examples" / "qwen2.5_32b"
    missing = sorted({file.stem for file in folder.glob("*.yaml")} - set(sections) - NO_MACHINE)
    if missing:
        text += f"\n**Not traced for this page:** {', '.join(missing)}.\n"
    for name, tables in sorted(sections.items()):
        text += f"\n## {name}\n\n{tables}\n"
    target.write_text(text)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model of two layers; only its config.json."""
    folder = tmp_path_factory.mktemp("model")
    fields = {
        "model_type": "qwen2",
        "vocab_size": 1024,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
    }
    (folder / "config.json").write_text(json.dumps(fields))
    return folder
