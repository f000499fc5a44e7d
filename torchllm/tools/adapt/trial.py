"""A step built as recipes/pretrain.py builds it, and random batches for it: what `tune` and the benchmarks time."""

from typing import NamedTuple

import torch

from torchllm.config import Config, gradient_accumulation
from torchllm.data.batch import Batch
from torchllm.models.decoder import Decoder, build_model
from torchllm.models.lora import apply_lora
from torchllm.optim.average import WeightAverage
from torchllm.optim.optimizer import build_optimizer
from torchllm.optim.schedule import LearningRate
from torchllm.parallel.initialize import initialize
from torchllm.parallel.mesh import Mesh, sequence_pieces
from torchllm.parallel.parallelize import build_forward_backward, parallelize
from torchllm.runtime.device import compute_dtype
from torchllm.runtime.process import Runtime
from torchllm.train.step import TrainStep


class Trial(NamedTuple):
    """The parts that take steps, without data and checkpoints."""

    stages: list[Decoder]
    optimizer: torch.optim.Optimizer
    step: TrainStep


def build_trial(config: Config, runtime: Runtime, mesh: Mesh) -> Trial:
    """Build stages, optimizer and step on this rank. The order of calls is the same as in recipes/pretrain.py."""
    device, training = runtime.device, config.training
    dtype = compute_dtype(training, device)
    length = training.sequence_length
    with torch.device("meta"):
        model = build_model(config.model, training.loss_chunk, training.z_loss)
    apply_lora(model, config.lora, dtype)
    stages = parallelize(model, mesh, config.parallel, config.recompute, config.compile, config.float8, dtype, length)
    initialize(stages, config.model, device, config.run.seed)
    optimizer = build_optimizer(stages, config.optimizer)
    WeightAverage(stages, config.optimizer.ema_decay).follow(optimizer)
    learning_rate = LearningRate(config.schedule, config.optimizer.learning_rate, training.steps)
    forward_backward = build_forward_backward(stages, mesh, config.parallel, training, dtype)
    step = TrainStep(stages, forward_backward, optimizer, learning_rate, mesh, training, device)
    return Trial(stages, optimizer, step)


def synthetic_batches(config: Config, mesh: Mesh, device: torch.device) -> list[Batch]:
    """Return the micro batches of a step of one rank: random tokens, on the device."""
    training = config.training
    pieces = sequence_pieces(mesh).positions(training.sequence_length)
    positions = torch.cat([torch.arange(piece.start, piece.stop, device=device) for piece in pieces])
    shape = (training.micro_batch_size, len(positions))  # (B, S), under context parallelism (B, S / n)
    batches = []
    for _ in range(gradient_accumulation(training, mesh.data_size)):
        tokens, labels = torch.randint(config.model.vocab, (2, *shape), device=device)
        document_ids = torch.zeros_like(tokens) if config.data.document_mask else None
        batches.append(Batch(tokens, labels, positions.expand(shape), document_ids))
    return batches
