"""The machines a run is planned for: `train_configs/clusters/*.toml`, read strictly, and which link ranks meet on.

No torch. Ranks are numbered through the nodes, `gpus_per_node` on each, as run_train.sh starts them.
"""

import difflib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from torchllm.config import Bound, Config, Model, Parallel, Training
from torchllm.config.read import Fault, read_table
from torchllm.config.toml import KeyPath, dotted, read_files, shown
from torchllm.resources import find_config, resource
from torchllm.spec.software import Constants

FOLDER = resource("train_configs/clusters")

Given = Annotated[float, Bound(over=0.0)]
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
    efficiency: Given = 1.0
    """share of the bandwidth that large collectives reach"""


@dataclass(frozen=True)
class PeakRates:
    """Dense matrix products, FLOP/s, by type of the factors; 0: it has no such unit."""

    bfloat16: Given = math.inf
    tf32: Given = math.inf
    float8: Annotated[float, Bound(at_least=0.0)] = 0.0


@dataclass(frozen=True)
class AttentionRates:
    """FLOP/s that attention kernels reach forward on long sequences of heads of 128, a causal mask's pairs counted."""

    flash1: Given = math.inf
    flash2: Given = math.inf
    flash3: Given = math.inf
    """the fastest there is: FlashAttention 3 or cuDNN's"""


@dataclass(frozen=True)
class Hardware:
    """One kind of node, and how many of them are joined. Every key but float8 must be in the file."""

    gpu: str = ""
    """name of the GPU"""
    gpus_per_node: GivenCount = 1
    nics_per_node: GivenCount = 1
    """network cards for computing"""
    multiprocessors: GivenCount = 1
    """of one GPU"""
    memory: Given = math.inf
    """bytes of one GPU that torch can use"""
    memory_bandwidth: Given = math.inf
    """bytes a second of one GPU's memory"""
    peak: PeakRates = field(default_factory=PeakRates)
    achievable: Given = math.inf
    """FLOP/s that large bfloat16 matrix products reach"""
    attention: AttentionRates = field(default_factory=AttentionRates)
    constants: Constants = field(default_factory=Constants)
    """of torchllm on these machines, fitted by `recipes/plan.py calibrate`"""
    links: tuple[Link, ...] = ()
    """inner to outer: NVLink first, the whole cluster last"""

    def link_among(self, shape: Sequence[int], dimensions: Sequence[int]) -> Link | None:
        """The slowest link that groups of ranks meet on; None: some reach beyond the cluster.

        shape: of the mesh of all ranks, numbered row by row; dimensions: those in which the ranks of a group differ.
        """
        at = _link_among(self._spans, tuple(shape), tuple(dimensions))
        return None if at is None else self.links[at]

    @cached_property
    def _spans(self) -> tuple[int, ...]:
        return tuple(link.gpus for link in self.links)


@lru_cache(maxsize=65536)
def _link_among(spans: tuple[int, ...], shape: tuple[int, ...], dimensions: tuple[int, ...]) -> int | None:
    """Which of links of such spans. A group reaches as far whatever its first rank is; it stays under a link if it
    does from every place in a span at which a group starts."""
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    reach = sum((shape[axis] - 1) * strides[axis] for axis in dimensions)
    for at, span in enumerate(spans):
        if math.prod(shape) <= span:  # all ranks are in one
            return at
        places = {0}
        for axis in set(range(len(shape))) - set(dimensions) if reach < span else ():
            different = min(shape[axis], span // math.gcd(span, strides[axis]))
            places = {(place + step * strides[axis]) % span for place in places for step in range(different)}
        if max(places) + reach < span:
            return at
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
    tokens = training.global_batch_size // parallel.data_ranks * (training.sequence_length // parallel.cp)
    blocks = model.layers / parallel.pp
    return 8 * (parallel.tp - 1) / parallel.tp * blocks * tokens * model.hidden * itemsize


def unknown_cluster(name: str) -> str:
    """Return what is wrong with the name of a cluster that has no file; "" if it has one."""
    if name.endswith(".toml"):
        return "" if Path(find_config(name)).is_file() else f"{shown(name)}: no such file"
    names = sorted(file.stem for file in FOLDER.glob("*.toml"))
    if name in names:
        return ""
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    hint = f"did you mean {shown(close[0])}?" if close else "add it there"
    return f"{shown(name)} is not in train_configs/clusters ({', '.join(names)}); {hint}"


def read_cluster(name: str, errors: list[str]) -> Hardware | None:
    """Return a cluster of train_configs/clusters, or of a TOML file.

    None, after a line in `errors` for each thing that is wrong, if the file is missing or invalid.
    """
    file = name if name.endswith(".toml") else str(FOLDER / f"{name}.toml")
    layer = read_files(file, errors)
    if not layer.is_complete:  # its keys are unknown, not missing
        return None
    faults: list[Fault] = []
    hardware: Hardware = read_table(Hardware, layer.table, faults)
    wrong = [(fault.path, fault.message) for fault in faults]
    if not wrong:
        wrong = list(_problems(hardware, layer.table))
    for path, message in wrong:
        errors.append(f"{layer.origins.get(path, file)}: {dotted(path)}: {message}")
    return None if wrong else hardware


def _problems(hardware: Hardware, table: dict[str, Any]) -> Iterator[tuple[KeyPath, str]]:
    """What is left out, or does not fit together."""
    tables: list[tuple[KeyPath, type, dict[str, Any]]] = [
        ((), Hardware, table),
        (("peak",), PeakRates, table.get("peak", {})),
        (("attention",), AttentionRates, table.get("attention", {})),
    ]
    tables += [(("links", str(index)), Link, link) for index, link in enumerate(table.get("links", []))]
    for path, kind, written in tables:
        names = {key.name for key in fields(kind)} - {*written, "float8", "constants"}
        yield from (((*path, name), "is left out") for name in sorted(names))
    spans = [link.gpus for link in hardware.links]
    for index, (inner, outer) in enumerate(pairwise(hardware.links), start=1):
        if outer.gpus <= inner.gpus or outer.gpus % inner.gpus:
            yield ("links", str(index), "gpus"), f"{outer.gpus} must be a multiple of the {inner.gpus} of {inner.name}"
    if spans and hardware.gpus_per_node not in spans:
        yield ("links",), f"none has gpus = {hardware.gpus_per_node}, those of a node"
