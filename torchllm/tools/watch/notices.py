"""Lines that a run logs, and calls of `run.on_event`, beyond those of the core."""

import logging
from typing import Literal

from torchllm.metrics.observer import ObservedRun, Observer
from torchllm.metrics.sinks import Record
from torchllm.runtime.device import compute_dtype

log = logging.getLogger("torchllm")


class Notices(Observer):
    """Logs what a corpus holds beside text, and a layout that is slow on this machine."""

    def begin(self, run: ObservedRun) -> None:
        """See Observer."""
        for name, header in run.data.corpora().items():
            if not header.counts:  # e.g. of text without unknown tokens
                continue
            from torchllm.tools.prepare.counts import describe_counts, describe_unknown

            for line in (*describe_counts(header.counts), *describe_unknown(header)):
                log.info("%s: %s", name, line)
        if run.config.parallel.tp == 1:
            return
        from torchllm.tools.planner.cluster import tensor_parallel_warning

        dtype = compute_dtype(run.config.training, run.runtime.device)
        if slow := tensor_parallel_warning(run.config, run.runtime.ranks_on_node, dtype.itemsize):
            log.warning("%s", slow)


class Events(Observer):
    """Calls `run.on_event` at the first step that is not finite, and where the load of experts is warned of."""

    def __init__(self) -> None:
        self.skipped_steps = 0.0
        self.load_alarms = 0

    def begin(self, run: ObservedRun) -> None:
        """See Observer."""
        self.run = run
        self.skipped_steps = 0.0
        self.load_alarms = 0

    def logged(self, n: int, record: Record) -> None:
        """See Observer."""
        skipped, alarms = record["skipped_steps"] or 0.0, self.run.meter.load_alarms
        if skipped and not self.skipped_steps:
            self._call("nan")
        if alarms > self.load_alarms:
            self._call("imbalance")
        self.skipped_steps, self.load_alarms = skipped, alarms

    def _call(self, event: Literal["nan", "imbalance"]) -> None:
        from torchllm.tools.launch.on_event import call_on_event  # most runs end without an event

        call_on_event(self.run.config.run.on_event, event, self.run.runtime.folder)
