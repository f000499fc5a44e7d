"""A step built as recipes/pretrain.py builds it, and random batches for it: what `tune` and the benchmarks time."""

from typing import NamedTuple

import numpy as np
import torch

from torchllm.config import Config, gradient_accumulation
from torchllm.data.batch import Batch
from torchllm.data.corpus import Window
from torchllm.data.order import Location
from torchllm.data.sequence_reader import SequenceReader
from torchllm.data.shard import Split
from torchllm.data.synthetic import Synthetic
from torchllm.models.decoder import Decoder, add_low_rank_updates, build_model
from torchllm.optim.average import WeightAverage
from torchllm.optim.optimizer import build_optimizer
from torchllm.optim.schedule import LearningRate
from torchllm.parallel.initialize import initialize
from torchllm.parallel.mesh import Mesh, sequence_pieces
from torchllm.parallel.parallelize import build_forward_backward, parallelize
from torchllm.runtime.device import compute_dtype
from torchllm.runtime.process import Runtime
from torchllm.tools.iterable import piece_of
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
        model = build_model(config.model, training.loss_chunk, training.z_loss, training.weights_dtype)
    add_low_rank_updates(model, config, dtype)
    stages = parallelize(model, mesh, config.parallel, config.recompute, config.compile, config.float8, dtype, length)
    initialize(stages, config.model, device, config.run.seed)
    optimizer = build_optimizer(stages, config.optimizer)
    WeightAverage(stages, config.optimizer.ema_decay, config.optimizer.ema_offload).follow(optimizer)
    learning_rate = LearningRate(config.schedule, config.optimizer.learning_rate, training.steps)
    forward_backward = build_forward_backward(stages, mesh, config.parallel, training, dtype)
    step = TrainStep(stages, forward_backward, optimizer, learning_rate, mesh, training, device)
    return Trial(stages, optimizer, step)


def synthetic_batches(config: Config, mesh: Mesh, device: torch.device) -> list[Batch]:
    """Return the micro batches of a step of one rank, on the device: random documents, read and packed as in a run."""
    training = config.training
    micro_batches, size = gradient_accumulation(training, mesh.data_size), training.micro_batch_size
    source, pieces = RandomDocuments(config.model.vocab), sequence_pieces(mesh)
    length, depth = training.sequence_length, config.model.mtp_depth
    reader = SequenceReader([source], length, config.data.document_mask, pieces, depth)
    first = mesh.data_rank * micro_batches * size
    values = reader.read("train", [Location(0, 0, first + number) for number in range(micro_batches * size)])
    return reader.packed_batches(torch.from_numpy(values), micro_batches, size).unpack(device)


class RandomDocuments(Synthetic):
    """Random tokens with a document's begin at every 1,024th, on average."""

    def window(self, split: Split, number: int, length: int, piece: range | None = None) -> Window:
        piece = piece or range(length)
        whole = super().window(split, number, length, range(max(length, piece.stop)))
        begins = np.random.default_rng(number).random(len(whole.ids)) < 1 / 1024
        begins[0] = True
        return piece_of(whole._replace(begins=np.flatnonzero(begins)), piece)
