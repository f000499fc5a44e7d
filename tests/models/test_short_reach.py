"""A core that reaches a few tokens back, and its cache: text by text, and one token at a time."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torchllm.models.short_reach import NO_DOCUMENT, CachedReach, ShortReach

pytestmark = pytest.mark.quick


class Convolution(ShortReach):
    """A convolution of each channel, whose weights are (C, r + 1), that of the current token last."""

    def __init__(self, reach: int) -> None:
        super().__init__()
        self.reach = reach

    def forward(self, x: Tensor, document_ids: Tensor | None, *of_channels: Tensor) -> Tensor:
        (weight,) = of_channels
        length = x.shape[1]
        out = torch.zeros_like(x)
        for back in range(self.reach + 1):
            earlier = F.pad(x.movedim(1, -1), (back, 0))[..., :length].movedim(-1, 1)
            if document_ids is not None:
                same = F.pad(document_ids, (back, 0), value=NO_DOCUMENT)[:, :length] == document_ids
                earlier = earlier * same.reshape(*same.shape, *[1] * (x.dim() - 2))
            factor = weight[:, -1 - back]
            out = out + earlier * factor.reshape(-1, *[1] * (x.dim() - 3))
        return out


@pytest.mark.parametrize("reach", [1, 3])
@pytest.mark.parametrize("prompt", [1, 2, 7])
@pytest.mark.parametrize("padding", [0, 1])
def test_one_token_at_a_time_is_the_whole_computation(reach: int, prompt: int, padding: int) -> None:
    """A prompt may be shorter than the reach, and the second text have a token less, behind padding."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 12, 4, 2, generator=generator, dtype=torch.float64)
    weight = torch.randn(4, reach + 1, generator=generator, dtype=torch.float64)
    core = Convolution(reach)
    prompt += padding
    ids = (torch.arange(12) >= torch.tensor([[0], [padding]])).long() if padding else None
    expected = core(x, core.mask(ids), weight)
    cached = CachedReach(core)
    parts = [cached(x[:, :prompt], cached.mask(None if ids is None else ids[:, :prompt]), weight)]
    parts += [cached(x[:, i : i + 1], cached.mask(None), weight) for i in range(prompt, 10)]
    parts.append(cached(x[:, 10:], cached.mask(None), weight))
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=0, atol=1e-14)
    assert cached.before is not None
    assert cached.before.shape[1] == reach
