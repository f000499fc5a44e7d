import torch

from torchllm.models.attention import CORES
from torchllm.tools.generate.cached_attention import CachedAttention

LENGTH, PROMPT = 12, 6


def test_one_token_at_a_time_is_the_whole_computation() -> None:
    """Window 4 is full after the prompt, 8 is not; room 0: the cache grows."""
    for name, window in [("eager", 4), ("eager", 8), ("sdpa", 0), ("sdpa", 4)]:
        for room in [0, LENGTH]:
            generator = torch.Generator().manual_seed(0)
            q, k, v = (torch.randn(2, LENGTH, heads, 8, generator=generator) for heads in (4, 2, 2))
            cached = CachedAttention(CORES[name](window), room=room)
            parts = []
            for begin, end in ((0, PROMPT), *((i, i + 1) for i in range(PROMPT, LENGTH))):
                parts.append(cached(q[:, begin:end], k[:, begin:end], v[:, begin:end], cached.mask(None)))
            assert cached.keys is not None, room
            assert cached.keys.shape[2] == (window or LENGTH), room
            expected = CORES["eager"](window)(q, k, v, None)
            torch.testing.assert_close(
                torch.cat(parts, dim=1), expected, rtol=1e-5, atol=1e-6
            )  # a row at a time: other sums
