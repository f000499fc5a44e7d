"""The families that can be read and written, and the unsupported features of others. No torch."""

from torchllm.tools.hub.families.family import HubFamily
from torchllm.tools.hub.families.glm4_moe import GLM4_MOE
from torchllm.tools.hub.families.gpt2 import GPT2
from torchllm.tools.hub.families.llama import LLAMA
from torchllm.tools.hub.families.minimax_m2 import MINIMAX_M2
from torchllm.tools.hub.families.mistral import MINISTRAL, MISTRAL
from torchllm.tools.hub.families.mixtral import MIXTRAL
from torchllm.tools.hub.families.olmo2 import OLMO2
from torchllm.tools.hub.families.olmo3 import OLMO3
from torchllm.tools.hub.families.olmoe import OLMOE
from torchllm.tools.hub.families.qwen2 import QWEN2
from torchllm.tools.hub.families.qwen3 import QWEN3
from torchllm.tools.hub.families.qwen3_moe import QWEN3_MOE
from torchllm.tools.hub.families.smollm3 import SMOLLM3

HUB_FAMILIES: dict[str, HubFamily] = {
    family.model_type: family
    for family in (
        *(LLAMA, MISTRAL, QWEN2, QWEN3, OLMO2, OLMO3, SMOLLM3, MINISTRAL),
        *(GPT2, MIXTRAL, QWEN3_MOE, OLMOE, GLM4_MOE, MINIMAX_M2),
    )
}
"""by the model_type of config.json; a model is exported as the first that fits"""

UNSUPPORTED_TYPES = {
    "bloom": "ALiBi positions",
    "cohere": "LayerNorm without a bias, and one norm for attention and feed-forward layer in parallel",
    "cohere2": "one norm for attention and feed-forward layer in parallel",
    "deepseek_v2": "multi-head latent attention, and a mixture of experts",
    "deepseek_v3": "multi-head latent attention, and a mixture of experts",
    "falcon": "attention and feed-forward layer in parallel",
    "gemma": "scaled embeddings, norms whose weight is added to 1, and GELU in a gated feed-forward layer",
    "gemma2": "softcapped scores, norms before and after, and windows in every second block",
    "gemma3": "pictures, norms before and after, and windows in most of the blocks",
    "gemma3_text": "norms before and after, and windows in most of the blocks, with other rotary positions",
    "gpt_neox": "attention and feed-forward layer in parallel, and rotary positions of a part of each head",
    "gpt_oss": "sinks of the attention, and a mixture of experts",
    "gptj": "attention and feed-forward layer in parallel, and rotary positions of neighboring features",
    "granite": "multipliers of embeddings, residuals and logits",
    "llama4": "a mixture of experts, and pictures",
    "mamba": "a state-space model",
    "mpt": "ALiBi positions",
    "olmo": "LayerNorm without weights",
    "opt": "learned positions with an offset, and ReLU",
    "phi": "attention and feed-forward layer in parallel, and rotary positions of a part of each head",
    "phi3": "one matrix for q, k and v, one for gate and up, and rotary positions scaled as in LongRoPE",
    "phimoe": "a router that masks scores (SparseMixer), LayerNorm and biases",
    "qwen2_moe": "shared experts with a gate",
    "qwen3_next": "linear attention, and a mixture of experts",
    "stablelm": "LayerNorm in Llama's form, and rotary positions of a part of each head",
    "starcoder2": "LayerNorm, biases and rotary positions in one model",
}
"""model_type -> features that the model here does not have"""
