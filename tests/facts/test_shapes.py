"""The shapes of all parameters, against the model as built."""

import pytest
import torch

from tests.facts.test_parameters import MODELS
from torchllm.facts.shapes import parameter_shapes
from torchllm.models.decoder import build_model

pytestmark = pytest.mark.quick


def test_names_shapes_and_order_are_those_of_the_built_model() -> None:
    for name, model in MODELS.items():
        with torch.device("meta"):
            decoder = build_model(model)
        built = {key: tuple(tensor.shape) for key, tensor in decoder.named_parameters()}
        shapes = parameter_shapes(model)
        assert shapes == built, name
        shapes.pop("embed_positions.weight", None)
        built.pop("embed_positions.weight", None)
        assert list(shapes) == list(built), name
