"""Every attention core against a softmax spelled out query by query in float64, and against each other."""

import sys
import types
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from tests.models.test_layers import filled, inputs
from torchllm.config import Model
from torchllm.config.errors import UserError
from torchllm.models import attention_cores
from torchllm.models.attention import CORES, Attention, build_attention
from torchllm.models.attention_cores import EagerAttention
from torchllm.models.layers import rotary_angles, rotate

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


def spelled_out(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    window: int = 0,
    scale: float = WIDTH**-0.5,
    cap: float = 0.0,
) -> Tensor:
    """Attention one query at a time, float64. scale: of the scores. cap: soft one of the scores."""
    q = q.double()
    k = k.double()
    v = v.double()
    sequences, length, heads, _ = q.shape
    group = heads // k.shape[2]
    out = torch.empty_like(q)
    for b in range(sequences):
        document_of_token = None if documents is None else documents[b]
        for i in range(length):
            visible = visible_keys(document_of_token, i, window)
            for h in range(heads):
                keys = k[b, visible, h // group]
                values = v[b, visible, h // group]
                scores = keys @ q[b, i, h] * scale
                if cap:
                    scores = cap * torch.tanh(scores / cap)
                weights = torch.softmax(scores, 0)
                out[b, i, h] = weights @ values
    return out


@pytest.fixture
def flex_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention as plain operations: the same meaning, without the seconds of a compilation."""
    monkeypatch.setattr("torchllm.models.attention_cores.compiled_flex_attention", lambda: flex_attention)


def out_and_gradients(core: Callable[..., Tensor], inputs: QKV, upstream: Tensor) -> tuple[Tensor, QKV]:
    leaves = QKV(*(x.clone().requires_grad_() for x in inputs))
    out = core(*leaves)
    return out.detach(), QKV(*torch.autograd.grad(out, leaves, upstream.to(out.dtype)))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.usefixtures("flex_uncompiled")
@pytest.mark.parametrize(
    ("heads", "kv", "window", "documents", "scale", "cap"),
    [
        (4, 2, 0, None, 0.0, 0.0),
        (4, 2, 4, DOCUMENTS, 0.0, 0.0),
        (6, 1, 0, DOCUMENTS, 0.0, 0.0),
        (4, 2, 0, None, 0.9, 0.0),
        (4, 2, 4, DOCUMENTS, 0.9, 0.0),
        (4, 2, 0, None, 0.9, 1.5),
        (4, 2, 4, DOCUMENTS, 0.0, 0.5),
    ],
)
def test_every_core_is_attention(
    heads: int, kv: int, window: int, documents: Tensor | None, scale: float, cap: float
) -> None:
    whole = qkv(heads, kv)
    upstream = torch.randn(whole.q.shape, generator=torch.Generator().manual_seed(9))
    options: dict[str, Any] = {"documents": documents, "window": window, "scale": scale or WIDTH**-0.5, "cap": cap}
    expected, gradients = out_and_gradients(partial(spelled_out, **options), whole, upstream)
    for name in ("eager", "flex") if cap else ("eager", "sdpa", "flex"):
        module: Any = CORES[name](Model(window=window, softmax_scale=scale, score_softcap=cap))
        core = partial(module, mask=module.mask(documents))
        if name == "flex":  # it has no backward on a CPU
            with torch.no_grad():
                torch.testing.assert_close(core(*whole).double(), expected, **TOLERANCE, msg=name)
            continue
        out, computed = out_and_gradients(core, whole, upstream)
        torch.testing.assert_close(out.double(), expected, **TOLERANCE, msg=name)
        for gradient, exact in zip(computed, gradients, strict=True):
            torch.testing.assert_close(gradient, exact, rtol=0, atol=1e-5)  # sums over 13 queries and up to 6 heads


def test_sdpa_refuses_a_soft_cap() -> None:
    with pytest.raises(UserError, match=r"model\.attention: sdpa has no model\.score_softcap: use flex or flash"):
        CORES["sdpa"](Model(score_softcap=50.0))


def test_eager_softmax_of_bfloat16_is_computed_in_float32() -> None:
    q, k, v = (x.bfloat16() for x in qkv(4, 2))
    out = EagerAttention(Model())(q, k, v, None)
    expected = spelled_out(q, k, v, None)
    assert out.dtype == torch.bfloat16
    # bfloat16 keeps 8 bits of scores up to 8, of weights up to 1 and of the result
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=5e-2)


def test_flex_refuses_a_backward_on_a_cpu() -> None:
    core = CORES["flex"](Model())
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


def test_the_operations_of_a_package_are_saved_by_selective_recomputation(monkeypatch: pytest.MonkeyPatch) -> None:
    saved: set[Any] = set()
    monkeypatch.setattr(attention_cores, "ATTENTION_OPERATIONS", saved)
    attention_cores._save_results_of("flash_attn::of_another_version", "torchllm::document_attention")
    assert saved == {torch.ops.torchllm.document_attention.default}


def test_flash_is_called_causally_with_unexpanded_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package needs a GPU; what is ours is how it is called: (B, S, H, Q), fewer key-value heads, causal.

    Its window is the number of tokens before and behind a query's own that it sees, -1 for all.
    """

    def flash_attn_func(
        *qkv: Tensor,
        causal: bool,
        window_size: tuple[int, int],
        softmax_scale: float | None,
        softcap: float = 0.0,
    ) -> Tensor:
        assert causal
        before, behind = window_size
        assert behind == (0 if window else -1)
        return spelled_out(*qkv, None, before + 1, softmax_scale or WIDTH**-0.5, softcap).float()

    fake = types.ModuleType("flash_attn")
    fake.flash_attn_func = flash_attn_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", fake)
    q, k, v = qkv(4, 2)
    for window, scale, cap in ((0, 0.0, 0.0), (4, 0.0, 0.0), (4, 0.9, 1.5)):
        view = Model(window=window, softmax_scale=scale, score_softcap=cap)
        core = CORES["flash"](view)
        expected = EagerAttention(view)(q, k, v, None)
        torch.testing.assert_close(core(q, k, v, core.mask(None)), expected, **TOLERANCE)


PACKAGES = {"flash_attn_interface": 3, "flash_attn.cute": 4, "flash_attn": 2}
"""modules of FlashAttention, and their versions of it"""


@pytest.mark.parametrize(
    ("capability", "installed", "width", "called"),
    [
        ((9, 0), (2, 3, 4), 128, 3),
        ((9, 0), (2, 4), 192, 4),
        ((10, 0), (2, 3, 4), 128, 4),
        ((10, 0), (2, 3, 4), 192, 2),  # of which flash-attn-4 has no kernel there
        ((10, 0), (2,), 128, 2),
        ((8, 0), (2, 3, 4), 128, 2),
    ],
)
def test_flash_calls_the_package_for_the_gpu(
    capability: tuple[int, int], installed: tuple[int, ...], width: int, called: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Version 4 returns the sums of the softmax with the result. tests/hollow calls the real packages."""
    for name, number in PACKAGES.items():
        result = (number, "sums") if number == 4 else number
        fake = types.SimpleNamespace(flash_attn_func=mock.Mock(return_value=result, __module__=name))
        monkeypatch.setitem(sys.modules, name, fake if number in installed else None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(attention_cores, "version", lambda name: "4.0.0")
    core = CORES["flash"](Model(head_dim=width))
    assert core(*qkv(4, 2), core.mask(None)) == called


@pytest.mark.parametrize("keys", [{"window": 4}, {"score_softcap": 1.5}])
def test_flash_with_kernels_that_ignore_a_key_is_refused(keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The package's Triton kernels, for AMD's GPUs; tests/hollow compares those of the real package."""
    fake = types.ModuleType("flash_attn")
    exec("def flash_attn_func(*qkv, **options): ...\nUSE_TRITON_ROCM = True", fake.__dict__)
    monkeypatch.setitem(sys.modules, "flash_attn", fake)
    assert CORES["flash"](Model())
    with pytest.raises(UserError, match=r'"flash": .* flash-attn ignores windows and soft caps'):
        CORES["flash"](Model(**keys))


@pytest.mark.parametrize(("family", "biased"), [("llama", False), ("gpt", True)])
def test_attention_module_around_its_core(family: Literal["llama", "gpt"], biased: bool) -> None:
    """Projections to heads, rotation of q and k but not of v, output projection."""
    model = Model(family=family, hidden=24, heads=6, kv_heads=2, head_dim=8, attention="eager")
    module: Any = filled(Attention(model))
    assert (module.q_proj.bias is not None) == biased
    x = inputs(BATCH, LENGTH, 24)
    positions = torch.arange(LENGTH).expand(BATCH, LENGTH)
    rotary = rotary_angles(model, positions)

    with mock.patch.object(module.core, "forward", side_effect=lambda q, k, v, mask: 2 * q) as core:
        out = module(x, rotary, None)
    q, k, v, _ = core.call_args.args
    assert q.shape == (BATCH, LENGTH, 6, 8)
    assert torch.equal(v, module.v_proj(x).view(BATCH, LENGTH, 2, 8))
    plain_k = module.k_proj(x).view(BATCH, LENGTH, 2, 8)
    assert torch.equal(k[:, 0], plain_k[:, 0])
    assert not torch.allclose(k[:, 5], plain_k[:, 5])
    torch.testing.assert_close(out, module.o_proj(q.flatten(-2) * 2))


def test_values_are_normed_projections_of_keys() -> None:
    """Of keys before their norm and rotary positions, as Gemma 4 has them."""
    model = Model(hidden=24, heads=6, kv_heads=2, head_dim=8, attention="eager", qk_norm="head", v_norm=True)
    module: Any = filled(Attention(replace(model, keys_as_values=True)))
    x = inputs(BATCH, LENGTH, 24)
    rotary = rotary_angles(model, torch.arange(LENGTH).expand(BATCH, LENGTH))
    with mock.patch.object(module.core, "forward", side_effect=lambda q, k, v, mask: q) as core:
        module(x, rotary, None)
    _, k, v, _ = core.call_args.args
    plain = module.k_proj(x).view(BATCH, LENGTH, 2, 8)
    torch.testing.assert_close(v, plain / (plain.square().mean(-1, keepdim=True) + model.norm_epsilon).sqrt())
    torch.testing.assert_close(k, rotate(module.k_norm(plain), rotary))


@pytest.mark.parametrize("gate", ["element", "head"])
def test_results_are_multiplied_by_their_gates(gate: Literal["element", "head"]) -> None:
    """The rows of q_proj are, head by head, those of the queries and of their gates, as Qwen3-Next publishes them."""
    model = Model(hidden=24, heads=6, kv_heads=2, head_dim=8, attention="eager", attention_gate=gate)
    gated: Any = filled(build_attention(model))
    plain: Any = Attention(replace(model, attention_gate="none"))
    plain.load_state_dict(gated.state_dict() | {"q_proj.weight": plain.q_proj.weight}, strict=gate == "element")
    x = inputs(BATCH, LENGTH, 24)
    if gate == "element":
        of_queries, of_gates = gated.q_proj.weight.unflatten(0, (6, 2, 8)).unbind(1)
        gates = torch.sigmoid(x @ of_gates.flatten(0, 1).T).unflatten(-1, (6, 8))
    else:
        of_queries = gated.q_proj.weight
        gates = torch.sigmoid(x @ gated.head_gate.weight.T).unsqueeze(-1)
    with torch.no_grad():
        plain.q_proj.weight.copy_(of_queries.reshape(48, 24))
        rotary = rotary_angles(model, torch.arange(LENGTH).expand(BATCH, LENGTH))
        results = plain.heads(x, rotary, None).unflatten(-1, (6, 8))
        expected = gated.o_proj((results * gates).flatten(-2))
        torch.testing.assert_close(gated(x, rotary, None), expected, rtol=1e-5, atol=1e-4)  # sums of size 20
