"""Batches of a run: sources in the run's order, behind torchdata's StatefulDataLoader, agreed on by all ranks.

torchdata only prefetches. The position of the run in its data is one number, the sequences consumed by all ranks
together, so resuming is O(1) and does not depend on the number of ranks, workers or micro batches.
"""

import atexit
import logging
import math
import multiprocessing
import os
import signal
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from torchllm.config import Data, Finetune, Model, Training, gradient_accumulation
from torchllm.config.applied_keys import applied
from torchllm.config.errors import DataError
from torchllm.config.stages import Progress, StageSteps, span_of
from torchllm.data.batch import Batch
from torchllm.data.checked_file import DamagedFile
from torchllm.data.corpus import Corpus, SequenceSource, close_shards
from torchllm.data.corpus_header import CorpusHeader
from torchllm.data.open_sources import open_sources
from torchllm.data.order import DataOrder, Location
from torchllm.data.packing import DataRanks as DataRanks
from torchllm.data.packing import Packed, PackedBatches
from torchllm.data.readers import name_source
from torchllm.data.sequence_reader import SequenceReader
from torchllm.data.stages import (
    ContinuedStages,
    continue_stages,
    limit_epochs,
    plan_stages,
    steps_within,
    tokens_of,
)
from torchllm.runtime.parent import end_with_starter

if TYPE_CHECKING:
    from torchllm.data.described_sources import DescribedSources
    from torchllm.data.held_out import HeldOut
    from torchllm.data.verification import Verification

log = logging.getLogger(__name__)

_ENDLESS = 2**62
"""number of steps that no run reaches"""
_PREFETCHED_STEPS = 2


def build_loader(
    data: Data, training: Training, model: Model, seed: int, ranks: DataRanks, finetune: Finetune | None = None
) -> "TrainLoader":
    """Return a loader at sequence 0, after tokenizing small raw sources that are not cached (one process per node).

    Call it on all ranks: an error on one rank is raised as the same DataError on all. finetune: how conversations
    become tokens, and whether training.steps follows from epochs; None: sources of conversations are an error.
    """
    applied("data", data)
    opened = open_sources(data, training, model, ranks, finetune)
    counts_epochs = finetune is not None and finetune.epochs > 0
    verification, depth = opened.verification, model.mtp_depth
    return TrainLoader(
        opened.sources, data, training, seed, ranks, verification, counts_epochs, depth, opened.validation
    )


class _Steps(torch.utils.data.Dataset[Packed | DataError]):
    """The training data of one data rank: item k is its part of step `first` + k.

    The global batch of a step is consecutive sequences of the run. Micro batch m of data rank r has B of them, starting
    at (m * ranks + r) * B. readers: by length.
    """

    def __init__(
        self,
        readers: Mapping[int, SequenceReader],
        order: DataOrder,
        first: int,
        spans: Sequence[StageSteps],
        ranks: DataRanks,
    ) -> None:
        self.readers = readers
        self.order = order
        self.first = first
        self.spans = spans
        self.rank, self.ranks = ranks.rank, ranks.size

    def __getitem__(self, k: int) -> Packed | DataError:
        """Return the step's micro batches, packed, or the error why they cannot be read.

        If it were raised in a worker process, the user would see it below two tracebacks.
        """
        locations: list[Location] = []
        step = self.first + k
        span = span_of(self.spans, step)
        first, size = span.after(step - 1).sequences, span.training.micro_batch_size
        for micro_batch in range(gradient_accumulation(span.training, self.ranks)):
            start = first + (micro_batch * self.ranks + self.rank) * size
            locations += map(self.order.locate, range(start, start + size))
        try:
            return self.readers[span.training.sequence_length].read("train", locations)
        except DataError as error:
            return error


class TrainLoader:
    """The run's training batches, and its held-out ones."""

    def __init__(
        self,
        sources: list[SequenceSource],
        data: Data,
        training: Training,
        seed: int,
        ranks: DataRanks,
        verification: "Verification | None" = None,
        counts_epochs: bool = False,
        depth: int = 0,
        validation: Sequence[SequenceSource] = (),
    ) -> None:
        """Start at sequence 0 of `sources`, the opened data.sources. `verification` runs in the background.

        counts_epochs: the run has the same number of epochs of each source, unless weights are chosen. depth: of
        `Batch.ahead`. validation: the opened data.validation.
        """
        self._depth = depth
        self.on_damage: Callable[[int, str], None] = lambda first_step, reason: None
        """callback before damaged data ends the run: first step that trained on it, and the damage"""
        self._verification = verification
        self._data = data
        self._training = training
        self._workers = data.workers
        self._ranks = ranks
        self._seed = seed
        self._names = [name_source(f"data.sources.{index}", source) for index, source in enumerate(data.sources)]
        self._weights = [settings.weight for settings in data.sources]
        self._max_epochs = [settings.max_epochs for settings in data.sources]
        self._consumed = 0
        self._steps = 0
        self._proven = 0
        """number of first steps whose data was right when they read it"""
        self._batches: Iterator[Any] | None = None
        self._counts_epochs = counts_epochs
        self._sources, self._validation = sources, validation
        length = training.sequence_length
        fingerprints, tokenizers = [], set()
        skipped: Counter[str] = Counter()
        for weight, source in zip(self._weights, sources, strict=True):
            fingerprints.append([source.fingerprint, weight])
            if isinstance(source, Corpus):
                tokenizers.add(source.header.tokenizer)
                skipped.update(source.header.skipped)
        self.skipped: dict[str, int] = dict(skipped)
        """number of records skipped by data.on_bad_record = "skip", by error"""
        settings = self._data.document_mask, self._ranks.pieces, self._depth
        self._readers: dict[int, SequenceReader] = {}
        """by length"""
        self._sizes: dict[int, list[int]] = {}
        """sequences of each source, by `PlannedStage.length`"""
        for other in self._data.lengths(length):
            cut = sources
            if other != length and self._data.packing == "best_fit":
                from torchllm.data.best_fit import with_length  # most runs need none

                cut = [with_length(source, other) for source in sources]
            self._readers[other] = SequenceReader(cut, other, *settings)
            self._sizes[0 if other == length else other] = [source.count("train", other) for source in cut]
        self._mixture = self._data
        """settings with the sources' weights in training; `data` has the weights for held-out sequences"""
        if self._counts_epochs:
            from torchllm.data.epoch_limits import mixed_by_size  # few runs count them

            self._mixture = mixed_by_size(self._data, self._sizes[0])
        self._order_by(plan_stages(self._mixture, self._training))
        self._fingerprint: dict[str, Any] = {
            "sources": fingerprints,
            "tokenizer": sorted(tokenizers),
            "sequence_length": length,
            "seed": self._seed,
        }
        if self._data.packing != "concatenate":
            self._fingerprint["packing"] = self._data.packing
        if any(self._max_epochs):
            self._fingerprint["max_epochs"] = self._max_epochs

    @cached_property
    def _held_out(self) -> "HeldOut":
        """The held-out sequences of the sources."""
        from torchllm.data.held_out import HeldOut  # of no use to runs that only train

        evaluated = self._validation or self._sources
        settings = self._training.sequence_length, self._data.document_mask, self._ranks.pieces, self._depth
        return HeldOut(evaluated, self._data, self._training, self._ranks, SequenceReader(evaluated, *settings))

    def _order_by(self, planned: ContinuedStages) -> None:
        """Draw the sequences by these stages."""
        self._stages, self._spans = planned.stages, planned.spans
        self._limited = limit_epochs(planned.stages, self._sizes, self._max_epochs)
        *before, last = self._limited.stages
        self._order = DataOrder(self._seed, self._sizes[0], last.weights, before, self._sizes, last.length)

    def _check_epochs_left(self, steps: int) -> None:
        """Raise DataError if all sources will have had their max_epochs before step number `steps` is complete."""
        if not self._limited.end:
            return
        possible = steps_within(self._spans, self._limited.end)
        if possible < steps:
            fewer = f", or train {possible} steps" if possible else ""
            raise DataError(
                f"data.sources: all have had their max_epochs after step {possible} of {steps}: raise max_epochs{fewer}"
            )

    def next_step(self) -> PackedBatches:
        """Return the micro batches of this rank in the next optimizer step.

        Raises DataError if a file of the data turns out damaged, after calling `on_damage`.
        """
        if self._batches is None:
            if not self._counts_epochs:  # else `steps_of_epochs` has checked it
                self._check_epochs_left(self._training.steps)
            self._batches = self._start()
        self._check_epochs_left(self._steps + 1)
        self._check_verification()
        item = next(self._batches)
        if isinstance(item, DataError):
            raise self._with_steps(item)
        values = torch.as_tensor(item)
        training = span_of(self._spans, self._steps + 1).training
        batch = range(self._consumed, self._consumed + training.global_batch_size)
        if any(stage.end in batch for stage in self._limited.stages[:-1]):
            from torchllm.data.described_sources import describe_size  # few runs have stages

            size = f"; {describe_size(training)}" * self._data.changes_size
            log.info("data: from step %d on %s%s", self._steps + 1, self._described().shares(batch[0], batch[-1]), size)
        self._consumed += training.global_batch_size
        self._steps += 1
        accumulation = gradient_accumulation(training, self._ranks.size)
        return self._readers[training.sequence_length].packed_batches(values, accumulation, training.micro_batch_size)

    def _start(self) -> Iterator[Any]:
        """Start the worker processes and return an iterator over the packed steps."""
        on_gpu = torch.cuda.is_available()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*set_vital.*", category=UserWarning)  # torchdata calls it
            # Forking a process with threads is safe here: a worker touches numpy, its memory maps and one thread of
            # torch, never a GPU. A spawned worker would import torch, for seconds and 300 MB per rank.
            warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)
            loader = StatefulDataLoader(
                _Steps(self._readers, self._order, self._steps + 1, self._spans, self._ranks),
                batch_size=None,  # an item is a whole step
                sampler=range(_ENDLESS),
                num_workers=self._workers,
                prefetch_factor=_PREFETCHED_STEPS if self._workers else None,
                # For a GPU, tensors come through shared memory and are pinned by a thread, off the step's path. Without
                # that thread an array through the pipe is faster: 0.4 ms against 1.4 ms for 1,024 tokens.
                collate_fn=_to_tensor if on_gpu else _unchanged,
                pin_memory=on_gpu,
                worker_init_fn=partial(_start_worker, os.getpid()),
                multiprocessing_context="fork" if self._workers and sys.platform == "linux" else None,
                generator=torch.Generator(),  # otherwise every start would draw from the run's random state
                snapshot_every_n_steps=_ENDLESS,  # never: `state` does not need it
            )
            if self._workers:
                multiprocessing.Lock()  # fails where there is no room; then an iterator would be left half made
            batches = iter(loader)
        if self._workers:
            # At exit multiprocessing sends SIGTERM, which workers ignore, and waits without end: end them earlier.
            atexit.register(_end_workers, weakref.ref(batches))
        if self._verification is not None:
            self._verification.start()
        return batches

    def state(self) -> dict[str, Any]:
        """Return the position of the run in its data, its fingerprint and the chat template of conversations, as JSON.

        Looks at the data first. Raises DataError, as `next_step` does, if a file turns out damaged: the run must not
        save then.
        """
        self._look()
        state = {
            "sequences": self._consumed,
            "steps": self._steps,
            "stages": [stage if stage.length else stage[:3] for stage in self._stages],
            "fingerprint": self._fingerprint,
        }
        if any(self._sizes.keys()):
            state["tokens"] = tokens_of(self._stages, self._consumed, self._training)
        chat = self._chat_plan()
        return state if chat is None else state | {"chat": chat}

    def _chat_plan(self) -> dict[str, Any] | None:
        """Return the `ChatPlan` of the conversations of all sources; None if there are none, or if they differ.

        Export and chat need it, and the files that it came from may change.
        """
        corpora = [source for source in self._sources if isinstance(source, Corpus)]
        plans = [corpus.header.plan["chat"] for corpus in corpora if corpus.header.plan.get("chat")]
        return plans[0] if plans and all(plan == plans[0] for plan in plans) else None

    def _check_verification(self) -> None:
        """Raise DataError if the background verification has found a damaged file."""
        if self._verification is not None and self._verification.problem is not None:
            raise self._with_steps(self._verification.problem)

    def _look(self, everything: bool = False) -> None:
        """Verify files that were changed: everything, or the first of many bytes. Raises DataError, as `next_step`."""
        self._check_verification()
        try:
            if self._verification is None or self._verification.look(everything):
                self._proven = self._steps
        except DamagedFile as damage:
            raise self._with_steps(damage) from None

    def _with_steps(self, error: DataError) -> DataError:
        """Return an error that names the steps that may have been trained on wrong bytes, after `on_damage`."""
        if not isinstance(error, DamagedFile) or self._proven == self._steps:
            return error
        first = self._proven + 1
        self.on_damage(first, f"it may have been trained on damaged data: {error.path} {error.fault}")
        return DataError(
            f"{error}. Steps {first} to {self._steps} may have been trained on it: if there are checkpoints of them, "
            "they are marked as suspect, and none of them is used when the run is started again"
        )

    def keep_sources_of(self, state: Mapping[str, Any]) -> None:
        """Do nothing: forks of recipes/evaluate.py of version 0.2 call it."""

    def load_state(self, state: dict[str, Any], record: Mapping[str, Any] | None = None) -> None:
        """Continue from a saved state; O(1). record: record of its checkpoint; its config names the saved sources.

        Raises DataError (a ValueError) that lists the differences if the sequences would differ from the saved run.
        """
        from torchllm.data.data_changes import (  # of no use to a fresh run
            data_differences,
            limits_that_differ,
            mixture_as_in,
            stages_from_state,
        )

        settings = (record or {}).get("config", {}).get("data", {})
        saved = stages_from_state(state, len(self._sources))
        sequences = state["sequences"]
        progress = Progress(state["steps"], sequences, tokens_of(saved, sequences, self._training))
        mixture = mixture_as_in(saved, self._mixture, self._data, self._sizes[0])
        continued = continue_stages(mixture, self._training, saved, progress)
        current = self._fingerprint
        if self._data.stage and not continued.differences:
            # Sources that were added since then, for later stages, are in no sequence so far.
            current = current | {"sources": current["sources"][: len(state["fingerprint"]["sources"])]}
        differences = data_differences(state["fingerprint"], current, settings, self._data)
        if not differences:  # otherwise the stages may differ because the weights of the sources differ
            differences = continued.differences or limits_that_differ(
                continued.stages, self._sizes, self._max_epochs, state
            )
        if differences:
            listed = "\n  ".join(differences)
            raise DataError(f"the checkpoint was trained on other data:\n  {listed}")
        self.close()
        self._consumed = progress.sequences
        self._steps = self._proven = progress.steps
        self._order_by(continued)

    def close(self) -> None:
        """End the worker processes and close the shards; the next step starts and opens them again.

        Raises DataError, as `next_step` does, if a file turns out damaged that a step has read since the last `state`.
        """
        if self._batches is not None and self._workers:
            _end_workers(weakref.ref(self._batches))
        self._batches = None
        if self._verification is not None:
            self._verification.close()
        close_shards()
        if self._proven < self._steps:
            self._look(everything=True)

    def validation_sequences(self, sequences: int) -> int:
        """Return `sequences`, or the number of held-out sequences if it is smaller. Raises DataError if it is 0."""
        available = min(sequences, self._held_out.sequences)
        if not available:
            raise DataError(
                "nothing is held out to evaluate on, or less than a sequence: set evaluate.interval = 0 or, in a new "
                'run, a larger data.validation_fraction (kind "tokens": prepare the corpus again with it)'
            )
        applied("evaluate.interval")
        return available

    def validation_batches(self, sequences: int, device: torch.device) -> Iterator[Batch]:
        """Yield this rank's share of the first `sequences` held-out sequences, see `HeldOut.batches`.

        Raises DataError if nothing is held out.
        """
        return self._held_out.batches(self.validation_sequences(sequences), device)

    def steps_of_epochs(self, epochs: float) -> int:
        """Return the number of steps, at least 1, for `epochs` passes over the data (with weights, on average).

        Raises DataError if a source has no end, or if max_epochs end it before.
        """
        from torchllm.data.synthetic import Synthetic  # of no use to other runs

        if any(isinstance(source, Synthetic) for source in self._sources):
            raise DataError("finetune.epochs: random tokens (data.sources of kind synthetic) have no end: set it to 0")
        applied("finetune.epochs", epochs)
        if len(self._sizes) > 1:
            raise DataError("finetune.epochs: counts sequences of one length, and data.stage has several: set it to 0")
        steps = max(1, 1 + steps_within(self._spans, math.ceil(epochs * sum(self._sizes[0])) - 1))
        self._check_epochs_left(steps)
        return steps

    def describe_sources(self, steps: int) -> list[str]:
        """Return a line per source, with its size and its epochs in a run of `steps` steps, and a line per stage."""
        described = self._described()
        stages = described.list_stages(steps, self._consumed, self._data.changes_size)
        return [*described.list_sources(steps), *self._held_out.describe(), *stages]

    def describe_rounded_shares(self) -> str:
        """List the sources whose share of the sequences differs from their weight; "" if there is none."""
        return self._described().rounded_shares()

    def _described(self) -> "DescribedSources":
        from torchllm.data.described_sources import DescribedSources  # runs without a log print none of it

        return DescribedSources(
            self._names, self._sources, self._max_epochs, self._stages, self._limited, self._spans, self._order
        )

    def corpora(self) -> dict[str, CorpusHeader]:
        """Return the descriptions of the first corpora among the sources, by name of the source."""
        from torchllm.data.described_sources import LISTED

        named = zip(self._names[:LISTED], self._sources, strict=False)
        return {name: source.header for name, source in named if isinstance(source, Corpus)}


def _unchanged(item: Packed | DataError) -> Packed | DataError:
    return item


def _to_tensor(item: Packed | DataError) -> torch.Tensor | DataError:
    return item if isinstance(item, DataError) else torch.from_numpy(item)


def _end_workers(batches: "weakref.ref[Any]") -> None:
    """End the worker processes of an iterator, even if a traceback keeps the iterator alive."""
    iterator = batches()
    if iterator is not None:
        iterator._shutdown_workers()


def _start_worker(trainer: int, worker: int) -> None:
    """Make a worker ignore the signals that ask a run to stop, and end when the process `trainer` ends or is killed.

    Schedulers signal whole process groups, but the trainer decides when to stop.
    """
    end_with_starter(trainer)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
