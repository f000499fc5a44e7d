"""Describe a torchllm run as a row of a table of measurements, and read such rows back. No torch.

Tables of other frameworks, which leave much to be guessed, are read by evidence/measurements.py of a checkout.
"""

import csv
import math
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

from torchllm import __version__
from torchllm.config import Config, Model, gradient_accumulation
from torchllm.config.errors import UserError
from torchllm.config.schema import OPTIONS
from torchllm.facts.flops import parameter_count
from torchllm.tools.config.checks import conflicts
from torchllm.tools.config.degrees import resolve_degrees
from torchllm.tools.config.read import ConfigError, read_table
from torchllm.tools.planner.case import Case
from torchllm.tools.planner.cluster import Hardware, read_cluster, unknown_cluster
from torchllm.tools.planner.search.auto import case_of

_COLUMN_LINES = (
    "dataset stack group model n_params layers hidden heads kv_heads head_dim qkv_bias qk_norm norm_position window",
    "ffn experts top_k moe_ffn shared_experts dense_layers vocab tied_emb seq_len",
    "cluster gpu gpus dp dp_replicate dp_shard tp pp cp ep etp cp_method schedule interleave_v micro_batch grad_accum",
    "global_batch_seqs zero_stage seq_parallel tp_overlap dispatcher act_ckpt loss_chunk attn_impl",
    "rmsnorm_kernel compile compile_loss precision",
    "status step_time_s tokens_per_s_per_gpu peak_memory_gib mfu_pct hfu_pct",
    "fold software assumed note source",
)
COLUMNS = tuple(" ".join(_COLUMN_LINES).split())
"""the columns of a row; an empty cell is one that the source does not say"""
KEYS = {
    "model": {
        "family": "model",
        "layers": "layers",
        "hidden": "hidden",
        "heads": "heads",
        "kv_heads": "kv_heads",
        "head_dim": "head_dim",
        "qkv_bias": "qkv_bias",
        "qk_norm": "qk_norm",
        "norm_position": "norm_position",
        "window": "window",
        "ffn": "ffn",
        "vocab": "vocab",
        "tied_embeddings": "tied_emb",
        "attention": "attn_impl",
        "max_sequence_length": "seq_len",
    },
    "training": {
        "sequence_length": "seq_len",
        "micro_batch_size": "micro_batch",
        "global_batch_size": "global_batch_seqs",
        "loss_chunk": "loss_chunk",
    },
    "parallel": {
        "dp_replicate": "dp_replicate",
        "dp_shard": "dp_shard",
        "tp": "tp",
        "pp": "pp",
        "cp": "cp",
        "cp_method": "cp_method",
        "schedule": "schedule",
        "virtual_stages": "interleave_v",
        "zero_stage": "zero_stage",
        "sequence_parallel": "seq_parallel",
    },
    "recompute": {"mode": "act_ckpt"},
    "compile": {"norm": "rmsnorm_kernel", "block": "compile", "loss": "compile_loss"},
}
"""the keys of a config that a row has, and their columns"""
KEYS_OF_EXPERTS = {
    "model": {
        "experts": "experts",
        "top_k": "top_k",
        "expert_ffn": "moe_ffn",
        "shared_experts": "shared_experts",
        "dense_layers": "dense_layers",
    },
    "parallel": {"ep": "ep"},
}
"""keys and columns of a mixture of experts; its rows are `torchllm`'s where `etp`, Megatron's name, agrees"""
UNWRITTEN = {
    "training": ("weights_dtype",),
    "optimizer": ("name", "state_dtype", "offload", "ema_decay"),
    "parallel": ("regather", "split", "keep_last_block", "prefetch", "expert_dispatch", "expert_chunks"),
    "recompute": ("k", "offload"),
    "compile": ("graphs",),
}
"""further keys that a prediction depends on, by section: they have no column"""
SWITCHES = ("qkv_bias", "tied_emb", "seq_parallel", "rmsnorm_kernel", "compile", "compile_loss")
"""columns of 0 and 1"""
ATTENTION = {"sdpa": "sdpa", "flash": "flash2", "flex": "flex", "eager": "eager"}
"""attention kernels of the config, and the words of the tables"""


def measurement_of(config: Config, gpus: int) -> dict[str, str]:
    """Return the cells, by column, of a resolved config on `gpus` GPUs."""
    model, parallel, training = config.model, config.parallel, config.training
    cells: dict[str, Any] = {"dataset": "sweep", "stack": "torchllm", "software": __version__}
    cells["group"] = f"sweep/s{training.sequence_length}/{gpus}"
    cells["fold"] = f"torchllm/{model.family}-{model.layers}x{model.hidden}"
    cells["cluster"] = config.cluster.name
    cells["gpus"] = gpus
    for keys in (KEYS, KEYS_OF_EXPERTS) if model.experts else (KEYS,):
        for section, columns in keys.items():
            for key, column in columns.items():
                cells[column] = getattr(getattr(config, section), key)
    cells |= _resolved_cells(config)
    cells["dp"] = parallel.data_ranks
    cells["n_params"] = parameter_count(model)
    cells["grad_accum"] = gradient_accumulation(training, parallel.data_ranks)
    cells["precision"] = f"float8 {config.float8.recipe}" if config.float8.is_on else training.dtype
    cells["tp_overlap"] = "none" if parallel.tp > 1 else ""
    if model.experts:
        cells["moe_ffn"] = model.expert_width
        cells["etp"] = parallel.tp if parallel.ep == 1 else 1
    return {column: str(int(value) if column in SWITCHES else value) for column, value in cells.items()}


def _resolved_cells(config: Config) -> dict[str, Any]:
    """Return the cells of keys that have another value where they are used, or none."""
    model, parallel = config.model, config.parallel
    is_pipelined = parallel.pp > 1
    is_compiled = config.compile.block is True
    window: object = model.window or ""
    # A key without a column that is not at its default makes a row that is not read.
    for key in OPTIONS:
        if key not in COLUMNS and getattr(model, key) != getattr(Model, key):
            window = f"with model.{key}"
    if not config.trains_all:
        window = "with frozen weights"
    default = Config()
    for section, keys in UNWRITTEN.items():
        values, defaults = getattr(config, section), getattr(default, section)
        if different := [key for key in keys if getattr(values, key) != getattr(defaults, key)]:
            window = f"with {section}.{different[0]}"
    if model.pattern:
        window = "by the kind of a block"
    return {
        "kv_heads": model.kv,
        "head_dim": model.head_width,
        "window": window,
        "attn_impl": ATTENTION[model.attention],
        "seq_len": config.training.sequence_length,
        "zero_stage": parallel.zero,
        "cp_method": parallel.cp_method if parallel.cp > 1 else "",
        "schedule": parallel.schedule if is_pipelined else "",
        "interleave_v": parallel.stages_per_rank if is_pipelined else "",
        "rmsnorm_kernel": config.compile.norm or is_compiled,
        "compile": is_compiled,
        "compile_loss": config.compile.loss is True,
    }


class OwnRow(NamedTuple):
    """A row of a table of torchllm's runs."""

    cells: dict[str, str]
    case: Case | None
    problem: str
    """why there is no case; empty if there is one"""

    @property
    def seconds(self) -> float | None:
        """Measured step time; None if the row has none."""
        return number_in(self.cells, "step_time_s") if self.cells.get("status", "ok") == "ok" else None


def read_rows(file: str, cluster: str = "") -> list[OwnRow]:
    """Return the rows of a CSV file, see `read_cells`."""
    return [read_row(cells) for cells in read_cells(file, cluster)]


def read_cells(file: str, cluster: str) -> list[dict[str, str]]:
    """Return the rows of a CSV file. OSError if there is no such file, ValueError if it is not a table of layouts.

    cluster: replaces the cluster that the rows name, unless it is empty; ValueError if there is none of this name.
    """
    if cluster and (unknown := unknown_cluster(cluster)):
        raise ValueError(unknown)
    with open(file, newline="") as opened:
        reader = csv.DictReader(opened)
        if not set(reader.fieldnames or ()) >= {"hidden", "layers", "gpus"}:
            raise ValueError(f"{file}: no columns hidden, layers and gpus: not a table of layouts")
        rows = [{column: (text or "").strip() for column, text in line.items() if column} for line in reader]
    return [cells | {"cluster": cluster} if cluster else cells for cells in rows]


def read_row(cells: dict[str, str]) -> OwnRow:
    """Read one row that `measurement_of` described."""
    try:
        for column in ("step_time_s", "peak_memory_gib"):
            number_in(cells, column)
        return OwnRow(cells, case_of(config_of(cells), _hardware(cells.get("cluster", ""))), "")
    except (ValueError, UserError) as error:
        return OwnRow(cells, None, str(error))


def number_in(cells: dict[str, str], column: str) -> float | None:
    """Return a measured number; None if the cell is empty. ValueError if it is not over 0 and finite."""
    text = cells.get(column, "")
    try:
        number = float(text) if text else None
    except ValueError:
        number = math.nan
    if number is not None and not 0 < number < math.inf:
        raise ValueError(f"{column}: must be a number over 0, not {text!r}")
    return number


def config_of(cells: dict[str, str]) -> Config:
    """Return the config that a row describes. ValueError if it is not one of torchllm in 16 bits, or is refused."""
    if not cells.get("stack"):
        raise ValueError("no layout that was measured")
    if cells["stack"] != "torchllm":
        raise ValueError(f"stack {cells['stack']!r}: rows of other frameworks are for python -m evidence score")
    if "float8" in cells.get("precision", ""):
        raise ValueError(f"precision {cells['precision']!r}: a plan is of products in 16 bits")
    kernels = {word: kernel for kernel, word in ATTENTION.items()}
    table: dict[str, Any] = {}
    for keys in (KEYS, KEYS_OF_EXPERTS) if cells.get("experts") else (KEYS,):
        for section, columns in keys.items():
            for key, column in columns.items():
                if text := cells.get(column, ""):
                    table.setdefault(section, {})[key] = _value(column, kernels.get(text, text))
    faults: list[ConfigError] = []
    config: Config = read_table(Config, table, faults)
    parallel, wrong = resolve_degrees(config.parallel, int(cells["gpus"]), "set gpus")
    config = replace(config, parallel=parallel)
    for fault in [*faults, *wrong, *conflicts(config, parallel.ranks)]:
        raise ValueError(f"{fault.key}: {fault.message}")
    return config


def _value(column: str, text: str) -> object:
    """Return the value that a cell stands for."""
    if column in SWITCHES:
        return text == "1"
    return int(text) if text.isdecimal() else text


@cache
def _hardware(cluster: str) -> Hardware:
    """Return a cluster by name or file. ValueError if it has no file, or a wrong one."""
    if not cluster:
        raise ValueError("the row names no cluster: set --cluster")
    problems = [unknown] if (unknown := unknown_cluster(cluster)) else []
    hardware = None if problems else read_cluster(cluster, problems)
    if hardware is None:
        raise ValueError("; ".join(problems))
    return hardware
