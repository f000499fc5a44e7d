"""A step put together as recipes/pretrain.py does, and random batches for it: what `tune` and the benchmarks time."""

import torch

from torchllm.config import Config, gradient_accumulation
from torchllm.data.batch import Batch
from torchllm.models.decoder import Decoder, build_model
from torchllm.optim.optimizer import build_optimizer
from torchllm.optim.schedule import LearningRate
from torchllm.parallel.initialize import initialize
from torchllm.parallel.mesh import Mesh
from torchllm.parallel.parallelize import parallelize
from torchllm.parallel.pipeline import build_forward_backward
from torchllm.runtime.process import Runtime, compute_dtype
from torchllm.train.step import TrainStep


def library_step(
    config: Config, runtime: Runtime, mesh: Mesh
) -> tuple[list[Decoder], torch.optim.Optimizer, TrainStep]:
    """Our stages, optimizer and step, built as pretrain.py builds them."""
    device, training = runtime.device, config.training
    with torch.device("meta"):
        model = build_model(config.model, training.loss_chunk)
    dtype = compute_dtype(training, device)
    length = training.sequence_length
    stages = parallelize(model, mesh, config.parallel, config.recompute, config.compile, dtype, length)
    initialize(stages, config.model, device, config.run.seed)
    optimizer = build_optimizer(stages, config.optimizer)
    learning_rate = LearningRate(config.schedule, config.optimizer.learning_rate, training.steps)
    forward_backward = build_forward_backward(stages, mesh, config.parallel, training, dtype)
    return stages, optimizer, TrainStep(stages, forward_backward, optimizer, learning_rate, mesh, training, device)


def synthetic_batches(config: Config, mesh: Mesh, device: torch.device) -> list[Batch]:
    """One rank's micro batches of a step, random and on the device."""
    training = config.training
    shape = (training.micro_batch_size, training.sequence_length)
    batches = []
    for _ in range(gradient_accumulation(training, mesh.data_size)):
        tokens, labels = torch.randint(config.model.vocab, (2, *shape), device=device)
        positions = torch.arange(shape[1], device=device).expand(shape)
        batches.append(
            Batch(tokens, labels, positions, torch.zeros_like(tokens) if config.data.document_mask else None)
        )
    return batches
