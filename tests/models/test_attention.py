"""Every attention core against a softmax spelled out query by query in float64, and against each other."""

import dataclasses
import sys
import types
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from torchllm.config import Model
from torchllm.config.errors import UserError
from torchllm.models import attention
from torchllm.models.attention import CORES, Attention, EagerAttention
from torchllm.models.layers import rotary_angles

pytestmark = pytest.mark.quick
BATCH, LENGTH, WIDTH = 2, 13, 8
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 1 + [2] * 7, [0] * 13])  # one document of a single token
TOLERANCE = {"rtol": 0.0, "atol": 2e-6}  # float32 averages of numbers of size 1


class QKV(NamedTuple):
    """Random queries (B, S, H, Q), keys and values (B, S, K, Q)."""

    q: Tensor
    k: Tensor
    v: Tensor


def qkv(heads: int, kv: int) -> QKV:
    generator = torch.Generator().manual_seed(heads)
    q = torch.randn(BATCH, LENGTH, heads, WIDTH, generator=generator)
    k = torch.randn(BATCH, LENGTH, kv, WIDTH, generator=generator)
    v = torch.randn(BATCH, LENGTH, kv, WIDTH, generator=generator)
    return QKV(q, k, v)


def visible_keys(document_of_token: Tensor | None, query: int, window: int) -> list[int]:
    """Positions up to the query's own, of the same document; with a window over 0 the last ones."""
    visible = []
    first = max(0, query - window + 1) if window else 0
    for key in range(first, query + 1):
        if document_of_token is None or document_of_token[key] == document_of_token[query]:
            visible.append(key)
    return visible


def spelled_out(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, window: int = 0) -> Tensor:
    """Attention one query at a time, float64."""
    q = q.double()
    k = k.double()
    v = v.double()
    sequences, length, heads, width = q.shape
    group = heads // k.shape[2]
    out = torch.empty_like(q)
    for b in range(sequences):
        document_of_token = None if documents is None else documents[b]
        for i in range(length):
            visible = visible_keys(document_of_token, i, window)
            for h in range(heads):
                keys = k[b, visible, h // group]
                values = v[b, visible, h // group]
                scores = keys @ q[b, i, h] / width**0.5
                weights = torch.softmax(scores, 0)
                out[b, i, h] = weights @ values
    return out


@pytest.fixture
def flex_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention as plain operations: the same meaning, without the seconds of a compilation."""
    monkeypatch.setattr(attention, "compiled_flex_attention", lambda: flex_attention)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.usefixtures("flex_uncompiled")
@pytest.mark.parametrize(
    ("heads", "kv", "window", "documents"), [(4, 2, 0, None), (4, 2, 4, DOCUMENTS), (6, 1, 0, DOCUMENTS)]
)
def test_every_core_is_attention(heads: int, kv: int, window: int, documents: Tensor | None) -> None:
    q, k, v = qkv(heads, kv)
    expected = spelled_out(q, k, v, documents, window)
    for name in ("eager", "sdpa", "flex"):
        core = CORES[name](window)
        mask = core.mask(documents)  # type: ignore[operator]
        with torch.no_grad():
            out = core(q, k, v, mask)
        torch.testing.assert_close(out.double(), expected, **TOLERANCE, msg=name)


@pytest.mark.parametrize(("heads", "kv", "window", "documents"), [(4, 2, 4, None), (6, 1, 0, DOCUMENTS)])
def test_gradients_of_the_cores(heads: int, kv: int, window: int, documents: Tensor | None) -> None:
    inputs = qkv(heads, kv)
    generator = torch.Generator().manual_seed(9)
    upstream = torch.randn(inputs.q.shape, generator=generator)

    def gradients(run: Callable[..., Tensor]) -> QKV:
        leaves = QKV(*(x.clone().requires_grad_() for x in inputs))
        out = run(*leaves)
        return QKV(*torch.autograd.grad(out, leaves, upstream))

    def core(name: str) -> Callable[..., Tensor]:
        module: Any = CORES[name](window)
        mask = module.mask(documents)
        return lambda q, k, v: module(q, k, v, mask)

    def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return spelled_out(q, k, v, documents, window).float()

    tolerance = {"rtol": 0, "atol": 1e-5}  # sums over 13 queries and up to 6 heads
    expected = gradients(reference)
    for name in ("eager", "sdpa"):
        computed = gradients(core(name))
        torch.testing.assert_close(computed.q, expected.q, **tolerance)
        torch.testing.assert_close(computed.k, expected.k, **tolerance)
        torch.testing.assert_close(computed.v, expected.v, **tolerance)


def test_eager_softmax_of_bfloat16_is_computed_in_float32() -> None:
    q, k, v = (x.bfloat16() for x in qkv(4, 2))
    out = EagerAttention()(q, k, v, None)
    expected = spelled_out(q, k, v, None)
    assert out.dtype == torch.bfloat16
    # bfloat16 keeps 8 bits of scores up to 8, of weights up to 1 and of the result
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=5e-2)


def test_flex_refuses_a_backward_on_a_cpu() -> None:
    core = CORES["flex"]()
    q, k, v = (x.requires_grad_() for x in qkv(4, 2))
    mask = core.mask(DOCUMENTS)  # type: ignore[operator]
    with pytest.raises(UserError, match='"flex" has no backward on a CPU: use "sdpa" or "eager"'):
        core(q, k, v, mask)


def test_flash_without_its_package_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)  # what makes an import fail
    with pytest.raises(
        UserError, match=r'model.attention = "flash" cannot be used here: .*flash_attn.*\[flash\].*sdpa'
    ):
        Attention(Model(attention="flash"))


def test_flash_is_called_causally_with_unexpanded_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package needs a GPU; what is ours is how it is called: (B, S, H, Q), fewer key-value heads, causal.

    Its window is the number of tokens before and behind a query's own that it sees, -1 for all.
    """

    def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, causal: bool, window_size: tuple[int, int]) -> Tensor:
        assert causal
        before, behind = window_size
        assert behind == (0 if window else -1)
        return spelled_out(q, k, v, None, before + 1).float()

    fake = types.ModuleType("flash_attn")
    fake.flash_attn_func = flash_attn_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", fake)
    q, k, v = qkv(4, 2)
    for window in (0, 4):
        core = CORES["flash"](window)
        expected = EagerAttention(window)(q, k, v, None)
        torch.testing.assert_close(core(q, k, v, core.mask(None)), expected, **TOLERANCE)


@pytest.mark.parametrize(("family", "biased"), [("llama", False), ("gpt", True)])
def test_attention_module_around_its_core(family: Literal["llama", "gpt"], biased: bool) -> None:
    """Projections to heads, rotation of q and k but not of v, output projection."""
    model = Model(family=family, hidden=24, heads=6, kv_heads=2, head_dim=8, attention="eager")
    module = Attention(model)
    assert (module.q_proj.bias is not None) == biased
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            values = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(values * 0.2)
    x = torch.randn(BATCH, LENGTH, 24, generator=generator)
    positions = torch.arange(LENGTH).expand(BATCH, LENGTH)
    rotary = rotary_angles(model, positions)

    class Recorder(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
            self.inputs = QKV(q, k, v)
            return q * 2

    module.core = recorder = Recorder()
    out = module(x, rotary, None)
    q, k, v = recorder.inputs
    assert q.shape == (BATCH, LENGTH, 6, 8)
    assert k.shape == (BATCH, LENGTH, 2, 8)
    plain_v = module.v_proj(x).view(BATCH, LENGTH, 2, 8)
    assert torch.equal(v, plain_v)
    plain_k = module.k_proj(x).view(BATCH, LENGTH, 2, 8)
    assert torch.equal(k[:, 0], plain_k[:, 0])
    assert not torch.allclose(k[:, 5], plain_k[:, 5])
    doubled = q.flatten(-2) * 2
    torch.testing.assert_close(out, module.o_proj(doubled))
    every_head = dataclasses.replace(model, kv_heads=0)
    assert every_head.kv == 6
