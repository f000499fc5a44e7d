"""What every family must hold: what a token may see, and how a model comes apart. tests/tools/hub has its logits."""

from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from torchllm.config import Config, Model, Training
from torchllm.config.applied_keys import unapplied
from torchllm.config.errors import UserError
from torchllm.models import attention
from torchllm.models.block_mask import causal_block_mask
from torchllm.models.decoder import BlockInputs, Decoder, build_model, cast_parameters
from torchllm.parallel.initialize import initialize

pytestmark = pytest.mark.quick
CPU = torch.device("cpu")
LLAMA = Model(layers=3, hidden=32, heads=4, kv_heads=2, ffn=52, vocab=61, max_sequence_length=64)
GPT = replace(LLAMA, family="gpt", kv_heads=0)
QWEN = replace(LLAMA, qk_norm="head", tied_embeddings=True, head_dim=12)
OLMO2 = replace(LLAMA, qk_norm="width", norm_position="after")
MISTRAL = replace(LLAMA, window=5)  # of 24 tokens, and of documents of 7 to 9
FAMILIES = {
    "llama": LLAMA,
    "llama-tied": replace(LLAMA, tied_embeddings=True),
    "gpt": GPT,
    "qwen": QWEN,
    "olmo2": OLMO2,
    "mistral": MISTRAL,
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
    ],
)
def test_a_token_sees_its_own_document_up_to_itself(family: str, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits in a packed sequence are those of the document alone, bitwise whatever else is packed."""
    monkeypatch.setattr(attention, "compiled_flex_attention", lambda: flex_attention)  # seconds less, same meaning
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


@pytest.mark.parametrize("model", [LLAMA, MISTRAL])
def test_flex_attention_without_documents_has_one_mask_for_all_blocks_and_steps(model: Model) -> None:
    """Compiled blocks would each compute theirs anew: tests/hollow counts the launches."""
    decoder = made(replace(model, attention="flex"))
    masks: list[object] = []

    def run_blocks(blocks: list[tuple[object, BlockInputs]], x: Tensor) -> Tensor:
        masks.extend(inputs.mask for _, inputs in blocks)
        return x

    decoder.run_blocks = run_blocks
    for _ in range(2):
        decoder(tokens(model), positions())
    assert [mask is causal_block_mask(24, CPU, model.window) for mask in masks] == [True] * 2 * model.layers


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
