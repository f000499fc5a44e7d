"""float8: each product as its recipe says, in each layout as in one process, and what this machine must have."""

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.lattice import SIZES
from tests.parallel.trace import Collective, Trace
from tests.parity import Settings, Trainer, check_bfloat16, tiny, train_config, world_size
from tests.recipes.warm import pretrain
from tests.tiny_run import curve, metrics
from tests.workers import run
from torchllm.config import Float8
from torchllm.config.errors import UserError
from torchllm.models.decoder import build_model
from torchllm.optim.optimizer import apply_if_finite
from torchllm.parallel.float8 import apply_float8
from torchllm.tools.proof.compare import gradient_errors, largest_element
from torchllm.tools.proof.layouts import describe_layout
from torchllm.tools.proof.shrink import one_process

exhaustive = pytest.mark.exhaustive
RECIPES = ["rowwise", "rowwise_with_gw_hp", "tensorwise"]
FLOAT8: Settings = {**SIZES, "training.micro_batch_size": 6, "float8.recipe": "rowwise"}


def rounded(x: Tensor, over: int | None) -> Tensor:
    """Round a factor (rows, columns) to float8, by a power of two per row or column; over None: one scale for all."""
    kind = torch.float8_e4m3fn
    largest = x.abs().max() if over is None else x.abs().amax(over, keepdim=True)
    scale = (torch.finfo(kind).max / largest.double()).float().log2().floor().exp2()
    return (x.float() * scale).to(kind).float() / scale


def rounded_whole(x: Tensor, kind: torch.dtype) -> Tensor:
    """Round a factor to float8 by one scale, which is no power of two."""
    scale = (torch.finfo(kind).max / x.abs().max().double()).float()
    return (x.float() * scale).to(kind).float() / scale


def expected_products(recipe: str, x: Tensor, weight: Tensor, gradient: Tensor) -> list[Tensor]:
    """Return output, gradient of the input, gradient of the weight: x (T, K), weight (N, K), gradient (T, N)."""
    if recipe == "tensorwise":
        x8, weight8 = rounded_whole(x, torch.float8_e4m3fn), rounded_whole(weight, torch.float8_e4m3fn)
        gradient8 = rounded_whole(gradient, torch.float8_e5m2)
        return [x8 @ weight8.t(), gradient8 @ weight8, gradient8.t() @ x8]
    output = rounded(x, 1) @ rounded(weight, 1).t()
    if recipe == "rowwise":
        of_input = rounded(gradient, 1) @ rounded(weight, 0)
        return [output, of_input, rounded(gradient, 0).t() @ rounded(x, 0)]
    of_input = rounded(gradient, 1) @ rounded(weight, None)
    return [output, of_input, gradient.t() @ x]


@pytest.mark.parametrize("recipe", RECIPES)
def test_products_are_those_of_the_recipe(recipe: Any) -> None:
    model = build_model(tiny({"model.layers": 1}).model)
    apply_float8(model, Float8(recipe), torch.bfloat16, "cpu", False)
    layer = model.layers["0"].get_submodule("mlp.down_proj").bfloat16()
    generator = torch.Generator().manual_seed(0)
    nn.init.normal_(layer.weight, generator=generator)
    # Rows and columns of very different sizes: a scale for all of them would lose the small ones.
    sizes = torch.logspace(-3, 3, 96)
    x = (torch.randn(48, 96, generator=generator) * sizes).bfloat16().requires_grad_()
    gradient = (torch.randn(48, 64, generator=generator) * sizes[:48, None]).bfloat16()
    output = layer(x)
    output.backward(gradient)
    expected = expected_products(recipe, x.detach(), layer.weight.detach(), gradient)
    for product, expected_product in zip((output, x.grad, layer.weight.grad), expected, strict=True):
        torch.testing.assert_close(product, expected_product.bfloat16())


def test_only_the_blocks_are_converted_and_names_and_parameters_stay() -> None:
    model = build_model(tiny({"model.family": "gpt"}).model)
    parameters = dict(model.named_parameters())
    apply_float8(model, Float8("rowwise"), torch.bfloat16, "cpu", False)
    converted = [name for name, module in model.named_modules() if type(module).__name__ == "Float8Linear"]
    assert len(converted) == 4 * 6  # q, k, v, o, up and down of each block
    assert all(name.startswith("layers.") for name in converted)
    assert not any(type(module) is nn.Linear for module in model.modules())
    after = dict(model.named_parameters())
    assert all(after[name] is parameters[name] for name in parameters)
    assert after.keys() == parameters.keys()


FSDP: Settings = {"parallel.dp_shard": 2}
PIPELINE: Settings = {"parallel.dp_replicate": 2, "parallel.pp": 2}


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [("rowwise", {**FSDP, "recompute.mode": "selective"}), pytest.param("tensorwise", PIPELINE, marks=exhaustive)],
)
def test_ranks_with_whole_products_round_as_one_process(recipe: str, settings: Settings) -> None:
    """They compute the products of one process, on its micro batches."""
    config = tiny({**FLOAT8, **settings, "float8.recipe": recipe, "training.dtype": "bfloat16", "training.steps": 1})
    (trained, *_) = run(train_config, world_size(config), config, True)
    (alone,) = run(train_config, 1, one_process(config, config.training.micro_batch_size), True)
    errors = gradient_errors(trained.gradients[0], alone.gradients[0], largest_element)
    assert all(error < 1e-5 for error in errors.values())
    assert trained.losses == pytest.approx(alone.losses, rel=1e-6)


@pytest.mark.parametrize(
    "settings",
    [
        {"parallel.tp": 2, "parallel.sequence_parallel": True, "recompute.mode": "full"},
        pytest.param({"parallel.cp": 2, "parallel.tp": 2, "model.family": "gpt"}, marks=exhaustive),
    ],
    ids=describe_layout,
)
def test_rowwise_adds_no_error_to_that_of_one_process(settings: Settings) -> None:
    """Where ranks have some of the features or some of the tokens of a product."""
    error = check_bfloat16(tiny({**FLOAT8, **settings}), ragged=True)
    assert error > 0.03  # and not bfloat16's, 1e-2


GATHERED: Settings = {**FLOAT8, **FSDP, "float8.recipe": "tensorwise"}
"""FSDP gathers its weights as float8"""


def collectives_of_two_steps(settings: Settings) -> list[list[Collective]]:
    """Return what is sent over FSDP's axis by a micro batch, by the optimizer, and by the next micro batch."""
    trainer = Trainer(tiny(settings), torch.bfloat16)
    parts = [
        lambda: trainer.forward_backward(trainer.batches(1)[:1], torch.tensor(1e-2)),
        lambda: apply_if_finite(trainer.optimizer, 1e-3, torch.tensor(True)),
        lambda: trainer.forward_backward(trainer.batches(2)[:1], torch.tensor(1e-2)),
    ]
    sent = []
    for part in parts:
        trace = Trace(trainer.mesh)
        with trace:
            part()
        sent.append(trace.sent("fsdp"))
    return sent


def test_tensorwise_weights_are_gathered_in_8_bits_and_scaled_once_per_step() -> None:
    before, update, after = run(collectives_of_two_steps, 2, GATHERED)[0]
    norms, matrices = 2 * 64, 4 * 64 * 64 + 3 * 64 * 96  # elements of a block
    gathered = Collective("gather", "fsdp", 2 * norms + matrices, torch.uint8)
    assert after.count(gathered) == before.count(gathered) == 4 + 3  # the last block is kept for its backward
    scales = [collective for collective in update if collective.kind == "reduce"]
    assert [collective.elements for collective in scales] == [4 * 7]  # of all layers at once
    assert not [collective for collective in after if collective.kind == "reduce"]
    assert len([collective for collective in before if collective.kind == "reduce"]) == (4 + 3) * 7


@exhaustive
def test_gathers_in_8_bits_add_no_error_to_that_of_one_process() -> None:
    assert check_bfloat16(tiny(GATHERED), ragged=True) > 0.03


@exhaustive
def test_tensor_parallel_weights_are_gathered_in_16_bits() -> None:
    _, _, after = run(collectives_of_two_steps, 4, {**GATHERED, "parallel.tp": 2})[0]
    assert {collective.dtype for collective in after if collective.kind == "gather"} == {torch.bfloat16}


def train_to_step_4(folder: Path, recipe: str) -> None:
    settings = ["--training.dtype=bfloat16", f"--float8.recipe={recipe}", "--training.steps=4"]
    assert pretrain(2, folder, *settings, "--checkpoint.interval=2", "--evaluate.interval=0") == ["", ""]


@exhaustive
@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_a_resumed_run_is_the_same_run_and_goes_on_without_float8(recipe: str, tmp_path: Path) -> None:
    whole, resumed, bfloat16 = (tmp_path / name for name in ("whole", "resumed", "bfloat16"))
    train_to_step_4(whole, recipe)
    for folder in (resumed, bfloat16):
        shutil.copytree(whole / "checkpoints/step-00000002", folder / "checkpoints/step-00000002")
    train_to_step_4(resumed, recipe)
    train_to_step_4(bfloat16, "none")
    assert curve(resumed) == curve(whole)[2:]
    assert [record["step"] for record in metrics(bfloat16)] == [3, 4]
    for after, expected in zip(curve(bfloat16), curve(whole)[2:], strict=True):
        assert after != expected
        assert after == pytest.approx(expected, rel=0.1)


def convert(dtype: torch.dtype, device_type: str) -> None:
    apply_float8(build_model(tiny({}).model), Float8("rowwise"), dtype, device_type, False)


def test_what_this_machine_lacks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"set training\.dtype = bfloat16"):
        convert(torch.float32, "cpu")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100-SXM4-80GB")
    with pytest.raises(UserError, match=r"needs a GPU with sm_89 or later .*, but NVIDIA A100-SXM4-80GB has sm_80"):
        convert(torch.bfloat16, "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    convert(torch.bfloat16, "cuda")  # no error on an L40S
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(UserError, match=r"Install the extra \(pip install -e '\.\[float8\]'\)"):
        convert(torch.bfloat16, "cpu")
