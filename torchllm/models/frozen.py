"""Freezes the parameters that `model.frozen` matches: they have no gradient and no optimizer state."""

from collections.abc import Iterable

from torch import nn

from torchllm.config import Lora, Model
from torchllm.config.applied_keys import applied
from torchllm.config.errors import UserError
from torchllm.facts.frozen import is_trained, problem_of_frozen
from torchllm.facts.parameters import canonical_name


def freeze(decoder: nn.Module, model: Model) -> None:
    """Freeze in place, before the decoder is cut into stages. Raises UserError if none or all would be frozen."""
    parameters = dict(decoder.named_parameters())
    if problem := problem_of_frozen(model.frozen, parameters):
        raise UserError(f"model.frozen: {problem}")
    for name, parameter in parameters.items():
        if model.freezes(name):
            parameter.requires_grad_(False)
    applied("model.frozen", model.frozen)


def check_trained(stages: Iterable[nn.Module], model: Model, lora: Lora) -> None:
    """Raise UserError if parameters that the config freezes require gradients, e.g. in a fork without `apply_lora`."""
    for stage in stages:
        for wrapped, parameter in stage.named_parameters():
            name = canonical_name(wrapped)
            if not parameter.requires_grad or is_trained(name, model, lora):
                continue
            if lora.is_on:
                raise UserError(
                    f"lora.rank: is {lora.rank}, but {name} is not frozen: call apply_lora(model, config.lora, dtype) "
                    "in the recipe, right after build_model; or set lora.rank to 0"
                )
            raise UserError(
                f"model.frozen: matches {name}, which this recipe trains: build the model with build_model, or call "
                "requires_grad_(False) on the parameter"
            )
