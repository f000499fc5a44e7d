"""The families that can be read and written. No torch."""

from torchllm.tools.hub.families.deepseek_v3 import DEEPSEEK_V3
from torchllm.tools.hub.families.ernie4_5 import ERNIE4_5, ERNIE4_5_MOE
from torchllm.tools.hub.families.family import HubFamily
from torchllm.tools.hub.families.gemma2 import GEMMA2
from torchllm.tools.hub.families.gemma3 import GEMMA3
from torchllm.tools.hub.families.gemma4 import GEMMA4
from torchllm.tools.hub.families.glm4_moe import GLM4_MOE
from torchllm.tools.hub.families.glm4_moe_lite import GLM4_MOE_LITE
from torchllm.tools.hub.families.gpt2 import GPT2
from torchllm.tools.hub.families.gpt_oss import GPT_OSS
from torchllm.tools.hub.families.granite import GRANITE
from torchllm.tools.hub.families.hy_v3 import HY_V3
from torchllm.tools.hub.families.llama import LLAMA
from torchllm.tools.hub.families.minimax_m2 import MINIMAX_M2
from torchllm.tools.hub.families.mistral import MINISTRAL, MINISTRAL3, MISTRAL
from torchllm.tools.hub.families.mixtral import MIXTRAL
from torchllm.tools.hub.families.nanochat import NANOCHAT
from torchllm.tools.hub.families.olmo2 import OLMO2
from torchllm.tools.hub.families.olmo3 import OLMO3
from torchllm.tools.hub.families.olmo_hybrid import OLMO_HYBRID
from torchllm.tools.hub.families.olmoe import OLMOE
from torchllm.tools.hub.families.qwen2 import QWEN2
from torchllm.tools.hub.families.qwen2_moe import QWEN2_MOE
from torchllm.tools.hub.families.qwen3 import QWEN3
from torchllm.tools.hub.families.qwen3_5 import QWEN3_5, QWEN3_5_MOE
from torchllm.tools.hub.families.qwen3_moe import QWEN3_MOE
from torchllm.tools.hub.families.qwen3_next import QWEN3_NEXT
from torchllm.tools.hub.families.seed_oss import SEED_OSS
from torchllm.tools.hub.families.smollm3 import SMOLLM3

HUB_FAMILIES: dict[str, HubFamily] = {
    family.model_type: family
    for family in (
        *(LLAMA, MISTRAL, QWEN2, QWEN3, OLMO2, OLMO3, SMOLLM3, MINISTRAL, MINISTRAL3),
        *(GEMMA2, GEMMA3, GEMMA4, GRANITE, SEED_OSS, ERNIE4_5),
        *(NANOCHAT, GPT2, MIXTRAL, QWEN2_MOE, QWEN3_MOE, OLMOE, GLM4_MOE, DEEPSEEK_V3, GLM4_MOE_LITE),
        *(MINIMAX_M2, HY_V3, GPT_OSS, ERNIE4_5_MOE),
        *(QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE, OLMO_HYBRID),
    )
}
"""by the model_type of config.json; a model is exported as the first that fits"""
