"""Turn the config of another program into one of torchllm: `torchllm convert FILE`.

    .toml        torchtitan
    .py          torchtitan since 0.3; FILE.py:NAME for one function of several. It is parsed, never imported
    .json        TrainingArguments of transformers; the meta file of a nanochat checkpoint
    .yaml        litgpt
    other text   the arguments of Megatron-LM's pretrain_gpt.py or nanochat's base_train.py, as in a shell script

`torchllm/tools/config/foreign_keys.toml` says which key has which name here; the functions below compute the values of
the keys whose units or meaning differ. Defaults of the other program that differ from ours are written out. A key that
has no setting here, or another value than an earlier key for the same setting, is in a comment with the reason.

Our own reader and checks read the result before it is printed: a value that they would refuse becomes "SET", a
combination that they would refuse is named in the first lines.
"""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from torchllm.config.errors import UserError
from torchllm.config.schema import AXES, Config
from torchllm.config.toml import toml_value
from torchllm.tools.config.checks import problems
from torchllm.tools.config.foreign import Equal, foreign_keys
from torchllm.tools.config.idle import contradictions
from torchllm.tools.config.read import ConfigError, read_table
from torchllm.tools.config.toml_files import Layer, merge_layers, read_files
from torchllm.tools.front.foreign_files import flat_keys, parse_foreign
from torchllm.tools.resources import resource

Settings = dict[str, Any]
"""Values by the names of our keys, such as {"parallel.tp": 2}."""


class Foreign(NamedTuple):
    """The config of another program."""

    program: str
    """a table of foreign_keys.toml"""
    values: dict[str, Any]
    """by the program's keys, tables flattened with dots, without keys at None"""
    gpus: int
    """number of GPUs that it is for; 0: not known"""

    def get(self, key: str) -> Any:
        """Return a value, or the program's default; None if the key has neither."""
        return self.values.get(key, DEFAULTS[self.program].get(key))


DEFAULTS: dict[str, dict[str, Any]] = {
    "torchtitan": {
        "optimizer.lr": 8e-4,
        "lr_scheduler.warmup_steps": 200,
        "lr_scheduler.decay_type": "linear",
        "lr_scheduler.lr_min": 0.0,
        "training.local_batch_size": 8,
        "training.global_batch_size": -1,
        "training.seq_len": 2048,
        "training.steps": 10000,
        "parallelism.fsdp_reshard_after_forward": "default",
        "parallelism.pipeline_parallel_degree": 1,
        "parallelism.pipeline_parallel_microbatch_size": 1,
        "parallelism.tensor_parallel_degree": 1,
        "checkpoint.enable": False,
        "optimizer.weight_decay": 0.1,
        "activation_checkpoint.mode": "selective",
        "compile.enable": False,
        "compile.components": ["model", "loss"],
    },
    "huggingface": {},  # its file has every key
    "megatron": {
        "lr_decay_style": "linear",
        "min_lr": 0.0,
        "weight_decay": 0.01,
        "adam_beta2": 0.999,
        "clip_grad": 1.0,
        "init_method_std": 0.02,
        "rotary_base": 10000,
        "normalization": "LayerNorm",
        "untie_embeddings_and_output_weights": False,
        "ffn_hidden_size": None,
        "disable_bias_linear": False,
        "attention_dropout": 0.1,
        "hidden_dropout": 0.1,
        "lr_wsd_decay_style": "exponential",
    },
    "nanochat": {
        "depth": 20,
        "aspect_ratio": 64,
        "head_dim": 128,
        "max_seq_len": 2048,
        "device_batch_size": 32,
        "matrix_lr": 0.02,
        "embedding_lr": 0.3,
        "unembedding_lr": 0.008,
        "weight_decay": 0.28,
        "warmup_steps": 40,
        "warmdown_ratio": 0.65,
        "final_lr_frac": 0.05,
    },
    "litgpt": {
        "train.global_batch_size": 512,
        "train.micro_batch_size": 4,
        "train.lr_warmup_steps": 2000,
        "train.min_lr": 4e-5,
        "train.max_norm": 1.0,
        "optimizer": "AdamW",
        "optimizer.init_args.lr": 1e-3,
    },
}
"""The programs' defaults for absent keys, if they differ from ours or are needed below. Sources: torchtitan 0.2.2,
Megatron-LM core 0.16, nanochat of July 2026, `litgpt pretrain` 0.5."""

FORMER_NAMES = {
    "training.batch_size": "training.local_batch_size",
    "training.warmup_steps": "lr_scheduler.warmup_steps",
    "training.tensor_parallel_degree": "parallelism.tensor_parallel_degree",
    "experimental.context_parallel_degree": "parallelism.context_parallel_degree",
    "experimental.pipeline_parallel_degree": "parallelism.pipeline_parallel_degree",
    "checkpoint.enable_checkpoint": "checkpoint.enable",
    "training.compile": "compile.enable",
}
"""Keys of older versions of torchtitan, whose values others are computed from."""
OPTIMIZERS = dict.fromkeys(("adamw", "adamw_torch", "adamw_torch_fused", "adamw_apex_fused", "adamw_hf"), "adamw")
OPTIMIZERS["sgd"] = "sgd"
"""Our names of optimizers by theirs; those with states of 8 bits are others."""
DIFFERENT_MODELS = {
    "nanochat": "the architecture differs: value embeddings are not in our models, and its windows and the soft cap of"
    " its logits are not read (model.pattern, model.logit_softcap), so the losses of both will differ"
}
"""programs whose models cannot be built here, with the reason"""


def converted_config(file: str, gpus: int = 0) -> str:
    """Return our TOML for the config in `file`. UserError if it cannot be read or no program is recognized."""
    their = read_foreign(file, gpus)
    settings, remarks = translate(their)
    add_what_is_needed(settings, remarks)
    replace_wrong_values(settings, remarks)
    drop_keys_without_effect(settings, remarks)
    return write(their, settings, remarks)


# Reading


def read_foreign(file: str, gpus: int = 0) -> Foreign:
    """Read a config of another program, without running any of its code."""
    name, _, function = file.partition(".py:")
    path = Path(f"{name}.py" if function else file)
    if path.is_dir():
        raise UserError(f'{path}: is a folder. Weights in it start a run by model.from_hf = "{path}"; convert a file')
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    if data[:2] == b"PK" or data[:1] == b"\x80":
        raise UserError(
            f"{path}: is a pickle, which runs code when it is read. TrainingArguments: in the environment that wrote"
            " it, write torch.load(FILE, weights_only=False).to_json_string() to a .json file. nanochat: take"
            " meta_NNNNNN.json, which lies next to the weights"
        )
    try:
        values = flat_keys(parse_foreign(path, data.decode(), function))
    except (ValueError, SyntaxError) as error:  # of UTF-8, TOML, JSON and Python
        raise UserError(f"{path}: cannot be read: {error}") from None
    if "model_type" in values:
        raise UserError(f"{path}: is a model without a run: `torchllm model {path.parent}` prints its [model]")
    known = {program: len(values.keys() & table.keys()) for program, table in foreign_keys().items()}
    program = max(known, key=lambda name: known[name])
    if not known[program]:
        raise UserError(f"{path}: has no key of {', '.join(known)}")
    if values.get("activation_checkpoint", "") is None:  # since torchtitan 0.3
        values["activation_checkpoint.mode"] = "none"
    return Foreign(
        program, {FORMER_NAMES.get(key, key): value for key, value in values.items() if value is not None}, gpus
    )


# Values whose meaning or unit differs. A function returns our settings, or the reason why there are none.

Computed = Callable[[Foreign], Settings | str]


class NoEffect(str):
    """The reason why a key changes nothing in its config: it is not a remark on the training."""


def _batch_of_ranks(their: Foreign, per_rank: int, divided_by: int = 1) -> Settings | str:
    """The global batch is not in the file: it depends on the number of data-parallel ranks."""
    if not their.gpus:
        return f"training.global_batch_size is {per_rank} times the number of data-parallel ranks: give --gpus=N"
    return {"training.global_batch_size": per_rank * their.gpus // divided_by}


def _hf_batch(their: Foreign) -> Settings | str:
    accumulated = int(their.get("gradient_accumulation_steps") or 1)
    return _batch_of_ranks(their, int(their.get("per_device_train_batch_size")) * accumulated)


def _titan_length(their: Foreign) -> int:
    return int(their.values.get("training.max_context_length") or their.get("training.seq_len"))


def _titan_micro_batch(their: Foreign) -> Settings:
    """A pipeline divides the local batch into micro batches. Since August 2026 it is given in tokens."""
    has_stages = int(their.get("parallelism.pipeline_parallel_degree")) > 1
    key = "parallelism.pipeline_parallel_microbatch_size" if has_stages else "training.local_batch_size"
    tokens = their.values.get("training.num_tokens_per_microbatch_per_dp_rank")
    return {"training.micro_batch_size": int(tokens) // _titan_length(their) if tokens else int(their.get(key))}


def _titan_batch(their: Foreign) -> Settings | str:
    tokens = int(their.values.get("training.num_tokens_per_train_step") or -1)
    given = tokens // _titan_length(their) if tokens > 0 else int(their.get("training.global_batch_size"))
    if given > 0:
        return {"training.global_batch_size": given}
    local = int(their.get("training.local_batch_size"))
    if "training.num_tokens_per_microbatch_per_dp_rank" in their.values:
        stages = int(their.get("parallelism.pipeline_parallel_degree"))
        count = int(their.values.get("parallelism.num_pp_microbatches") or 1) if stages > 1 else 1
        local = count * int(_titan_micro_batch(their)["training.micro_batch_size"])
    cut = math.prod(int(their.get(f"parallelism.{axis}_parallel_degree") or 1) for axis in _MODEL_AXES)
    return _batch_of_ranks(their, local, divided_by=cut)


_MODEL_AXES = ("pipeline", "tensor", "context")


TITAN_DEBUG_MODELS: dict[str, Settings] = {
    "llama3": {"layers": 6, "hidden": 256, "heads": 16, "ffn": 768, "vocab": 2048, "max_sequence_length": 131072}
    | {"rope_theta": 500000.0, "rope_scaling_factor": 8.0},
    "qwen3": {"layers": 8, "hidden": 256, "heads": 16, "kv_heads": 8, "head_dim": 128, "ffn": 3072, "vocab": 2048}
    | {"tied_embeddings": True, "qk_norm": "head", "rope_theta": 1000000.0, "norm_epsilon": 1e-6},
}
"""[model] of torchtitan's flavor debugmodel, by its model.name"""
TITAN_PARTS = {
    "llama4": "experts whose input is weighted by the router",
    "qwen3_vl": "an encoder of images",
}
"""a part that our models lack, by torchtitan's model.name"""


def _titan_model(their: Foreign) -> Settings | str:
    flavor = str(their.get("model.flavor") or their.get("model_spec") or their.get("model_spec.flavor"))
    size, *kernel = re.split(r"_(?=flex|varlen)", flavor.lower().replace("-", "_"))
    documents = {"data.document_mask": True} if kernel else {}  # both kernels are there for the mask of documents
    words = str(their.get("model.name") or "llama3").split("_")
    for end in range(len(words), 0, -1):  # a function of a Python file may be llama3_mine
        name = "_".join(words[:end])
        base = f"models/{name}_{size}.toml"
        if resource(f"train_configs/{base}").is_file():
            return {"base": base} | documents
        if size == "debugmodel" and name in TITAN_DEBUG_MODELS:
            return {f"model.{key}": value for key, value in TITAN_DEBUG_MODELS[name].items()} | documents
        if name in TITAN_PARTS:
            return f"the architecture differs: {name} has {TITAN_PARTS[name]}, which our models lack"
    return f"train_configs/models has no {'_'.join(words)} {flavor}: name another file, or write sizes into [model]"


def _titan_schedule(their: Foreign) -> Settings | str:
    decay, share = their.get("lr_scheduler.decay_type"), their.get("lr_scheduler.decay_ratio")
    if share is None:
        return {"schedule.name": decay} if decay != "sqrt" else '1-sqrt is a decay of schedule.name = "wsd" here'
    if decay == "cosine":
        return 'a constant rate with a cosine decay is not here: schedule.name = "wsd" decays linearly or by 1-sqrt'
    steps = round(float(share) * int(their.get("training.steps")))
    if not steps:  # here 0 stands for a tenth of the run
        return {"schedule.name": "constant"}
    return {
        "schedule.name": "wsd",
        "schedule.decay": "1-sqrt" if decay == "sqrt" else decay,
        "schedule.decay_steps": steps,
    }


def _titan_final(their: Foreign) -> Settings:
    return {"schedule.final_fraction": their.values.get("lr_scheduler.min_lr_factor", their.get("lr_scheduler.lr_min"))}


def _titan_zero(their: Foreign) -> Settings:
    policy = their.get("parallelism.fsdp_reshard_after_forward") or "default"
    has_stages = int(their.get("parallelism.pipeline_parallel_degree")) > 1
    return {"parallel.zero_stage": 2 if policy == "never" or (policy == "default" and has_stages) else 3}


def _titan_recompute(their: Foreign) -> Settings:
    classes = {"SelectiveAC": "selective", "FullAC": "full"}  # since 0.3
    mode = classes.get(str(their.values.get("activation_checkpoint", "")), their.get("activation_checkpoint.mode"))
    has_spec = any(key.startswith("model_spec") for key in their.values)  # since 0.3, too
    option = str(their.get("activation_checkpoint.selective_ac_option") or ("op" if has_spec else 2))
    if mode == "selective" and option.isdigit():
        return {"recompute.mode": "every_k", "recompute.k": int(option)}
    return {"recompute.mode": "selective_half" if mode == "selective" else mode}


def _titan_compile(their: Foreign) -> Settings:
    parts = their.get("compile.components") if their.get("compile.enable") else ()
    return {"compile.block": "model" in parts, "compile.loss": "loss" in parts}


def _decay_of_all(key: str) -> Computed:
    """Return the function of a weight decay that norms and biases have, too, unless groups of parameters are given."""
    return lambda their: (
        {"optimizer.weight_decay": their.get(key)}
        | ({} if "optimizer.param_groups" in their.values else {"optimizer.vector_decay": 1.0})
    )


def _titan_tensor(their: Foreign) -> Settings:
    degree = int(their.get("parallelism.tensor_parallel_degree"))
    is_on = their.values.get("parallelism.enable_sequence_parallel", True)
    return {"parallel.tp": degree, "parallel.sequence_parallel": degree > 1 and is_on}


def _titan_saves(their: Foreign) -> Settings:
    return {
        "checkpoint.interval": int(their.get("checkpoint.interval") or 500) if their.get("checkpoint.enable") else 0
    }


def _titan_validation(their: Foreign) -> Settings:
    is_on = their.get("validation.enable") or their.get("validator.enable")
    interval = their.get("validation.freq") or their.get("validator.freq") or 10
    return {"evaluate.interval": int(interval) if is_on else 0}


def _unless_off(compute: Callable[[Foreign], Settings], key: str) -> Computed:
    """Return the function of an interval that counts only if `key` is true."""

    def interval(their: Foreign) -> Settings | str:
        settings = compute(their)
        return settings if any(settings.values()) else NoEffect(f"it is off, as {key} is not true")

    return interval


def _titan_data(their: Foreign) -> Settings | str:
    name = their.get("training.dataset") or their.get("dataloader.dataset") or their.get("dataloader.dataset.dataset")
    path = their.get("training.dataset_path") or their.get("dataloader.dataset_path")
    if name == "c4" and not path:
        return {"data.sources": [{"kind": "hub", "path": "allenai/c4", "subset": "en"}]}
    return f"name the source of {path or name} in [[data.sources]] (docs/data.md)"


def _titan_float8(their: Foreign) -> Settings | str:
    code = str(their.get("model_spec.converters"))  # Python, since 0.3
    if "Float8Linear" in code:
        written = re.search(r"recipe_name='(\w+)'", code)
        return {"float8.recipe": written[1] if written else "rowwise"}
    if re.search(r"(?<!mm\.)\bfloat8\b", str(their.get("model.converters"))):  # not quantize.grouped_mm.float8
        recipe = their.get("quantize.linear.float8.recipe_name") or their.get("float8.recipe_name")
        return {"float8.recipe": recipe or "tensorwise"}
    return "float8.recipe, of linear layers, is the only conversion here"


def _if_float8(key: str) -> Computed:
    """Return the function of an option of float8, which our table explains if float8 is on."""
    remark = foreign_keys()["torchtitan"][key].remark
    return lambda their: (
        NoEffect("float8 is off") if isinstance(found := _titan_float8(their), str) else remark or found
    )


def _hf_schedule(their: Foreign) -> Settings | str:
    theirs = str(their.get("lr_scheduler_type"))
    if theirs == "cosine_with_min_lr":
        if "lr_scheduler_kwargs.min_lr" in their.values:
            return {"schedule.name": "cosine"} | _fraction(their, "lr_scheduler_kwargs.min_lr", "learning_rate")
        return {"schedule.name": "cosine", "schedule.final_fraction": their.get("lr_scheduler_kwargs.min_lr_rate")}
    names = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
    name = names.get(theirs)
    if name is None:
        return f"{theirs} is no schedule here: take the nearest schedule.name"
    return {"schedule.name": name} | ({} if name == "constant" else {"schedule.final_fraction": 0.0})


def _hf_steps(their: Foreign) -> Settings | str:
    steps = int(their.get("max_steps") or -1)
    if steps > 0:
        return {"training.steps": steps}
    return f"{their.get('num_train_epochs')} epochs: set training.steps, or finetune.epochs for conversations"


def _hf_warmup(their: Foreign) -> Settings | str:
    steps, share = float(their.get("warmup_steps") or 0), float(their.get("warmup_ratio") or 0.0)
    if steps < 1:  # since transformers 5 a share, too
        steps, share = 0, steps or share
    total = int(their.get("max_steps") or -1)
    if not steps and share and total <= 0:
        return f"warmup is {share:g} of the steps: set schedule.warmup_steps"
    return {"schedule.warmup_steps": int(steps) or math.ceil(share * total)}


def _unless(other: str, compute: Computed) -> Computed:
    """Return the function of a key that does not count if another one is over 0."""
    return lambda their: NoEffect(f"{other} counts") if (their.get(other) or 0) > 0 else compute(their)


def _trackers(key: str, project: str) -> Computed:
    """Return the function of a key that names trackers. project: the default there."""
    return lambda their: (
        {f"metrics.{name}": project for name in ("wandb", "mlflow", "trackio") if name in str(their.get(key))}
        or "it names no tracker of ours but TensorBoard, which is on"
    )


def _optimizer_named(key: str) -> Computed:
    def compute(their: Foreign) -> Settings | str:
        name = str(their.get(key))
        ours = OPTIMIZERS.get(name.rpartition(".")[2].lower())
        return {"optimizer.name": ours} if ours else f"{name} is no optimizer here: docs/fork_a_recipe.md adds one"

    return compute


def _parts_of_llama(their: Foreign) -> tuple[bool, bool, bool]:
    """Return which of Llama's norms, feed-forward layers and positions Megatron's arguments ask for."""
    values = their.values
    is_rotary = values.get("position_embedding_type") == "rope"
    return values.get("normalization") == "RMSNorm", bool(values.get("swiglu")), is_rotary


def _megatron_family(their: Foreign) -> Settings | str:
    parts = _parts_of_llama(their)
    if all(parts):
        return {"model.family": "llama"}
    if not any(parts):
        return {"model.family": "gpt"}
    return 'RMSNorm, SwiGLU and rotary positions come together here (model.family = "llama"), or none of them ("gpt")'


def _megatron_biases(their: Foreign) -> str:
    has_biases, ours_has = not their.get("disable_bias_linear"), not any(_parts_of_llama(their))
    if has_biases == ours_has:
        return NoEffect("as the model.family has them")
    ours = 'model.family = "gpt" has them' if ours_has else "our models have none"
    return f"the architecture differs: matrices have {'biases' if has_biases else 'no biases'} there, and {ours}"


def _megatron_decay(their: Foreign) -> Settings | str:
    if str(their.get("lr_decay_style")).lower() != "wsd":
        return NoEffect("the schedule is another one")
    decays = {"linear": "linear", "minus_sqrt": "1-sqrt"}
    style = str(their.get("lr_wsd_decay_style"))
    return {"schedule.decay": decays[style]} if style in decays else "schedule.decay is linear or 1-sqrt here"


def _megatron_ffn(their: Foreign) -> Settings:
    """By default 4 times the width, with SwiGLU two thirds of that, rounded down to a multiple of 64."""
    width = 4 * int(their.values["hidden_size"])
    if their.values.get("swiglu"):
        width = width * 2 // 3 // 64 * 64
    return {"model.ffn": their.get("ffn_hidden_size") or width}


def _megatron_vocab(their: Foreign) -> Settings | str:
    multiple = int(their.values.get("make_vocab_size_divisible_by", 128))
    multiple *= int(their.values.get("tensor_model_parallel_size", 1))
    if "vocab_size" not in their.values:
        return f"set model.vocab: the tokenizer's number of tokens, rounded up to a multiple of {multiple}"
    return {"model.vocab": math.ceil(int(their.values["vocab_size"]) / multiple) * multiple}


def _megatron_steps(their: Foreign) -> Settings:
    if "train_iters" in their.values:
        return {"training.steps": their.values["train_iters"]}
    return {"training.steps": int(their.values["train_samples"]) // int(their.values["global_batch_size"])}


def _megatron_schedule(their: Foreign) -> Settings:
    style = str(their.get("lr_decay_style")).lower()
    settings: Settings = {"schedule.name": style}
    return settings if style == "constant" else settings | _fraction(their, "min_lr", "lr")


def _fraction(their: Foreign, least: str, peak: str) -> Settings:
    rate = their.get(peak)
    return {"schedule.final_fraction": float(f"{float(their.get(least)) / float(rate):.6g}")} if rate else {}


def _megatron_recompute(their: Foreign) -> Settings | str:
    if their.values.get("recompute_activations") or their.get("recompute_granularity") == "selective":
        return (
            'selective recomputes attention alone there, which the fused kernel does here; recompute.mode stays "none"'
        )
    return {"recompute.mode": "full"}


def _megatron_stages(their: Foreign) -> Settings:
    degree = int(their.values.get("pipeline_model_parallel_size", 1))
    per_stage = their.values.get("num_layers_per_virtual_pipeline_stage")
    if per_stage is None:
        return {"parallel.pp": degree}
    count = int(their.values["num_layers"]) // degree // int(per_stage)
    return {"parallel.pp": degree, "parallel.schedule": "Interleaved1F1B", "parallel.virtual_stages": count}


def _megatron_data(their: Foreign) -> Settings:
    words = str(their.values["data_path"]).split()
    if len(words) == 1:
        return {"data.sources": [{"kind": "megatron", "path": words[0]}]}
    pairs = zip(words[::2], words[1::2], strict=False)
    return {"data.sources": [{"kind": "megatron", "path": path, "weight": float(weight)} for weight, path in pairs]}


def _nanochat_model(their: Foreign) -> Settings:
    depth, width = int(their.get("depth")), int(their.get("head_dim"))
    heads = math.ceil(depth * int(their.get("aspect_ratio")) / width)
    sizes = {"layers": depth, "hidden": heads * width, "heads": heads, "head_dim": width, "ffn": 4 * heads * width}
    form = {"family": "nanochat", "qk_norm": "head"}
    return {f"model.{key}": value for key, value in (form | sizes).items()}


def _nanochat_steps(their: Foreign) -> Settings | str:
    steps = int(their.get("num_iterations") or -1)
    return {"training.steps": steps} if steps > 0 else "it derives the steps from the size: `torchllm size` does here"


def _nanochat_batch(their: Foreign) -> Settings | str:
    tokens = int(their.get("total_batch_size") or -1)
    if tokens <= 0:
        return "it derives the batch from the size: `torchllm size` does here"
    return {"training.global_batch_size": tokens // int(their.get("max_seq_len"))}


def _nanochat_optimizer(their: Foreign) -> Settings:
    rate = float(their.get("matrix_lr"))
    embedding, head = float(their.get("embedding_lr")) / rate, float(their.get("unembedding_lr")) / rate
    settings = {"name": "muon", "learning_rate": rate, "embedding_rate": embedding, "head_rate": head}
    return {f"optimizer.{key}": value for key, value in settings.items()}


def _nanochat_schedule(their: Foreign) -> Settings:
    steps = int(their.get("num_iterations") or -1)
    settings: Settings = {"schedule.name": "wsd", "schedule.final_fraction": their.get("final_lr_frac")}
    if steps > 0:
        settings["schedule.decay_steps"] = round(float(their.get("warmdown_ratio")) * steps)
    has_decay = settings.get("schedule.decay_steps") != 0  # here 0 stands for a tenth of the run
    return settings if has_decay else {"schedule.name": "constant"}


def _nanochat_float8(their: Foreign) -> Settings | str:
    return {"float8.recipe": their.get("fp8_recipe") or "tensorwise"} if their.get("fp8") else NoEffect("fp8 is off")


def _litgpt_rate(their: Foreign) -> str:
    """Return the key of the learning rate: it moved in version 0.5."""
    return "train.learning_rate" if "train.learning_rate" in their.values else "optimizer.init_args.lr"


TORCH_ADAMW: dict[str, Settings] = {
    "betas": {"optimizer.beta1": 0.9, "optimizer.beta2": 0.999},
    "weight_decay": {"optimizer.weight_decay": 0.01, "optimizer.vector_decay": 1.0},
}
"""our settings of torch.optim.AdamW's defaults, by the argument that is left out"""


def _litgpt_optimizer(key: str) -> Computed:
    def compute(their: Foreign) -> Settings | str:
        if key == "optimizer" and "optimizer.class_path" in their.values:
            return NoEffect("optimizer.class_path names it")
        settings = _optimizer_named(key)(their)
        if settings != {"optimizer.name": "adamw"} or "train.learning_rate" in their.values:
            return settings
        for argument, default in TORCH_ADAMW.items():
            if f"optimizer.init_args.{argument}" not in their.values:
                settings = settings | default
        return settings

    return compute


def _litgpt_steps(their: Foreign) -> Settings | str:
    if their.get("train.max_steps"):
        return {"training.steps": their.get("train.max_steps")}
    length = their.get("train.max_seq_length") or their.get("model_config.block_size")
    if not their.get("train.max_tokens") or not length:
        return "set training.steps: the tokens of the run over those of a step"
    tokens = int(their.get("train.global_batch_size")) * int(length)
    return {"training.steps": math.ceil(int(their.get("train.max_tokens")) / tokens)}


def _litgpt_length(their: Foreign) -> Settings:
    return {"training.sequence_length": their.get("train.max_seq_length") or their.get("model_config.block_size")}


def _is_bfloat16(key: str) -> Computed:
    return lambda their: {
        "training.dtype": "bfloat16" if "bf" in str(their.get(key)) or their.get(key) is True else "float32"
    }


_OFF = (False, "False", "none", "dummy")
"""Values for "not at all"; nanochat's run named dummy is not logged."""


def _if_true(key: str, ours: str, value: Any) -> Computed:
    return lambda their: {ours: value} if their.get(key) not in _OFF else f"{ours} stays off"


def _tokenizer_in(key: str) -> Computed:
    def compute(their: Foreign) -> Settings:
        path = str(their.get(key))
        is_file = Path(path).suffix in (".json", ".model")
        return {"data.tokenizer": path if is_file else f"{path.rstrip('/')}/tokenizer.json"}

    return compute


COMPUTED: dict[str, dict[str, Computed]] = {
    "torchtitan": {
        "training.local_batch_size": _titan_micro_batch,
        "training.global_batch_size": _titan_batch,
        "model.flavor": _titan_model,
        "model_spec": _titan_model,
        "model_spec.flavor": _titan_model,
        "model_spec.converters": _titan_float8,
        "model.converters": _titan_float8,
        **{key: _if_float8(key) for key in foreign_keys()["torchtitan"] if "float8." in key},
        "optimizer.weight_decay": _decay_of_all("optimizer.weight_decay"),
        "compile.enable": _titan_compile,
        "compile.components": _titan_compile,
        "model.tokenizer_path": _tokenizer_in("model.tokenizer_path"),
        "model.hf_assets_path": _tokenizer_in("model.hf_assets_path"),
        "hf_assets_path": _tokenizer_in("hf_assets_path"),
        "metrics.enable_wandb": _if_true("metrics.enable_wandb", "metrics.wandb", "torchtitan"),
        "optimizer.name": lambda their: {"optimizer.name": str(their.get("optimizer.name")).lower()},
        "lr_scheduler.decay_type": _titan_schedule,
        "lr_scheduler.decay_ratio": _titan_schedule,
        "lr_scheduler.lr_min": _titan_final,
        "training.dataset": _titan_data,
        "training.dataset_path": _titan_data,
        "dataloader.dataset": _titan_data,
        "dataloader.dataset_path": _titan_data,
        "dataloader.dataset.dataset": _titan_data,
        "training.num_tokens_per_microbatch_per_dp_rank": _titan_micro_batch,
        "training.num_tokens_per_train_step": _titan_batch,
        "parallelism.num_pp_microbatches": _titan_batch,
        "parallelism.fsdp_reshard_after_forward": _titan_zero,
        "parallelism.tensor_parallel_degree": _titan_tensor,
        "parallelism.enable_sequence_parallel": _titan_tensor,
        "parallelism.pipeline_parallel_microbatch_size": _titan_micro_batch,
        "checkpoint.enable": _titan_saves,
        "checkpoint.interval": _unless_off(_titan_saves, "checkpoint.enable"),
        "validation.enable": _titan_validation,
        "validation.freq": _unless_off(_titan_validation, "validation.enable"),
        "validator.enable": _titan_validation,
        "validator.freq": _unless_off(_titan_validation, "validator.enable"),
        "checkpoint.async_mode": lambda their: {
            "checkpoint.asynchronous": their.get("checkpoint.async_mode") != "disabled"
        },
        "activation_checkpoint": _titan_recompute,
        "activation_checkpoint.mode": _titan_recompute,
        "activation_checkpoint.selective_ac_option": _titan_recompute,
    },
    "huggingface": {
        "gradient_accumulation_steps": _hf_batch,
        "lr_scheduler_type": _hf_schedule,
        "max_steps": _hf_steps,
        "lr_scheduler_kwargs.min_lr": _hf_schedule,
        "lr_scheduler_kwargs.min_lr_rate": _hf_schedule,
        "num_train_epochs": _unless("max_steps", _hf_steps),
        "warmup_steps": _hf_warmup,
        "warmup_ratio": _unless("warmup_steps", _hf_warmup),
        "report_to": _trackers("report_to", "huggingface"),
        "use_cpu": _if_true("use_cpu", "run.device", "cpu"),
        "optim": _optimizer_named("optim"),
        "bf16": _is_bfloat16("bf16"),
        "gradient_checkpointing": _if_true("gradient_checkpointing", "recompute.mode", "full"),
    },
    "megatron": {
        "position_embedding_type": _megatron_family,
        "normalization": _megatron_family,
        "swiglu": _megatron_family,
        "disable_bias_linear": _megatron_biases,
        "untie_embeddings_and_output_weights": lambda their: {
            "model.tied_embeddings": not their.get("untie_embeddings_and_output_weights")
        },
        "ffn_hidden_size": _megatron_ffn,
        "distributed_timeout_minutes": lambda their: {
            "run.timeout": 60 * float(their.get("distributed_timeout_minutes"))
        },
        "qk_layernorm": lambda _: {"model.qk_norm": "head"},
        "vocab_size": _megatron_vocab,
        "make_vocab_size_divisible_by": _megatron_vocab,
        "train_iters": _megatron_steps,
        "train_samples": _megatron_steps,
        "lr_warmup_samples": lambda their: {
            "schedule.warmup_steps": int(their.values["lr_warmup_samples"]) // int(their.values["global_batch_size"])
        },
        "lr_decay_style": _megatron_schedule,
        "min_lr": _megatron_schedule,
        "lr_wsd_decay_style": _megatron_decay,
        "bf16": _is_bfloat16("bf16"),
        "pipeline_model_parallel_size": _megatron_stages,
        "num_layers_per_virtual_pipeline_stage": _megatron_stages,
        "use_distributed_optimizer": lambda _: {"parallel.zero_stage": 1},
        "use_torch_fsdp2": lambda _: {"parallel.zero_stage": 3},
        "recompute_granularity": _megatron_recompute,
        "recompute_activations": _megatron_recompute,
        "recompute_method": _megatron_recompute,
        "data_path": _megatron_data,
        "reset_attention_mask": lambda _: {"data.document_mask": True},
        "reset_position_ids": lambda _: {"data.document_mask": True},
    },
    "nanochat": {
        "depth": _nanochat_model,
        "aspect_ratio": _nanochat_model,
        "head_dim": _nanochat_model,
        "num_iterations": _nanochat_steps,
        "target_param_data_ratio": _nanochat_steps,
        "target_flops": _nanochat_steps,
        "total_batch_size": _nanochat_batch,
        "matrix_lr": _nanochat_optimizer,
        "embedding_lr": _nanochat_optimizer,
        "unembedding_lr": _nanochat_optimizer,
        "warmdown_ratio": _nanochat_schedule,
        "final_lr_frac": _nanochat_schedule,
        "eval_tokens": lambda their: {
            "evaluate.sequences": max(1, int(their.get("eval_tokens")) // their.get("max_seq_len"))
        },
        "save_every": lambda their: {"checkpoint.interval": max(0, int(their.get("save_every")))},
        "eval_every": lambda their: {"evaluate.interval": max(0, int(their.get("eval_every")))},
        "fp8": _nanochat_float8,
        "fp8_recipe": _nanochat_float8,
        "device_type": lambda their: {"run.device": their.get("device_type") or "auto"},
        "model_tag": lambda their: {"run.folder": f"runs/{their.get('model_tag')}"},
        "run": _if_true("run", "metrics.wandb", "nanochat"),
    },
    "litgpt": {
        "precision": _is_bfloat16("precision"),
        "tokenizer_dir": _tokenizer_in("tokenizer_dir"),
        "optimizer": _litgpt_optimizer("optimizer"),
        "optimizer.class_path": _litgpt_optimizer("optimizer.class_path"),
        "optimizer.init_args.betas": lambda their: dict(
            zip(("optimizer.beta1", "optimizer.beta2"), their.get("optimizer.init_args.betas"), strict=True)
        ),
        "optimizer.init_args.weight_decay": _decay_of_all("optimizer.init_args.weight_decay"),
        "train.weight_decay": _decay_of_all("train.weight_decay"),
        "logger_name": _trackers("logger_name", "litgpt"),
        "train.max_tokens": _litgpt_steps,
        "train.max_steps": _litgpt_steps,
        "train.max_seq_length": _litgpt_length,
        "model_config.block_size": lambda their: {"model.max_sequence_length": their.get("model_config.block_size")},
        "train.min_lr": lambda their: (
            {"schedule.name": "cosine"} | _fraction(their, "train.min_lr", _litgpt_rate(their))
        ),
    },
}


# Writing

SET = "SET"
"""stands for a value that the user must write: --check refuses it"""
SOURCES = [{"kind": "text", "path": SET}]
"""the same for data.sources"""
NEEDED = ("training.sequence_length", "training.global_batch_size", "training.steps")
"""Keys that our defaults must not decide: "SET" where the other config lacks one, so that nothing else is trained."""
TRAINED = {"model", "base", "data", "training", "optimizer", "schedule", "finetune", "lora", "float8"}
"""sections whose keys change the training"""
AFTER_TRAINING = {"export", "generate"}
"""sections that no run reads until it has trained"""


class Translated(NamedTuple):
    """A setting and where it comes from."""

    value: Any
    origin: str

    @property
    def is_unset(self) -> bool:
        """Whether the user must write the value: it is SET, or names a variable."""
        if isinstance(self.value, str):
            return self.value == SET or "$" in self.value
        return self.value == SOURCES


class Remark(NamedTuple):
    """A comment on a key of the other program that is not a setting."""

    text: str
    rank: int
    """0: the architecture differs; 1: the training may differ; 2: it does not"""


def translate(their: Foreign) -> tuple[dict[str, Translated], list[Remark]]:
    """Return our settings by key, and a remark for each key of the program that has none."""
    table = foreign_keys()[their.program]
    settings: dict[str, Translated] = {}
    remarks = []
    absent = {key: value for key, value in DEFAULTS[their.program].items() if key not in their.values}
    for key, value in {**their.values, **absent}.items():
        equal = table.get(key, Equal(remark="no key here is known for it", changes=True))
        compute = COMPUTED[their.program].get(key)
        result: Settings | str = equal.remark or {equal.key: value}
        if "$" in str(value) and not equal.remark:
            result = _by_hand(equal.key, value, f"a variable: write its value into {equal.key}")
        elif compute:
            try:
                result = compute(their)
                if not isinstance(result, str) and None in result.values():
                    raise ValueError
            except (KeyError, TypeError, ValueError, ArithmeticError, OSError):
                result = _by_hand(equal.key, SET, f"its value is not understood: set {equal.key}")
        if key in absent and isinstance(result, NoEffect):
            continue
        origin = f"{key} = {_short(value)}" + (", the default there" if key in absent else "")
        changes = bool(value) and not isinstance(result, NoEffect)
        changes = changes and (equal.changes or equal.key.split(".")[0] in TRAINED)
        if isinstance(result, str):
            differs = equal.key == "base" or "the architecture differs" in result
            rank = 0 if differs else 1 if changes else 2
            remarks.append(Remark(f"{origin}: {result}", rank))
            needs_value = compute is not None and equal.key.startswith("model.")  # no default may decide it
            result = _by_hand(equal.key, SET, result) if needs_value else {}
        if isinstance(result, str):
            continue
        for ours, item in result.items():
            first = settings.setdefault(ours, Translated(item, origin))
            if item != first.value and key not in absent:
                text = f"{origin}: {ours} is {_short(first.value)} by {first.origin}"
                remarks.append(Remark(text, 1 if changes else 2))
    if their.program in DIFFERENT_MODELS:
        remarks.append(Remark(DIFFERENT_MODELS[their.program], 0))
    return settings, remarks


def add_what_is_needed(settings: dict[str, Translated], remarks: list[Remark]) -> None:
    """Add "SET" for `NEEDED` keys, model and data that are not known; take out values of a whole section."""
    for key in [key for key in settings if key != "base" and "." not in key]:  # a value for a whole section
        remarks.append(Remark(f"{settings.pop(key).origin}: set the keys of [{key}]", 1))
    for key in NEEDED:
        settings.setdefault(key, Translated(SET, "no such key there, or its value depends on others: see below"))
    settings.setdefault("data.tokenizer", Translated(SET, "the tokenizer of the model"))
    settings.setdefault("data.sources", Translated(SOURCES, "the corpus"))
    if not settings.keys() & {"base", "model.from_hf", "model.layers"}:
        settings["base"] = Translated(SET, "a file of train_configs; or write the sizes into [model]")


def read_settings(settings: dict[str, Translated], faults: list[ConfigError]) -> Config:
    """Return the config that our reader makes of settings, with their base. Wrong values are appended to `faults`."""
    table: dict[str, Any] = {}
    for key, setting in settings.items():
        section, _, name = key.partition(".")
        if name:
            table.setdefault(section, {})[name] = setting.value
    layers = [Layer(table, {})]
    if "base" in settings and not settings["base"].is_unset:
        layers.insert(0, read_files(str(resource("train_configs") / settings["base"].value), []))
    config: Config = read_table(Config, merge_layers(tuple(layers)).table, faults)
    return config


def replace_wrong_values(settings: dict[str, Translated], remarks: list[Remark]) -> None:
    """Write "SET" for each value that our reader refuses. If it has no influence on a run, it becomes a remark."""
    faults: list[ConfigError] = []
    read_settings(settings, faults)
    for fault in faults:
        key = ".".join(fault.path[:2])
        if not settings[key].is_unset and key.split(".")[0] in AFTER_TRAINING:
            remarks.append(Remark(f"{settings.pop(key).origin}: {key} {fault.message}", 2))
        elif not settings[key].is_unset:
            value = SOURCES if key == "data.sources" else SET
            settings[key] = Translated(value, f"{settings[key].origin}: {fault.message}")


def drop_keys_without_effect(settings: dict[str, Translated], remarks: list[Remark]) -> None:
    """Take out keys that other keys rule out, which --check refuses."""
    open_sections = {key.split(".")[0] for key, setting in settings.items() if setting.is_unset}
    for idle in contradictions(read_settings(settings, [])):
        if idle.key in settings and idle.key.split(".")[0] not in open_sections:
            remarks.append(Remark(f"{settings.pop(idle.key).origin}: {idle.key} {idle.reason}", 2))


def refusals(settings: dict[str, Translated], gpus: int) -> list[str]:
    """Return why --check refuses settings that it takes one by one. gpus: 0 if their number is not known.

    Problems that depend on a value that is not there yet are left to --check.
    """
    unset = [key for key, setting in settings.items() if setting.is_unset]
    if "base" in unset or "model.from_hf" in settings:
        unset.append("model.")
    config = read_settings(settings, [])
    fewest = math.prod(max(1, getattr(config.parallel, axis)) for axis in AXES)
    found = [f"{problem.key}: {problem.message}" for problem in problems(config, gpus or fewest)]
    return [line for line in found if not any(key in line for key in unset)]


def write(their: Foreign, settings: dict[str, Translated], remarks: list[Remark]) -> str:
    """Return the TOML: the work that is left, settings with their former names, and the remarks by their rank."""
    launch = f"NPROC={their.gpus} ./run_train.sh" if their.gpus else "./run_train.sh"
    unset = [key for key, setting in settings.items() if setting.is_unset]
    lines = [_comment(remark.text) for remark in remarks if remark.rank == 0]
    lines.append(f"# Converted from a config of {their.program}. Check it: {launch} THIS_FILE --check")
    if unset:
        lines.append(f"# Still to be SET: {', '.join(unset)}")
    lines += [_comment(f"--check refuses {line}") for line in refusals(settings, their.gpus)]
    if "base" in settings:
        lines.append(f"base = {toml_value(settings['base'].value)}  {_comment(settings['base'].origin)}")
    sections: dict[str, list[str]] = {}
    for key, setting in settings.items():
        section, _, name = key.partition(".")
        if name and key != "data.sources":
            sections.setdefault(section, []).append(f"{name} = {toml_value(setting.value)}  {_comment(setting.origin)}")
    for section in vars(Config()):
        if section in sections:
            lines += ["", f"[{section}]", *sections[section]]
        if section == "data":
            for source in settings["data.sources"].value:
                lines += ["", "[[data.sources]]", *(f"{name} = {toml_value(item)}" for name, item in source.items())]
    for rank, title in ((1, "May change the training"), (2, "Does not change the training")):
        texts = [remark.text for remark in remarks if remark.rank == rank]
        if texts:
            lines += ["", f"# {title}; no key has the same meaning:", *(_comment(f"  {text}") for text in texts)]
    return "\n".join(lines) + "\n"


def _by_hand(key: str, value: Any, reason: str) -> Settings | str:
    """Return a value that --check refuses in the place of the right one, or the reason if our reader would take it."""
    section, _, name = key.partition(".")
    faults: list[ConfigError] = []
    if name and key != "data.sources":
        read_table(Config, {section: {name: value}}, faults)
    return {key: value} if faults else reason


def _comment(text: str) -> str:
    """Return text as a comment, without control characters and halves of characters, which TOML does not take."""
    return "# " + re.sub(r"[\x00-\x1f\x7f]", "?", text.encode(errors="replace").decode())


def _short(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
