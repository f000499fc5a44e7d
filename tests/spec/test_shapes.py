"""The shapes of all parameters, against the model as built."""

import pytest
import torch

from tests.spec.test_parameters import MODELS
from torchllm.models.decoder import build_model
from torchllm.spec.shapes import parameter_shapes


@pytest.mark.parametrize("name", MODELS)
def test_names_shapes_and_order_are_those_of_the_built_model(name: str) -> None:
    with torch.device("meta"):
        model = build_model(MODELS[name])
    built = {key: tuple(tensor.shape) for key, tensor in model.named_parameters()}
    shapes = parameter_shapes(MODELS[name])
    assert shapes == built
    assert [key for key in shapes if "embed_positions" not in key] == [
        key for key in built if "embed_positions" not in key
    ]
