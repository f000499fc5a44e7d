"""config.json with drawn fields, of all families: the model is transformers', or a field is refused by its name."""

import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from tests.parity import tiny
from tests.tools.hub.published import LLAMA3_SCALING, YARN
from tests.tools.hub.test_import import error_of_logits, one_process
from torchllm.tools.hub.config_json import known_fields
from torchllm.tools.hub.files import read_hub_config
from torchllm.tools.hub.registry import HUB_FAMILIES
from torchllm.tools.hub.safetensors_header import HubFileError

pytestmark = pytest.mark.exhaustive

DRAWS = 300
LENGTH = 24
"""tokens of a text; over the windows, and over some lengths before a scaling"""
OUTCOMES = ("right", "refused", "refused by both", "read here alone")
"""that are not wrong; the last: transformers fails, often at a null that an earlier version took for a default"""
ABSENT = "absent"
"""stands for a field that a config.json lacks"""
Draw = Callable[[random.Random], Any]

SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 96,
    "max_position_embeddings": 64,
}
GPT2_SIZES = {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 96, "n_positions": 64}
EXPERT_SIZES = {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_intermediate_size": 12}


def one_of(*values: Any) -> Draw:
    return lambda drawn: drawn.choice(values)


def rotary_table(drawn: random.Random) -> dict[str, Any]:
    """Return a table of rotary positions, often without some of its fields, or with odd values."""
    tables = (
        {"rope_type": "default", "rope_theta": 1e5},
        {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
        LLAMA3_SCALING,
        YARN,
        YARN | {"mscale": 1.0, "mscale_all_dim": 0.5, "attention_factor": None},
        {"rope_type": "dynamic", "factor": 2.0},
    )
    table = {name: value for name, value in drawn.choice(tables).items() if drawn.random() > 0.1}
    if drawn.random() < 0.3:
        table["type"] = table.pop("rope_type", "default")
    for name, values in ROTARY_FIELDS.items():
        if (name in table or name == "truncate") and drawn.random() < 0.2:
            table[name] = drawn.choice(values)
    return table


ROTARY_FIELDS: dict[str, tuple[Any, ...]] = {
    "factor": (1.0, 1, 4, 0.5, None, "2"),
    "rope_theta": (5e5, None),
    "low_freq_factor": (4.0, 2.0),
    "original_max_position_embeddings": (8, None, 64),
    "beta_fast": (32, None, 0.5),
    "beta_slow": (1, None),
    "attention_factor": (0.0, 0.0, 1.0, None, 0.7),
    "truncate": (True, False),
    "mscale": (0.5, 0.0, None),
}
"""other values of the fields of a table"""


def kinds_of_blocks(drawn: random.Random) -> Any:
    kinds = [drawn.choice(("full_attention", "sliding_attention"))] * 2
    return drawn.choice((kinds, kinds, None, ["full_attention", "sliding_attention"]))


ANY_FAMILY: dict[str, Draw] = {
    "vocab_size": one_of(97, 128),
    "tie_word_embeddings": one_of(True, False, ABSENT),
    "initializer_range": one_of(0.1, ABSENT),
    "is_causal": one_of(True, None, False),
    "use_cache": one_of(False),
    "attention_dropout": one_of(0.1),
    "torch_dtype": one_of("bfloat16", "float32"),
    "per_layer_config": one_of(None, {}),
    "attention_chunk_size": one_of(None, 8),
    "layer_types": kinds_of_blocks,
}
DECODER: dict[str, Draw] = ANY_FAMILY | {
    "num_hidden_layers": one_of(1, 3),
    "hidden_size": one_of(48, 40, 36),
    "num_attention_heads": one_of(2, 6, 8),
    "num_key_value_heads": one_of(1, 4, 3, None, 0, ABSENT),
    "head_dim": one_of(8, 12, 16, 7, None, 0),
    "intermediate_size": one_of(40, 17),
    "max_position_embeddings": one_of(16, 2048, None, ABSENT),
    "rms_norm_eps": one_of(1e-5, 1e-2, ABSENT),
    "hidden_act": one_of("silu", "swish", "gelu"),
    "attention_bias": one_of(False, True, None),
    "mlp_bias": one_of(False, True),
    "rope_theta": one_of(1e4, 5e5, 10000, None),
    "rope_scaling": lambda drawn: drawn.choice((None, rotary_table(drawn))),
    "rope_parameters": rotary_table,
    "original_max_position_embeddings": one_of(16, 32),
    "partial_rotary_factor": one_of(0.5, 1.0, 0.25, None),
    "sliding_window": one_of(9, 9, 64, None, 0),
    "pretraining_tp": one_of(2),
}
EXPERTS: dict[str, Draw] = {
    "num_experts_per_tok": one_of(1, 2, 4, 5),
    "norm_topk_prob": one_of(True, False, None),
    "moe_intermediate_size": one_of(8, 20, 0),
    "router_aux_loss_coef": one_of(0.5),
    "output_router_logits": one_of(False),
}
QWEN_WINDOW: dict[str, Draw] = {
    "use_sliding_window": one_of(True, True, False, None),
    "sliding_window": one_of(9, 9, None, 0),
    "max_window_layers": one_of(0, 1, 2, 28),
}
QWEN_EXPERTS: dict[str, Draw] = {
    "decoder_sparse_step": one_of(1, 2, 0),
    "mlp_only_layers": one_of([], [0], [1], [0, 1], None),
    "head_dim": one_of(8, 6),
}
GLM: dict[str, Draw] = {
    "n_shared_experts": one_of(2, 0),
    "first_k_dense_replace": one_of(0, 1, 2),
    "use_qk_norm": one_of(True, False),
    "routed_scaling_factor": one_of(2.5, 1.0),
    "n_group": one_of(1, 2, 1),
    "topk_group": one_of(1),
    "num_nextn_predict_layers": one_of(1),
}
GPT2: dict[str, Draw] = ANY_FAMILY | {
    "n_layer": one_of(1, 3),
    "n_embd": one_of(48, 40, None),
    "n_head": one_of(2, 8, 3),
    "n_inner": one_of(40, None, 0),
    "n_positions": one_of(32, 16),
    "n_ctx": one_of(32),
    "num_attention_heads": one_of(4, 2),
    "hidden_size": one_of(32, 48),
    "activation_function": one_of("gelu_new", "gelu_pytorch_tanh", "gelu"),
    "layer_norm_epsilon": one_of(1e-3, ABSENT),
    "scale_attn_weights": one_of(True, False),
    "scale_attn_by_inverse_layer_idx": one_of(False, True),
    "reorder_and_upcast_attn": one_of(True, False),
    "add_cross_attention": one_of(False, True),
    "resid_pdrop": one_of(0.0),
}
FIELDS: dict[str, dict[str, Draw]] = {
    "llama": DECODER,
    "mistral": DECODER,
    "qwen2": DECODER | QWEN_WINDOW,
    "qwen3": DECODER | QWEN_WINDOW,
    "olmo2": DECODER,
    "mixtral": DECODER | EXPERTS | {"num_local_experts": one_of(2, 3)},
    "qwen3_moe": DECODER | EXPERTS | QWEN_EXPERTS,
    "olmoe": DECODER | EXPERTS | {"clip_qkv": one_of(None, 1.0)},
    "glm4_moe": DECODER | EXPERTS | GLM,
    "gpt2": GPT2,
}
"""family -> fields, and how each is drawn"""


def draw_config(number: int) -> dict[str, Any]:
    """Return the n-th config.json, which depends on nothing but n: tiny sizes, and some drawn fields."""
    drawn = random.Random(number)
    model_type = list(FIELDS)[number % len(FIELDS)]
    sizes = GPT2_SIZES if model_type == "gpt2" else SIZES
    content: dict[str, Any] = {"model_type": model_type, **sizes}
    if HUB_FAMILIES[model_type].has_experts:
        content |= {name: value for name, value in EXPERT_SIZES.items() if name in FIELDS_OF_EXPERTS[model_type]}
        content["num_experts_per_tok"] = 2
    names = drawn.sample(sorted(FIELDS[model_type]), drawn.randint(1, 3))
    if model_type != "gpt2" and drawn.random() < 0.5:
        names.append("rope_parameters")
    if drawn.random() < 0.5:
        content |= WINDOWS.get(model_type, {})
        names.append(drawn.choice(("is_causal", "layer_types", "use_cache")))
    for name in names:
        content[name] = FIELDS[model_type][name](drawn)
        if content[name] == ABSENT:
            del content[name]
    return content


WINDOWS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 9},
    "mixtral": {"sliding_window": 9},
    "qwen2": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0},
    "qwen3": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0},
}
"""fields of a window in the families that have one; half of the draws have them, and half have a rotary table"""


FIELDS_OF_EXPERTS = {
    "mixtral": ("num_local_experts",),
    "qwen3_moe": ("num_experts", "moe_intermediate_size"),
    "olmoe": ("num_experts",),
    "glm4_moe": ("n_routed_experts", "moe_intermediate_size"),
}
"""the sizes of experts that a family has"""


def publish(content: dict[str, Any], folder: Path) -> Any:
    """Write a model with this config.json and random weights; return it, an object of transformers."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(content))
    config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" not in name:
                tensor.normal_(mean=float(tensor.dim() == 1), std=0.2)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return model


def outcome_of(content: dict[str, Any], folder: Path) -> str:
    """Return one of OUTCOMES, or what is wrong."""
    tokens = torch.randint(0, 96, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    theirs: Any
    try:
        with torch.no_grad():
            theirs = publish(content, folder)(tokens).logits
    except Exception as error:  # whatever a class of transformers raises
        theirs = error
    try:
        model = read_hub_config(folder).model
    except HubFileError as error:
        lines = [line.removeprefix(f"{folder / 'config.json'}: ") for line in str(error).split("\n")]
        names = {line.partition(":")[0].partition(".")[0] for line in lines}
        if not names <= known_fields(HUB_FAMILIES[content["model_type"]]):
            return f"refused by another name: {lines}"
        return "refused by both" if isinstance(theirs, Exception) else "refused"
    if isinstance(theirs, Exception):
        return "read here alone"
    ours = one_process(replace(tiny({}), model=replace(model, from_hf=str(folder))))
    with torch.no_grad():
        error = error_of_logits(ours(tokens, torch.arange(LENGTH).expand(2, LENGTH)).numpy(), theirs.numpy())
    return "right" if error <= 1e-5 else f"logits differ by {error:.1e}"


def test_a_drawn_config_is_the_model_of_transformers_or_refused_by_the_name_of_a_field(tmp_path: Path) -> None:
    table: dict[str, Counter[str]] = {model_type: Counter() for model_type in FIELDS}
    wrong = {}
    for number in range(DRAWS):
        content = draw_config(number)
        outcome = outcome_of(content, tmp_path / str(number))
        if outcome not in OUTCOMES:
            wrong[number] = (outcome, content)
            outcome = "wrong"
        table[content["model_type"]].update([outcome, "tried"])
    columns = ("tried", *OUTCOMES, "wrong")
    print(f"{'family':12}{''.join(f'{column:>17}' for column in columns)}")
    for model_type, counts in table.items():
        print(f"{model_type:12}{''.join(f'{counts[column]:17}' for column in columns)}")
    assert not wrong
    assert table.keys() == HUB_FAMILIES.keys()
    assert all(counts["right"] >= counts["tried"] / 4 for counts in table.values())  # it compares
