"""benchmark titan: the training step against torchtitan's, of the same model. For torchtitan 0.2.2."""

import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from torchllm.config import Config, Features
from torchllm.config.errors import UserError
from torchllm.parallel.mesh import build_mesh
from torchllm.runtime.device import compute_dtype
from torchllm.runtime.process import Runtime
from torchllm.tools.adapt.trial import synthetic_batches

from .step import compare_steps
from .tools import Tables, Work

if TYPE_CHECKING:
    from .settings import BenchmarkConfig

LLAMA = Features(norm="rms", gated_ffn=True, biases=False, learned_positions=False)
"""features of torchtitan's model"""
RECOMPUTE = {"none": "none", "full": "full", "selective_half": "selective"}
"""torchtitan's names of the modes that save the same, or as much"""
NEVER = 1_000_000
"""steps between two lines of its log, which wait for the GPU"""
NAME = "torchllm"
"""of the model, in torchtitan's registry"""


def titan(config: "BenchmarkConfig", runtime: Runtime) -> Tables:
    """Time torchllm's step and torchtitan's, in turns. UserError if torchtitan cannot take the same step."""
    problem = obstacle(config, runtime.device)
    if problem:
        raise UserError(f"benchmark titan: {problem}")
    mesh = build_mesh(config.parallel, runtime.device)
    batches = synthetic_batches(config, mesh, runtime.device)
    build_torchtitan = partial(torchtitan_step, config, runtime.local_rank)
    return compare_steps(config, runtime, mesh, batches, "torchtitan", build_torchtitan).tables


def obstacle(config: Config, device: torch.device) -> str:
    """Return why torchtitan cannot take this config's step; "" if it can."""
    model, parallel = config.model, config.parallel
    has_own_heads = model.head_width * model.heads != model.hidden
    parts = (model.qkv_bias, model.qk_norm, model.norm_position, model.window, model.experts)
    has_own_parts = parts != (False, "none", "before", 0, 0)
    obstacles = {
        "torchtitan needs a GPU": device.type != "cuda",
        "torchtitan is not installed: pip install torchtitan==0.2.2": find_spec("torchtitan") is None,
        'it computes in bfloat16; set training.dtype = "bfloat16"': (
            compute_dtype(config.training, device) != torch.bfloat16
        ),
        "its Llama has no other family, no head_dim, qkv_bias, qk_norm, norm_position, window and experts": (
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
    """Return the keys of torchtitan's JobConfig that make its step the one of this config."""
    training, parallel = config.training, config.parallel
    return {
        "model.name": NAME,
        "model.flavor": NAME,
        "metrics.log_freq": NEVER,
        "training.seq_len": training.sequence_length,
        "training.local_batch_size": training.micro_batch_size,
        "training.global_batch_size": training.global_batch_size,
        "training.max_norm": training.max_grad_norm,
        "compile.enable": config.compile.block is True,
        "activation_checkpoint.mode": RECOMPUTE[config.recompute.mode],
        "activation_checkpoint.selective_ac_option": "op",
        "parallelism.data_parallel_replicate_degree": parallel.dp_replicate,
        "parallelism.data_parallel_shard_degree": parallel.dp_shard,
        "parallelism.tensor_parallel_degree": parallel.tp,
    }


def torchtitan_step(config: Config, local_rank: int) -> Work:
    """Return a step of torchtitan's own trainer, with the model of the config and random tokens."""
    from torchtitan.config import JobConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.models.llama3.model.args import TransformerModelArgs
    from torchtitan.protocols.train_spec import get_train_spec, register_train_spec
    from torchtitan.train import Trainer

    class JoinedTrainer(Trainer):
        """torchtitan's trainer in a process that has joined its job already."""

        def init_distributed(self) -> ParallelDims:
            return ParallelDims(
                dp_replicate=config.parallel.dp_replicate,
                dp_shard=config.parallel.dp_shard,
                cp=1,
                tp=config.parallel.tp,
                pp=1,
                ep=1,
                etp=1,
                world_size=config.parallel.ranks,
            )

    model = config.model
    sizes = TransformerModelArgs(
        dim=model.hidden,
        n_layers=model.layers,
        n_heads=model.heads,
        n_kv_heads=model.kv,
        vocab_size=model.vocab,
        multiple_of=model.ffn,  # it rounds a width that follows from dim up to a multiple of this:
        ffn_dim_multiplier=0.001,  # a small one becomes model.ffn itself
        norm_eps=model.norm_epsilon,
        rope_theta=model.rope_theta,
    )
    llama = get_train_spec("llama3")
    own_parts = {"build_tokenizer_fn": None, "build_dataloader_fn": lambda **_: None}
    register_train_spec(NAME, replace(llama, model_args={NAME: sizes}, **own_parts))
    job = JobConfig()
    for key, value in torchtitan_keys(config).items():
        section, name = key.split(".")
        if not hasattr(getattr(job, section), name):
            raise UserError(f"benchmark titan: this torchtitan has no key {key}: pip install torchtitan==0.2.2")
        setattr(getattr(job, section), name, value)
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
    while True:
        yield {"input": tokens}, tokens
