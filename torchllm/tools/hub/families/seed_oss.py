"""Seed-OSS (ByteDance 2025): Llama's form with biases of q, k and v."""

from dataclasses import replace

from torchllm.tools.hub.families.family import ConfigField, RequiredField, TensorRule
from torchllm.tools.hub.families.llama import ATTENTION, LLAMA, SILU, decoder_fields
from torchllm.tools.hub.families.qwen2 import QKV_BIASES

SEED_OSS = replace(
    LLAMA,
    model_type="seed_oss",
    architecture="SeedOssForCausalLM",
    fields=(
        *decoder_fields(
            vocab=155136, ffn=27648, kv_heads=8, length=524288, head_dim=128, layers=64, hidden=4096, heads=80
        ),
        ConfigField("attention_bias", "qkv_bias", True),
        ConfigField("attention_out_bias", "o_bias", False),
    ),
    required=(SILU, RequiredField("mlp_bias", (False,), "biases of the feed-forward layer")),
    tensors=(*LLAMA.tensors, *QKV_BIASES, TensorRule(ATTENTION + "o_proj.bias", ("layers.{}.self_attn.o_proj.bias",))),
    ignored_fields=(*LLAMA.ignored_fields, "residual_dropout"),
    heads_divide_hidden=False,
)
