"""benchmark titan: the training step against torchtitan's, of the same model. For torchtitan 0.3.0."""

import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from benchmark.step import compare_steps
from benchmark.tools import Tables, Work

from torchllm.config import Config, Features, Model
from torchllm.config.errors import UserError
from torchllm.config.schema import OPTIONS
from torchllm.parallel.mesh import build_mesh
from torchllm.runtime.device import compute_dtype
from torchllm.runtime.process import Runtime
from torchllm.tools.adapt.trial import synthetic_batches

if TYPE_CHECKING:
    from benchmark.settings import BenchmarkConfig

LLAMA = Features(norm="rms", feed_forward="gated", biases=False, learned_positions=False)
"""features of torchtitan's model"""
RECOMPUTE = ("none", "full", "selective_half")
"""modes with a counterpart in torchtitan that saves the same tensors, or the same amount"""
VERSION = "0.3.0"
"""of torchtitan; others have other names"""
NEVER = 1_000_000
"""steps between two lines of its log, which wait for the GPU"""


def titan(config: "BenchmarkConfig", runtime: Runtime) -> Tables:
    """Time torchllm's step and torchtitan's, in turns. UserError if torchtitan cannot take the same step."""
    problem = obstacle(config, runtime.device)
    if problem:
        raise UserError(f"benchmark titan: {problem}")
    mesh = build_mesh(config.parallel, runtime.device)
    batches = synthetic_batches(config, mesh, runtime.device)
    build_torchtitan = partial(torchtitan_step, config, runtime.local_rank)
    return compare_steps(config, runtime, mesh, batches, "torchtitan", build_torchtitan)


def installed_version() -> str:
    """Return the version of torchtitan; empty if it is not installed."""
    try:
        return version("torchtitan")
    except PackageNotFoundError:
        return ""


def obstacle(config: Config, device: torch.device) -> str:
    """Return why torchtitan cannot take this config's step; "" if it can."""
    model, parallel = config.model, config.parallel
    has_own_heads = model.head_width * model.heads != model.hidden
    own_keys = (*OPTIONS, "window", "experts", "pattern")
    has_own_parts = any(getattr(model, key) != getattr(Model, key) for key in own_keys)
    obstacles = {
        "torchtitan needs a GPU": device.type != "cuda",
        f"it needs torchtitan {VERSION}, which is not installed: pip install torchtitan=={VERSION}": (
            installed_version() != VERSION
        ),
        'it computes in bfloat16; set training.dtype = "bfloat16"': (
            compute_dtype(config.training, device) != torch.bfloat16
        ),
        f"its Llama has no other family, no head_dim, {', '.join(own_keys[:-1])} and {own_keys[-1]}": (
            model.features != LLAMA or has_own_heads or has_own_parts
        ),
        "its Llama has an untied output projection; set model.tied_embeddings = false": model.tied_embeddings,
        "pipelines and context parallelism are not compared; set parallel.pp and parallel.cp to 1": (
            parallel.pp * parallel.cp > 1
        ),
        'float8 and documents are not compared; set float8.recipe = "none" and data.document_mask = false': (
            config.float8.is_on or config.data.document_mask
        ),
        f"it has no such recomputation; set recompute.mode to one of {', '.join(RECOMPUTE)}": (
            config.recompute.mode not in RECOMPUTE
        ),
    }
    return next((text for text, is_so in obstacles.items() if is_so), "")


def torchtitan_keys(config: Config) -> dict[str, Any]:
    """Return the keys of torchtitan's Trainer.Config that make its step the one of this config."""
    training, parallel = config.training, config.parallel
    return {
        "metrics.log_freq": NEVER,
        "training.seq_len": training.sequence_length,
        "training.local_batch_size": training.micro_batch_size,
        "training.global_batch_size": training.global_batch_size,
        "training.max_norm": training.max_grad_norm,
        "compile.enable": config.compile.block is True,
        "parallelism.data_parallel_replicate_degree": parallel.dp_replicate,
        "parallelism.data_parallel_shard_degree": parallel.dp_shard,
        "parallelism.tensor_parallel_degree": parallel.tp,
        "parallelism.spmd_backend": "partial_dtensor",  # its default, spmd_types, fails in torch 2.13's fully_shard
        "debug.enable_structured_logging": False,
    }


def torchtitan_model(config: Config) -> Any:
    """Return torchtitan's Llama of the config's sizes, with FlexAttention."""
    from torchtitan.models import llama3

    model = config.model
    rope = llama3.ComplexRoPE.Config(
        dim=model.head_width, max_seq_len=config.training.sequence_length, theta=model.rope_theta
    )
    # Private, but the one function that makes blocks of any size; the version is pinned.
    layers = llama3._build_llama3_layers(
        n_layers=model.layers,
        dim=model.hidden,
        n_heads=model.heads,
        n_kv_heads=model.kv,
        hidden_dim=model.ffn,
        rope=rope,
        attn_backend="flex",
    )
    sizes = llama3.llama3_configs["8B"](attn_backend="flex")  # for the initial weights of its ends
    return replace(
        sizes,
        dim=model.hidden,
        vocab_size=model.vocab,
        tok_embeddings=replace(sizes.tok_embeddings, num_embeddings=model.vocab, embedding_dim=model.hidden),
        norm=replace(sizes.norm, normalized_shape=model.hidden),
        lm_head=replace(sizes.lm_head, in_features=model.hidden, out_features=model.vocab),
        layers=layers,
    )


def torchtitan_step(config: Config, local_rank: int, *, cuda_graphs: bool = True) -> Work:
    """Return a step of torchtitan's own trainer, with the model of the config and random tokens.

    Its CUDA graphs are on by default, as in torchtitan.
    """
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.optimizer import default_adamw
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
    from torchtitan.models.llama3 import model_registry
    from torchtitan.trainer import Trainer

    class JoinedTrainer(Trainer):
        """torchtitan's trainer in a process that has joined its job already."""

        def init_distributed(self) -> ParallelDims:
            return ParallelDims.from_config(self.config.parallelism, config.parallel.ranks)

    policies = {"none": None, "full": FullAC.Config(), "selective_half": SelectiveAC.Config()}
    nothing = SimpleNamespace(build=lambda **_: None)  # in place of a tokenizer and a loader
    job = Trainer.Config(
        model_spec=replace(model_registry("8B"), model=torchtitan_model(config)),
        tokenizer=nothing,
        dataloader=nothing,
        loss=CrossEntropyLoss.Config(global_vocab_size=config.model.vocab),
        optimizer=default_adamw(lr=3e-4),  # any rate
        activation_checkpoint=policies[config.recompute.mode],
    )
    for key, value in torchtitan_keys(config).items():
        section, name = key.split(".")
        setattr(getattr(job, section), name, value)
    job.training.disable_cuda_graphs = not cuda_graphs
    os.environ.setdefault("LOCAL_RANK", str(local_rank))
    trainer = JoinedTrainer(job)
    data = trainer.batch_generator(random_batches(config))

    def take_step() -> None:
        trainer.step += 1
        trainer.train_step(data)

    return take_step


def random_batches(config: Config) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
    """Yield micro batches without end; like torchtitan's loader, on the host."""
    shape = (config.training.micro_batch_size, config.training.sequence_length)
    tokens = torch.randint(config.model.vocab, shape)
    positions = torch.arange(shape[1]).expand(shape)  # one document
    while True:
        yield {"input": tokens, "positions": positions}, tokens
