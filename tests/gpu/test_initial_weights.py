"""The initial weights of a GPU: to the last bit those of a CPU. It has not run on a GPU yet."""

import pytest
import torch
from torch import Tensor

from torchllm.config import Model
from torchllm.models.decoder import build_model
from torchllm.parallel.initialize import initialize

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: a GPU's arithmetic needs one")
MODEL = Model(layers=2, hidden=512, heads=8, kv_heads=2, ffn=1408, vocab=4096)


def weights_on(device: str) -> dict[str, Tensor]:
    with torch.device("meta"):
        model = build_model(MODEL)
    initialize([model], MODEL, torch.device(device), seed=1)
    return {name: weight.detach().cpu() for name, weight in model.named_parameters()}


def test_a_gpu_starts_from_the_weights_of_a_cpu() -> None:
    expected = weights_on("cpu")
    made = weights_on("cuda")
    assert made.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(made[name], expected[name])] == []
