"""The input of every prediction: one layout of one model on one cluster, under one framework. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torchllm.config import Model, Optimizer, Parallel, Recompute, TrainedParameters, Training
from torchllm.config.errors import UserError
from torchllm.facts.flops import ALL_TRAINED
from torchllm.tools.planner import comms
from torchllm.tools.planner.cluster import Hardware
from torchllm.tools.planner.compute import Kernels, Piece, kernel_of_attention
from torchllm.tools.planner.experts import IMBALANCE, PADDED
from torchllm.tools.planner.parameters import as_read, different_views, why_not_costed
from torchllm.tools.planner.software import Software

PP, REPLICATE, SHARD, CP, TP = range(5)
"""dimensions of `Case.mesh`"""


@dataclass(frozen=True)
class Case:
    """One layout of one model on one cluster, degrees resolved."""

    model: Model
    training: Training
    parallel: Parallel
    recompute: Recompute
    kernels: Kernels
    hardware: Hardware
    software: Software
    trained: TrainedParameters = ALL_TRAINED
    """`software` is `frozen_weights.with_frozen_weights` of it"""
    optimizer: Optimizer = field(default_factory=Optimizer)
    """`software` is `optimizer_states.with_optimizer_states` of it"""
    imbalance: float = IMBALANCE
    """with experts: rows of the busiest rank's experts, divided by the average over ranks"""

    def __post_init__(self) -> None:
        """UserError if the model has blocks whose costs are not known."""
        if reason := why_not_costed(self.model):
            raise UserError(reason)

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
        """Sizes of pp, dp_replicate, dp_shard, cp, tp: the order of the ranks' numbers."""
        parallel = self.parallel
        return (parallel.pp, parallel.dp_replicate, parallel.dp_shard, parallel.cp, parallel.tp)

    def group(self, dimensions: Sequence[int], one_card: bool = False) -> comms.Group:
        """Return the ranks that differ in `dimensions` of the mesh, with their rates of sending."""
        return comms.group(self.mesh, dimensions, self.hardware, self.software.constants.fall, one_card)

    @property
    def piece(self) -> Piece:
        """One micro batch on one rank."""
        parallel, training = self.parallel, self.training
        tokens = training.micro_batch_size * training.sequence_length // parallel.cp
        spread = parallel.tp if parallel.sequence_parallel else 1
        return Piece(
            training.micro_batch_size,
            tokens,
            training.sequence_length,
            parallel.tp,
            spread,
            parallel.ep if self.model.experts else 1,
            self.imbalance,
            parallel.cp > 1 and parallel.cp_method == "ring",
            PADDED if parallel.expert_dispatch == "optimistic" else 1.0,
            parallel.expert_chunks if self.model.experts and parallel.ep > 1 else 1,
        )

    @property
    def tokens_before(self) -> float:
        """Tokens before each piece of a sequence that a window reaches, per token; 0 unless `parallel/windows.py` acts.

        Of a view: windows may differ.
        """
        parallel, length = self.parallel, self.training.sequence_length
        if parallel.cp == 1 or parallel.cp_method != "ring":
            return 0.0
        window = self.model.window_within(length)
        return 0.0 if window == length else (window - 1) / (length / (2 * parallel.cp))

    @property
    def of_views(self) -> tuple["Case", ...]:
        """The same layout of the models of `parameters.different_views`, whose blocks are all of one kind."""
        return tuple(map(self._of_view, different_views(self.model)))

    def _of_view(self, view: Model) -> "Case":
        view = as_read(view)
        if view.attention == self.model.attention:
            return replace(self, model=view)
        kernels = self.kernels._replace(attention=kernel_of_attention(view, self.software))
        return replace(self, model=view, kernels=kernels)
