"""The decoder against Hugging Face's Llama, Qwen3 and GPT-2, and what every family must hold: what a token may see."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing here may ask the network

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from torchllm.config import Model
from torchllm.models import attention
from torchllm.models.attention import Attention, CachedAttention
from torchllm.models.decoder import Decoder, build_model, hold_in
from torchllm.parallel.initialize import initialize

pytestmark = pytest.mark.quick
CPU = torch.device("cpu")
LLAMA = Model(layers=3, hidden=32, heads=4, kv_heads=2, ffn=52, vocab=61, max_sequence_length=64)
GPT = replace(LLAMA, family="gpt", kv_heads=0)
QWEN = replace(LLAMA, qk_norm="head", tied_embeddings=True, head_dim=12)
GLM = replace(LLAMA, qkv_bias=True, head_dim=16, rotary_fraction=0.5)
QWEN2 = replace(LLAMA, qkv_bias=True)
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
VARIANTS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "one-group": {"kv_heads": 1},
    "every-head": {"kv_heads": 0},
    "tied": {"tied_embeddings": True},
    "wide-heads": {"head_dim": 12},
    "llama31-scaling": {"rope_theta": 500000.0, "rope_scaling_factor": 8.0, "rope_original_length": 16},
    "linear-scaling": {"rope_scaling": "linear", "rope_scaling_factor": 4.0},
    "yarn": {"rope_scaling": "yarn", "rope_scaling_factor": 4.0, "rope_original_length": 400, "head_dim": 16},
    "yarn-not-truncated": {
        **{"rope_scaling": "yarn", "rope_scaling_factor": 4.0, "rope_original_length": 400, "rope_truncate": False},
        **{"rope_beta_fast": 20.0, "rope_beta_slow": 2.0, "rope_attention_factor": 1.3, "head_dim": 16},
    },
    "eager": {"attention": "eager"},
}


def tokens(model: Model, length: int = 24) -> Tensor:
    return torch.randint(model.vocab, (2, length), generator=torch.Generator().manual_seed(0))


def positions(length: int = 24) -> Tensor:
    return torch.arange(length).expand(2, length)


def made(model: Model, loss_chunk: int = 0) -> Decoder:
    """A decoder with random weights everywhere, norms and biases too, large enough for differences to show."""
    with torch.device("meta"):
        decoder = build_model(model, loss_chunk)
    initialize([decoder], model, CPU, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in decoder.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise * 0.1)
    return decoder


def randomize(reference: Any) -> None:
    """Add noise to every weight: norms start at 1 and biases at 0, and unlike numbers tell more."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in reference.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise * 0.1)


def load_weights(ours: Decoder, reference: Any) -> None:
    """Copy the weights of Hugging Face's Llama or a descendant: our names are theirs without "model.".

    Only norms over the whole width have other names here.
    """
    weights = {name.removeprefix("model."): value for name, value in reference.state_dict().items()}
    if ours.model.qk_norm == "width":
        weights = {name.replace("_norm.", "_width_norm."): value for name, value in weights.items()}
    ours.load_state_dict(weights, strict=True)
    ours.tie_embeddings()


def check_logits(ours: Decoder, reference: Any, model: Model) -> None:
    """Assert that both models compute the same logits, and that these are not all alike."""
    text = tokens(model)
    with torch.no_grad():
        expected = reference(text, use_cache=False).logits
        got = ours(text, positions())
    assert expected.std() > 0.1
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


def llama_fields(model: Model) -> dict[str, Any]:
    """Return the arguments that the configs of Hugging Face's Llama and its descendants have in common."""
    return {
        "vocab_size": model.vocab,
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv,
        "head_dim": model.head_width,
        "max_position_embeddings": model.max_sequence_length,
        "rms_norm_eps": model.norm_epsilon,
        "tie_word_embeddings": model.tied_embeddings,
        "initializer_range": 0.1,
    }


def rope_of(model: Model) -> dict[str, Any]:
    """Return the arguments of Hugging Face's configs for the rotary positions; transformers 5 reads rope_parameters."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": model.rope_theta}
    if model.rotary_fraction < 1:
        rope["partial_rotary_factor"] = model.rotary_fraction
    if model.rope_scaling_factor > 1:
        rope |= {"rope_type": model.rope_scaling, "factor": model.rope_scaling_factor}
        if model.rope_scaling != "linear":
            rope["original_max_position_embeddings"] = model.rope_original_length
        if model.rope_scaling == "llama3":
            rope["low_freq_factor"] = model.rope_low_frequency_factor
            rope["high_freq_factor"] = model.rope_high_frequency_factor
        if model.rope_scaling == "yarn":
            rope["beta_fast"] = model.rope_beta_fast
            rope["beta_slow"] = model.rope_beta_slow
            rope["truncate"] = model.rope_truncate
            rope["attention_factor"] = model.rope_attention_factor or None
    return {
        "rope_parameters": rope,
        # transformers 4 reads these two
        "rope_theta": model.rope_theta,
        "rope_scaling": rope if model.rope_scaling_factor > 1 else None,
    }


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_logits_are_those_of_hugging_faces_llama(changes: dict[str, Any]) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    check_against(replace(LLAMA, **changes), LlamaForCausalLM, LlamaConfig)


GLM_VARIANTS = [
    {},
    {"rotary_fraction": 0.25},
    VARIANTS["yarn"],
    pytest.param(VARIANTS["linear-scaling"], marks=pytest.mark.exhaustive),
    pytest.param(VARIANTS["llama31-scaling"], marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize("changes", GLM_VARIANTS, ids=str)
def test_logits_are_those_of_hugging_faces_glm_without_experts(changes: dict[str, Any]) -> None:
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    model = replace(GLM, **changes)
    check_against(model, Glm4MoeForCausalLM, Glm4MoeConfig, attention_bias=True, first_k_dense_replace=model.layers)


@pytest.mark.parametrize("changes", [{}, {"tied_embeddings": False, "kv_heads": 0, "rope_theta": 1e6}], ids=str)
def test_logits_are_those_of_hugging_faces_qwen3(changes: dict[str, Any]) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    check_against(replace(QWEN, **changes), Qwen3ForCausalLM, Qwen3Config)


@pytest.mark.parametrize(("kernel", "window"), [("sdpa", 0), ("eager", 5)])
def test_logits_are_those_of_hugging_faces_qwen2(kernel: str, window: int) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    model = replace(QWEN2, attention=kernel, window=window)  # type: ignore[arg-type]
    options = {"use_sliding_window": window > 0, "sliding_window": window or None, "max_window_layers": 0}
    check_against(model, Qwen2ForCausalLM, Qwen2Config, **options)


@pytest.mark.parametrize(("kernel", "window"), [("eager", 5), ("sdpa", 0), ("sdpa", 1), ("sdpa", 5), ("sdpa", 24)])
def test_logits_are_those_of_hugging_faces_mistral(kernel: str, window: int) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    model = replace(MISTRAL, attention=kernel, window=window)  # type: ignore[arg-type]
    check_against(model, MistralForCausalLM, MistralConfig, sliding_window=window or None)


@pytest.mark.parametrize("changes", [{}, {"kv_heads": 0}], ids=str)
def test_logits_are_those_of_hugging_faces_olmo2(changes: dict[str, Any]) -> None:
    from transformers import Olmo2Config, Olmo2ForCausalLM

    check_against(replace(OLMO2, **changes), Olmo2ForCausalLM, Olmo2Config)


def check_against(model: Model, reference_class: Any, config_class: Any, **options: Any) -> None:
    """Assert that a model of Hugging Face and ours, with its random weights, compute the same logits."""
    torch.manual_seed(0)
    reference = reference_class(config_class(**llama_fields(model), **rope_of(model), **options)).eval()
    randomize(reference)
    ours = build_model(model)
    load_weights(ours, reference)
    check_logits(ours, reference, model)


GPT2_NAMES = {
    "ln_1": "input_layernorm",
    "attn.c_proj": "self_attn.o_proj",
    "ln_2": "post_attention_layernorm",
    "mlp.c_fc": "mlp.up_proj",
    "mlp.c_proj": "mlp.down_proj",
}
"""Hugging Face's names within a block of GPT-2, and ours; its c_attn is our q_proj, k_proj and v_proj"""


def weights_of_gpt2(state: dict[str, Tensor], layers: int) -> dict[str, Tensor]:
    """Rename, cut and transpose the weights of Hugging Face's GPT-2, whose matrices are (in, out)."""
    weights: dict[str, Tensor] = {}
    for index in range(layers):
        for kind in ("weight", "bias"):
            for old, new in GPT2_NAMES.items():
                value = state[f"transformer.h.{index}.{old}.{kind}"]
                weights[f"layers.{index}.{new}.{kind}"] = value.mT if value.dim() == 2 else value
            parts = state[f"transformer.h.{index}.attn.c_attn.{kind}"].chunk(3, dim=-1)
            for name, part in zip("qkv", parts, strict=True):
                weights[f"layers.{index}.self_attn.{name}_proj.{kind}"] = part.mT if kind == "weight" else part
    weights["norm.weight"] = state["transformer.ln_f.weight"]
    weights["norm.bias"] = state["transformer.ln_f.bias"]
    weights["embed_tokens.weight"] = state["transformer.wte.weight"]
    weights["embed_positions.weight"] = state["transformer.wpe.weight"]
    weights["lm_head.weight"] = state["lm_head.weight"]
    return weights


def test_logits_are_those_of_hugging_faces_gpt2() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = replace(GPT, tied_embeddings=True)
    torch.manual_seed(0)
    reference = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=model.vocab,
            n_positions=model.max_sequence_length,
            n_embd=model.hidden,
            n_layer=model.layers,
            n_head=model.heads,
            n_inner=model.ffn,
            layer_norm_epsilon=model.norm_epsilon,
            initializer_range=0.1,
        )
    ).eval()
    randomize(reference)
    weights = weights_of_gpt2(reference.state_dict(), model.layers)
    ours = build_model(model)
    ours.load_state_dict(weights, strict=True)
    check_logits(ours, reference, model)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("family", "kernel"),
    [
        *((family, "sdpa") for family in FAMILIES),
        ("llama", "eager"),
        ("mistral", "eager"),
        ("gpt", "flex"),
        ("mistral", "flex"),
        *(pytest.param(family, "flex", marks=pytest.mark.exhaustive) for family in ("llama", "qwen", "olmo2")),
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


@pytest.mark.parametrize("family", FAMILIES)
def test_labels_turn_logits_into_a_loss_sum(family: str) -> None:
    model = FAMILIES[family]
    decoder = made(model, loss_chunk=11)
    text = tokens(model)
    labels = text.roll(-1, dims=1)
    labels[:, -1] = -100
    loss = decoder(text, positions(), None, labels)
    logits = decoder(text, positions()).double()
    log_probabilities = logits.log_softmax(-1)[:, :-1]
    targets = labels[:, :-1].unsqueeze(-1)
    expected = -log_probabilities.gather(-1, targets).sum()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_cached_generation_is_the_whole_computation(family: str) -> None:
    model = FAMILIES[family]
    decoder = made(model)
    text = tokens(model)
    with torch.no_grad():
        expected = decoder(text, positions())
        for module in list(decoder.modules()):
            if isinstance(module, Attention):
                module.core = CachedAttention(module.core)
        prompt = slice(0, 7)
        parts = [decoder(text[:, prompt], positions()[:, prompt])]
        for i in range(7, 24):
            token = slice(i, i + 1)
            part = decoder(text[:, token], positions()[:, token])
            parts.append(part)
        got = torch.cat(parts, dim=1)
    torch.testing.assert_close(got, expected, rtol=0, atol=5e-6)  # attention over a row at a time: other sums


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_without_some_ends_compose_to_the_whole(family: str) -> None:
    """What a pipeline does: the first blocks with the embedding, the others with the head."""
    model = FAMILIES[family]
    whole, first, last = made(model), made(model), made(model)
    del first.layers["2"], last.layers["0"], last.layers["1"]
    first.norm = first.lm_head = None
    last.embed_tokens = last.embed_positions = None
    with torch.no_grad():
        states = first(tokens(model), positions())
        logits = last(states, positions())
        expected = whole(tokens(model), positions())
    assert states.shape == (2, 24, model.hidden)
    assert torch.equal(logits, expected)


def test_built_on_meta_it_has_no_memory_and_no_buffers() -> None:
    for model in FAMILIES.values():
        with torch.device("meta"):
            decoder = build_model(model)
        assert all(parameter.is_meta for parameter in decoder.parameters())
        assert list(decoder.buffers()) == []  # nothing to lose in to_empty, to shard or to save


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
    untied = build_model(FAMILIES["llama"])
    assert "lm_head.weight" in dict(untied.named_parameters())


@pytest.mark.parametrize(("router_dtype", "dtype"), [("float32", torch.float32), ("compute", torch.bfloat16)])
def test_a_model_that_is_not_trained_chooses_experts_in_the_type_of_its_training(
    router_dtype: Literal["float32", "compute"], dtype: torch.dtype
) -> None:
    with torch.device("meta"):
        model = build_model(replace(LLAMA, experts=4, router_bias=True, shared_experts=1, router_dtype=router_dtype))
    hold_in(model, torch.bfloat16)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (dtype if "router" in name else torch.bfloat16), name
    assert [buffer.dtype for buffer in model.buffers()] == [torch.float32] * LLAMA.layers
