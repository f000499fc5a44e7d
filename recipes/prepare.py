"""Tokenize the raw sources of a config once, in parallel, into shards that any number of runs can train on.

    python recipes/prepare.py CONFIG.toml --prepare.folder=tokens [--prepare.processes=16] [--data.tokenizer=...]

Each raw source becomes one folder. Stopped and started again, it keeps the finished shards (after checking them). At
the end it prints the [[data.sources]] tables that read what it wrote.
"""

import sys
from dataclasses import dataclass, field

from torchllm.config import Config, Natural, Positive, load_config


@dataclass(frozen=True)
class Prepare:
    """What recipes/prepare.py writes."""

    folder: str = ""
    """folder to write to; each source gets a folder in it"""
    processes: Natural = 0
    """processes that tokenize; 0: one a CPU"""
    shard_mib: Positive = 64.0
    """text in a shard, about, in MiB: the unit of parallel work and of starting again"""


@dataclass(frozen=True)
class PrepareConfig(Config):
    """A run's config and what to prepare from it."""

    prepare: Prepare = field(default_factory=Prepare)


import json
import re
import time
from pathlib import Path
from typing import Any

from torchllm.config import Source
from torchllm.data.build import CorpusPlan, TokenizerSpec
from torchllm.data.cache import available_cpus, is_raw, plan_corpus, tokenize_source
from torchllm.data.corpus import HEADER, Corpus
from torchllm.data.error import DataError
from torchllm.data.tokenizer import load_tokenizer


def folder_name(index: int, source: Source) -> str:
    """A folder name for a source: its place in the config, kind, and what its path ends with."""
    tail = re.sub(r"[^A-Za-z0-9]+", "-", Path(source.path).stem).strip("-")
    return "-".join(part for part in (str(index), source.kind, tail) if part)


def prepare(plan: CorpusPlan, spec: TokenizerSpec, folder: Path, processes: int) -> tuple[dict[str, Any], float]:
    """The header of the corpus in `folder`, and the seconds it took to write (0: it was there)."""
    if (folder / HEADER).exists():
        header = Corpus(folder).header
        if header["key"] != plan.key:
            raise DataError(
                f"{folder} holds another corpus (other files, tokenizer or settings): choose another prepare.folder, "
                "or delete that one"
            )
        return header, 0.0
    start = time.perf_counter()
    header = tokenize_source(plan, spec, folder, processes)
    return header, time.perf_counter() - start


def main(config: PrepareConfig) -> None:
    """Prepare every raw source. DataError says what is wrong with one."""
    if not config.prepare.folder:
        raise DataError("prepare.folder is empty: say where to write, --prepare.folder=tokens")
    spec = TokenizerSpec(config.data.tokenizer, config.data.pattern)
    tokenizer = load_tokenizer(config.data.tokenizer, config.data.pattern)
    tables = []
    for index, source in enumerate(config.data.sources):
        folder = Path(config.prepare.folder).expanduser().resolve() / folder_name(index, source)
        if is_raw(source):
            plan = plan_corpus(source, config.data, tokenizer, config.model.vocab, config.prepare.shard_mib)
            header, seconds = prepare(plan, spec, folder, config.prepare.processes or available_cpus())
            speed = f"{header['text_bytes'] / 1e6 / seconds:,.1f} MB/s" if seconds else "it was there already"
            print(f"{folder}: {header['documents']:,} documents, {header['tokens']:,} tokens, {speed}")
            for what, count in header["skipped"].items():
                print(f"  skipped {count:,} records: {what}")
            source = Source(kind="tokens", path=str(folder), weight=source.weight)
        tables.append(source)
    print("\nTo train on it:\n")
    print(f"[data]\ntokenizer = {json.dumps(config.data.tokenizer)}")
    for source in tables:
        path = f"path = {json.dumps(source.path)}\n" if source.path else ""
        print(f'\n[[data.sources]]\nkind = "{source.kind}"\n{path}weight = {source.weight}')


if __name__ == "__main__":
    try:
        main(load_config(sys.argv[1:], schema=PrepareConfig, one_device=True))
    except DataError as error:
        sys.exit(f"error: {error}")
