"""Options of attention and of the block under each technique: gradients equal one process.

The formulas: tests/models. The numbers of published models that have them: tests/tools/hub. Others: the lattice.
"""

from tests.lattice import MODEL_PARTS
from tests.parallel import tiers
from tests.parity import Settings, check
from torchllm.config import Kinds

GEMMA: Settings = {
    **MODEL_PARTS["Gemma 3"],
    **{"model.qk_norm": "head", "model.norm_position": "both", "model.tied_embeddings": True},
    "model.pattern": ("local", "full"),
    "model.kinds": Kinds(local={"window": 7}, full={"rope_theta": 500.0}),
}
GEMMA2: Settings = GEMMA | {"model.qk_norm": "width", "model.attention": "eager", "model.score_softcap": 0.3}
"""scores of a fresh model are small: so is a cap that shows"""
GEMMA4: Settings = {
    **{"model.qk_norm": "head", "model.v_norm": True, "model.norm_position": "both", "model.block_scale": True},
    **{"model.softmax_scale": 1.0, "model.activation": "gelu_tanh", "model.norm_epsilon": 1e-2},
    "model.pattern": ("local", "full"),
    "model.kinds": Kinds(
        local={"window": 7},
        full={
            **{"keys_as_values": True, "kv_heads": 2, "head_dim": 12, "rope_theta": 500.0},
            **{"rope_proportional": True, "rotary_fraction": 0.5},
        },
    ),
}
GEMMA4_EXPERTS: Settings = GEMMA4 | {
    **{"model.dense_beside": True, "model.experts": 8, "model.top_k": 3, "model.expert_ffn": 40},
    **{"model.router_z_loss": 0.1, "model.balance_loss": "global", "model.balance_weight": 0.3},
}
MINISTRAL3: Settings = {
    **{"model.rope_scaling": "yarn", "model.rope_scaling_factor": 4.0, "model.rope_original_length": 4},
    "model.rope_query_scale": 0.7,
}
GATED: Settings = {
    "model.qk_norm": "head",
    "model.attention_gate": "element",
    "model.rope_interleaved": True,
    "model.rotary_fraction": 0.5,
    "model.norm_offset": True,
    "model.residual_multiplier": 0.4,
    "model.logit_divisor": 2.0,
}
GPT_OSS: Settings = {
    **{"model.layers": 2, "model.experts": 8, "model.top_k": 3, "model.expert_ffn": 48, "model.expert_biases": True},
    **{"model.activation": "clamped_silu", "model.qkv_bias": True, "model.o_bias": True, "model.sinks": True},
}
SP: Settings = {"parallel.tp": 2, "parallel.sequence_parallel": True}
ZBV: Settings = {"parallel.pp": 2, "parallel.schedule": "ZBVZeroBubble", "recompute.mode": "segment"}
ULYSSES: Settings = {"parallel.cp": 2, "parallel.cp_method": "ulysses", "data.document_mask": True}
RING: Settings = {"parallel.cp": 2, "data.document_mask": True}
BY_DEFAULT: dict[str, Settings] = {
    "Gemma 3, sequence parallel": GEMMA | SP,
    "Gemma 2, a ring": GEMMA2 | RING,
    "Gemma 4 with experts, sequence parallel": GEMMA4_EXPERTS | SP,
    "gpt-oss, whose biases after a sum over tp are added once": GPT_OSS | {"parallel.tp": 2},
    "gate per element, sequence parallel, z-loss in chunks": (
        GATED | SP | {"training.z_loss": 0.02, "training.loss_chunk": 20}
    ),
}
LAYOUTS: dict[str, Settings] = {
    "Gemma 4 with experts, over FSDP": (
        GEMMA4_EXPERTS | {"parallel.dp_shard": 2, "parallel.ep": 2, "recompute.mode": "ffn"}
    ),
    "Gemma 4 with experts, over tp and sp": GEMMA4_EXPERTS | SP | {"parallel.ep": 2, "training.micro_batch_size": 2},
    "Gemma 4 with experts, over tp": GEMMA4_EXPERTS | {"parallel.tp": 2, "parallel.ep": 2},
    "Gemma 4 with experts, compiled": GEMMA4_EXPERTS | {"parallel.tp": 2, "compile.block": True},
    "Gemma 4 with experts, compiled, selective": (
        GEMMA4_EXPERTS | {"parallel.tp": 2, "recompute.mode": "selective", "compile.block": True}
    ),
    "Gemma 4 with experts, split backward of segments": GEMMA4_EXPERTS | ZBV,
    "Gemma 4 with experts, Ulysses, half of the products": (
        GEMMA4_EXPERTS | ULYSSES | {"recompute.mode": "selective_half", "model.mtp_depth": 1}
    ),
    "Gemma 4, a ring": GEMMA4 | RING,
    "Ministral 3, sequence parallel, compiled": MINISTRAL3 | SP | {"compile.block": True},
    "Gemma 4, gates, values of keys with biases": (
        GEMMA4 | {"parallel.tp": 2, "model.attention_gate": "element", "model.qkv_bias": True}
    ),
    "gpt-oss, over FSDP": GPT_OSS | {"parallel.dp_shard": 2, "parallel.ep": 2},
    "gpt-oss, over FSDP and tp": GPT_OSS | {"parallel.dp_shard": 2, "parallel.tp": 2, "parallel.ep": 4},
    "gpt-oss, over half of FSDP and sp": GPT_OSS | SP | {"parallel.dp_shard": 2, "parallel.ep": 2},
    "gpt-oss, selective, compiled": (
        GPT_OSS | {"parallel.dp_shard": 2, "recompute.mode": "selective", "compile.block": True}
    ),
    "gpt-oss, over a ring": GPT_OSS | {"parallel.cp": 2, "parallel.ep": 2, "recompute.mode": "selective"},
    "gpt-oss, tensor parallel, penalties": (
        GPT_OSS
        | {
            **{"parallel.tp": 2, "model.balance_loss": "sequence", "model.balance_weight": 0.3},
            "model.router_z_loss": 0.1,
        }
    ),
}


@tiers.train(BY_DEFAULT, LAYOUTS)
def test_a_layout_trains_the_same_model(settings: Settings) -> None:
    check(settings, ragged=True)
