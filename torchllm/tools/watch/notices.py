"""Lines about a run before its first step, and calls of `run.on_event`."""

import logging

from torchllm.config.stages import span_of, spans_of
from torchllm.facts.flops import active_parameter_count, parameter_count, trained_parameter_count
from torchllm.metrics.observer import ObservedRun, Observer
from torchllm.metrics.sinks import Record
from torchllm.runtime.device import compute_dtype

log = logging.getLogger("torchllm")


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
    for line in data.describe_sources(training.steps):
        if header := counted.get(line.partition("): ")[0] + ")"):
            from torchllm.tools.prepare.counts import describe_corpus  # of conversations, or with unknown tokens

            line = "; ".join([line, *describe_corpus(header, in_detail=False)])
        log.info("%s", line)
    if start < training.steps:
        spans = spans_of(config.data, training)
        begin, end = (span_of(spans, step).after(step).tokens for step in (start, training.steps))
        firsts = {max(start, span.before.steps) + 1 for span in spans}  # steps with which a size may begin
        used = [span_of(spans, step).training for step in firsts if step <= training.steps]
        sizes = sorted({size.global_batch_size * size.sequence_length for size in used})
        per_step = f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,}"
        tokens = f"{end - begin:,} tokens, {per_step} per step"
        log.info("steps %d to %d: %s", start + 1, training.steps, tokens)


def describe_peak(run: ObservedRun) -> None:
    """Log which peak of the data sheet MFU is a share of, where some products are in float8 and others are not."""
    peak = run.meter.peak
    if run.config.float8.is_on and peak is not None and not run.config.metrics.peak_tflops:
        log.info("MFU and HFU are against %.4g TFLOP/s per rank, float8's", peak / run.runtime.world_size / 1e12)


def _warn(run: ObservedRun) -> None:
    """Log notices about a config for the user, before its first step."""
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
    """Calls `run.on_event` at the first step that is not finite."""

    def begin(self, run: ObservedRun) -> None:
        self.run = run
        self.skipped_steps = 0.0

    def logged(self, n: int, record: Record) -> None:
        skipped = record["skipped_steps"] or 0.0
        if skipped and not self.skipped_steps:
            from torchllm.tools.launch.on_event import call_on_event  # most runs end without an event

            call_on_event(self.run.config.run.on_event, "nan", self.run.runtime.folder)
        self.skipped_steps = skipped
