"""Where logged steps go: a file of JSON lines, TensorBoard, the console. Only rank 0 has sinks.

A fork adds one by writing a class with `write` and `close` and giving an instance to `monitor.add_sink`, after
`monitor.begin`. A sink that raises ends no training: see `TolerantSink`.
"""

import glob
import io
import itertools
import json
import logging
import math
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torchllm.config import Config
from torchllm.config.write import dump_toml
from torchllm.metrics.appended_file import AppendedFile
from torchllm.runtime.tolerance import Tolerance

log = logging.getLogger("torchllm")

WAITING_RECORDS = 1000
"""records that a sink may miss and still get when it works again"""

Record = dict[str, float | None]
"""a logged step; `metrics/meter.py` describes the keys"""


class Sink(Protocol):
    """Takes every logged step, and every profiled one."""

    def write(self, step: int, record: Record) -> None:
        """Take the record of a step. OSError: not yet; the record comes again with a later one."""

    def close(self) -> None:
        """Write the records that are not written yet."""


class WaitingRecord(NamedTuple):
    """A record that a sink has not taken yet."""

    step: int
    record: Record


class TolerantSink:
    """Stands before a sink whose failures end nothing: the first is logged with the sink's name, training goes on.

    Records that met an OSError (a full disk) wait, `waiting` of them at most, and go to the sink before the next one
    when it works again. A record that made the sink raise anything else is dropped.
    """

    def __init__(self, name: str, sink: Sink, waiting: int = WAITING_RECORDS) -> None:
        self.sink = sink
        self.tolerance = Tolerance(name)
        self.waiting: deque[WaitingRecord] = deque(maxlen=waiting)

    def write(self, step: int, record: Record) -> None:
        """Give the sink the records that wait and this one, if it takes them."""
        self._give([*self.waiting, WaitingRecord(step, record)])

    def _give(self, records: Sequence[WaitingRecord]) -> None:
        self.waiting.clear()
        for index, waiting in enumerate(records):
            try:
                self.sink.write(waiting.step, waiting.record)
            except OSError as error:
                self.tolerance.failed(error)
                self.waiting.extend(records[index:])
                return
            except Exception as error:
                self.tolerance.failed(error)
            else:
                self.tolerance.worked()

    def close(self) -> None:
        """Close the sink, after a last try to give it the records that wait."""
        self._give(list(self.waiting))
        if self.waiting:
            log.warning("%s: the last %d records were not written", self.tolerance.name, len(self.waiting))
        try:
            self.sink.close()
        except Exception as error:
            self.tolerance.failed(error)


def open_sinks(folder: Path, config: Config, start: int = 0) -> list[Sink]:
    """Return the sinks of a run that has done `start` steps; for rank 0. They open their files at the first record."""
    lines = folder / "metrics.jsonl"
    sinks: list[Sink] = [TolerantSink(str(lines), JsonLines(lines, start))]
    if config.metrics.tensorboard:
        board = TensorBoard(folder / "tensorboard", start, dump_toml(config))
        sinks.append(TolerantSink(str(board.file.path), board))
    return sinks


def open_loads_file(folder: Path, start: int = 0) -> Sink:
    """Return the sink of the tokens per expert, of a run that has done `start` steps; for rank 0.

    Its records have "step", and a list for each block with experts: "layers.3": [tokens of its first expert, ...].
    """
    path = folder / "experts.jsonl"
    return TolerantSink(str(path), JsonLines(path, start))


class JsonLines:
    """Writes metrics.jsonl: one object per record, on disk as soon as it is written.

    A run resumed after step `start` first cuts off the lines of later steps, so that no step is in the file twice.
    Lines after the last record up to `start` that are no records (the end of a killed run) are cut off too, with a
    warning. Only the part that is cut off is read, and the block before it. Values that are not finite become null:
    JSON has no NaN.
    """

    def __init__(self, path: Path, start: int = 0) -> None:
        self.file = AppendedFile(path)
        self.start = start
        self.is_cut = False

    def write(self, step: int, record: Record) -> None:
        """Append a line. OSError: nothing of it is in the file."""
        if not self.is_cut:
            if self.file.path.exists():
                from torchllm.metrics.cut_lines import cut_lines_after  # of no use to a fresh run

                cut_lines_after(self.file.path, self.start)
            self.is_cut = True
        finite = {key: _finite(value) for key, value in record.items()}
        self.file.write(json.dumps(finite, allow_nan=False).encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        self.file.close()


def _finite(value: Any) -> Any:
    """Return a value of a record: None for a number that is not finite."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


class TensorBoard:
    """Writes TensorBoard files. Points that an earlier launch wrote after step `start` are hidden.

    TensorBoard shows groups of curves in the order of the alphabet, and so the curves of a group. The names are chosen
    for it: loss, validation loss, speed and memory come first; then performance, progress, system, time_share, update.

    torch's SummaryWriter would write in a thread, which ends with a traceback when the disk is full, and so does each
    one that is made to try again.
    """

    TAGS: Mapping[str, str] = {
        "loss": "at_a_glance/1_loss",
        "validation_loss": "at_a_glance/2_validation_loss",
        "validation_bits_per_byte": "at_a_glance/5_validation_bits_per_byte",
        "tokens_per_second": "at_a_glance/3_tokens_per_second",
        "targets_per_second": "performance/targets_per_second",
        "memory_gib": "at_a_glance/4_memory_gib",
        "mfu": "performance/mfu",
        "mfu_unmasked": "performance/mfu_unmasked",
        "hfu": "performance/hfu",
        "step_seconds": "performance/step_seconds",
        "data_seconds": "performance/data_seconds",
        "tokens": "progress/tokens",
        "grad_norm": "update/grad_norm",
        "learning_rate": "update/learning_rate",
        "z_loss": "update/z_loss",
        "mtp_loss": "update/mtp_loss",
        "memory_reserved_gib": "system/memory_reserved_gib",
        "allocation_retries": "system/allocation_retries",
        "skipped_steps": "update/skipped_steps",
    }
    """key of a record -> name of its curve"""

    GROUPS: Mapping[str, str] = {
        "breakdown": "time_share",
        "experts": "experts",
        "gpu": "system",
        "validation_bits_per_byte": "validation_bits_per_byte",
        "validation_loss": "validation_loss",
    }
    """keys with a slash: the part before it -> group of the curve"""

    LAYOUT: Mapping[str, Mapping[str, Sequence[str | Sequence[str]]]] = {
        "Does it learn?": {
            "loss": ["Multiline", ["at_a_glance/1_loss"]],
            "validation loss": ["Multiline", ["at_a_glance/2_validation_loss"]],
            "gradient norm": ["Multiline", ["update/grad_norm"]],
        },
        "Is it fast?": {
            "tokens per second": ["Multiline", ["at_a_glance/3_tokens_per_second"]],
            "MFU": ["Multiline", ["performance/mfu"]],
            "seconds of a step": ["Multiline", ["performance/step_seconds"]],
            "seconds that it waits for data": ["Multiline", ["performance/data_seconds"]],
        },
        "Is the machine well?": {
            "memory, GiB": ["Multiline", ["at_a_glance/4_memory_gib"]],
            "watts of the GPU": ["Multiline", ["system/watts"]],
        },
    }
    """the page "custom scalars", main questions first; a chart has a curve per run, so one tag"""

    def __init__(self, folder: Path, start: int = 0, config: str = "") -> None:
        """config: text that the page "text" shows."""
        # The begin of the name is TensorBoard's, with the time in seconds; it reads the files of a folder in the order
        # of their names. So a launch after the clock went back takes the second after the last file's.
        names = glob.glob("events.out.tfevents.*", root_dir=folder)  # none of a folder that cannot be read
        earlier = [name.split(".")[3] for name in names]
        moment = max([int(time.time()), *(int(part) + 1 for part in earlier if part.isdecimal())])
        launch = f"{moment:010d}.{os.uname().nodename}.{os.getpid()}.{next(_FILES)}"
        self.file = AppendedFile(folder / f"events.out.tfevents.{launch}")
        self.start = start
        self.config = config
        self.has_begun = False

    def write(self, step: int, record: Record) -> None:
        """Append the points of a record. OSError: none of them is in the file."""
        # They take a second to import, and not every run asks for them.
        from tensorboard.compat.proto.event_pb2 import Event
        from torch.utils.tensorboard import summary

        moment = time.time()
        events = [] if self.has_begun else self._first_events(moment)
        for key, value in record.items():
            if key != "step" and value is not None:
                events.append(Event(wall_time=moment, step=step, summary=summary.scalar(self.tag(key), value)))
        self.file.write(_tensorboard_records(events))
        self.has_begun = True

    def _first_events(self, moment: float) -> list[Any]:
        """Return the head of the file, as torch's SummaryWriter writes it with a `purge_step`, layout and config."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from torch.utils.tensorboard import summary

        first = self.start + 1
        code = "\n".join(f"    {line}" for line in self.config.splitlines())  # in Markdown
        return [
            Event(wall_time=moment, step=first, file_version="brain.Event:2"),
            Event(wall_time=moment, step=first, session_log=SessionLog(status=SessionLog.START)),
            Event(wall_time=moment, step=self.start, summary=summary.custom_scalars(self.LAYOUT)),
            Event(wall_time=moment, step=self.start, summary=summary.text("config", code)),
        ]

    def tag(self, key: str) -> str:
        """Return the name of a key's curve; a key that a fork added is in the group "other", or in its own."""
        if key in self.TAGS:
            return self.TAGS[key]
        group, slash, name = key.partition("/")
        if not slash:
            return f"other/{key}"
        return f"{self.GROUPS.get(group, group)}/{name}"

    def close(self) -> None:
        """Close the file."""
        self.file.close()


_FILES = itertools.count()
"""numbers the TensorBoard files of this process"""


def _tensorboard_records(events: Sequence[Any]) -> bytes:
    """Return events (protocol buffers) as records of a TensorBoard file."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    buffer = io.BytesIO()
    writer = RecordWriter(buffer)
    for event in events:
        writer.write(event.SerializeToString())
    return buffer.getvalue()
