"""ERNIE 4.5 (Baidu 2025), the dense model: Llama's form, whose rotary positions turn neighboring features."""

from dataclasses import replace

from torchllm.tools.hub.families.family import RequiredField
from torchllm.tools.hub.families.llama import LLAMA, SILU, decoder_fields

ERNIE4_5 = replace(
    LLAMA,
    model_type="ernie4_5",
    architecture="Ernie4_5ForCausalLM",
    features={"family": "llama", "rope_interleaved": True},
    fields=decoder_fields(
        vocab=103424,
        ffn=3072,
        kv_heads=2,
        length=131072,
        epsilon=1e-5,
        head_dim=128,
        layers=18,
        hidden=1024,
        heads=16,
        tied=True,
    ),
    required=(SILU, RequiredField("use_bias", (False,), "biases of all matrices")),
    ignored_tensors=r"(?!)",
    ignored_fields=(),
    heads_divide_hidden=False,
    rope_theta=500000.0,
)
