"""The mixer around a gated delta rule is the published one, and documents in it are as if alone."""

import pytest
import torch

from tests.models.parts.test_delta_rule import (
    BATCH,
    EXACT,
    KERNEL,
    KEY_HEADS,
    KEY_WIDTH,
    VALUE_HEADS,
    VALUE_WIDTH,
    documents_of,
    random,
)
from torchllm.config import Model
from torchllm.models.parts.gated_delta import GatedDeltaNet

MODEL = Model(
    mixer="gated_delta",
    hidden=16,
    delta_key_heads=KEY_HEADS,
    delta_value_heads=VALUE_HEADS,
    delta_key_dim=KEY_WIDTH,
    delta_value_dim=VALUE_WIDTH,
    norm_epsilon=1e-6,
)


def mixer(dtype: torch.dtype = torch.float64) -> GatedDeltaNet:
    module = GatedDeltaNet(MODEL)
    for seed, parameter in enumerate(module.parameters()):
        parameter.data = (random(*parameter.shape, seed=seed) * 0.5).to(dtype)
    return module


def published(module: GatedDeltaNet) -> torch.nn.Module:
    """Return transformers' module with the same weights."""
    from transformers import OlmoHybridConfig
    from transformers.models.olmo_hybrid.modeling_olmo_hybrid import OlmoHybridGatedDeltaNet

    config = OlmoHybridConfig(
        hidden_size=MODEL.hidden,
        linear_num_key_heads=KEY_HEADS,
        linear_num_value_heads=VALUE_HEADS,
        linear_key_head_dim=KEY_WIDTH,
        linear_value_head_dim=VALUE_WIDTH,
        linear_conv_kernel_dim=KERNEL,
        linear_allow_neg_eigval=False,
        num_hidden_layers=4,
    )
    theirs = OlmoHybridGatedDeltaNet(config, layer_idx=0)
    theirs.o_norm.variance_epsilon = MODEL.norm_epsilon
    ours = module.state_dict()
    convolutions = [ours.pop(f"of_heads.{name}_conv") for name in "qkv"]
    weights = {name.removeprefix("of_heads."): weight for name, weight in ours.items()}
    theirs.load_state_dict({**weights, "conv1d.weight": torch.cat(convolutions).unsqueeze(1)})
    return theirs


@pytest.mark.exhaustive  # transformers is 4 s to import
def test_the_module_is_the_published_one() -> None:
    """In float32. Theirs subtracts sums of log decays since a chunk's begin, which is exact for slow decays alone."""
    module = mixer(torch.float32)
    module.of_heads.A_log.data -= 4.0
    x = random(BATCH, 150, MODEL.hidden, seed=20).float()
    expected = published(module)(x)
    # either is within 7e-7 of the largest element of float64's
    torch.testing.assert_close(module(x, None, None), expected, rtol=0, atol=1e-6 * float(expected.abs().max()))


def test_documents_are_as_if_alone() -> None:
    module = mixer()
    lengths = [2, 66, 1, 40]
    x = random(1, sum(lengths), MODEL.hidden, seed=21)
    together = module(x, None, module.core.mask(documents_of(lengths).unsqueeze(0)))
    alone = torch.cat([module(part, None, None) for part in x.split(lengths, dim=1)], dim=1)
    torch.testing.assert_close(together, alone, rtol=0, atol=EXACT)
