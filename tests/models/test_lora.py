"""Low-rank updates of a frozen model (LoRA), in one process."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from tests.parity import fill_updates, tiny
from torchllm.checkpoint.state import holds_all_weights
from torchllm.config import Config, Kinds
from torchllm.config.errors import UserError
from torchllm.config.schema import Lora
from torchllm.facts.flops import target_shapes, trained_parameter_count
from torchllm.facts.parameters import canonical_name, is_low_rank_factor
from torchllm.models.decoder import Decoder, build_model
from torchllm.models.frozen import check_trained
from torchllm.models.lora import UpdatedLinear, apply_lora, merge_update
from torchllm.optim.optimizer import build_optimizer
from torchllm.parallel.initialize import initialize
from torchllm.tools.config.checks import problems
from torchllm.tools.proof.layouts import Settings, with_settings

CONFIG = tiny({"lora.rank": 3, "lora.alpha": 12.0})
CPU = torch.device("cpu")
TOKENS = torch.randint(96, (2, 8), generator=torch.Generator().manual_seed(0))
POSITIONS = torch.arange(8).expand(2, 8)


def built(config: Config, dtype: torch.dtype = torch.float32, loss_chunk: int = 0) -> Decoder:
    model = build_model(config.model, loss_chunk)
    apply_lora(model, config.lora, dtype)
    initialize([model], config.model, CPU, seed=0)
    return model


def parameters(model: Decoder) -> dict[str, Tensor]:
    return {canonical_name(name): parameter for name, parameter in model.named_parameters()}


def test_a_run_starts_from_the_model_that_is_tuned() -> None:
    plain = built(replace(CONFIG, lora=Lora()))
    tuned = built(CONFIG)
    assert not holds_all_weights([tuned])
    assert holds_all_weights([plain])
    for name, value in parameters(plain).items():
        assert torch.equal(parameters(tuned)[name], value), name
    assert torch.equal(tuned(TOKENS, POSITIONS), plain(TOKENS, POSITIONS))


def test_a_merged_update_is_the_update() -> None:
    tuned, merged = built(CONFIG), built(replace(CONFIG, lora=Lora()))
    fill_updates([tuned], CONFIG)
    with torch.no_grad():
        for module_name, module in tuned.named_modules():
            if isinstance(module, UpdatedLinear):
                weight = merged.get_parameter(f"{module_name}.weight")
                weight.copy_(merge_update(weight, module.lora_A.weight, module.lora_B.weight, CONFIG.lora.scale))
    logits = tuned(TOKENS, POSITIONS)
    assert (logits - merged(TOKENS, POSITIONS)).abs().max() < 1e-5 * logits.abs().max()
    assert (logits - built(CONFIG)(TOKENS, POSITIONS)).abs().max() > 1e-2 * logits.abs().max()


VALUELESS = {"model.pattern": ("shared", "full"), "model.kinds": Kinds(shared={"keys_as_values": True}, full={})}
"""two kinds of blocks, of which one lacks a matrix of lora.targets"""


@pytest.mark.parametrize("kinds", [{}, VALUELESS], ids=["one kind", "two kinds"])
@pytest.mark.parametrize("targets", [CONFIG.lora.targets, ("v_proj", "down_proj")])
def test_only_the_updates_are_trained(targets: tuple[str, ...], kinds: Settings) -> None:
    config = with_settings(CONFIG, {"lora.targets": targets, **kinds})
    model = built(config, torch.bfloat16)
    for name, parameter in parameters(model).items():
        assert parameter.requires_grad == is_low_rank_factor(name), name
        assert parameter.dtype == (torch.float32 if parameter.requires_grad else torch.bfloat16), name
    trained = {name: parameter for name, parameter in parameters(model).items() if parameter.requires_grad}
    assert {name.split(".")[3] for name in trained} == set(targets)
    assert sum(parameter.numel() for parameter in trained.values()) == trained_parameter_count(
        config.model, config.trained
    )
    optimizer = build_optimizer([model], config.optimizer)
    assert set(optimizer.state) == set(trained.values())


def test_the_table_of_targets_has_the_shapes_of_the_model() -> None:
    block = build_model(CONFIG.model).layers["0"]
    linears = {name.split(".")[-1]: layer for name, layer in block.named_modules() if isinstance(layer, nn.Linear)}
    assert {name: tuple(layer.weight.shape) for name, layer in linears.items()} == target_shapes(CONFIG.model)


def test_a_matrix_that_some_kind_of_blocks_has_is_a_target() -> None:
    config = with_settings(CONFIG, VALUELESS)
    assert not list(problems(config, 1))
    without = with_settings(CONFIG, {"model.keys_as_values": True})
    assert [problem.key for problem in problems(without, 1)] == ["lora.targets"]


def test_a_model_that_is_not_frozen_is_an_error() -> None:
    model = built(CONFIG, torch.bfloat16)
    check_trained([model], CONFIG)
    plain = build_model(CONFIG.model)
    check_trained([plain], replace(CONFIG, lora=Lora()))
    with pytest.raises(UserError, match=r"embed_tokens\.weight: this recipe trains it, .* add_low_rank_updates"):
        check_trained([plain], CONFIG)
    model.norm.requires_grad_()  # no checkpoint would hold it
    with pytest.raises(UserError, match=r"norm\.weight: this recipe trains it"):
        check_trained([model], CONFIG)


def test_a_frozen_head_gets_no_gradient_in_chunks() -> None:
    losses = []
    for loss_chunk in (0, 5):
        model = built(CONFIG, loss_chunk=loss_chunk)
        fill_updates([model], CONFIG)
        loss = model(TOKENS, POSITIONS, labels=TOKENS)
        loss.backward()
        assert model.lm_head is not None
        assert model.lm_head.weight.grad is None
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        assert len(gradients) == 2 * len(CONFIG.lora.targets) * CONFIG.model.layers
        losses.append(math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients)))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
