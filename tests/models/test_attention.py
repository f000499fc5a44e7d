"""Every attention core against a softmax spelled out query by query in float64, and against each other."""

import dataclasses
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from torchllm.config import Model
from torchllm.config.errors import UserError
from torchllm.models import attention
from torchllm.models.attention import CORES, Attention, CachedAttention, EagerAttention, document_mask
from torchllm.models.layers import rotary_angles

BATCH, LENGTH, WIDTH = 2, 13, 8
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 1 + [2] * 7, [0] * 13])  # one document of a single token
TOLERANCE = {"rtol": 0.0, "atol": 2e-6}  # float32 averages of numbers of size 1
HEADS = [(4, 4), (4, 2), (6, 1)]  # query heads, key-value heads


def qkv(heads: int, kv: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(heads)
    return tuple(torch.randn(BATCH, LENGTH, n, WIDTH, generator=generator) for n in (heads, kv, kv))  # type: ignore[return-value]


def spelled_out(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
    """Attention one query at a time, float64."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[2] // k.shape[2]
    out = torch.empty_like(q)
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            for i in range(q.shape[1]):
                seen = [j for j in range(i + 1) if documents is None or documents[b, j] == documents[b, i]]
                weights = torch.softmax(k[b, seen, h // group] @ q[b, i, h] / q.shape[-1] ** 0.5, 0)
                out[b, i, h] = weights @ v[b, seen, h // group]
    return out


@pytest.fixture
def flex_uncompiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """FlexAttention as plain operations: the same meaning, without the seconds of a compilation."""
    monkeypatch.setattr(attention, "compiled_flex_attention", lambda: flex_attention)
    attention._causal_block_mask.cache_clear()
    yield
    attention._causal_block_mask.cache_clear()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.usefixtures("flex_uncompiled")
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["causal", "documents"])
@pytest.mark.parametrize(("heads", "kv"), HEADS)
@pytest.mark.parametrize("name", ["eager", "sdpa", "flex"])
def test_core_is_attention(name: str, heads: int, kv: int, documents: Tensor | None) -> None:
    core = CORES[name]()
    q, k, v = qkv(heads, kv)
    with torch.no_grad():
        out = core(q, k, v, core.mask(documents))  # type: ignore[operator]
    torch.testing.assert_close(out.double(), spelled_out(q, k, v, documents), **TOLERANCE)


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["causal", "documents"])
@pytest.mark.parametrize(("heads", "kv"), HEADS)
def test_gradients_of_the_cores(heads: int, kv: int, documents: Tensor | None) -> None:
    inputs = qkv(heads, kv)
    upstream = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(9))

    def gradients(run: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        leaves = [x.clone().requires_grad_() for x in inputs]
        return torch.autograd.grad(run(*leaves), leaves, upstream)

    def core(name: str) -> Callable[..., Tensor]:
        module: Any = CORES[name]()
        return lambda q, k, v: module(q, k, v, module.mask(documents))

    expected = gradients(lambda q, k, v: spelled_out(q, k, v, documents).float())
    for name in ("eager", "sdpa"):
        for got, wanted in zip(gradients(core(name)), expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)  # sums over 13 queries and up to 6 heads


def test_document_mask() -> None:
    mask = document_mask(torch.tensor([[0, 0, 1]]))
    assert mask.shape == (1, 1, 3, 3)
    assert mask[0, 0].tolist() == [[True, False, False], [True, True, False], [False, False, True]]


def test_eager_softmax_of_bfloat16_is_computed_in_float32() -> None:
    q, k, v = (x.bfloat16() for x in qkv(4, 2))
    out = EagerAttention()(q, k, v, None)
    assert out.dtype == torch.bfloat16
    # bfloat16 keeps 8 bits of scores up to 8, of weights up to 1 and of the result
    torch.testing.assert_close(out.double(), spelled_out(q, k, v, None), rtol=0, atol=5e-2)


def test_flex_refuses_a_backward_on_a_cpu() -> None:
    core = CORES["flex"]()
    q, k, v = (x.requires_grad_() for x in qkv(4, 2))
    with pytest.raises(UserError, match='"flex" has no backward on a CPU: use "sdpa" or "eager"'):
        core(q, k, v, core.mask(DOCUMENTS))  # type: ignore[operator]


def test_flash_without_its_package_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)  # what makes an import fail
    with pytest.raises(
        UserError, match=r'model.attention = "flash" cannot be used here: .*flash_attn.*\[flash\].*sdpa'
    ):
        Attention(Model(attention="flash"))


def test_flash_is_called_causally_with_unexpanded_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package needs a GPU; what is ours is how it is called: (B, S, H, Q), fewer key-value heads, causal."""

    def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
        assert causal
        return spelled_out(q, k, v, None).float()

    fake = types.ModuleType("flash_attn")
    fake.flash_attn_func = flash_attn_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", fake)
    core, q, k, v = CORES["flash"](), *qkv(4, 2)
    torch.testing.assert_close(core(q, k, v, core.mask(None)), EagerAttention()(q, k, v, None), **TOLERANCE)  # type: ignore[operator]


@pytest.mark.parametrize("name", ["eager", "sdpa"])
@pytest.mark.parametrize(("heads", "kv"), HEADS)
def test_cached_core_is_the_whole_computation(name: str, heads: int, kv: int) -> None:
    q, k, v = qkv(heads, kv)
    cached, prompt = CachedAttention(CORES[name]()), 6
    parts = [slice(0, prompt), *(slice(i, i + 1) for i in range(prompt, LENGTH))]
    out = torch.cat([cached(q[:, p], k[:, p], v[:, p], cached.mask(None)) for p in parts], dim=1)
    torch.testing.assert_close(out.double(), spelled_out(q, k, v, None), **TOLERANCE)


@pytest.mark.parametrize(("family", "biased"), [("llama", False), ("gpt", True)])
def test_attention_module_around_its_core(family: Literal["llama", "gpt"], biased: bool) -> None:
    """Projections to heads, rotation of q and k but not of v, output projection."""
    model = Model(family, hidden=24, heads=6, kv_heads=2, head_dim=8, attention="eager")
    module = Attention(model)
    assert (module.q_proj.bias is not None) == biased
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    x = torch.randn(BATCH, LENGTH, 24, generator=generator)
    rotary = rotary_angles(model, torch.arange(LENGTH).expand(BATCH, LENGTH))

    seen: dict[str, Tensor] = {}

    class Recorder(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
            seen.update(q=q, k=k, v=v)
            return q * 2

    module.core = Recorder()
    out = module(x, rotary, None)
    assert (seen["q"].shape, seen["k"].shape) == ((BATCH, LENGTH, 6, 8), (BATCH, LENGTH, 2, 8))
    plain = module.v_proj(x).view(BATCH, LENGTH, 2, 8)
    assert torch.equal(seen["v"], plain)
    assert torch.equal(seen["k"][:, 0], module.k_proj(x).view(BATCH, LENGTH, 2, 8)[:, 0])
    assert not torch.allclose(seen["k"][:, 5], module.k_proj(x).view(BATCH, LENGTH, 2, 8)[:, 5])
    torch.testing.assert_close(out, module.o_proj(seen["q"].flatten(-2) * 2))
    assert dataclasses.replace(model, kv_heads=0).kv == 6
