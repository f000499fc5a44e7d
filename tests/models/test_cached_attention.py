import torch

from torchllm.config import Kinds, Model
from torchllm.models.attention import CORES
from torchllm.models.cached_attention import CachedAttention
from torchllm.models.decoder import build_model
from torchllm.tools.continue_texts import caching

LENGTH, PROMPT = 12, 6


def test_one_token_at_a_time_is_the_whole_computation() -> None:
    """Window 4 is full after the prompt, 8 is not; room 0: the cache grows."""
    plain: dict[str, float] = {}
    cases = [
        ("eager", 4, {"score_softcap": 0.7}),
        ("eager", 8, plain),
        ("sdpa", 0, {"softmax_scale": 0.9}),
        ("sdpa", 4, plain),
    ]
    for name, window, options in cases:
        model = Model(window=window, **options)
        for room in [0, LENGTH]:
            generator = torch.Generator().manual_seed(0)
            q, k, v = (torch.randn(2, LENGTH, heads, 8, generator=generator) for heads in (4, 2, 2))
            cached = CachedAttention(CORES[name](model), room=room)
            parts = []
            for begin, end in ((0, PROMPT), *((i, i + 1) for i in range(PROMPT, LENGTH))):
                parts.append(cached(q[:, begin:end], k[:, begin:end], v[:, begin:end], cached.mask(None)))
            assert cached.keys is not None, room
            assert cached.keys.shape[2] == (window or LENGTH), room
            expected = CORES["eager"](model)(q, k, v, None)
            torch.testing.assert_close(
                torch.cat(parts, dim=1), expected, rtol=1e-5, atol=1e-6
            )  # a row at a time: other sums


def test_each_kind_of_blocks_caches_its_window_and_turns_its_positions() -> None:
    """Windows 3 and 8: one is full after the prompt, one later."""
    kinds = {
        "near": {"window": 3, "rotary_fraction": 0.0, "head_dim": 6, "kv_heads": 1, "attention": "eager"},
        "far": {"window": 8, "rope_theta": 50.0, "heads": 2, "qk_norm": "head", "ffn": 20, "norm_position": "after"},
        "all": {"experts": 3},
    }
    sizes = {"layers": 4, "hidden": 16, "heads": 4, "kv_heads": 2, "ffn": 24, "vocab": 31, "experts": 3}
    for kind in ("near", "far"):
        kinds[kind]["experts"] = 0
    model = build_model(Model(**sizes, pattern=tuple(kinds), kinds=Kinds(kinds))).double()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(31, (2, LENGTH), generator=generator)
    positions = torch.arange(LENGTH).expand(2, LENGTH)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5, generator=generator)
        expected = model(tokens, positions)
        with caching(model, room=LENGTH, padding=None):
            for begin, end in ((0, PROMPT), *((i, i + 1) for i in range(PROMPT, LENGTH))):
                logits = model(tokens[:, begin:end], positions[:, begin:end])
                torch.testing.assert_close(logits[:, 0], expected[:, end - 1], rtol=1e-10, atol=1e-10)
