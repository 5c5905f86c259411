"""What a server's rank is handed to have a bucket on a GPU, as torch and SGLang read it. No GPU is needed for that."""

import base64
import importlib.util
import inspect
import io
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.multiprocessing import reductions

from rollout.weights import transport
from rollout.weights.transport import SendRequest, SharedMemoryTransport
from tests.rollout.peer import _Unpickler

UUID = "0a1b2c3d-0000-4000-8000-00000000beef"
NUMBER = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters).index("storage_device")


def test_sglang_takes_a_uuid_where_torch_has_the_gpus_number() -> None:
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    source = (Path(spec.origin).parent / "srt" / "utils" / "patch_torch.py").read_text()
    (index,) = re.findall(r"_REDUCE_TENSOR_ARG_DEVICE_INDEX = (\d+)", source)
    assert int(index) == NUMBER
    assert "reductions.rebuild_cuda_tensor = _rebuild_cuda_tensor_modified" in source, "found by torch's own name"


def test_a_buckets_memory_is_found_by_its_gpus_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    """`reduce_tensor` is torch's; what it returns for a tensor on the process's GPU 0 comes back with the UUID instead
    of the 0, and all else as it was."""
    names = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
    arguments = tuple(0 if at == NUMBER else name for at, name in enumerate(names))
    rebuild = reductions.rebuild_cuda_tensor
    monkeypatch.setattr(transport.reductions, "reduce_tensor", lambda _: (rebuild, arguments))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid=UUID))
    empty = SendRequest(transport="tensor", targets=(), label="1", deadline_s=1, backend="nccl", api_key_file=None)
    memory = SharedMemoryTransport(empty, torch.device("cuda"))
    buffer: Any = SimpleNamespace(is_cuda=True, device=torch.device("cuda"))
    bucket = SimpleNamespace(shapes={"a": (2, 3), "b": (4,)}, dtype_of=lambda _: torch.bfloat16)
    payload = transport._payload(memory.handle(buffer), bucket)
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", lambda *given: given)  # as SGLang puts its own there
    content = _Unpickler(io.BytesIO(base64.b64decode(payload))).load()
    memory.close()
    assert content["flattened_tensor"] == tuple(UUID if at == NUMBER else name for at, name in enumerate(names))
    assert [(each.name, each.start_idx, each.end_idx) for each in content["metadata"]] == [("a", 0, 12), ("b", 12, 20)]
