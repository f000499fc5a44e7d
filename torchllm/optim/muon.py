"""Muon: the matrices of the blocks are updated by their orthogonalized momentum, all other parameters by AdamW.

The formulas are the same as in torch.optim.Muon: momentum, Newton-Schulz iterations and adjust_lr_fn "original" of
Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon/); "match_rms_adamw" of Liu et al. 2025 (Muon is Scalable
for LLM Training, arXiv 2502.16982, section 2.2), which uses AdamW's learning rate and weight decay.

The iterations need a whole matrix. N ranks that share the weights (dp_shard x cp x tp) process N matrices per round,
one each: the owner gathers all parts of its matrix, iterates alone, and sends each rank its part of the result. So the
update is bitwise the same in every layout, and no work is done twice. Ranks with copies of the same shards
(dp_replicate, zero_stage 0) each do all of it.

The experts of a mixture have separate matrices, stacked in one parameter. Ranks with different experts (FSDP by expert,
ep) orthogonalize their own, without communication; ranks with different parts of the same experts (tp, FSDP along the
hidden states) divide the matrices among them.

Communication per round: an all-to-all over the ranks of FSDP and one over tp, there and back, each only if it shards
the matrices. A rank sends its own shards once per all-to-all, whatever the number of ranks; in bfloat16 on a GPU, like
the iterations, and in float32 on a CPU.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchllm.config import Optimizer as OptimizerConfig
from torchllm.optim.fused import Group, start_adamw, update_by_adamw
from torchllm.parallel.local_tensor import local_tensor

ITERATIONS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""coefficients of the quintic: the steepest at zero that still brings singular values to about 1 (0.7 to 1.2)"""
SMALLEST_NORM = 1e-7
"""a matrix is divided by its norm, or by this if that is smaller"""


class Cut(NamedTuple):
    """How matrices are cut over the ranks of a process group."""

    group: dist.ProcessGroup
    dimension: int
    """-2: by rows; -1: by columns"""
    sizes: tuple[int, ...]
    """number of rows or columns of each rank"""


class OwnedMatrices(NamedTuple):
    """Matrices of one shape that one rank orthogonalizes: a parameter, or some of its stacked experts."""

    parameter: Tensor
    group: Group
    """the optimizer's parameter group, with its settings"""
    shape: tuple[int, int]
    """shape of each whole matrix"""
    cuts: tuple[Cut, ...] = ()
    """in the order of gathering the parts"""
    first: int = 0
    """index of the first matrix on this rank"""
    number: int = 1

    @property
    def products(self) -> int:
        """Multiplications of one iteration, with m rows or columns, whichever are fewer, and n of the other: the Gram
        matrix, its square, and the product with the matrix."""
        fewer, other = sorted(self.shape)
        return self.number * (2 * fewer * fewer * other + fewer**3)

    def parts(self, tensor: Tensor) -> Tensor:
        """Return a view of this rank's parts of the matrices, (number, R, C). tensor: sharded like the parameter."""
        local = local_tensor(tensor)
        stacked = local.unsqueeze(0) if local.ndim == 2 else local
        return stacked[self.first : self.first + self.number]


class Muon(torch.optim.Optimizer):
    """Muon over this rank's shards of the groups that are `orthogonalized`; AdamW over the others.

    A step changes nothing if `found_inf` is not 0.
    """

    found_inf = torch.zeros(())

    def __init__(self, groups: list[Group], config: OptimizerConfig) -> None:
        """groups: torch's parameter groups; those with a true `orthogonalized` have matrices alone."""
        settings = {"lr": config.learning_rate, "betas": (config.beta1, config.beta2), "eps": config.epsilon}
        self.matrices: list[OwnedMatrices] = []
        super().__init__(groups, settings | {"weight_decay": config.weight_decay, "orthogonalized": False})
        self._step_supports_amp_scaling = True  # it reads found_inf
        self.momentum = config.muon_momentum
        self.adjust_lr_fn = config.adjust_lr_fn

    def add_param_group(self, param_group: Group) -> None:
        """Add a group with its state; torch's constructor adds every group by this."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        self._start(group)
        if group["orthogonalized"]:
            for parameter in group["params"]:
                self.matrices += matrices_of(parameter, group)
        self.rounds = rounds_of(self.matrices)

    def _start(self, group: Group) -> None:
        """Give every parameter of a group its state."""
        if not group["orthogonalized"]:
            return start_adamw(group, self.state)
        for parameter in group["params"]:
            self.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # takes no closure
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            if not group["orthogonalized"]:
                self._update_others(group)
        for matrices in self.rounds:
            with_gradient = [owned for owned in matrices if owned.parameter.grad is not None]
            if with_gradient:
                self._update(with_gradient)

    def _update_others(self, group: Group) -> None:
        """Update the parameters of a group without matrices."""
        update_by_adamw(group, self.state, self.found_inf)

    def _update(self, matrices: Sequence[OwnedMatrices]) -> None:
        """Update the matrices of a round."""
        directions = [self._direction(owned) for owned in matrices]
        orthogonal = orthogonalize_parts(directions, [owned.cuts for owned in matrices])
        for owned, parts in zip(matrices, orthogonal, strict=True):
            self._apply(owned, parts)

    def _direction(self, owned: OwnedMatrices) -> Tensor:
        """Add a gradient to the momentum; return this rank's part of Nesterov's momentum, to be orthogonalized.

        Each operation rounds once. A fused one would round differently by an element's position in its shard.
        """
        assert owned.parameter.grad is not None
        new_part = owned.parts(owned.parameter.grad) * (1.0 - self.momentum)
        updated = (self._load_momentum(owned) * self.momentum).add_(new_part)
        direction = (updated * self.momentum).add_(new_part)
        self._store_momentum(owned, updated)
        return direction.to(iteration_dtype(direction.device))

    def _load_momentum(self, owned: OwnedMatrices) -> Tensor:
        """Return this rank's part of the momentum of matrices."""
        return owned.parts(self.state[owned.parameter]["momentum_buffer"])

    def _store_momentum(self, owned: OwnedMatrices, updated: Tensor) -> None:
        """Write this rank's part of a new momentum unless the step is skipped."""
        self._write(self._load_momentum(owned), updated)

    def _apply(self, owned: OwnedMatrices, direction: Tensor) -> None:
        """Move this rank's part of matrices against its part of the orthogonalized direction."""
        rate = owned.group["lr"]
        weight = owned.parts(owned.parameter)
        moved = weight * (1.0 - rate * owned.group["weight_decay"])
        moved.sub_(direction.to(weight.dtype) * (rate * rate_factor(owned.shape, self.adjust_lr_fn)))
        self._write(weight, moved)

    def _write(self, tensor: Tensor, value: Tensor) -> None:
        """Write a value into a tensor unless the step is skipped; the decision stays on the device."""
        tensor.copy_(torch.where(self.found_inf > 0, tensor, value))


def iteration_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of the iterations and of their communication.

    On a CPU it is float32: bfloat16 products sum in another order for other shapes, so that two layouts would differ
    by 3e-3 of an update.
    """
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def rate_factor(shape: tuple[int, int], adjust_lr_fn: Literal["original", "match_rms_adamw"]) -> float:
    """Return the learning rate of a matrix as a multiple of the scheduled one."""
    rows, columns = shape
    if adjust_lr_fn == "original":
        return math.sqrt(max(1.0, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))


def orthogonalize(matrices: Tensor) -> Tensor:
    """Return about U Vᵀ of each matrix U S Vᵀ, (N, R, C), by Newton-Schulz iterations in its type."""
    a, b, c = COEFFICIENTS
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=SMALLEST_NORM)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if is_tall else x


def matrices_of(parameter: Tensor, group: Group) -> list[OwnedMatrices]:
    """Return the matrices of a parameter on this rank, divided into one part for each rank that shares them.

    group: the optimizer's parameter group. A parameter without stacked experts is one matrix.
    """
    cuts = cuts_of(parameter)
    shape = (parameter.shape[-2], parameter.shape[-1])
    stacked = 1 if parameter.ndim == 2 else len(local_tensor(parameter))
    each = max(1, math.ceil(stacked / owners_of(cuts)))
    firsts = range(0, stacked, each)
    return [OwnedMatrices(parameter, group, shape, cuts, first, min(each, stacked - first)) for first in firsts]


def owners_of(cuts: Sequence[Cut]) -> int:
    """Return the number of ranks that share matrices with these cuts."""
    return math.prod(dist.get_world_size(cut.group) for cut in cuts)


def rounds_of(matrices: Sequence[OwnedMatrices]) -> list[list[OwnedMatrices]]:
    """Return the matrices in rounds, equal on all ranks that share them: the same ranks for all matrices of a round."""
    by_ranks: dict[tuple[dist.ProcessGroup, ...], list[OwnedMatrices]] = {}
    for owned in matrices:
        by_ranks.setdefault(tuple(cut.group for cut in owned.cuts), []).append(owned)
    return [of_round for shared in by_ranks.values() for of_round in deal(shared, owners_of(shared[0].cuts))]


def deal(matrices: Sequence[OwnedMatrices], ranks: int) -> list[list[OwnedMatrices]]:
    """Return the matrices in rounds of at most one member per rank; the members of a round cost about the same."""
    by_cost = sorted(matrices, key=lambda owned: owned.products, reverse=True)
    return [by_cost[first : first + ranks] for first in range(0, len(by_cost), ranks)]


def orthogonalize_parts(parts: Sequence[Tensor], cuts: Sequence[Sequence[Cut]]) -> list[Tensor]:
    """Return this rank's parts of orthogonalized matrices.

    parts: this rank's, one tensor (N, R, C) per member of a round. cuts: of each member, over the same process groups.
    The members are distributed over the ranks of the first group, which concatenate their parts, then over the ranks of
    the next group. The owner of whole matrices orthogonalizes them, and the parts of the result go the same way back.
    """
    if not parts or not cuts[0]:
        return [orthogonalize(part) for part in parts]
    group = cuts[0][0].group
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    own_parts, own_cuts = parts[rank::ranks], cuts[rank::ranks]
    outgoing = [parts[receiver::ranks] for receiver in range(ranks)]
    incoming = [[_shape_on(sender, *own) for own in zip(own_parts, own_cuts, strict=True)] for sender in range(ranks)]
    received = exchange(outgoing, incoming, group, parts[0])
    joined = []
    for position, (cut, *_) in enumerate(own_cuts):
        joined.append(torch.cat([of_sender[position] for of_sender in received], dim=cut.dimension))
    results = orthogonalize_parts(joined, [inner for _, *inner in own_cuts])
    answers: list[list[Tensor]] = [[] for _ in range(ranks)]
    for result, (cut, *_) in zip(results, own_cuts, strict=True):
        for receiver, piece in enumerate(result.split(cut.sizes, dim=cut.dimension)):
            answers[receiver].append(piece)
    answered = exchange(answers, [[part.shape for part in of_owner] for of_owner in outgoing], group, parts[0])
    orthogonal = list(parts)
    for sender, of_owner in enumerate(answered):
        orthogonal[sender::ranks] = of_owner
    return orthogonal


def _shape_on(rank: int, part: Tensor, cuts: Sequence[Cut]) -> tuple[int, ...]:
    """Return the shape of a rank's part of matrices. part, cuts: this rank's part, and the cuts that are left."""
    shape = list(part.shape)
    shape[cuts[0].dimension] = cuts[0].sizes[rank]
    return tuple(shape)


def exchange(
    outgoing: Sequence[Sequence[Tensor]],
    shapes: Sequence[Sequence[tuple[int, ...]]],
    group: dist.ProcessGroup,
    like: Tensor,
) -> list[list[Tensor]]:
    """Send outgoing[r] to rank r of a group, in one all-to-all; return the tensors from each rank, of its `shapes`.

    like: gives dtype and device, since there may be no tensor to send.
    """
    flat = [tensor.flatten() for of_receiver in outgoing for tensor in of_receiver]
    sent = torch.cat([like.new_empty(0), *flat])
    sent_sizes = [sum(tensor.numel() for tensor in of_receiver) for of_receiver in outgoing]
    sizes = [[math.prod(shape) for shape in of_sender] for of_sender in shapes]
    received_sizes = list(map(sum, sizes))
    received = sent.new_empty(sum(received_sizes))
    dist.all_to_all_single(received, sent, received_sizes, sent_sizes, group=group)
    tensors = []
    for of_sender, elements in zip(shapes, received.split(received_sizes), strict=True):
        pieces = elements.split([math.prod(shape) for shape in of_sender])
        tensors.append([piece.view(shape) for piece, shape in zip(pieces, of_sender, strict=True)])
    return tensors


def cuts_of(parameter: Tensor) -> tuple[Cut, ...]:
    """Return the cuts of each matrix of a parameter: over the ranks of FSDP, then over tp.

    FSDP cuts a rank's part of tensor parallelism like torch.chunk: the last ranks may have fewer rows. A stack that is
    cut between its matrices leaves each matrix whole.
    """
    if not isinstance(parameter, DTensor):
        return ()
    mesh = parameter.device_mesh
    cuts: list[Cut] = []
    left = list(parameter.shape)
    for axis in reversed(range(mesh.ndim)):
        placement, ranks = parameter.placements[axis], mesh.size(axis)
        if ranks == 1 or placement.is_replicate():
            continue
        # Shard, or the strided one of FSDP over tp, which has no public name
        dimension = placement.dim - parameter.ndim  # type: ignore[attr-defined]
        if dimension < -2:
            continue
        length = left[dimension]
        per_rank = math.ceil(length / ranks)
        sizes = tuple(min(per_rank, max(0, length - per_rank * rank)) for rank in range(ranks))
        cuts.insert(0, Cut(mesh.get_group(axis), dimension, sizes))
        left[dimension] = sizes[mesh.get_local_rank(axis)]
    return tuple(cuts)
