"""FP8 weights from the real trainer into SGLang's own model and loaders; no FP8 product is computed on a CPU."""

import hashlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dapo.actor.model.hf_config import HFModelConfig
from megatron_dapo.config import ConfigError, load_config
from megatron_dapo.diagnostics.evaluation_session import fingerprint
from megatron_dapo.diagnostics.local_jobs import with_own_servers
from rollout.config import QUANTIZATION, RolloutConfig
from rollout.server.server_command import ServerSpec, server_arguments
from rollout.weights.checksums import Checksums, expected_checksums
from rollout.wire.client import ServerInfo
from tests.actor.gloo import RankPlace, run_ranks
from tests.actor.tiny import MIXTURE, save_tiny
from tests.actor.weights.test_hf_weights import assert_same_tensors, read_folder
from tests.cluster.test_rank_weights import beside, peers, request
from tests.coordinator.sync_kit import send

pytestmark = pytest.mark.timeout(300)
QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart" / "dapo.yaml"
SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 128, "vocab_size": 200}
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 256}
KINDS = [ServerInfo(device="cpu", dtype="bfloat16", tensor_parallel=ranks, routed_experts=False) for ranks in (1, 2)]
BUCKET = 300_000


def write(place: RankPlace, folder: Path, layout: dict[str, Any]) -> dict[ServerInfo, Checksums]:
    """The folder's model as fp8/NAME beside it."""
    from megatron_dapo.actor.actor import MegatronActor
    from megatron_dapo.cluster.rank_weights import RankWeights
    from megatron_dapo.config.actor_config import ActorConfig, LayoutConfig
    from megatron_dapo.config.run_config import ModelConfig

    actor = MegatronActor(
        ActorConfig(layout=LayoutConfig(**layout), device="cpu"),
        ModelConfig(path=str(folder), context_length=64, dtype="bfloat16"),
        rank=place.rank,
        world_size=place.world_size,
        rendezvous=place.rendezvous,
        steps_per_rollout=1,
        seed=1,
        timeout_s=120,
    )
    return RankWeights(actor, bucket_bytes=BUCKET, quantization=QUANTIZATION).write(fp8_folder(folder), KINDS)


def fp8_folder(folder: Path) -> Path:
    return folder.parent / "fp8" / folder.name


class Written:
    """Three models of one shape, and what the trainer wrote of the last two."""

    def __init__(self, root: Path, family: str) -> None:
        more = EXPERTS if family == MIXTURE else {}
        names = ("plain", "v1", "v2")
        self.plain, *self.given = (
            save_tiny(root / name, family, tied=family == "qwen3", seed=seed, **SHAPE, **more)
            for seed, name in enumerate(names)
        )
        (root / "fp8").mkdir()
        layout = {"expert": 2, "data": 2} if family == MIXTURE else {"tensor": 2}
        results = [run_ranks(2, write, folder, layout, timeout_s=200) for folder in self.given]
        assert [other for _, other in results] == [{}, {}]
        self.checksums = [first for first, _ in results]
        self.folders = [fp8_folder(folder) for folder in self.given]


@pytest.fixture(
    scope="module", params=[*(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2", "qwen3")), MIXTURE]
)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    return Written(tmp_path_factory.mktemp(request.param), request.param)


def loaded_by_sglang(written: Written, ranks: int, rank: int) -> list[dict[str, Any]]:
    spec = ServerSpec(
        model_path=written.plain, device="cpu", dtype="bfloat16", context_length=128, seed=1, log_path=Path("unused")
    )
    arguments = server_arguments(RolloutConfig(quantization="fp8", tensor_parallel=ranks), spec, 1)
    ours = {"batched_prefill": "torch_native", "batched_decode": "torch_native"}
    command = [sys.executable, "-m", "tests.rollout.weights.fp8_in_sglang"]
    command += [json.dumps([ours.get(word, word) for word in arguments]), str(rank)]
    ran = subprocess.run([*command, *map(str, (written.plain, *written.folders))], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return [json.loads(line) for line in ran.stdout.splitlines() if line.startswith('{"loaded"')]


@pytest.mark.parametrize(("ranks", "rank"), [pytest.param(1, 0, marks=pytest.mark.slow), (2, 1)])
def test_sglang_loads_them_again_and_again_and_reports_the_trainers_checksums(
    written: Written, ranks: int, rank: int
) -> None:
    """By a folder, then by `load_weights` alone; the first weights are those of the start, which nothing can be made
    of."""
    start, *loads = loaded_by_sglang(written, ranks, rank)
    assert [each["loaded"] for each in (start, *loads)] == ["plain", "v1", "v2", "v2", "v1"]
    for each in loads:
        at = ("v1", "v2").index(each["loaded"])
        assert each["checksums"] == written.checksums[at][KINDS[ranks - 1]][rank]
        assert each["checksums"] != start["checksums"]
        held = {name: value for name, value in each["bytes"].items() if not name.endswith(("k_scale", "v_scale"))}
        assert held == shards_of(read_folder(written.folders[at]), ranks, rank)
        # Of layers that Qwen2 tells of it; the KV cache keeps its type and size.
        assert [scales for scales in each["cache"] if scales not in ([1.0, 1.0], [None, None])] == []
        assert len(each["cache"]) == SHAPE["num_hidden_layers"]


def shards_of(tensors: dict[str, torch.Tensor], ranks: int, rank: int) -> dict[str, str]:
    """Hashes of a rank's tensors as the rule of tensor parallelism has them: rows or columns, joined by hand."""
    joined: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for name in sorted(tensors, key=_place_of):
        tensor = tensors[name]
        part = name.split(".")[-2]
        dim = 1 if part in ("o_proj", "down_proj") else 0
        if part in ("embed_tokens", "lm_head"):
            tensor = torch.nn.functional.pad(tensor, (0, 0, 0, 256 - SHAPE["vocab_size"]))
        if part.endswith("_proj") or part in ("embed_tokens", "lm_head"):
            tensor = tensor.chunk(ranks, dim)[rank]
        joined.setdefault(_held_as(name), []).append(tensor)
    hashes = {}
    for name, parts in joined.items():
        whole = [part.contiguous().view(torch.uint8).flatten() for part in parts]
        hashes[name] = hashlib.sha256(torch.cat(whole).numpy().tobytes()).hexdigest()
    return hashes


def _held_as(name: str) -> str:
    kind = name.rsplit(".", 1)[1]
    if ".experts." in name:
        joined = "w2" if ".down_proj." in name else "w13"
        return f"{name.split('.experts.')[0]}.experts.{joined}_{kind}"
    for part in ("q_proj", "k_proj", "v_proj"):
        name = name.replace(f".{part}.", ".qkv_proj.")
    for part in ("gate_proj", "up_proj"):
        name = name.replace(f".{part}.", ".gate_up_proj.")
    return name


def _place_of(name: str) -> tuple[int, int]:
    """Expert, then q before k before v, gate before up."""
    expert = int(name.split(".experts.")[1].split(".")[0]) if ".experts." in name else -1
    order = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    return expert, next((at for at, part in enumerate(order) if f".{part}." in name), 0)


def test_the_folder_says_what_it_holds_and_its_checksums_are_the_same_read_back(written: Written) -> None:
    for folder, given, checksums in zip(written.folders, written.given, written.checksums, strict=True):
        assert json.loads((folder / "config.json").read_text())["quantization_config"] == QUANTIZATION
        assert {info: expected_checksums(folder, info) for info in KINDS} == checksums
        tensors, plain = read_folder(folder), read_folder(given)
        quantized = {name for name in plain if name.endswith("_proj.weight")}
        assert tensors.keys() == plain.keys() | {f"{name}_scale_inv" for name in quantized}
        for name in plain.keys() - quantized:
            assert torch.equal(tensors[name], plain[name].bfloat16()), name


def test_one_wrong_scale_is_another_checksum(written: Written, tmp_path: Path) -> None:
    """Even by its last bit but seven, which bfloat16 keeps of any product; and one FP8 number, by its last bit."""
    folder, checksums = written.folders[0], written.checksums[0][KINDS[0]]
    tensors = read_folder(folder)
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    for name, place in (("self_attn.o_proj.weight_scale_inv", (0, 0)), ("self_attn.o_proj.weight", (5, 6))):
        changed = {key: tensor.clone() for key, tensor in tensors.items()}
        one = changed[f"model.layers.1.{name}"]
        bits = one.view(torch.int32 if one.dtype == torch.float32 else torch.uint8)
        bits[place] ^= 1 << 16 if one.dtype == torch.float32 else 1
        _save(changed, tmp_path / "model.safetensors")
        found = expected_checksums(tmp_path, KINDS[0])
        assert {key for key in found[0] if found[0][key] != checksums[0][key]} == {
            "model.layers.1.self_attn.o_proj.weight"
        }


def _save(tensors: dict[str, torch.Tensor], file: Path) -> None:
    from safetensors.torch import save_file

    save_file(tensors, file, {"format": "pt"})


@pytest.mark.parametrize("transport", ["tensor", "distributed"])
def test_what_is_sent_is_what_is_written(transport: str, tmp_path: Path) -> None:
    made = Written(tmp_path, "qwen2")
    with peers(tmp_path, (), ()) as started:
        asked = beside(started) if transport == "tensor" else request(transport, started)
        more = ("cpu", "bfloat16", QUANTIZATION)
        first, *_ = run_ranks(2, send, made.given[1], [asked], KINDS, BUCKET, *more, timeout_s=200)
        [sent] = first
        assert sent.failures == {}
        assert dict(sent.checksums) == made.checksums[1]
        whole = read_folder(made.folders[1])
        assert sent.bytes == sum(tensor.nbytes for tensor in whole.values())
        assert sent.bytes > 2 * BUCKET
        for each in started:
            _, tensors = each.held()
            assert_same_tensors(tensors, whole)


def test_a_server_that_was_restarted_starts_with_the_same_arguments(tmp_path: Path) -> None:
    spec = ServerSpec(
        model_path=tmp_path, device="cuda", dtype="bfloat16", context_length=128, seed=1, log_path=tmp_path / "log"
    )
    config = RolloutConfig(quantization="fp8")
    for each in (spec, replace(spec, weight_version="7")):
        arguments = server_arguments(config, each, 1)
        told = json.loads(arguments[arguments.index("--json-model-override-args") + 1])
        assert told == {"quantization_config": QUANTIZATION}
        assert "--quantization" not in arguments
    assert "--json-model-override-args" not in server_arguments(RolloutConfig(), spec, 1)


def test_an_evaluation_serves_a_folder_as_it_is(written: Written) -> None:
    config = load_config(QUICKSTART, ["model.dtype=bfloat16"])
    for folder, quantization in ((written.folders[0], "fp8"), (written.plain, "none")):
        assert with_own_servers(config, folder).rollout.quantization == quantization
    assert fingerprint(written.folders[0]) != fingerprint(written.folders[1])
    with pytest.raises(ConfigError, match=r"quantization_config = .*: only None is supported"):
        HFModelConfig.load(written.folders[0])
