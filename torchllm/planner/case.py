"""The input of every prediction: one layout of one model on one cluster, under one framework. No torch."""

from dataclasses import dataclass, field

from torchllm.config import Lora, Model, Optimizer, Parallel, Recompute, Training
from torchllm.config.errors import UserError
from torchllm.planner.compute import Kernels, Piece
from torchllm.spec.cluster import Hardware
from torchllm.spec.flops import WITHOUT_LORA
from torchllm.spec.software import Software

PP, REPLICATE, SHARD, CP, TP = range(5)
"""dimensions of `Case.mesh`"""


class UnknownModel(UserError):
    """A model that the planner cannot predict."""


def check_known(model: Model) -> None:
    """Raise UnknownModel if the planner, to which all blocks are alike, cannot predict a model."""
    if model.experts:
        raise UnknownModel(
            "model.experts: the planner does not know mixtures of experts yet: set the degrees of [parallel] yourself, "
            'with parallel.layout = "manual"'
        )


@dataclass(frozen=True)
class Case:
    """One layout of one model on one cluster, degrees resolved. UnknownModel if the planner cannot predict it."""

    model: Model
    training: Training
    parallel: Parallel
    recompute: Recompute
    kernels: Kernels
    hardware: Hardware
    software: Software
    lora: Lora = WITHOUT_LORA
    """`software` is `frozen_weights.with_frozen_weights` of it"""
    optimizer: Optimizer = field(default_factory=Optimizer)
    """`software` is `optimizer_states.with_optimizer_states` of it"""

    def __post_init__(self) -> None:
        check_known(self.model)

    @property
    def data_ranks(self) -> int:
        """Ranks that read different sequences."""
        return self.parallel.data_ranks

    @property
    def ranks(self) -> int:
        """Number of GPUs."""
        return self.parallel.ranks

    @property
    def micro_batches(self) -> int:
        """Micro batches of a step on one data-parallel rank."""
        return self.training.global_batch_size // (self.training.micro_batch_size * self.data_ranks)

    @property
    def mesh(self) -> tuple[int, ...]:
        """Sizes of pp, dp_replicate, dp_shard, cp, tp: the order in which ranks are numbered."""
        parallel = self.parallel
        return (parallel.pp, parallel.dp_replicate, parallel.dp_shard, parallel.cp, parallel.tp)

    @property
    def piece(self) -> Piece:
        """One micro batch on one rank."""
        parallel, training = self.parallel, self.training
        tokens = training.micro_batch_size * training.sequence_length // parallel.cp
        spread = parallel.tp if parallel.sequence_parallel else 1
        return Piece(training.micro_batch_size, tokens, training.sequence_length, parallel.tp, spread)
