"""Observers of a run: objects that a Monitor calls at the events of a training. They change no weight.

A fork adds its own by `monitor.observers.append(...)`: docs/fork_a_recipe.md has an example. One that is added after
`monitor.begin` begins with the next step.

Every rank has the same observers and calls them in the same order, so they may communicate. An exception of an observer
ends the training, as one of the recipe would; for a receiver of records that may fail see `TolerantSink`.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

from torchllm.config import Config
from torchllm.data.corpus_header import CorpusHeader
from torchllm.metrics.meter import Meter
from torchllm.metrics.sinks import Record
from torchllm.models.decoder import Decoder
from torchllm.parallel.mesh import Mesh
from torchllm.runtime.process import Runtime


class ObservedData(Protocol):
    """The data of a run: a `TrainLoader`, or one of a fork."""

    skipped: dict[str, int]
    """number of records skipped, by error"""

    def state(self) -> dict[str, Any]:
        """Return how far the run is in its data; "sequences": the number consumed by all ranks."""

    def describe_sources(self, steps: int) -> list[str]:
        """Return lines on the data of a run of `steps` steps."""

    def describe_rounded_shares(self) -> str:
        """List the sources whose share of the sequences differs from their weight; "" if there is none."""

    def corpora(self) -> dict[str, CorpusHeader]:
        """Return the descriptions of corpora among the sources, by name of the source."""


class ObservedRun(NamedTuple):
    """A run whose steps begin with this config."""

    config: Config
    runtime: Runtime
    mesh: Mesh
    stages: Sequence[Decoder]
    """this rank's part of the model"""
    data: ObservedData
    start: int
    """the last step that was taken before"""
    meter: Meter


class Change(NamedTuple):
    """Another config for the run to go on with, from a checkpoint."""

    config: Config
    reason: str


class Observer:
    """The base of observers: its methods do nothing."""

    def begin(self, run: ObservedRun) -> None:
        """Called before the first step with a config; again if the run goes on with another one."""

    def step(self, n: int) -> AbstractContextManager[None]:
        """Return a context around step `n`."""
        return nullcontext()

    def spent(self, cause: str, seconds: float) -> None:
        """Called when `seconds` of this rank went to "data", "evaluate", "checkpoint" or "compile", not to a step."""

    def logged(self, n: int, record: Record) -> None:
        """Called after a logged step; `metrics/meter.py` describes the keys of a record."""

    def evaluated(self, n: int, loss: float) -> None:
        """Called after an evaluation; loss: nats per held-out target token."""

    def saved(self, n: int) -> Change | None:
        """Called after a checkpoint but the last one. All ranks must return the same: a config to go on with, or None.

        None: with the same config.
        """
        return None

    def end(self) -> None:
        """Called after the last step with a config."""

    def close(self) -> None:
        """Called at the end of the run."""
