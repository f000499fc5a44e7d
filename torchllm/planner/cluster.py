"""The machines a run is planned for: `train_configs/clusters/*.toml`, read strictly, and which link ranks meet on.

No torch. Ranks are numbered through the nodes, `gpus_per_node` on each, as run_train.sh starts them.
"""

import difflib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise, product
from pathlib import Path
from typing import Annotated, Any

from torchllm.config import Bound, Config, Model, Parallel, Training
from torchllm.config_toml import KeyPath, dotted, read_files, shown
from torchllm.config_types import Fault, read_table

FOLDER = Path(__file__).parents[2] / "train_configs" / "clusters"

Given = Annotated[float, Bound(above=0.0)]
GivenCount = Annotated[int, Bound(at_least=1)]


@dataclass(frozen=True)
class Link:
    """What joins GPUs up to some number, in one kind of hop."""

    name: str = ""
    """what people call it"""
    gpus: GivenCount = 1
    """GPUs that reach each other over this link or a faster one"""
    bandwidth: Given = math.inf
    """bytes a second that one GPU can send, one way, while all others send too"""
    latency: Given = math.inf
    """seconds until a small message is there"""


@dataclass(frozen=True)
class Peak:
    """Dense matrix products, FLOP/s, by type of the factors; 0: it has no such unit."""

    bfloat16: Given = math.inf
    tf32: Given = math.inf
    float8: Annotated[float, Bound(at_least=0.0)] = 0.0


@dataclass(frozen=True)
class Hardware:
    """One kind of node, and how many of them are joined. Every key but float8 must be in the file."""

    gpu: str = ""
    """name of the GPU"""
    gpus_per_node: GivenCount = 1
    nics_per_node: GivenCount = 1
    """network cards for computing"""
    memory: Given = math.inf
    """bytes of one GPU that torch can use"""
    memory_bandwidth: Given = math.inf
    """bytes a second of one GPU's memory"""
    peak: Peak = field(default_factory=Peak)
    links: tuple[Link, ...] = ()
    """inner to outer: NVLink first, the whole cluster last"""

    def link_among(self, shape: Sequence[int], dimensions: Sequence[int]) -> Link | None:
        """The slowest link that groups of ranks meet on; None: some reach beyond the cluster.

        shape: of the mesh of all ranks, numbered row by row; dimensions: those in which the ranks of a group differ.
        """
        strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]

        def numbers(axes: Sequence[int]) -> list[int]:
            places = product(*(range(0, strides[axis] * shape[axis], strides[axis]) for axis in axes))
            return [sum(place) for place in places]

        starts = numbers([axis for axis in range(len(shape)) if axis not in dimensions])
        first, *_, last = [0, *numbers(dimensions)]
        for link in self.links:
            if all((start + first) // link.gpus == (start + last) // link.gpus for start in starts):
                return link
        return None


def slow_tensor_parallel(tp: int, gpus_per_node: int, sent: float, hardware: Hardware | None) -> str:
    """A warning if some tp ranks are not on one node; else empty. `sent`: bytes a rank sends over tp in a step."""
    if gpus_per_node % tp == 0:
        return ""
    inside, outside = "links inside a node", "the network, some ten times slower"
    if hardware is not None and hardware.gpus_per_node < hardware.links[-1].gpus:
        inner, outer = next(two for two in pairwise(hardware.links) if two[0].gpus == hardware.gpus_per_node)
        inside, outside = inner.name, f"{outer.name}, {inner.bandwidth / outer.bandwidth:.3g} times slower"
    return (
        f"parallel.tp = {tp} leaves the node ({gpus_per_node} ranks): {sent / 1e9:.3g} GB a rank and step go not over "
        f"{inside} but over {outside}; a tp that divides {gpus_per_node} stays inside"
    )


def tensor_parallel_warning(config: Config, ranks_on_node: int, itemsize: int) -> str:
    """`slow_tensor_parallel` of a run, its cost by formula; degrees resolved. `itemsize`: bytes of a hidden state."""
    hardware = read_cluster(config.cluster.name, []) if config.cluster.name else None
    sent = tensor_parallel_bytes(config.model, config.training, config.parallel, itemsize)
    return slow_tensor_parallel(config.parallel.tp, ranks_on_node, sent, hardware)


def tensor_parallel_bytes(model: Model, training: Training, parallel: Parallel, itemsize: int) -> float:
    """What a rank sends over tp in a step, degrees resolved, without embedding, head and recomputation.

    Two all-reduces of the hidden states a block forward and two backward, 2 (t - 1) / t each in a ring, or with
    sequence parallelism the same bytes by other names (Narayanan et al. 2021, arXiv 2104.04473, section 3.2).
    """
    ranks = parallel.dp_replicate * parallel.dp_shard
    tokens = training.global_batch_size // ranks * (training.sequence_length // parallel.cp)
    blocks = model.layers / parallel.pp
    return 8 * (parallel.tp - 1) / parallel.tp * blocks * tokens * model.hidden * itemsize


def unknown_cluster(name: str) -> str:
    """What is wrong with a name that no file of train_configs/clusters has; else empty."""
    names = sorted(file.stem for file in FOLDER.glob("*.toml"))
    if name in names:
        return ""
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    hint = f"did you mean {shown(close[0])}?" if close else "add it there"
    return f"{shown(name)} is not in train_configs/clusters ({', '.join(names)}); {hint}"


def read_cluster(name: str, found: list[str]) -> Hardware | None:
    """`name` of train_configs/clusters; None, and lines in `found`, if something in it is wrong."""
    file = str(FOLDER / f"{name}.toml")
    before = len(found)
    layer = read_files(file, found)
    faults: list[Fault] = []
    hardware: Hardware = read_table(Hardware, layer.table, faults)
    lines = [(fault.path, fault.message) for fault in faults] or list(_problems(hardware, layer.table))
    found += [f"{layer.places.get(path, file)}: {dotted(path)}: {message}" for path, message in lines]
    return None if len(found) > before else hardware


def _problems(hardware: Hardware, table: dict[str, Any]) -> Iterator[tuple[KeyPath, str]]:
    """What is left out, or does not fit together."""
    tables: list[tuple[KeyPath, type, dict[str, Any]]] = [
        ((), Hardware, table),
        (("peak",), Peak, table.get("peak", {})),
    ]
    tables += [(("links", str(index)), Link, link) for index, link in enumerate(table.get("links", []))]
    for path, kind, written in tables:
        yield from (((*path, key.name), "is left out") for key in fields(kind) if key.name not in {*written, "float8"})
    spans = [link.gpus for link in hardware.links]
    for index, (inner, outer) in enumerate(pairwise(hardware.links), start=1):
        if outer.gpus <= inner.gpus or outer.gpus % inner.gpus:
            yield ("links", str(index), "gpus"), f"{outer.gpus} must be a multiple of the {inner.gpus} of {inner.name}"
    if spans and hardware.gpus_per_node not in spans:
        yield ("links",), f"none has gpus = {hardware.gpus_per_node}, those of a node"
