"""The machines a run is planned for: `train_configs/clusters/*.toml`, read strictly, and the links between its ranks.

No torch. Ranks are numbered node by node, `gpus_per_node` on each, as run_train.sh starts them.
"""

import difflib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from torchllm.config import Bound, Config, Count, Model, Parallel, Positive, Training
from torchllm.config.keys import KeyPath
from torchllm.config.toml import shown
from torchllm.tools.config.read import ConfigError, read_table
from torchllm.tools.config.toml_files import read_files
from torchllm.tools.planner.software import Constants
from torchllm.tools.resources import find_config, resource

FOLDER = resource("train_configs/clusters")

OPTIONAL = ("float8", "constants", "fall", "host", "capacity")
"""keys of a cluster file that may be missing"""


@dataclass(frozen=True)
class Link:
    """One kind of connection, which joins a number of GPUs: NVLink in a node, the network of a rack, of the cluster."""

    name: str = ""
    """name in reports and warnings"""
    gpus: Count = 1
    """GPUs that reach each other over this link or a faster one"""
    bandwidth: Positive = math.inf
    """bytes per second that one GPU can send in one direction while all other GPUs send too"""
    latency: Positive = math.inf
    """seconds until a small message arrives"""
    efficiency: Positive = 1.0
    """share of the bandwidth that large collectives reach"""
    fall: Annotated[float, Bound(at_least=0.0)] = math.inf
    """exponent of the fall of the collectives' bandwidth with their number of nodes, beyond two; inf: not measured
    on this network, so that `Constants.fall` applies"""


@dataclass(frozen=True)
class PeakRates:
    """Peak of dense matrix products in FLOP/s, by data type; 0: the GPU has no unit for it."""

    bfloat16: Positive = math.inf
    tf32: Positive = math.inf
    float8: Annotated[float, Bound(at_least=0.0)] = 0.0


@dataclass(frozen=True)
class AttentionRates:
    """FLOP/s that attention kernels reach forward, with heads 128 wide and long sequences.

    Only the (query, key) pairs that a causal mask leaves are counted.
    """

    flash1: Positive = math.inf
    flash2: Positive = math.inf
    flash3: Positive = math.inf
    """the fastest available: FlashAttention 3 or cuDNN's"""


@dataclass(frozen=True)
class Host:
    """The memory of a node's processors, as one GPU has it while all others of the node use it too; 0: not known."""

    bandwidth: Annotated[float, Bound(at_least=0.0)] = 0.0
    """bytes per second in one direction over PCIe or NVLink-C2C"""
    memory_bandwidth: Annotated[float, Bound(at_least=0.0)] = 0.0
    """bytes per second of the memory: one GPU's share"""
    capacity: Annotated[float, Bound(at_least=0.0)] = 0.0
    """bytes of the memory: one GPU's share; 0: not known, and a plan does not ask whether they suffice"""


@dataclass(frozen=True)
class Hardware:
    """One kind of node, and the links that join nodes. All keys but those in `OPTIONAL` are required in the file."""

    gpu: str = ""
    """name of the GPU"""
    gpus_per_node: Count = 1
    multiprocessors: Count = 1
    """number in one GPU"""
    memory: Positive = math.inf
    """bytes of one GPU that torch can use"""
    memory_bandwidth: Positive = math.inf
    """bytes per second of one GPU's memory"""
    peak: PeakRates = field(default_factory=PeakRates)
    achievable: Positive = math.inf
    """FLOP/s that large bfloat16 matrix products reach"""
    attention: AttentionRates = field(default_factory=AttentionRates)
    host: Host = field(default_factory=Host)
    constants: Constants = field(default_factory=Constants)
    """constants of torchllm on these machines, fitted by `recipes/plan.py calibrate`"""
    links: tuple[Link, ...] = ()
    """inner to outer: NVLink first, the whole cluster last"""

    @property
    def is_gpu(self) -> bool:
        """Whether it is a GPU: a cluster file may also describe a CPU."""
        return self.gpu != "CPU"

    @cached_property
    def domain(self) -> int:
        """GPUs that reach each other at the rate of the innermost link: the GPUs of a node, or of a rack of nodes."""
        return max(link.gpus for link in self.links if link.bandwidth >= self.links[0].bandwidth)

    def used(self, shape: Sequence[int]) -> int:
        """Return how many GPUs of each domain a job uses: all, or fewer, if its groups then leave fewer domains.

        Of 72 GPUs in a rack a job with groups of 32 uses 64. shape: as in `link_among`.
        """
        return _used(self.domain, self.gpus_per_node, tuple(shape))

    def link_among(self, shape: Sequence[int], dimensions: Sequence[int]) -> Link | None:
        """Return the slowest link over which groups of ranks communicate; None if a group exceeds the cluster.

        shape: of the mesh of all ranks, numbered row by row; dimensions: axes that the ranks of a group differ in.
        """
        domain, used = self.domain, self.used(shape)
        spans = [link.gpus if link.gpus < domain else link.gpus // domain * used for link in self.links]
        index = _link_among(tuple(spans), tuple(shape), tuple(dimensions))
        return None if index is None else self.links[index]


@lru_cache(maxsize=65536)
def _used(domain: int, gpus_per_node: int, shape: tuple[int, ...]) -> int:
    """Return `Hardware.used`: whole nodes, so that as few neighboring ranks as possible are in different domains.

    Inner axes count first. Groups of P neighboring ranks on u GPUs per domain leave gcd(P, u) ranks together at least.
    """
    neighbors = [math.prod(shape[axis:]) for axis in reversed(range(len(shape)))]
    if neighbors[-1] <= domain:
        return domain
    choices = range(gpus_per_node, domain + 1, gpus_per_node)
    return max(choices, key=lambda used: ([math.gcd(ranks, used) for ranks in neighbors], used))


@lru_cache(maxsize=65536)
def _link_among(spans: tuple[int, ...], shape: tuple[int, ...], dimensions: tuple[int, ...]) -> int | None:
    """Return the index of the first link under which every group of ranks stays; None if there is none.

    spans: GPUs that each link joins, inner to outer. A link joins ranks 0 to span - 1, span to 2 span - 1 and so on, so
    a group stays under it if (its first rank mod span) + (its last rank - its first rank) < span.
    """
    ranks = math.prod(shape)
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    reach = 0  # from the first rank of a group to its last: the same for all groups
    for axis in dimensions:
        reach += (shape[axis] - 1) * strides[axis]
    other_axes = [axis for axis in range(len(shape)) if axis not in dimensions]
    for index, span in enumerate(spans):
        if ranks <= span:
            return index
        if reach < span and max(_first_ranks(span, shape, strides, other_axes)) + reach < span:
            return index
    return None


def _first_ranks(span: int, shape: Sequence[int], strides: Sequence[int], axes: Sequence[int]) -> set[int]:
    """Return the first rank, modulo `span`, of every group. axes: mesh axes that the groups differ in."""
    remainders = {0}
    for axis in axes:
        period = span // math.gcd(span, strides[axis])  # steps along the axis until remainders repeat
        steps = range(min(shape[axis], period))
        remainders = {(start + step * strides[axis]) % span for start in remainders for step in steps}
    return remainders


def slow_tensor_parallel(tp: int, gpus_per_node: int, sent: float, hardware: Hardware | None) -> str:
    """Return a warning if some tp ranks are not on one node, else "".

    sent: bytes that a rank sends over tp in a step. hardware: names the links; None: not known.
    """
    if gpus_per_node % tp == 0:
        return ""
    inside = "links inside a node"
    outside = "the network, some ten times slower"
    if hardware is not None:
        for inner, outer in pairwise(hardware.links):
            if inner.gpus == hardware.gpus_per_node:
                inside = inner.name
                outside = f"{outer.name}, {inner.bandwidth / outer.bandwidth:.3g} times slower"
    return (
        f"parallel.tp = {tp} leaves the node ({gpus_per_node} ranks): {sent / 1e9:.3g} GB per rank and step go over "
        f"{outside}, instead of {inside}; a tp that divides {gpus_per_node} stays inside"
    )


def tensor_parallel_warning(config: Config, ranks_on_node: int, itemsize: int) -> str:
    """Return the warning of `slow_tensor_parallel` for a run with resolved degrees, "" if there is none.

    itemsize: bytes of one element of the hidden states.
    """
    hardware = read_cluster(config.cluster.name, []) if config.cluster.name else None
    sent = tensor_parallel_bytes(config.model, config.training, config.parallel, itemsize)
    return slow_tensor_parallel(config.parallel.tp, ranks_on_node, sent, hardware)


def tensor_parallel_bytes(model: Model, training: Training, parallel: Parallel, itemsize: int) -> float:
    """Return the bytes that a rank sends over tp in a step, without embedding, head and recomputation.

    A block all-reduces its hidden states (B, S, D) twice forward and twice backward; an all-reduce sends 2 (t - 1) / t
    of them in a ring of t ranks (Narayanan et al. 2021, arXiv 2104.04473, section 3.2). With sequence parallelism these
    bytes are sent by all-gathers and reduce-scatters instead. The degrees of `parallel` are resolved.
    """
    tokens = training.global_batch_size // parallel.data_ranks * (training.sequence_length // parallel.cp)
    blocks = model.layers / parallel.pp
    return 8 * (parallel.tp - 1) / parallel.tp * blocks * tokens * model.hidden * itemsize


def unknown_cluster(name: str) -> str:
    """Return why a cluster's name is invalid: it has no file; "" if it has one."""
    if name.endswith(".toml"):
        return "" if Path(find_config(name)).is_file() else f"{shown(name)}: no such file"
    names = sorted(file.stem for file in FOLDER.glob("*.toml"))
    if name in names:
        return ""
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    hint = f"did you mean {shown(close[0])}?" if close else "add it there"
    return f"{shown(name)} is not in train_configs/clusters ({', '.join(names)}); {hint}"


def read_cluster(name: str, errors: list[str]) -> Hardware | None:
    """Return the cluster of this name in train_configs/clusters, or of a TOML file.

    Return None if the file is missing or invalid, after adding a line to `errors` for each fault.
    """
    file = name if name.endswith(".toml") else str(FOLDER / f"{name}.toml")
    layer = read_files(file, errors, "train_configs/clusters")
    if not layer.is_complete:  # its keys are unknown, not missing
        return None
    faults: list[ConfigError] = []
    hardware: Hardware = read_table(Hardware, layer.table, faults)
    faults = [fault._replace(message=REMOVED.get(fault.path, fault.message)) for fault in faults]
    if not faults:
        faults = [*missing_keys(layer.table), *invalid_links(hardware)]
    for fault in faults:
        line = layer.origins.get(fault.path, file)
        errors.append(f"{line}: {fault.key}: {fault.message}")
    return None if faults else hardware


REMOVED = {
    ("nics_per_node",): "is not read any more: remove the line",
    ("constants", "flush"): "is replaced: the time of a pipeline's step beyond its bubble is predicted from the bytes"
    " of its last reductions (constants.fall) and the waits for messages (constants.message); fit them with"
    " recipes/plan.py calibrate",
}
"""keys that cluster files had, and their remedies"""


def missing_keys(table: dict[str, Any]) -> Iterator[ConfigError]:
    """Yield a fault for each required key that a cluster file lacks."""
    sections: dict[KeyPath, tuple[type, dict[str, Any]]] = {
        (): (Hardware, table),
        ("peak",): (PeakRates, table.get("peak", {})),
        ("attention",): (AttentionRates, table.get("attention", {})),
    }
    if "host" in table:
        sections["host",] = Host, table["host"]
    for index, link in enumerate(table.get("links", [])):
        sections["links", str(index)] = Link, link
    for path, (kind, keys) in sections.items():
        for name in sorted(key.name for key in fields(kind)):
            if name not in keys and name not in OPTIONAL:
                yield ConfigError((*path, name), "required key is missing")


def invalid_links(hardware: Hardware) -> Iterator[ConfigError]:
    """Yield a fault for each link that does not fit the others or the node."""
    for index, (inner, outer) in enumerate(pairwise(hardware.links), start=1):
        if outer.gpus <= inner.gpus or outer.gpus % inner.gpus:
            message = f"{outer.gpus} must be a multiple of the {inner.gpus} of {inner.name}"
            yield ConfigError(("links", str(index), "gpus"), message)
    spans = [link.gpus for link in hardware.links]
    if spans and hardware.gpus_per_node not in spans:
        yield ConfigError(("links",), f"none has gpus = {hardware.gpus_per_node}, the number on a node (gpus_per_node)")
