"""The cost of a checkpoint's index, by counts and seconds, for ranks that need not exist.

    python -m tests.growth.checkpoint_index [MODEL.toml] [RANKS ...]

Every rank holds a part of each parameter and of its three entries of AdamW, as FSDP shards them; the model exists as
shapes only. Printed: the bytes that ranks send each other at the first save, the size of the index, and the time to
make it, and to plan the reads of the first rank when it resumes on the same number of ranks.
"""

import json
import sys
import time
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch

from torchllm.checkpoint.index import Index, Integers, Region, parse_index
from torchllm.checkpoint.plan import InventoryEntry, JobParts, make_index, region_numbers
from torchllm.checkpoint.read_plan import PieceRead, ReadPlan, plan_reads
from torchllm.checkpoint.tensors import BYTES_AT_A_TIME
from torchllm.models.decoder import build_model
from torchllm.tools.config.load import load_config

MODEL = "train_configs/models/llama3_70b.toml"


class SyntheticRanks(NamedTuple):
    """The parts of all ranks, as they would report them."""

    inventory: list[InventoryEntry]
    """of all ranks"""
    regions: list[list[Region]]
    """per rank and sharding"""


class IndexCost(NamedTuple):
    """The cost of an index."""

    ranks: int
    tensors: int
    pieces: int
    sent_bytes: int
    """by one rank that sends both its inventory and its regions, at the first save"""
    index_bytes: int
    make_seconds: float
    parse_seconds: float
    pieces_read: int
    """by one rank that resumes"""
    plan_seconds: float
    """to plan that"""


def shapes_of_run(model_toml: str = MODEL) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of a run by key: of the parameters, and of AdamW's states for each."""
    config = load_config([model_toml], one_device=True)
    with torch.device("meta"):
        model = build_model(config.model)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, parameter in model.named_parameters():
        shapes[f"model.{name}"] = tuple(parameter.shape)
        for entry in ("exp_avg", "exp_avg_sq"):
            shapes[f"optimizer.{name}.{entry}"] = tuple(parameter.shape)
        shapes[f"optimizer.{name}.step"] = ()
    return shapes


def synthetic_ranks(shapes: Mapping[str, tuple[int, ...]], shard: int, replicate: int = 1) -> SyntheticRanks:
    """Return the parts of shard x replicate ranks, of float32 tensors that are sharded on their first dimension."""
    distinct = list(dict.fromkeys(shapes.values()))
    inventory = [InventoryEntry(key, "float32", shape, 4, distinct.index(shape)) for key, shape in shapes.items()]
    regions = []
    for rank in range(shard * replicate):
        regions.append([_part(shape, rank % shard, shard) for shape in distinct])
    return SyntheticRanks(inventory, regions)


def _part(shape: tuple[int, ...], number: int, parts: int) -> Region:
    """Return part `number` of a tensor cut into `parts` as torch.chunk cuts it; of a scalar, all of it."""
    if not shape:
        return Region((), ())
    length = -(-shape[0] // parts)
    begin = min(number * length, shape[0])
    end = min(begin + length, shape[0])
    return Region((begin, *(0,) * (len(shape) - 1)), (end - begin, *shape[1:]))


def index_of(ranks: SyntheticRanks) -> Index:
    """Return the index that the ranks agree on."""
    return make_index(parts_of_job(ranks))


def parts_of_job(ranks: SyntheticRanks) -> JobParts:
    """Return the parts of the ranks as they gather them."""
    numbers: list[Integers] = [region_numbers(regions) for regions in ranks.regions]
    return JobParts([ranks.inventory], [0] * len(numbers), numbers)


def measure_index(shapes: Mapping[str, tuple[int, ...]], shard: int, replicate: int = 1) -> IndexCost:
    """Return the cost of the index of these tensors on shard x replicate ranks."""
    ranks = synthetic_ranks(shapes, shard, replicate)
    start = time.perf_counter()
    content = index_of(ranks).serialize()
    made = time.perf_counter()
    index = parse_index(content, "the index")
    parsed = time.perf_counter()
    plan = plan_reads(index, parts_of_job(ranks), 0, BYTES_AT_A_TIME)
    planned = time.perf_counter()
    inventory_bytes = len(json.dumps(ranks.inventory))
    return IndexCost(
        ranks=len(ranks.regions),
        tensors=len(index.tensors),
        pieces=sum(len(entry.grid.writers) for entry in index.tensors.values()),
        sent_bytes=inventory_bytes + 8 * len(region_numbers(ranks.regions[0])),
        index_bytes=len(content),
        make_seconds=made - start,
        parse_seconds=parsed - made,
        pieces_read=len(pieces_read(plan)),
        plan_seconds=planned - parsed,
    )


def pieces_read(plan: ReadPlan) -> list[PieceRead]:
    """Return the pieces that a rank reads."""
    return plan.alone + [read for round_ in plan.rounds for read in round_.reads]


def main(arguments: list[str]) -> None:
    """Print a row per number of ranks."""
    models = [argument for argument in arguments if argument.endswith(".toml")]
    sizes = [int(argument) for argument in arguments if argument.isdigit()] or [64, 256, 1024]
    shapes = shapes_of_run(*models[:1])
    rows = [measure_index(shapes, ranks) for ranks in sizes]
    print("  ".join(IndexCost._fields))
    for row in rows:
        print("  ".join(f"{value:.3f}" if isinstance(value, float) else str(value) for value in row))
    for name in ("index_bytes", "make_seconds", "plan_seconds"):
        figures = [getattr(row, name) for row in rows]
        if len(sizes) > 1:
            exponent = np.polyfit(np.log(sizes), np.log(figures), 1)[0]
            print(f"{name} grows as ranks^{exponent:.2f}")


if __name__ == "__main__":
    main(sys.argv[1:])
