"""Read the layout of a row of measurements: degrees, batch, pipeline schedule. No torch."""

import re
from dataclasses import replace
from typing import NamedTuple

from evidence.cells import Cells
from torchllm.config import SCHEDULES, Model, Parallel, Training
from torchllm.tools.config.axis_problems import micro_batch_problems
from torchllm.tools.planner.schedules import PUBLISHED
from torchllm.tools.planner.software import Software

OTHER_NAMES = {
    "interleaved": "Interleaved1F1B",
    "zb1p": "ZB-H1",
    "zb2p": "ZB-H2",
    "zbh1": "ZB-H1",
    "zbh2": "ZB-H2",
    "zbv": "ZBVZeroBubble",
}
"""other names of schedules, in small letters and digits alone"""


class Degrees(NamedTuple):
    """How many ranks each axis has."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int

    @property
    def data_ranks(self) -> int:
        """Ranks that read different sequences."""
        return self.dp_replicate * self.dp_shard

    @property
    def ranks(self) -> int:
        """Number of GPUs."""
        return self.pp * self.data_ranks * self.cp * self.tp


def parallel_of(cells: Cells, model: Model, software: Software) -> Parallel:
    """Return the layout of a row. ValueError names the missing cell, or says why there is no such layout."""
    degrees = _degrees(cells)
    schedule = _schedule(cells) if degrees.pp > 1 else PipelineOrder("1F1B", 0)
    is_split = cells.is_set("seq_parallel", default=software.default_sequence_parallel)
    is_ulysses = cells.text("cp_method") == "ulysses"
    parallel = Parallel(
        **degrees._asdict(),
        ep=_expert_degree(cells, model, degrees),
        sequence_parallel=is_split and degrees.tp > 1,
        zero_stage=cells.number_or("zero_stage", software.default_zero_stage),
        schedule=schedule.name,  # type: ignore[arg-type]  # checked in _schedule
        virtual_stages=schedule.virtual_stages,
        cp_method="ulysses" if is_ulysses else "ring",
    )
    return replace(parallel, split=even_split(model.layers, parallel.stages))


def training_of(cells: Cells, parallel: Parallel) -> Training:
    """Return the batch of a row. ValueError if it is not known, does not divide, or its schedule cannot run it."""
    data_ranks = parallel.data_ranks
    micro_batch = _micro_batch(cells, data_ranks)
    sequences = cells.number_or("global_batch_seqs", 0)
    if not sequences:
        sequences = micro_batch * data_ranks * _accumulation(cells, parallel)
    sequences_at_once = micro_batch * data_ranks
    if not sequences_at_once or not sequences or sequences % sequences_at_once:
        raise ValueError(
            f"global_batch_seqs {sequences} does not divide by micro batch {micro_batch} x dp {data_ranks}"
        )
    if parallel.pp > 1:
        for problem in micro_batch_problems(parallel, sequences // sequences_at_once):
            raise ValueError(problem.message)
    return Training(
        micro_batch_size=micro_batch,
        global_batch_size=sequences,
        sequence_length=cells.count("seq_len"),
        loss_chunk=cells.number_or("loss_chunk", 0),
    )


def _micro_batch(cells: Cells, data_ranks: int) -> int:
    """Return the sequences of a micro batch: the row's own, or computed from the batch."""
    follows_from_batch = cells.text("global_batch_seqs") and cells.text("grad_accum")
    if cells.text("micro_batch") or not follows_from_batch:
        return cells.count("micro_batch")
    accumulation = max(1, cells.number("grad_accum"))
    return cells.number("global_batch_seqs") // (data_ranks * accumulation)


def _accumulation(cells: Cells, parallel: Parallel) -> int:
    """Return the micro batches of a step. Memory does not depend on them once the pipeline is full; a time does."""
    if cells.text("grad_accum"):
        return cells.count("grad_accum")
    if cells.text("step_time_s"):
        raise ValueError("global_batch_seqs and grad_accum are missing")
    if parallel.pp > 1:
        cells.assume("one micro batch per pipeline stage")
    return parallel.stages


def _degrees(cells: Cells) -> Degrees:
    """Return the degrees of a row. ValueError if they are missing, zero, or do not multiply to its GPUs."""
    gpus = cells.count("gpus")
    pp = cells.number_or("pp", 1)
    cp = cells.number_or("cp", 1)
    tp = cells.number_or("tp", 1)
    model_ranks = pp * cp * tp
    names_data_ranks = cells.text("dp") or cells.text("dp_shard")
    if model_ranks != gpus and not names_data_ranks:
        for column in ("tp", "pp"):
            cells.number(column)  # a degree that is not named is unknown, and so is data parallelism
    if min(gpus, pp, cp, tp) < 1:
        raise ValueError(f"gpus {gpus}, pp {pp}, cp {cp}, tp {tp}: each must be at least 1")
    data_ranks = cells.number_or("dp", 0) or gpus // model_ranks
    data_axes = _data_axes(cells, data_ranks)
    degrees = Degrees(pp, data_axes.replicate, data_axes.shard, cp, tp)
    if degrees.ranks != gpus and cells.text("step_time_s"):
        if gpus % model_ranks:
            raise ValueError(f"{gpus} GPUs are not pp {pp} x dp {degrees.data_ranks} x cp {cp} x tp {tp}")
        degrees = degrees._replace(dp_replicate=1, dp_shard=gpus // model_ranks)
        cells.assume(f"dp = {degrees.dp_shard}, what {gpus} GPUs leave")
    if not degrees.ranks:
        raise ValueError(f"{gpus} GPUs are fewer than pp {pp} x cp {cp} x tp {tp}")
    return degrees


class DataAxes(NamedTuple):
    """How the data ranks are divided."""

    replicate: int
    shard: int


def _data_axes(cells: Cells, data_ranks: int) -> DataAxes:
    """Return how the data ranks are divided: all share one copy of the weights if the row does not say it."""
    shard = cells.number_or("dp_shard", shards_in_note(cells.text("note")))
    usual_replicate = data_ranks // shard if shard else 1
    replicate = cells.number_or("dp_replicate", usual_replicate)
    return DataAxes(replicate, shard or data_ranks // max(1, replicate))


def shards_in_note(note: str) -> int:
    """Return N if a note says "sharded over N GPUs", as tables without the column dp_shard do; 0: it does not say."""
    match = re.search(r"\bsharded over (\d+) GPUs", note)
    return int(match[1]) if match else 0


def _expert_degree(cells: Cells, model: Model, degrees: Degrees) -> int:
    """Return ep. ValueError if the experts are sharded as torchllm does not shard them.

    etp, Megatron-Core's name, is the number of ranks that share each matrix of an expert: here tp without ep, and 1
    with ep, which borrows the innermost ranks of dp_shard x cp x tp.
    """
    ep = max(1, cells.number_or("ep", 1))
    if not model.experts:
        return 1
    etp = cells.number_or("etp", 0)
    etp_of_torchllm = degrees.tp if ep == 1 else 1
    if etp and etp != etp_of_torchllm:
        raise ValueError(f"etp {etp} with ep {ep} and tp {degrees.tp}: torchllm shards experts over ep or over tp")
    borrowed = degrees.dp_shard * degrees.cp * degrees.tp
    if borrowed % ep or model.experts % ep:
        raise ValueError(f"ep {ep} does not divide {borrowed} ranks (dp_shard x cp x tp) and {model.experts} experts")
    return ep


class PipelineOrder(NamedTuple):
    """A pipeline's schedule."""

    name: str
    virtual_stages: int
    """stages per rank; 0: the schedule's usual number"""


def _schedule(cells: Cells) -> PipelineOrder:
    """Return the schedule of a pipeline. ValueError if its name is unknown."""
    virtual_stages = cells.number_or("interleave_v", 1)
    word = cells.text("schedule")
    if not word:
        cells.assume("schedule 1F1B")
        word = "1F1B"
    plain = "".join(letter for letter in word.lower() if letter.isalnum())
    names = {name.lower(): name for name in SCHEDULES} | OTHER_NAMES
    if plain not in names:
        raise ValueError(f"schedule {word!r} is unknown ({', '.join([*SCHEDULES, *PUBLISHED])})")
    name = names[plain]
    if name in ("1F1B", "Interleaved1F1B") and virtual_stages > 1:
        return PipelineOrder("Interleaved1F1B", virtual_stages)
    return PipelineOrder(name, 0)


def even_split(layers: int, stages: int) -> tuple[int, ...]:
    """Return the blocks of each stage as Megatron splits them: equal, or one fewer at both ends; else ()."""
    if layers % stages == 0 or stages == 1:
        return (layers // stages,) * stages
    if (layers + 2) % stages == 0:
        middle = (layers + 2) // stages
        end = middle - 1
        return (end, *[middle] * (stages - 2), end)
    return ()
