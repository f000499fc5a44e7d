"""Muon's cost at the end of a step: the time of its products and of its communication, and memory. No torch.

As in `optim/muon.py`: the ranks that share the weights own the matrices of their blocks in turns. The matrices
of a round have similar cost, and all ranks wait for its largest.
"""

import math
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from torchllm.config import Model, without_experts
from torchllm.facts.flops import MatrixShape, target_shapes
from torchllm.tools.planner.case import CP, SHARD, TP, Case
from torchllm.tools.planner.cluster import Hardware
from torchllm.tools.planner.compute import dense_width, matmul_seconds
from torchllm.tools.planner.experts import expert_parameters, expert_shards

ITERATIONS = 5
"""of Newton-Schulz (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/)"""
SENT = 2.0
"""bytes per element that is sent, and the type of the iterations: 16 bits on a GPU"""


class MatrixProduct(NamedTuple):
    """A matrix product (m, k) x (k, n)."""

    m: int
    n: int
    k: int

    @property
    def flops(self) -> int:
        """Operations; a multiply-add is two."""
        return 2 * self.m * self.n * self.k


def iteration_products(shape: MatrixShape) -> list[MatrixProduct]:
    """Return the products of one iteration: the Gram matrix, its square, and the product with the matrix."""
    m, n = sorted(shape)
    return [MatrixProduct(m, m, n), MatrixProduct(m, m, m), MatrixProduct(m, n, m)]


def orthogonalization_flops(shape: MatrixShape) -> int:
    """Return the operations for a matrix of m rows or columns, whichever are fewer, and n of the other:
    5 (4 m² n + 2 m³)."""
    return ITERATIONS * sum(product.flops for product in iteration_products(shape))


def products_seconds(shape: MatrixShape, hardware: Hardware) -> float:
    """Return the seconds of the products of one iteration."""
    return sum(matmul_seconds(*product, hardware) for product in iteration_products(shape))


@lru_cache(maxsize=1024)
def iteration_seconds(shapes: tuple[MatrixShape, ...], owners: int, hardware: Hardware) -> float:
    """Return the seconds of all iterations for some matrices, which ranks own in turns."""
    of_shape = {shape: products_seconds(shape, hardware) for shape in set(shapes)}
    by_cost = sorted(shapes, key=orthogonalization_flops, reverse=True)
    return sum(ITERATIONS * of_shape[largest] for largest in by_cost[::owners])


def matrix_shapes(model: Model) -> list[MatrixShape]:
    """Return the shapes of a block's matrices that ranks own in turns, routed experts excluded. model: a view."""
    if not model.experts:
        return list(target_shapes(model).values())
    width = dense_width(model)
    shapes = target_shapes(replace(without_experts(model), ffn=width))
    return [shape for shape in shapes.values() if min(shape) > 0]


def expert_seconds(model: Model, blocks: int, owners: int, hardware: Hardware) -> float:
    """Return the seconds of the iterations for the routed experts of some like blocks. model: their view.

    Each rank iterates for its share of them, at least for one expert.
    """
    if not model.experts:
        return 0.0
    shape = MatrixShape(model.expert_width, model.hidden)
    per_expert = ITERATIONS * products_seconds(shape, hardware)
    return blocks * 3 * math.ceil(model.experts / owners) * per_expert


def expert_exchange_seconds(case: Case, blocks: int) -> float:
    """Return the seconds to exchange parts of experts of like blocks, there and back, if ranks do not have them whole.

    case: of their view.

    tp without ep cuts their features, and FSDP the hidden states where ranks could not have equally many.
    """
    model, parallel = case.model, case.parallel
    if not model.experts:
        return 0.0
    shards = case.group([SHARD, CP] if parallel.zero else [])
    tp = case.group([TP])
    owners = shards.size * tp.size
    cutting = [tp]
    if parallel.ep > 1:
        cutting = []
        shards = expert_shards(case.mesh, parallel.ep, case.hardware, case.software)
    experts_per_rank = model.experts // parallel.ep
    if experts_per_rank % shards.size and model.hidden % shards.size == 0:
        cutting.append(shards)
    stacks = 3 * blocks
    elements = blocks * expert_parameters(model, owners)
    sent = SENT * elements / stacks
    one_way = sum(group.exchange(sent) for group in cutting)
    return 2 * stacks * one_way


def muon_seconds(case: Case, views: tuple[int, ...]) -> float:
    """Return the seconds that Muon needs for the matrices of a rank's blocks: 0 if they are frozen.

    Each round sends all parts of its matrices there and back over the ranks of FSDP, and over the ranks of tp.

    views: of each block, as in `StageSize`.
    """
    if case.optimizer.name != "muon" or case.trained.only_updates or not views:
        return 0.0
    parallel = case.parallel
    over_shards = case.group([SHARD, CP] if parallel.zero else [])
    over_tp = case.group([TP])
    owners = over_shards.size * over_tp.size
    of_views = case.of_views
    shapes_of_views = [matrix_shapes(of_view.model) for of_view in of_views]
    shapes = tuple(shape for view in views for shape in shapes_of_views[view])
    rounds = math.ceil(len(shapes) / owners)
    elements = sum(math.prod(shape) for shape in shapes)
    sent = SENT * elements / owners / rounds
    one_way = over_shards.exchange(sent) + over_tp.exchange(sent)
    seconds = 2 * rounds * one_way
    seconds += iteration_seconds(shapes, owners, case.hardware)
    for view in sorted(set(views)):
        seconds += expert_seconds(of_views[view].model, views.count(view), owners, case.hardware)
        seconds += expert_exchange_seconds(of_views[view], views.count(view))
    return seconds


def muon_bytes(case: Case) -> float:
    """Return the peak bytes of Muon's update, reached at the largest matrix of a model without experts.

    An owner has, in 16 bits, the parts of Nesterov's momentum that it sends, the whole momentum, the result and its
    transpose, and for each axis that cuts matrices the parts that it receives and those that it answers with; the last
    of them also as one message. A rank that shares no matrix has four float32 copies of it.
    """
    if case.optimizer.name != "muon" or case.trained.only_updates:
        return 0.0
    largest = max(math.prod(shape) for of_view in case.of_views for shape in matrix_shapes(of_view.model))
    cuts = [case.group(axes).size > 1 for axes in ([SHARD, CP] if case.parallel.zero else [], [TP])]
    return SENT * largest * (5 + 2 * sum(cuts) if any(cuts) else 8)
