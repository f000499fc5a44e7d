"""Describe a run's config as a row of measurements, in the columns and words that `measurements` reads. No torch."""

from typing import Any

from torchllm import __version__
from torchllm.config import Config, Model, Parallel, gradient_accumulation
from torchllm.spec.flops import parameter_count


def measurement_of(config: Config, gpus: int) -> dict[str, str]:
    """Return the cells, by column, of a resolved config on `gpus` GPUs."""
    model, training, parallel = config.model, config.training, config.parallel
    dp = parallel.data_ranks
    attention = {"sdpa": "sdpa", "flash": "flash2", "flex": "flex", "eager": "eager"}[model.attention]
    found: dict[str, Any] = {
        "dataset": "sweep",
        "stack": "torchllm",
        "group": f"sweep/s{training.sequence_length}/{gpus}",
        "model": model.family,
        "n_params": parameter_count(model),
        "layers": model.layers,
        "hidden": model.hidden,
        "heads": model.heads,
        "kv_heads": model.kv,
        "head_dim": model.head_width,
        "qkv_bias": int(model.qkv_bias),
        "qk_norm": model.qk_norm,
        "norm_position": model.norm_position,
        "window": model.window or "",
        "ffn": model.ffn,
        **expert_cells(model, parallel),
        "vocab": model.vocab,
        "tied_emb": int(model.tied_embeddings),
        "seq_len": training.sequence_length,
        "cluster": config.cluster.name,
        "gpus": gpus,
        "dp": dp,
        "dp_replicate": parallel.dp_replicate,
        "dp_shard": parallel.dp_shard,
        "tp": parallel.tp,
        "pp": parallel.pp,
        "cp": parallel.cp,
        "cp_method": parallel.cp_method if parallel.cp > 1 else "",
        "schedule": parallel.schedule if parallel.pp > 1 else "",
        "interleave_v": parallel.stages_per_rank if parallel.pp > 1 else "",
        "micro_batch": training.micro_batch_size,
        "grad_accum": gradient_accumulation(training, dp),
        "global_batch_seqs": training.global_batch_size,
        "zero_stage": parallel.zero_stage,
        "seq_parallel": int(parallel.sequence_parallel),
        "tp_overlap": "none" if parallel.tp > 1 else "",
        "act_ckpt": config.recompute.mode,
        "loss_chunk": training.loss_chunk,
        "attn_impl": attention,
        "rmsnorm_kernel": int(config.compile.norm or config.compile.block is True),
        "compile": int(config.compile.block is True),
        "fold": f"torchllm/{model.family}-{model.layers}x{model.hidden}",
        "software": __version__,
        "precision": f"float8 {config.float8.recipe}" if config.float8.is_on else config.training.dtype,
    }
    return {key: str(value) for key, value in found.items()}


def expert_cells(model: Model, parallel: Parallel) -> dict[str, Any]:
    """Return the cells of a mixture of experts; none of a dense model. etp: ranks that share a matrix of an expert."""
    if not model.experts:
        return {}
    return {
        "experts": model.experts,
        "top_k": model.top_k,
        "moe_ffn": model.expert_width,
        "shared_experts": model.shared_experts,
        "dense_layers": model.dense_layers,
        "ep": parallel.ep,
        "etp": parallel.tp if parallel.ep == 1 else 1,
    }
