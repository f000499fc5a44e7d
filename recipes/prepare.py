"""Tokenizes the raw sources of a config once, in parallel, into shards that any number of runs can train on.

    python recipes/prepare.py CONFIG.toml --prepare.folder=tokens [--prepare.processes=16] [--data.tokenizer=...]
    python recipes/prepare.py CONFIG.toml --prepare.show=3

Each raw source becomes one folder. If it is stopped and started again, it checks and keeps the finished shards. At the
end it prints the [[data.sources]] tables that read its shards.
"""

import sys
from dataclasses import asdict, dataclass, field

from torchllm.config import Config, FilePath, Natural, NonNegative
from torchllm.tools.front.resolve import load_sizes


@dataclass(frozen=True)
class Prepare:
    """Where and how recipes/prepare.py writes."""

    folder: FilePath = ""
    """folder to write to; each source gets a folder in it"""
    remote: str = ""
    """URL of a storage, as s3://bucket/tokens, that gets a copy of the finished folders, for runs to read"""
    processes: Natural = 0
    """processes that tokenize; 0: one per CPU"""
    shard_mib: NonNegative = 0.0
    """part of a source that becomes a shard, in MiB: the unit of parallel work, and of repeated work after a stop; 0:
    1/256 of the source, at least 64 and at most 1024"""
    show: Natural = 0
    """print this number of examples of each source of conversations, and their trained parts; nothing is written"""


@dataclass(frozen=True)
class PrepareConfig(Config):
    """The config of a run, with a section on how to prepare its data."""

    prepare: Prepare = field(default_factory=Prepare)


import json
import re
import time
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from torchllm.config import Source
from torchllm.config.errors import DataError, RefusedStart
from torchllm.config.schema import RAW_KINDS
from torchllm.config.toml import toml_value
from torchllm.data.corpus import Corpus
from torchllm.data.corpus_header import HEADER, CorpusHeader
from torchllm.data.readers import ReaderSettings, describe_source
from torchllm.data.tokenizer import Tokenizer, describe_documents, load_tokenizer
from torchllm.runtime.error_report import report_errors
from torchllm.runtime.host_limits import usable_cores
from torchllm.runtime.signs_of_life import signs_of_life
from torchllm.runtime.storage import StorageError
from torchllm.tools.prepare.bad_records import check_not_empty
from torchllm.tools.prepare.build import choose_split, warn_of_changes, write_corpus
from torchllm.tools.prepare.cache import plan_corpus
from torchllm.tools.prepare.counts import describe_corpus, untrained
from torchllm.tools.prepare.plan import CorpusPlan, LoadTokenizer
from torchllm.tools.prepare.upload import refuse_other_corpus, upload_corpus


class Prepared(NamedTuple):
    """A corpus that was written."""

    header: CorpusHeader
    seconds: float | None
    """duration; None: it was written earlier"""


def main(config: PrepareConfig) -> None:
    """Tokenize every raw source, and print the tables that read the result.

    Raises RefusedStart for a wrong source or tokenizer, before anything is written; DataError for wrong records.
    """
    load = partial(load_tokenizer, config.data.tokenizer)
    root = Path(config.prepare.folder).resolve()
    try:
        if not config.prepare.folder and not config.prepare.show:
            raise DataError("prepare.folder is empty: say where to write, --prepare.folder=tokens")
        tokenizer = load()
        for line in describe_documents(tokenizer):
            print(line)
        plans = plan_sources(config, tokenizer, root)
        folders = {
            key: root / folder_name(index, source)
            for index, (key, source) in enumerate(config.data.all_sources.items())
            if key in plans
        }
        remote = config.prepare.remote.rstrip("/")
        copies = {key: f"{remote}/{folder.name}" for key, folder in folders.items() if remote}
        for key, url in copies.items():
            refuse_other_corpus(folders[key], url)
    except (DataError, StorageError) as error:
        raise RefusedStart(str(error)) from error
    if config.prepare.show:
        for plan in plans.values():
            show(plan, tokenizer, config.prepare.show)
        return
    processes = config.prepare.processes or usable_cores()
    tables = dict(config.data.all_sources)
    for key, folder in folders.items():
        print_corpus(folder, prepare(plans[key], load, folder, processes, config.data.max_bad_share))
        if key in copies:
            upload_corpus(folder, copies[key])
        path, raw = copies.get(key, str(folder)), tables[key]
        tables[key] = Source(kind="tokens", path=path, weight=raw.weight, max_epochs=raw.max_epochs)
    print("\nTo train on it:\n")
    print(f"[data]\ntokenizer = {json.dumps(config.data.tokenizer)}")
    for key, table in tables.items():
        print(f"\n[[{key.rpartition('.')[0]}]]")
        for name, value in asdict(table).items():
            if name in ("kind", "weight") or value != getattr(Source(), name):
                print(f"{name} = {toml_value(value)}")


def plan_sources(config: PrepareConfig, tokenizer: Tokenizer, root: Path) -> dict[str, CorpusPlan]:
    """Return the plan of each raw source, by its key in the config. Raises DataError for a wrong source."""
    plans = {}
    length = config.training.sequence_length
    settings = ReaderSettings(config.data, config.model.vocab, tokenizer, config.finetune, length)
    pins = root / "revisions" if config.prepare.folder else None
    for key, source in config.data.all_sources.items():
        if source.kind in RAW_KINDS:
            plans[key] = plan_corpus(source, settings, config.prepare.shard_mib, pins)
    return plans


def show(plan: CorpusPlan, tokenizer: Tokenizer, count: int) -> None:
    """Print the first examples of a source of conversations. Raises RefusedStart if none of them can be trained on."""
    name = describe_source(plan.source.kind, plan.source.path)
    if plan.chat is None:
        print(f"{name}: text, all of which is trained")
        return
    from torchllm.tools.prepare.show_conversations import show_examples  # with packages for templates

    examples = list(islice(show_examples(plan, tokenizer), count))
    for example in examples:
        print(f"\n{example.text}")
    if all(example.is_fault for example in examples):
        raise RefusedStart(f"{name}: none of its first {len(examples)} conversations can be trained on")


def folder_name(index: int, source: Source) -> str:
    """Return a folder name for a source: its place in the config, its kind, and the end of its path."""
    stem = re.sub(r"[^A-Za-z0-9]+", "-", Path(source.path).stem).strip("-")
    parts = [str(index), source.kind]
    if stem:
        parts.append(stem)
    return "-".join(parts)


def prepare(plan: CorpusPlan, load: LoadTokenizer, folder: Path, processes: int, max_bad_share: float) -> Prepared:
    """Write the corpus to `folder`, if it is not there yet. max_bad_share: as in `write_corpus`."""
    if (folder / HEADER).exists():
        corpus = Corpus(folder)
        header = corpus.header
        if header.key not in plan.keys:
            raise DataError(
                f"{folder} holds another corpus (other files, tokenizer or settings, or an earlier format): choose "
                "another prepare.folder, or delete that one"
            )
        if reason := untrained(header.counts):
            raise DataError(f"{folder}: {reason}")
        check_not_empty(str(folder), header.documents, header.skipped)
        corpus.check()
        warn_of_changes(plan, folder)
        return Prepared(header, None)
    start = time.perf_counter()
    header = write_corpus(choose_split(plan), load, folder, processes, max_bad_share)
    return Prepared(header, time.perf_counter() - start)


def print_corpus(folder: Path, prepared: Prepared) -> None:
    """Print the size of the corpus in `folder`."""
    header, seconds = prepared
    speed = "already there" if seconds is None else f"{header.text_bytes / 1e6 / seconds:,.1f} MB/s"
    print(f"{folder}: {Corpus(folder).describe()}, {speed}")
    for line in describe_corpus(header):
        print(f"  {line}")
    revision = header.plan["source"].get("revision")
    if revision:
        print(f"  of commit {revision}")
    for reason, count in header.skipped.items():
        print(f"  skipped {count:,} records: {reason}")


if __name__ == "__main__":
    prepare_config = load_sizes(sys.argv[1:], PrepareConfig)
    report_errors()
    with signs_of_life("prepare"):
        main(prepare_config)
