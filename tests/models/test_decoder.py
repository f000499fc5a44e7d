"""What every family must hold: what a token may see, and how a model comes apart. tests/tools/hub has its logits."""

from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from tests.config.conftest import config_of
from tests.config.test_inert import CONTRADICTED
from torchllm.config import Config, Kinds, Model, Training
from torchllm.config.applied_keys import unapplied
from torchllm.config.errors import UserError
from torchllm.facts.shapes import parameter_shapes
from torchllm.models.block_mask import causal_block_mask
from torchllm.models.cast import cast_parameters
from torchllm.models.decoder import BlockInputs, Decoder, build_model
from torchllm.parallel.initialize import initialize
from torchllm.tools.proof.layouts import Settings

pytestmark = pytest.mark.quick
CPU = torch.device("cpu")
LLAMA = Model(layers=3, hidden=32, heads=4, kv_heads=2, ffn=52, vocab=61, max_sequence_length=64)
GPT = replace(LLAMA, family="gpt", kv_heads=0)
QWEN = replace(LLAMA, qk_norm="head", tied_embeddings=True, head_dim=12)
OLMO2 = replace(LLAMA, qk_norm="width", norm_position="after")
MISTRAL = replace(LLAMA, window=5)  # of 24 tokens, and of documents of 7 to 9
KINDS = Kinds(
    local={"window": 5, "rotary_fraction": 0.0}, mid={"window": 9, "rope_theta": 50.0, "rotary_fraction": 0.5}, full={}
)
OF_KINDS = replace(LLAMA, layers=5, pattern=("local", "mid", "full"), kinds=KINDS)
GEMMA = replace(
    LLAMA,
    qk_norm="head",
    norm_position="both",
    norm_offset=True,
    activation="gelu_tanh",
    embedding_multiplier=5.7,
    softmax_scale=0.3,
    logit_softcap=3.0,
    tied_embeddings=True,
)
GEMMA4 = replace(
    LLAMA,
    qk_norm="head",
    v_norm=True,
    norm_position="both",
    block_scale=True,
    pattern=("local", "full"),
    kinds=Kinds(local={"window": 5}, full={"head_dim": 12, "kv_heads": 1, "keys_as_values": True}),
)
GRANITE = replace(LLAMA, residual_multiplier=0.22, logit_divisor=6.0, embedding_multiplier=12.0, softmax_scale=0.5)
FAMILIES = {
    "llama": LLAMA,
    "llama-tied": replace(LLAMA, tied_embeddings=True),
    "gpt": GPT,
    "qwen": QWEN,
    "olmo2": OLMO2,
    "mistral": MISTRAL,
    "kinds": OF_KINDS,
    "gemma": GEMMA,
    "gemma4": GEMMA4,
    "granite": GRANITE,
    "gated": replace(QWEN, attention_gate="element"),
    "gated heads": replace(LLAMA, attention_gate="head"),
}


def tokens(model: Model, length: int = 24) -> Tensor:
    return torch.randint(model.vocab, (2, length), generator=torch.Generator().manual_seed(0))


def positions(length: int = 24) -> Tensor:
    return torch.arange(length).expand(2, length)


def made(model: Model) -> Decoder:
    """A decoder with random weights everywhere, norms and biases too, large enough for differences to show."""
    with torch.device("meta"):
        decoder = build_model(model)
    initialize([decoder], model, CPU, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in decoder.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise * 0.1)
    return decoder


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("family", "kernel"),
    [
        *((family, "sdpa") for family in FAMILIES),
        ("llama", "eager"),
        ("mistral", "eager"),
        ("gpt", "flex"),
        ("mistral", "flex"),
        ("kinds", "flex"),
    ],
)
def test_a_token_sees_its_own_document_up_to_itself(family: str, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits in a packed sequence are those of the document alone, bitwise whatever else is packed."""
    # seconds less, same meaning
    monkeypatch.setattr("torchllm.models.attention_cores.compiled_flex_attention", lambda: flex_attention)
    model = replace(FAMILIES[family], attention=kernel)  # type: ignore[arg-type]
    decoder = made(model)
    text = tokens(model)
    lengths = torch.tensor([9, 8, 7])
    documents = torch.arange(3).repeat_interleave(lengths).expand(2, 24)
    position_in_document = torch.cat([torch.arange(9), torch.arange(8), torch.arange(7)]).expand(2, 24)
    second = slice(9, 17)

    @torch.no_grad()
    def logits(text: Tensor) -> Tensor:
        return decoder(text, position_in_document, documents)

    def with_other_tokens(*places: slice) -> Tensor:
        changed = text.clone()
        for place in places:
            changed[:, place] = (text[:, place] + 1) % model.vocab
        return changed

    packed = logits(text)
    other_documents = logits(with_other_tokens(slice(0, 9), slice(17, 24)))
    assert torch.equal(other_documents[:, second], packed[:, second])

    other_end = logits(with_other_tokens(slice(13, 24)))
    assert torch.equal(other_end[:, :13], packed[:, :13])
    assert not torch.allclose(other_end[:, 14:17], packed[:, 14:17])  # later tokens of the document do see them

    with torch.no_grad():
        alone = decoder(text[:, second], torch.arange(8).expand(2, 8))
    torch.testing.assert_close(packed[:, second], alone, rtol=0, atol=2e-6)  # other block sizes, another order of sums


@pytest.mark.parametrize(("model", "windows"), [(LLAMA, [0, 0, 0]), (MISTRAL, [5, 5, 5]), (OF_KINDS, [5, 9, 0, 5, 9])])
def test_flex_attention_without_documents_has_one_mask_for_all_blocks_of_a_window_and_steps(
    model: Model, windows: list[int]
) -> None:
    """Compiled blocks would each compute theirs anew: tests/hollow counts the launches."""
    decoder = made(replace(model, attention="flex"))
    masks: list[object] = []

    def run_blocks(blocks: list[tuple[object, BlockInputs]], x: Tensor) -> Tensor:
        masks.extend(inputs.mask for _, inputs in blocks)
        return x

    decoder.run_blocks = run_blocks
    for _ in range(2):
        decoder(tokens(model), positions())
    assert len(masks) == 2 * model.layers
    for mask, window in zip(masks, [*windows, *windows], strict=True):
        assert mask is causal_block_mask(24, CPU, window)


class BlockByHand(NamedTuple):
    """How a block of OF_KINDS differs from others."""

    window: int
    """tokens that a token sees"""
    turned: int
    """features of a head that rotary positions turn"""
    theta: float
    """base of the angles"""


BLOCKS_BY_HAND = [
    BlockByHand(5, 0, 1.0),
    BlockByHand(9, 4, 50.0),
    BlockByHand(24, 8, 10000.0),
    BlockByHand(5, 0, 1.0),
    BlockByHand(9, 4, 50.0),
]


def turned_by_hand(x: Tensor, place: Tensor, block: BlockByHand) -> Tensor:
    """Turn the pairs (i, i + R / 2) of the first R features as complex numbers. x (B, S, H, Q), place (B, S)."""
    half = block.turned // 2
    pairs = torch.complex(x[..., :half].double(), x[..., half : 2 * half].double())
    angles = place[:, :, None, None] * block.theta ** (-torch.arange(half) / max(half, 1))
    turned = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag, x[..., 2 * half :].double()), dim=-1)


def logits_by_hand(decoder: Decoder, text: Tensor, place: Tensor, documents: Tensor) -> Tensor:
    """Return the logits of OF_KINDS from formulas, in float64: (B, S, V). place: in its document."""
    weights = {name: parameter.double() for name, parameter in decoder.named_parameters()}

    def norm(x: Tensor, name: str) -> Tensor:
        return torch.nn.functional.rms_norm(x, (32,), weights[f"{name}.weight"], OF_KINDS.norm_epsilon)

    x = weights["embed_tokens.weight"][text]
    order = torch.arange(24)
    distance = order[:, None] - order
    for index, block in enumerate(BLOCKS_BY_HAND):
        product = partial(_product, weights, f"layers.{index}.")
        inner = norm(x, f"layers.{index}.input_layernorm")
        q, k, v = (product(f"self_attn.{name}_proj", inner).unflatten(-1, (-1, 8)) for name in "qkv")
        q, k = turned_by_hand(q, place, block), turned_by_hand(k, place, block)
        k, v = k.repeat_interleave(2, dim=2), v.repeat_interleave(2, dim=2)
        sees = (distance >= 0) & (distance < block.window) & (documents[:, :, None] == documents[:, None])
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / 8**0.5
        shares = scores.masked_fill(~sees[:, None], float("-inf")).softmax(-1)
        x = x + product("self_attn.o_proj", torch.einsum("bhqk,bkhd->bqhd", shares, v).flatten(2))
        inner = norm(x, f"layers.{index}.post_attention_layernorm")
        gate, up = product("mlp.gate_proj", inner), product("mlp.up_proj", inner)
        x = x + product("mlp.down_proj", torch.nn.functional.silu(gate) * up)
    return norm(x, "norm") @ weights["lm_head.weight"].T


def _product(weights: dict[str, Tensor], block: str, name: str, x: Tensor) -> Tensor:
    return x @ weights[f"{block}{name}.weight"].T


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("kernel", ["sdpa", "eager", "flex"])
def test_each_block_has_the_window_and_the_rotary_positions_of_its_kind(
    kernel: Literal["sdpa", "eager", "flex"], monkeypatch: pytest.MonkeyPatch
) -> None:
    # seconds less, same meaning
    monkeypatch.setattr("torchllm.models.attention_cores.compiled_flex_attention", lambda: flex_attention)
    decoder = made(replace(OF_KINDS, attention=kernel))
    one = torch.zeros(2, 24, dtype=torch.int64)
    two = (torch.arange(24) >= 11).long().expand(2, 24)
    place = torch.arange(24) - 11 * two
    text = tokens(OF_KINDS)
    with torch.no_grad():
        torch.testing.assert_close(
            decoder(text, positions()).double(), logits_by_hand(decoder, text, positions(), one), rtol=0, atol=1e-5
        )
        torch.testing.assert_close(
            decoder(text, place, two).double(), logits_by_hand(decoder, text, place, two), rtol=0, atol=1e-5
        )


def test_blocks_share_the_angles_of_a_rotary_setting_and_the_mask_of_a_window() -> None:
    kinds = Kinds(local={"window": 5}, full={}, other={"window": 5, "rope_theta": 50.0})
    decoder = made(replace(LLAMA, pattern=("local", "full", "other"), kinds=kinds, attention="eager"))
    local, full, other = decoder.inputs_of_blocks(positions(), positions() // 9, 0)
    assert local.rotary is full.rotary is not other.rotary
    assert local.mask is other.mask is not full.mask


@torch.no_grad()
def test_blocks_of_a_stage_are_of_the_kinds_that_they_have_in_the_whole_model() -> None:
    model = replace(OF_KINDS, pattern=("local", "local", "mid", "full"))
    whole, stage = made(model), made(model)
    passed_on: list[Tensor] = []
    whole.layers["0"].register_forward_hook(lambda module, inputs, x: passed_on.append(x))
    expected = whole(tokens(model), positions())
    del stage.layers["0"]
    stage.embeds = False
    assert torch.equal(stage(passed_on[0], positions()), expected)


def test_tied_embeddings_are_one_parameter_until_to_empty_and_after_tying_again() -> None:
    model = FAMILIES["llama-tied"]
    with torch.device("meta"):
        decoder = build_model(model)
    assert decoder.lm_head is not None
    assert decoder.embed_tokens is not None
    assert decoder.lm_head.weight is decoder.embed_tokens.weight
    assert "lm_head.weight" not in dict(decoder.named_parameters())
    decoder.to_empty(device="cpu")
    assert decoder.lm_head.weight is not decoder.embed_tokens.weight  # the footgun that tie_embeddings is for
    decoder.tie_embeddings()
    assert decoder.lm_head.weight is decoder.embed_tokens.weight


def test_what_a_model_is_built_with_is_applied() -> None:
    training = Training(loss_chunk=8, z_loss=0.1)
    build_model(LLAMA, training.loss_chunk, training.z_loss)
    assert not list(unapplied(Config(training=training)))


def test_a_block_that_is_not_registered_is_refused() -> None:
    with pytest.raises(UserError, match=r"model.block: 'unknown' is not registered"):
        build_model(replace(LLAMA, block="unknown"))


@torch.no_grad()
def test_a_key_that_is_said_to_do_nothing_changes_no_model() -> None:
    """Such a key in a base file is a line, and the run goes on: as without it."""
    small: Settings = {"model.layers": 1, "model.hidden": 32, "model.heads": 4, "model.ffn": 40, "model.vocab": 61}
    for key, (value, idle, _) in CONTRADICTED.items():
        if key.startswith("model.") and not any(setting.startswith("checkpoint.") for setting in idle):
            plain, with_key = config_of({**small, **idle}).model, config_of({**small, **idle, key: value}).model
            assert parameter_shapes(with_key) == parameter_shapes(plain), key
            with torch.device("meta"):
                decoders = build_model(plain), build_model(with_key)
            for decoder, model in zip(decoders, (plain, with_key), strict=True):
                initialize([decoder], model, CPU, seed=0)
            first, second = (decoder(tokens(plain), positions()) for decoder in decoders)
            assert torch.equal(first, second), key
            assert decoders[0].state_dict().keys() == decoders[1].state_dict().keys(), key


@pytest.mark.parametrize(("router_dtype", "dtype"), [("float32", torch.float32), ("compute", torch.bfloat16)])
def test_a_model_that_is_not_trained_chooses_experts_in_the_type_of_its_training(
    router_dtype: Literal["float32", "compute"], dtype: torch.dtype
) -> None:
    with torch.device("meta"):
        model = build_model(replace(LLAMA, experts=4, router_bias=True, shared_experts=1, router_dtype=router_dtype))
    cast_parameters(model, torch.bfloat16)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (dtype if "router" in name else torch.bfloat16), name
    assert [buffer.dtype for buffer in model.buffers()] == [torch.float32] * LLAMA.layers
