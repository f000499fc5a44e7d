"""What a dry run found, as a table for people and as JSON.

Nothing was computed: there is no loss, no norm and no time. "At the link's rate" is the bytes over the bandwidth of the
slowest link that the ranks of an axis meet on: what it takes if nothing else is on that link, and hides nothing.
"""

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from torchllm.config import Config
from torchllm.dry_run.memory import PURPOSES, Bytes
from torchllm.parallel.mesh import AXES, MeshAxis
from torchllm.spec.cluster import Hardware, Link, slow_tensor_parallel
from torchllm.spec.flops import parameter_count
from torchllm.spec.stages import balanced_split, stage_of_rank

TIGHT = 0.9
"""share of a device's memory over which a peak only just fits: the rest goes to what is not counted"""


class RankKind(NamedTuple):
    """One kind of rank."""

    pp_ranks: list[int]
    shown: int
    """the pipeline rank that the figures are of: that with the highest peak"""
    memory: Bytes
    """by purpose, when most was held"""
    most: Bytes
    """of each purpose, when that was largest"""
    sent: dict[tuple[str, str], tuple[int, float]]
    """axis and collective -> how many a step, bytes in all"""
    traced: tuple[int, int]
    """micro batches and pipeline ranks that were traced; the rest follows"""


class Report(NamedTuple):
    """A dry run."""

    config: Config
    dtype: torch.dtype
    shape: tuple[int, ...]
    """of the mesh"""
    axes: list[MeshAxis]
    hardware: Hardware | None
    micro_batches: int
    kinds: list[RankKind]

    def link(self, axis: MeshAxis) -> Link | None:
        """The slowest link that ranks of an axis meet on; None: not known."""
        return self.hardware.link_among(self.shape, axis.dimensions) if self.hardware else None

    def verdict(self, kind: RankKind) -> str:
        """Return whether it fits the device."""
        if self.hardware is None:
            return "unknown"
        share = sum(kind.memory.values()) / self.hardware.memory
        if share > 1:
            return "does not fit"
        return "tight" if share > TIGHT else "fits"


def as_json(report: Report) -> str:
    """Return one JSON object; sizes in bytes."""
    config, hardware = report.config, report.hardware
    out: dict[str, Any] = {
        "ranks": _ranks(report),
        "layout": _layout(report),
        "parameters": parameter_count(config.model),
        "micro_batches": report.micro_batches,
        "dtype": _dtype(report),
        "cluster": config.cluster.name or None,
        "device_memory": hardware and hardware.memory,
        "kinds": [_kind_as_dict(report, kind) for kind in report.kinds],
        "links": [_axis_as_dict(report, axis) for axis in report.axes if axis.size > 1],
        "assumed": list(assumptions(report)),
        "warnings": list(warnings(report)),
    }
    return json.dumps(out, indent=1)


def _kind_as_dict(report: Report, kind: RankKind) -> dict[str, Any]:
    """Return what `as_json` says of one kind of rank."""
    sent = []
    for (axis, name), (count, size_sent) in sorted(kind.sent.items()):
        sent.append({"axis": axis, "collective": name, "count": count, "bytes": size_sent})
    micro_batches, pp_ranks = kind.traced
    return {
        "pp_ranks": kind.pp_ranks,
        "shown_pp_rank": kind.shown,
        "stages": _stages(report, kind),
        "memory": {purpose: kind.memory[purpose] for purpose in PURPOSES},
        "peak": sum(kind.memory.values()),
        "at_most": {purpose: kind.most[purpose] for purpose in PURPOSES},
        "fits": report.verdict(kind),
        "sent": sent,
        "traced": {"micro_batches": micro_batches, "pp_ranks": pp_ranks},
    }


def _axis_as_dict(report: Report, axis: MeshAxis) -> dict[str, Any]:
    """Return what `as_json` says of one mesh axis: its ranks, and the slowest link that they meet on."""
    link = report.link(axis)
    return {
        "axis": axis.name,
        "ranks": axis.size,
        "link": link.name if link else None,
        "bandwidth": link.bandwidth if link else None,
    }


def as_text(report: Report) -> str:
    """Tables with a column for every kind of rank."""
    training = report.config.training
    data = report.micro_batches * training.micro_batch_size
    lines = [
        f"dry run of {_ranks(report):,} ranks: {_layout(report)}",
        f"{parameter_count(report.config.model):,} parameters; a step is {training.global_batch_size:,} sequences of "
        f"{training.sequence_length:,} tokens, {data} of them a data rank in {report.micro_batches} micro batches",
        "",
    ]
    lines += _table(_memory_rows(report))
    lines.append("")
    lines += _table(_sent_rows(report))
    lines.append("")
    lines += [f"assumed: {line}" for line in assumptions(report)]
    lines += [f"warning: {line}" for line in warnings(report)]
    return "\n".join(lines)


def _memory_rows(report: Report) -> Iterator[list[str]]:
    kinds = report.kinds
    if report.config.parallel.pp > 1:
        yield ["pipeline ranks", *(_span(kind.pp_ranks) for kind in kinds)]
        yield ["blocks (e embedding, h head)", *("; ".join(_stages(report, kind)) for kind in kinds)]
        yield ["the one shown", *(str(kind.shown) for kind in kinds)]
    yield ["memory of a rank at its peak"]
    for purpose in PURPOSES:
        if any(kind.memory[purpose] for kind in kinds):
            yield [f"  {purpose}", *(size(kind.memory[purpose]) for kind in kinds)]
    yield ["  sum", *(size(sum(kind.memory.values())) for kind in kinds)]
    for purpose in ("activations", "logits"):
        most = [size(kind.most[purpose]) for kind in kinds]
        if most != [size(kind.memory[purpose]) for kind in kinds]:
            yield [f"  {purpose}, at other times", *most]
    if report.hardware is not None:
        yield [f"  {report.hardware.gpu}, {size(report.hardware.memory)}", *map(report.verdict, kinds)]


def _sent_rows(report: Report) -> Iterator[list[str]]:
    yield ["sent by a rank in a step", *("" for _ in report.kinds), "link", "at its rate"]
    for axis in report.axes:
        found = sorted({name for kind in report.kinds for where, name in kind.sent if where == axis.name})
        for name in found:
            cells = [kind.sent.get((axis.name, name), (0, 0.0)) for kind in report.kinds]
            link = report.link(axis)
            most = max(sent for _, sent in cells)
            yield [
                f"  {axis.name} ({axis.size}) {name}",
                *(f"{size(sent)} in {count:,}" if count else "-" for count, sent in cells),
                link.name if link else "-",
                f"{most / link.bandwidth:.3g} s" if link else "-",
            ]


def _table(rows: Iterator[list[str]]) -> list[str]:
    cells = list(rows)
    columns = max(map(len, cells))
    cells = [[*row, *[""] * (columns - len(row))] for row in cells]
    widths = [max(len(row[column]) for row in cells if row[1:] != [""] * (columns - 1)) for column in range(columns)]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in cells]


def assumptions(report: Report) -> Iterator[str]:
    """What the figures rest on."""
    config = report.config
    chosen = "" if config.training.dtype != "auto" else ", which auto is there" if report.hardware else ", as here"
    yield f"computation in {_dtype(report)}{chosen}; weights, gradients and moments in float32"
    yield "kernels as on a CPU: a GPU's fused attention keeps the same for the backward, its fused norms less"
    if config.model.attention in ("flash", "flex"):
        yield f"attention sdpa in place of {config.model.attention}, which keeps the same for the backward"
    if config.compile.norm or config.compile.block or config.compile.loss:
        yield "nothing compiled: what is keeps less"
    yield "not counted: the allocator's gaps, buffers of the communication library, CUDA's own: some GiB on a GPU"
    yield "sent: in rings, each collective once round"
    for kind in report.kinds:
        batches, ranks = kind.traced
        if (batches, ranks) != (report.micro_batches, config.parallel.pp):
            yield (
                f"of pipeline rank {_span(kind.pp_ranks)}, {batches} micro batches on {ranks} ranks were traced, "
                f"and put together to {report.micro_batches} on {config.parallel.pp} in the order of the schedule"
            )


def warnings(report: Report) -> Iterator[str]:
    """What will be slow, and what there is not."""
    hardware, parallel = report.hardware, report.config.parallel
    if hardware is None:
        return
    sent = max(sum(sent for (axis, _), (_, sent) in kind.sent.items() if axis == AXES[-1]) for kind in report.kinds)
    if slow := slow_tensor_parallel(parallel.tp, hardware.gpus_per_node, sent, hardware):
        yield slow
    if _ranks(report) > hardware.links[-1].gpus:
        yield f"{_ranks(report):,} ranks, but the cluster has {hardware.links[-1].gpus:,} GPUs"


def size(bytes: float) -> str:
    """Three digits and a unit: 1.23 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if bytes < 1000 or unit == "GiB":
            break
        bytes /= 1024
    return f"{bytes:,.0f} {unit}" if unit == "B" or bytes >= 100 else f"{bytes:.3g} {unit}"


def _stages(report: Report, kind: RankKind) -> list[str]:
    """The blocks of each stage of the shown rank."""
    parallel = report.config.parallel
    if parallel.pp == 1:
        return [f"e 0-{report.config.model.layers - 1} h"]
    split = balanced_split(report.config.model, parallel, report.config.training.sequence_length)
    found = []
    for stage in stage_of_rank(parallel, kind.shown):
        first = sum(split[:stage])
        ends = "e " * (stage == 0), " h" * (stage == parallel.stages - 1)
        found.append(f"{ends[0]}{_span(range(first, first + split[stage]))}{ends[1]}")
    return found


def _span(numbers: Sequence[int]) -> str:
    """0-3,7 of 0, 1, 2, 3, 7."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)


def _ranks(report: Report) -> int:
    return math.prod(report.shape)


def _layout(report: Report) -> str:
    parallel = report.config.parallel
    degrees = " x ".join(f"{axis} {getattr(parallel, axis)}" for axis in AXES)
    schedule = f", {parallel.schedule}" if parallel.pp > 1 else ""
    return f"{degrees}, zero_stage {parallel.zero_stage}{schedule}, recompute {report.config.recompute.mode}"


def _dtype(report: Report) -> str:
    return str(report.dtype).removeprefix("torch.")
