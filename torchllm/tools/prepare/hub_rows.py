"""Data sets of the hub, whose rows `datasets` streams from their files; the commit of a branch is asked for once."""

import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchllm.config import Source
from torchllm.config.errors import DataError
from torchllm.tools.prepare.corpus_writer import first_noted
from torchllm.tools.prepare.record_form import RecordForm
from torchllm.tools.prepare.records import Origin, TextRecord
from torchllm.tools.prepare.source_files import SourceFile
from torchllm.tools.prepare.sources import ShardRange, even_cuts, ranges_between

if TYPE_CHECKING:  # 1 s of imports that a run with cached tokens never needs
    import datasets

log = logging.getLogger(__name__)

_REVISION_FOLDERS = 3
"""of the path of the copy of a data set: its configuration (with a hash of local files), its version, its commit"""
_COMMIT = re.compile("[0-9a-f]{40}")
_HUB_ROWS = 64
"""rows of a data set of the hub that are in memory as Python objects at a time"""
_HUB_PARQUET_ROWS = 16
"""rows of a parquet file of the hub that are unpacked at a time: all may be the longest text of a dictionary"""


class HubRows:
    """The rows of a split of a data set of the hub, read from its files over the network; no copy of it is kept.

    A position is one of the files: they are the smallest parts that `datasets` reads without those before them.
    """

    unit = "files"

    def __init__(self, source: Source, form: RecordForm) -> None:
        """Open a data set with the column of the records, and others that `form` reads.

        `source.revision` is the commit (see `pin_hub_source`). Raises DataError if the set or the column is missing.
        """
        self.source = source
        self.name = f"{source.path}[{source.split}]"
        self.form = form
        self.dataset = _stream_from_hub(source, form)
        self.total = self.dataset.num_shards
        self.mib = (_split_bytes(self.dataset.info, source) or 0) / 2**20
        """0 if the set does not say its size"""

    def cut_shards(self, count: int) -> list[ShardRange]:
        """Return ranges of files, one for each if there are fewer than `count`, or the set does not say its size."""
        ranges = min(count, self.total) if self.mib else self.total
        return ranges_between(even_cuts(self.total, ranges))

    def records(self, shard: ShardRange) -> Iterator[TextRecord]:
        for number in range(shard.start, shard.stop):
            name = f"{self.name} file {number}" if self.total > 1 else self.name
            for row, fields in enumerate(self._rows_of(number)):
                yield self.form.record(fields, Origin(name, row=row), is_row=True)

    def _rows_of(self, number: int) -> Iterator[dict[str, Any]]:
        """Yield the columns of each row of a file. Raises DataError if it cannot be read."""
        file = self.dataset.shard(num_shards=self.total, index=number)
        with _hub_errors(self.source):
            for columns in file.iter(batch_size=_HUB_ROWS):
                for values in zip(*columns.values(), strict=True):
                    yield dict(zip(columns, values, strict=True))


def _builder(source: Source) -> "datasets.DatasetBuilder":
    """Return the builder of a data set of the hub."""
    import datasets

    return datasets.load_dataset_builder(source.path, source.subset or None, revision=source.revision or None)


def raw_mib(source: Source, files: Sequence[SourceFile]) -> float | None:
    """Return the size of a source, in MiB; None if it is a data set of the hub that does not say its size."""
    if source.kind != "hub":
        return sum(file.size for file in files) / 2**20
    with _hub_errors(source):
        info = _builder(source).info
    size = _split_bytes(info, source)
    return None if size is None else size / 2**20


def _split_bytes(info: "datasets.DatasetInfo", source: Source) -> int | None:
    """Return the size of the source's split in bytes, if the data set says it."""
    splits = info.splits or {}
    return splits[source.split].num_bytes if source.split in splits else None


def pin_hub_source(source: Source, pins: Path) -> Source:
    """Return a source of the hub with the commit of its revision, which is asked of the hub once.

    pins: folder that remembers the commit, so that every later start reads the same rows, also if the branch has moved
    on. A folder of files that stands for a data set has no commit. Raises DataError if the hub cannot be asked.
    """
    if os.path.exists(source.path) or _COMMIT.fullmatch(source.revision):
        return source
    name = f"{source.path}@{source.revision or 'newest'}"
    pin = pins / name.replace("/", "--")
    try:
        commit = first_noted(pin, partial(_ask_commit, source))
    except OSError as error:
        raise DataError(
            f"{pin} cannot be written: {error.strerror or error}. Set data.cache to another folder"
        ) from error
    log.info("data.sources: %s is commit %s; delete %s to take a newer one", name, commit, pin)
    return replace(source, revision=commit)


def _ask_commit(source: Source) -> str:
    """Return the commit of a data set's revision. Raises DataError if the hub cannot be asked, or has none."""
    import huggingface_hub

    with _hub_errors(source):
        info = huggingface_hub.HfApi().dataset_info(source.path, revision=source.revision or None)
        if info.sha is None:
            raise ValueError("the hub names no commit")
        return info.sha


def hub_folder_version(source: Source) -> str:
    """Return a version of a folder that stands for a data set of the hub: new files, new version; "" if it is none."""
    if not os.path.exists(source.path):
        return ""
    with _hub_errors(source):
        builder = _builder(source)
    return "/".join(Path(builder.cache_dir).parts[-_REVISION_FOLDERS:])


def _stream_from_hub(source: Source, form: RecordForm) -> "datasets.IterableDataset":
    """Open the columns of a split of a data set of the hub that are read."""
    with _hub_errors(source):
        builder = _builder(source)
        if hasattr(builder.config, "batch_size"):
            builder.config.batch_size = _HUB_PARQUET_ROWS
        dataset = builder.as_streaming_dataset(split=source.split)
        names = dataset.column_names
        if names is None:  # known from the rows only
            names = list(next(iter(dataset), {}))
    if form.key not in names:
        raise DataError(f"data.sources: {source.path!r} has no column {form.key!r}, it has: {', '.join(names)}")
    return dataset.select_columns(form.columns(names))


@contextmanager
def _hub_errors(source: Source) -> Iterator[None]:
    """Turn any error, from an unknown name to a missing network, into a DataError that names source and cause."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        reason = _first_line(error)
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        if cause is not error:
            reason += f": {_first_line(cause)}"
        raise DataError(f"data.sources: cannot load split {source.split!r} of {source.path!r}: {reason}") from error


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
