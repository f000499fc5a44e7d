"""Lines about a run before its first step, and calls of `run.on_event`."""

import logging
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from torchllm.config import Model
from torchllm.config.stages import span_of, spans_of
from torchllm.facts.flops import active_parameter_count, parameter_count, trained_parameter_count
from torchllm.metrics.observer import ObservedRun, Observer
from torchllm.metrics.sinks import Record
from torchllm.runtime.device import compute_dtype
from torchllm.runtime.tolerance import Tolerance

if TYPE_CHECKING:
    from torchllm.data.corpus_header import CorpusHeader
    from torchllm.metrics.expert_load import ExpertLoads

log = logging.getLogger("torchllm")

PATIENCE = 10
"""logged steps in a row, after which there is a warning of the load of experts"""
OVERLOAD = 4.0
"""largest load, as a multiple of the mean, over which it is too large"""
SHARE_OF_WORST = 0.75
"""the same as a share of the largest that is possible, E / K: all tokens use the same K experts. The lower counts"""
LISTED = 3
"""experts that a warning names at most"""


class Notices(Observer):
    """Logs the model, its data, and whatever a user should know before the first step."""

    def __init__(self) -> None:
        self.has_begun = False

    def begin(self, run: ObservedRun) -> None:
        if not self.has_begun:
            _describe(run)
            describe_peak(run)
        self.has_begun = True
        _warn(run)
        if run.config.parallel.tp == 1:
            return
        from torchllm.tools.planner.cluster import tensor_parallel_warning

        dtype = compute_dtype(run.config.training, run.runtime.device)
        if slow := tensor_parallel_warning(run.config, run.runtime.ranks_on_node, dtype.itemsize):
            log.warning("%s", slow)


def _describe(run: ObservedRun) -> None:
    """Log the size of the model, its data and the steps to come."""
    config, data, start = run.config, run.data, run.start
    training, model = config.training, config.model
    log.info("model: %s parameters in %d blocks", f"{parameter_count(model):,}", model.layers)
    if model.experts:
        log.info(
            "experts: %d of %d for a token, in %d blocks; it uses %s of the parameters",
            model.top_k,
            model.experts,
            len(model.sparse_blocks),
            f"{active_parameter_count(model):,}",
        )
    if not config.trains_all:
        log.info("%s parameters are trained, others frozen", f"{trained_parameter_count(model, config.trained):,}")
    counted = {name: header for name, header in data.corpora().items() if header.counts}
    sources = data.describe_sources(training.steps)
    for line in sources:
        if header := counted.get(line.partition("): ")[0] + ")"):
            from torchllm.tools.prepare.counts import describe_corpus  # of conversations, or with unknown tokens

            line = "; ".join([line, *describe_corpus(header, in_detail=False)])
        log.info("%s", line)
    note_sources(run.runtime.folder / "sources.txt", sources, data.corpora())
    if start < training.steps:
        spans = spans_of(config.data, training)
        begin, second, before_last, end = (
            span_of(spans, step).after(step).tokens for step in (start, start + 1, training.steps - 1, training.steps)
        )
        first, last = second - begin, end - before_last
        per_step = f"{first:,}" if first == last else f"{first:,} to {last:,}"
        tokens = f"{end - begin:,} tokens, {per_step} per step"
        log.info("steps %d to %d: %s", start + 1, training.steps, tokens)


def note_sources(file: Path, lines: list[str], corpora: Mapping[str, "CorpusHeader"]) -> None:
    """Write the lines on the sources to a file for the report, with the bytes of text of a corpus."""
    noted = []
    for line in lines:
        header = corpora.get(line.partition(": ")[0])
        noted.append(f"{line}; {header.text_bytes / 1e6:,.1f} MB of text\n" if header is not None else f"{line}\n")
    with Tolerance(str(file)).attempt():
        file.write_text("".join(noted), encoding="utf-8")


def describe_peak(run: ObservedRun) -> None:
    """Log which peak of the data sheet MFU is a share of, where some products are in float8 and others are not."""
    peak = run.meter.peak
    if run.config.float8.is_on and peak is not None and not run.config.metrics.peak_tflops:
        log.info("MFU and HFU are against %.4g TFLOP/s per rank, float8's", peak / run.runtime.world_size / 1e12)


def _warn(run: ObservedRun) -> None:
    """Log what a user should know about a config before its first step."""
    config, data, start = run.config, run.data, run.start
    if start >= config.training.steps:
        log.info(
            "nothing to do: the run is at step %d of training.steps = %d; raise training.steps, or set another "
            "run.folder",
            start,
            config.training.steps,
        )
    if data.skipped:
        log.warning("records skipped: %s", data.skipped)
    if rounded := data.describe_rounded_shares():
        log.warning("shares of data.sources are rounded: %s", rounded)


class Events(Observer):
    """Calls `run.on_event` at the first step that is not finite, and where it warns of the load of experts."""

    def begin(self, run: ObservedRun) -> None:
        self.run = run
        self.skipped_steps = 0.0
        self.load_alarm: LoadAlarm | None = None
        if run.config.model.experts:
            self.load_alarm = LoadAlarm(run.config.model)

    def logged(self, n: int, record: Record) -> None:
        skipped, loads = record["skipped_steps"] or 0.0, self.run.meter.loads
        if skipped and not self.skipped_steps:
            self._call("nan")
        self.skipped_steps = skipped
        if self.load_alarm is not None and loads is not None and (problem := self.load_alarm.notice(loads)):
            log.warning("step %d: %s; model.router_bias and model.balance_loss keep loads equal", n, problem)
            self._call("imbalance")

    def _call(self, event: Literal["nan", "imbalance"]) -> None:
        from torchllm.tools.launch.on_event import call_on_event  # most runs end without an event

        call_on_event(self.run.config.run.on_event, event, self.run.runtime.folder)


class LoadAlarm:
    """Says where an expert had no token, or far too many, in `PATIENCE` logged steps in a row: once, until it ends."""

    def __init__(self, model: Model) -> None:
        self.blocks = model.sparse_blocks
        self.bound = min(OVERLOAD, SHARE_OF_WORST * model.experts / model.top_k)
        self.steps: Counter[str] = Counter()
        """logged steps in a row with a problem"""

    def notice(self, loads: "ExpertLoads") -> str:
        """Return what has gone on for too long since this logged step; empty: nothing."""
        problems = []
        for block, tokens, largest in zip(self.blocks, loads.tokens, loads.largest, strict=True):
            for expert, count in enumerate(tokens):
                if not count:
                    problems.append(f"expert {expert} of block {block} had no token")
            if self.bound > 1.0 and largest > self.bound:
                problems.append(f"an expert of block {block} had over {self.bound:.3g} times the mean tokens")
        self.steps = Counter({problem: self.steps[problem] + 1 for problem in problems})
        new = [problem for problem, steps in self.steps.items() if steps == PATIENCE]
        if not new:
            return ""
        more = f", and {len(new) - LISTED} more" if len(new) > LISTED else ""
        return f"in {PATIENCE} logged steps in a row {', '.join(new[:LISTED])}{more}"
