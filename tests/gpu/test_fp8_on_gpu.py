"""FP8 by TransformerEngine: gradients of the right direction, and a run that goes on from its checkpoint."""

import importlib.util

import pytest
import torch

from tests.actor.mini_batches import columns, relative_error
from tests.gpu.place import ON_CPU, save_small
from tests.gpu.test_actor_on_gpu import gradient_of
from tests.gpu.test_checkpoint_on_gpu import begin, go_on

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150)]
RECIPES = [("hybrid", "tensorwise", (8, 9)), ("e4m3", "tensorwise", (8, 9)), ("e4m3", "blockwise", (9, 0))]


@pytest.fixture(autouse=True)
def _needs_fp8(request: pytest.FixtureRequest) -> None:
    if ON_CPU or importlib.util.find_spec("transformer_engine") is None:
        pytest.skip("FP8 needs TransformerEngine and a GPU")
    least = request.getfixturevalue("least")
    if torch.cuda.get_device_capability() < least:
        pytest.skip(f"needs a GPU of compute capability {least[0]}.{least[1]}")


@pytest.mark.parametrize(("fp8", "recipe", "least"), RECIPES)
def test_the_gradient_points_the_same_way(gloo, on_device, record, fp8, recipe, least, tmp_path):
    folder = save_small(tmp_path, tied=False)
    data = columns(folder)
    _, wanted = gloo(1, gradient_of, folder, data, "float32", True, "cpu", {})[0]
    _, plain = on_device(gradient_of, folder, data, "bfloat16", True, "cuda", {})
    _, got = on_device(gradient_of, folder, data, "bfloat16", True, "cuda", {"fp8": fp8, "fp8_recipe": recipe})
    errors = {"bfloat16": relative_error(plain, wanted)[""], "FP8": relative_error(got, wanted)[""]}
    flat = [torch.cat([tensors[name].double().flatten() for name in wanted]) for tensors in (got, wanted)]
    cosine = float(torch.nn.functional.cosine_similarity(*flat, dim=0))
    record(
        f"gradient, {fp8}, {recipe}", {f"error, {name}": error for name, error in errors.items()} | {"cosine": cosine}
    )
    # E4M3 keeps 3 bits where bfloat16 keeps 7: 16 times the rounding. The direction stays; and if the error were
    # bfloat16's, FP8 did not reach the products.
    assert cosine > 0.6
    assert errors["bfloat16"] < errors["FP8"]


@pytest.mark.parametrize(("fp8", "recipe", "least"), RECIPES)
def test_a_run_goes_on_from_its_checkpoint(on_device, record, fp8, recipe, least, tmp_path):
    folder = save_small(tmp_path / "model", tied=False)
    data, fields = columns(folder), {"fp8": fp8, "fp8_recipe": recipe}
    wanted = on_device(begin, folder, data, "cuda", "bfloat16", tmp_path / "step", fields)
    got = on_device(go_on, folder, data, "cuda", "bfloat16", tmp_path / "step", fields)
    record(f"resume, {fp8}, {recipe}: step, loss, norm", {"without": wanted[0], "with": got[0]})
    assert got[0][2] == pytest.approx(wanted[0][2], rel=0.05), "the norm of the first gradient after the checkpoint"
