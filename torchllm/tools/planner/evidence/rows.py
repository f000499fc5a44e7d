"""Describe a run's config as a row of measurements, in the columns and words that `measurements` reads. No torch."""

from typing import Any

from torchllm import __version__
from torchllm.config import Config, Model, Parallel, gradient_accumulation
from torchllm.config.schema import OPTIONS
from torchllm.facts.flops import parameter_count
from torchllm.tools.planner.evidence.cells import COLUMNS

ATTENTION = {"sdpa": "sdpa", "flash": "flash2", "flex": "flex", "eager": "eager"}
"""attention kernels of the config, and the words of the tables"""


def measurement_of(config: Config, gpus: int) -> dict[str, str]:
    """Return the cells, by column, of a resolved config on `gpus` GPUs."""
    model = config.model
    cells: dict[str, Any] = {"dataset": "sweep", "stack": "torchllm", "software": __version__}
    cells["group"] = f"sweep/s{config.training.sequence_length}/{gpus}"
    shape = f"{model.layers}x{model.hidden}"
    cells["fold"] = f"torchllm/{model.family}-{shape}"
    cells["cluster"] = config.cluster.name
    cells["gpus"] = gpus
    cells |= model_cells(model)
    cells |= expert_cells(model, config.parallel)
    cells |= mesh_cells(config.parallel)
    cells |= training_cells(config)
    return {column: str(value) for column, value in cells.items()}


def model_cells(model: Model) -> dict[str, Any]:
    """Return the cells of a model's shape."""
    cells: dict[str, Any] = {"model": model.family, "n_params": parameter_count(model)}
    for column in ("layers", "hidden", "heads", "qk_norm", "norm_position", "ffn", "vocab"):
        cells[column] = getattr(model, column)
    cells["kv_heads"] = model.kv
    cells["head_dim"] = model.head_width
    cells["qkv_bias"] = int(model.qkv_bias)
    cells["window"] = model.window or ""
    # What the columns cannot say makes a row that is not scored.
    for key in OPTIONS:
        if key not in COLUMNS and getattr(model, key) != getattr(Model, key):
            cells["window"] = f"with model.{key}"
    if model.pattern:
        cells["window"] = "by the kind of a block"
    cells["tied_emb"] = int(model.tied_embeddings)
    return cells


def mesh_cells(parallel: Parallel) -> dict[str, Any]:
    """Return the cells of degrees and schedule."""
    cells: dict[str, Any] = {"dp": parallel.data_ranks}
    for column in ("dp_replicate", "dp_shard", "tp", "pp", "cp"):
        cells[column] = getattr(parallel, column)
    cells["zero_stage"] = parallel.zero
    is_pipelined = parallel.pp > 1
    cells["cp_method"] = parallel.cp_method if parallel.cp > 1 else ""
    cells["schedule"] = parallel.schedule if is_pipelined else ""
    cells["interleave_v"] = parallel.stages_per_rank if is_pipelined else ""
    cells["seq_parallel"] = int(parallel.sequence_parallel)
    cells["tp_overlap"] = "none" if parallel.tp > 1 else ""
    return cells


def training_cells(config: Config) -> dict[str, Any]:
    """Return the cells of the batch, and of how its blocks are computed."""
    training = config.training
    data_ranks = config.parallel.data_ranks
    is_compiled = config.compile.block is True
    cells: dict[str, Any] = {"seq_len": training.sequence_length}
    cells["micro_batch"] = training.micro_batch_size
    cells["grad_accum"] = gradient_accumulation(training, data_ranks)
    cells["global_batch_seqs"] = training.global_batch_size
    cells["act_ckpt"] = config.recompute.mode
    cells["loss_chunk"] = training.loss_chunk
    cells["attn_impl"] = ATTENTION[config.model.attention]
    cells["rmsnorm_kernel"] = int(config.compile.norm or is_compiled)
    cells["compile"] = int(is_compiled)
    cells["compile_loss"] = int(config.compile.loss is True)
    cells["precision"] = training.dtype
    if config.float8.is_on:
        cells["precision"] = f"float8 {config.float8.recipe}"
    return cells


def expert_cells(model: Model, parallel: Parallel) -> dict[str, Any]:
    """Return the cells of a mixture of experts; none of a dense model. etp: ranks that share a matrix of an expert."""
    cells: dict[str, Any] = {}
    if model.experts:
        cells["experts"] = model.experts
        cells["top_k"] = model.top_k
        cells["moe_ffn"] = model.expert_width
        cells["shared_experts"] = model.shared_experts
        cells["dense_layers"] = model.dense_layers
        cells["ep"] = parallel.ep
        cells["etp"] = parallel.tp if parallel.ep == 1 else 1
    return cells
