"""Which parameters of a built model are trained: those that `model.frozen` does not match, or added updates instead.

Others have no gradient and no optimizer state.
"""

from collections.abc import Iterable

from torch import nn

from torchllm.config import Config, Model
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


def check_trained(stages: Iterable[nn.Module], config: Config) -> None:
    """Raise UserError if parameters that the config freezes require gradients, e.g. in a fork with its own model."""
    for stage in stages:
        for wrapped, parameter in stage.named_parameters():
            name = canonical_name(wrapped)
            if parameter.requires_grad and not is_trained(name, config.model, config.trained):
                raise UserError(
                    f"{name}: this recipe trains it, but its config does not: build the model with build_model and "
                    "add_low_rank_updates, or call requires_grad_(False) on the parameter"
                )
