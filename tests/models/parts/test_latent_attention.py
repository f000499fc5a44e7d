"""Latent attention against transformers' DeepSeek-V3, and its cache against the whole computation."""

from dataclasses import replace

import pytest
import torch
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

from tests.models.test_layers import filled, inputs
from torchllm.config import Model
from torchllm.models.decoder import build_model
from torchllm.models.layers import rotary_angles
from torchllm.models.parts.latent_attention import LatentAttention
from torchllm.tools.continue_texts import caching

pytestmark = pytest.mark.quick
LENGTH, PROMPT = 12, 6
MODEL = Model(
    mixer="latent_attention",
    layers=2,
    hidden=32,
    heads=4,
    ffn=40,
    vocab=32,
    norm_epsilon=0.3,
    latent_q_width=20,
    latent_kv_width=12,
    latent_norm_epsilon=1e-6,
    nope_head_dim=10,
    rope_head_dim=6,
    v_head_dim=8,
)
MODELS = {"DeepSeek-V3": MODEL, "Moonlight": replace(MODEL, latent_q_width=0)}
CACHED = MODELS | {"soft cap": replace(MODEL, attention="eager", score_softcap=0.7, softmax_scale=0.4)}


def published(model: Model, own: LatentAttention) -> DeepseekV3Attention:
    """Return the module of transformers with the same weights, and rotary positions in halves."""
    config = DeepseekV3Config(
        **{"hidden_size": model.hidden, "num_attention_heads": model.heads, "rms_norm_eps": model.norm_epsilon},
        **{"num_key_value_heads": model.heads, "q_lora_rank": model.latent_q_width or None},
        **{"kv_lora_rank": model.latent_kv_width, "qk_nope_head_dim": model.nope_head_dim},
        **{"qk_rope_head_dim": model.rope_head_dim, "v_head_dim": model.v_head_dim, "rope_interleave": False},
        attn_implementation="eager",
    )
    module = DeepseekV3Attention(config, layer_idx=0)
    weights = own.state_dict()
    assert len(weights) == len(module.state_dict())
    for name, weight in weights.items():
        their_weight(module, name).data.copy_(weight)
    return module


def their_weight(module: DeepseekV3Attention, name: str) -> torch.nn.Parameter:
    """Return the parameter of transformers that a parameter here is."""
    layer = name.removesuffix(".weight").replace("_norm", "_layernorm").replace("kv_a_proj", "kv_a_proj_with_mqa")
    return module.get_submodule(layer).weight


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", MODELS)
def test_results_and_gradients_are_those_of_transformers(name: str, attention: str) -> None:
    """The norms of latents have another epsilon than the norms of the block, which is large here."""
    model = replace(MODELS[name], attention=attention)  # type: ignore[arg-type]
    own = filled(LatentAttention(model))
    assert isinstance(own, LatentAttention)
    theirs = published(model, own)
    x = inputs(2, LENGTH, 32)
    positions = torch.arange(LENGTH).expand(2, LENGTH)
    result = own(x, rotary_angles(model, positions), own.core.mask(None))
    embedding = DeepseekV3RotaryEmbedding(theirs.config)
    later = torch.full((LENGTH, LENGTH), -torch.inf).triu(1)[None, None]
    expected, _ = theirs(x, embedding(x, positions), later)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    d_out = inputs(2, LENGTH, 32)
    result.backward(d_out)
    expected.backward(d_out)
    for parameter_name, parameter in own.named_parameters():
        gradient = their_weight(theirs, parameter_name).grad
        assert parameter.grad is not None
        assert gradient is not None
        scale = gradient.abs().max()
        torch.testing.assert_close(parameter.grad / scale, gradient / scale, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("name", CACHED)
def test_generation_with_cached_latents_is_the_whole_computation(name: str) -> None:
    model = build_model(CACHED[name]).double()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(32, (2, LENGTH), generator=generator)
    padding = torch.zeros(2, PROMPT, dtype=torch.bool)
    padding[1, :2] = True
    positions = torch.stack((torch.arange(LENGTH), (torch.arange(LENGTH) - 2).clamp(min=0)))
    documents = torch.ones(2, LENGTH, dtype=torch.int64)
    documents[:, :PROMPT] = (~padding).long()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5, generator=generator)
        expected = model(tokens, positions, documents)
        for room in (0, LENGTH):
            with caching(model, room=room, padding=padding):
                for begin, end in ((0, PROMPT), *((i, i + 1) for i in range(PROMPT, LENGTH))):
                    seen = documents[:, :end] if begin == 0 else None
                    logits = model(tokens[:, begin:end], positions[:, begin:end], seen)
                    torch.testing.assert_close(logits[:, 0], expected[:, end - 1], rtol=1e-10, atol=1e-10)
                core = model.layers["0"].self_attn.core
                assert core.latents.shape[-1] == 12 + 6


def test_cached_latents_read_the_weights_of_each_forward() -> None:
    """Before it FSDP has a shard in the place of the weights."""
    own = filled(LatentAttention(MODEL))
    assert isinstance(own, LatentAttention)
    x, positions = inputs(2, 3, 32), torch.arange(3).expand(2, 3)
    expected = own(x, rotary_angles(MODEL, positions), None)
    gathered = own.kv_b_proj.weight
    own.kv_b_proj.weight = torch.nn.Parameter(torch.zeros_like(gathered))
    own.core = own.cached_core(room=3, padding=None)
    own.kv_b_proj.weight = gathered
    for part in (slice(0, 2), slice(2, 3)):
        result = own(x[:, part], rotary_angles(MODEL, positions[:, part]), None)
        torch.testing.assert_close(result, expected[:, part], rtol=1e-5, atol=1e-5)
