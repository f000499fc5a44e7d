"""Prints the result of a dry run as a table for people and as JSON.

Nothing was computed: there is no loss, no norm and no time. "At its rate" is the bytes divided by the bandwidth of the
slowest link between the ranks of an axis: the seconds that sending takes if nothing else uses that link.
"""

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from torchllm.config import Config
from torchllm.facts.flops import active_parameter_count, parameter_count, trained_parameter_count
from torchllm.facts.stages import balanced_split, stage_of_rank
from torchllm.parallel.mesh import AXES
from torchllm.tools.dry_run.memory import PURPOSES, Bytes
from torchllm.tools.dry_run.replay import SentTotals
from torchllm.tools.mesh_axes import MeshAxis
from torchllm.tools.planner.cluster import Hardware, Link, slow_tensor_parallel

TIGHT = 0.9
"""share of a device's memory above which a peak is "tight": the rest is left for memory that is not counted"""


class RankKind(NamedTuple):
    """Memory and messages of one kind of rank."""

    pp_ranks: list[int]
    shown: int
    """pipeline rank that the figures describe: the one with the highest peak"""
    memory: Bytes
    """memory by purpose when the sum was largest"""
    highest: Bytes
    """for each purpose, its memory when that was largest"""
    sent: SentTotals
    traced_micro_batches: int
    """micro batches of the traced step, the source of the whole step"""
    traced_pp_ranks: int
    """pipeline ranks of the step that was traced"""
    host: int
    """bytes in the host's memory, not in `memory`: states of the optimizer, inputs of blocks"""

    @property
    def peak(self) -> int:
        """Bytes when the sum was largest."""
        return sum(self.memory.values())


class Report(NamedTuple):
    """The result of a dry run."""

    config: Config
    dtype: torch.dtype
    """data type of the computation"""
    gpu: bool
    """whether the device is a GPU: the tensors of its kernels are counted"""
    shape: tuple[int, ...]
    """degrees of the mesh"""
    axes: list[MeshAxis]
    hardware: Hardware | None
    micro_batches: int
    kinds: list[RankKind]
    stage: str = ""
    """the stage of the training that was traced; empty: all have steps of one size"""

    def link(self, axis: MeshAxis) -> Link | None:
        """Return the slowest link between the ranks of an axis; None if it is unknown."""
        if self.hardware is None:
            return None
        return self.hardware.link_among(self.shape, axis.dimensions)

    def verdict(self, kind: RankKind) -> str:
        """Return whether the peak fits the device: fits, tight, does not fit, or unknown without a cluster."""
        if self.hardware is None:
            return "unknown"
        share = kind.peak / self.hardware.memory
        if share > 1:
            return "does not fit"
        return "tight" if share > TIGHT else "fits"


def as_json(report: Report) -> str:
    """Return the report as one JSON object; sizes are in bytes."""
    config, hardware = report.config, report.hardware
    out: dict[str, Any] = {
        "ranks": _ranks(report),
        "layout": _layout(report),
        "parameters": parameter_count(config.model),
        "active_parameters": active_parameter_count(config.model),
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
    """Return the entry of `as_json` for one kind of rank."""
    sent = []
    for (axis, name), (count, size_sent) in sorted(kind.sent.items()):
        sent.append({"axis": axis, "collective": name, "count": count, "bytes": size_sent})
    return {
        "pp_ranks": kind.pp_ranks,
        "shown_pp_rank": kind.shown,
        "stages": _stages(report, kind),
        "memory": {purpose: kind.memory[purpose] for purpose in PURPOSES},
        "peak": kind.peak,
        "host": kind.host,
        "at_most": {purpose: kind.highest[purpose] for purpose in PURPOSES},
        "fits": report.verdict(kind),
        "sent": sent,
        "traced": {"micro_batches": kind.traced_micro_batches, "pp_ranks": kind.traced_pp_ranks},
    }


def _axis_as_dict(report: Report, axis: MeshAxis) -> dict[str, Any]:
    """Return the entry of `as_json` for one mesh axis: its ranks, and the slowest link between them."""
    link = report.link(axis)
    return {
        "axis": axis.name,
        "ranks": axis.size,
        "link": link.name if link else None,
        "bandwidth": link.bandwidth if link else None,
    }


def as_text(report: Report) -> str:
    """Return the report as tables with a column for every kind of rank."""
    training = report.config.training
    data = report.micro_batches * training.micro_batch_size
    model = report.config.model
    active = f", of which a token uses {active_parameter_count(model):,}" if model.experts else ""
    lines = [
        f"dry run of {_ranks(report):,} ranks: {_layout(report)}",
        f"{parameter_count(model):,} parameters{active}; a step is {training.global_batch_size:,} sequences of "
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
    """Yield the rows of memory: a name, then a cell for each kind of rank."""
    kinds = report.kinds
    if report.config.parallel.pp > 1:
        yield ["pipeline ranks", *(_span(kind.pp_ranks) for kind in kinds)]
        yield ["blocks (e embedding, h head)", *("; ".join(_stages(report, kind)) for kind in kinds)]
        yield ["the one shown", *(str(kind.shown) for kind in kinds)]
    yield ["memory of a rank at its peak"]
    for purpose in PURPOSES:
        at_peak = [kind.memory[purpose] for kind in kinds]
        if any(at_peak):
            yield [f"  {purpose}", *map(size, at_peak)]
    yield ["  sum", *(size(kind.peak) for kind in kinds)]
    for purpose in ("activations", "logits"):
        at_peak_cells = [size(kind.memory[purpose]) for kind in kinds]
        highest_cells = [size(kind.highest[purpose]) for kind in kinds]
        if highest_cells != at_peak_cells:
            yield [f"  {purpose}, at other times", *highest_cells]
    if report.hardware is not None:
        yield [f"  {report.hardware.gpu}, {size(report.hardware.memory)}", *map(report.verdict, kinds)]


def _sent_rows(report: Report) -> Iterator[list[str]]:
    """Yield the rows of messages: axis and collective, a cell for each kind of rank, the link and its seconds."""
    yield ["sent by a rank in a step", *("" for _ in report.kinds), "link", "at its rate"]
    for axis in report.axes:
        link = report.link(axis)
        for collective in _collectives_of(report, axis):
            cells = []
            largest_sum = 0.0
            for kind in report.kinds:
                count, sent = kind.sent.get((axis.name, collective), (0, 0.0))
                cells.append(f"{size(sent)} in {count:,}" if count else "-")
                largest_sum = max(largest_sum, sent)
            row = [f"  {axis.name} ({axis.size}) {collective}", *cells]
            if link is None:
                yield [*row, "-", "-"]
            else:
                yield [*row, link.name, f"{largest_sum / link.bandwidth:.3g} s"]


def _collectives_of(report: Report, axis: MeshAxis) -> list[str]:
    """Return the kinds of collectives that any kind of rank runs over an axis, in alphabetical order."""
    collectives = set()
    for kind in report.kinds:
        for axis_name, collective in kind.sent:
            if axis_name == axis.name:
                collectives.add(collective)
    return sorted(collectives)


def _table(rows: Iterator[list[str]]) -> list[str]:
    """Return the rows as lines, the first column aligned to the left and all others to the right."""
    rows_of_cells = list(rows)
    columns = max(len(row) for row in rows_of_cells)
    widths = [0] * columns
    for row in rows_of_cells:
        if not any(row[1:]):  # a heading, which may be wider than its column
            continue
        for column, cell in enumerate(row):
            widths[column] = max(widths[column], len(cell))
    lines = []
    for row in rows_of_cells:
        cells = [row[0].ljust(widths[0])]
        for cell, width in zip(row[1:], widths[1:], strict=False):  # a heading has one cell
            cells.append(cell.rjust(width))
        lines.append("  ".join(cells).rstrip())
    return lines


def assumptions(report: Report) -> Iterator[str]:
    """Yield the assumptions behind the figures, a line each."""
    config = report.config
    if report.stage:
        yield f"a step of {report.stage}, the largest: stages have steps of other sizes"
    chosen = ""
    if config.training.dtype == "auto":
        chosen = ", which auto is there" if report.hardware else ", as here"
    trained = "low-rank updates, their" if config.trained.only_updates else "weights,"
    yield f"computation in {_dtype(report)}{chosen}; {trained} gradients and moments in float32"
    if not config.trains_all:
        dtype = _dtype(report) if config.trained.only_updates else "float32"
        trained_count = trained_parameter_count(config.model, config.trained)
        yield f"{trained_count:,} parameters are trained, the others frozen ({dtype})"
    if report.gpu:
        yield "norms, attention and Muon as on a GPU; all other kernels as on a CPU, which hold the same"
    else:
        yield "kernels as on a CPU: a GPU's fused norms hold less"
    if untraceable := sorted({"flash", "flex"} & config.model.attention_kernels):
        yield f"attention sdpa in place of {' and '.join(untraceable)}, which keeps the same tensors for the backward"
    has_loss = report.gpu and config.compile.loss is True
    if config.compile.block is True or (config.compile.loss is True and not has_loss):
        yield f"{'the loss as compiled, the rest not' if has_loss else 'nothing compiled'}: compiled blocks keep less"
    if config.compile.graphs:
        yield "the CUDA graph's pool stays after backward; not counted: an evaluation, which comes on top of it"
    yield "not counted: the allocator's gaps, buffers of the communication library, CUDA's own: some GiB on a GPU"
    if any(kind.host for kind in report.kinds):
        of_kinds = " or ".join(dict.fromkeys(size(kind.host) for kind in report.kinds))
        yield f"not counted: {of_kinds} of a rank's moments, averages or inputs of blocks in its host's memory"
    yield "sent: in rings, each collective once round"
    if config.parallel.ep > 1:
        yield "tokens use all experts equally often: a rank whose experts are chosen more often holds and receives more"
    if config.parallel.ep > 1 and config.parallel.expert_dispatch == "optimistic":
        yield "buffers of experts have a margin of 19 %: the less even the loads of a block are, the larger they become"
    for kind in report.kinds:
        batches, ranks = kind.traced_micro_batches, kind.traced_pp_ranks
        if batches != report.micro_batches or ranks != config.parallel.pp:
            yield (
                f"of pipeline rank {_span(kind.pp_ranks)}, {batches} micro batches on {ranks} ranks were traced, "
                f"and put together to {report.micro_batches} on {config.parallel.pp} in the order of the schedule"
            )


def warnings(report: Report) -> Iterator[str]:
    """Yield a line for each cause of a slow run, and for GPUs that the cluster lacks."""
    hardware, parallel = report.hardware, report.config.parallel
    if hardware is None:
        return
    sent_over_tp = max(_bytes_sent(kind, AXES[-1]) for kind in report.kinds)
    slow = slow_tensor_parallel(parallel.tp, hardware.gpus_per_node, sent_over_tp, hardware)
    if slow:
        yield slow
    if _ranks(report) > hardware.links[-1].gpus:
        yield f"{_ranks(report):,} ranks, but the cluster has {hardware.links[-1].gpus:,} GPUs"


def _bytes_sent(kind: RankKind, axis: str) -> float:
    """Return the bytes that a rank sends over an axis in a step."""
    total = 0.0
    for (axis_name, _), collectives in kind.sent.items():
        if axis_name == axis:
            total += collectives.bytes
    return total


def size(bytes: float) -> str:
    """Return a number of bytes in three digits and a unit: 1.23 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if bytes < 1000 or unit == "GiB":
            break
        bytes /= 1024
    return f"{bytes:,.0f} {unit}" if unit == "B" or bytes >= 100 else f"{bytes:.3g} {unit}"


def _stages(report: Report, kind: RankKind) -> list[str]:
    """Return the blocks of each stage of the shown rank, with "e" and "h" for embedding and head: "e 0-1"."""
    parallel = report.config.parallel
    if parallel.pp == 1:
        return [f"e 0-{report.config.model.layers - 1} h"]
    split = balanced_split(report.config.model, parallel, report.config.training.sequence_length)
    descriptions = []
    for stage in stage_of_rank(parallel, kind.shown):
        first_block = sum(split[:stage])
        description = _span(range(first_block, first_block + split[stage]))
        if stage == 0:
            description = f"e {description}"
        if stage == parallel.stages - 1:
            description = f"{description} h"
        descriptions.append(description)
    return descriptions


def _span(numbers: Sequence[int]) -> str:
    """Return numbers with runs shortened: "0-3,7" for 0, 1, 2, 3, 7."""
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
    if parallel.ep > 1:
        degrees += f", ep {parallel.ep}"
    schedule = f", {parallel.schedule}" if parallel.pp > 1 else ""
    return f"{degrees}, zero_stage {parallel.zero}{schedule}, recompute {report.config.recompute.mode}"


def _dtype(report: Report) -> str:
    return str(report.dtype).removeprefix("torch.")
