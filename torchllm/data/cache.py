"""From a source of the config to an open corpus: tokenized once a machine and cached, small sources only."""

import os
import shlex
import shutil
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchllm.config import Data, Source
from torchllm.data.build import CorpusPlan, TokenizerSpec, write_corpus
from torchllm.data.corpus import HEADER, Corpus, Sequences, Synthetic
from torchllm.data.error import DataError
from torchllm.data.sources import raw_mib, read_source, source_files
from torchllm.data.tokenizer import Tokenizer

_SHARD_MIB = 64.0


def available_cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def is_raw(source: Source) -> bool:
    """Whether a source has to be tokenized."""
    return source.kind not in ("tokens", "synthetic")


def plan_corpus(
    source: Source, data: Data, tokenizer: Tokenizer, vocab: int, shard_mib: float = _SHARD_MIB
) -> CorpusPlan:
    """What the corpus of a raw source is made of. DataError when it has no file, or `vocab` is too small for any text.

    `vocab` is model.vocab. The standard library is nobody's to mend: what is bad in it is always skipped.
    """
    if max(tokenizer.begin, tokenizer.end) >= vocab:
        raise DataError(
            f"model.vocab = {vocab} has no room for the special tokens of data.tokenizer {tokenizer.name!r}: "
            f"set it to {tokenizer.vocab} or more"
        )
    return CorpusPlan(
        source=replace(source, weight=1.0),
        files=source_files(source),
        tokenizer=tokenizer.fingerprint,
        vocab=min(vocab, tokenizer.vocab),
        validation_fraction=data.validation_fraction,
        on_bad_record="skip" if source.kind == "stdlib" else data.on_bad_record,
        shard_mib=shard_mib,
    )


def tokenize_source(
    plan: CorpusPlan, encoder: TokenizerSpec, folder: Path, processes: int = 1, raw: str = "raw"
) -> dict[str, Any]:
    """Read the plan's source and write its corpus; the header.

    What was read lies in `folder`/`raw` until the corpus is whole, so that starting again need not read it again;
    processes that make one corpus at the same time need names of their own for it.
    """
    header = write_corpus(read_source(plan.source, folder / raw, processes), plan, encoder, folder, processes)
    shutil.rmtree(folder / raw, ignore_errors=True)
    return header


def cache_root(data: Data) -> Path:
    """The cache folder: data.cache, or torchllm under the user's."""
    users = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "torchllm"
    return Path(data.cache or users).expanduser()


def cached_folder(data: Data, plan: CorpusPlan) -> Path:
    """Where the corpus of a plan is cached."""
    return cache_root(data) / f"{plan.source.kind}-{plan.key}"


def prepare_cached(plan: CorpusPlan, data: Data) -> None:
    """Tokenize a raw source into the cache, unless it is there. DataError when it is over data.max_raw_mib."""
    folder = cached_folder(data, plan)
    if (folder / HEADER).is_file():
        return
    size = raw_mib(plan.source, plan.files)
    if size is None or size > data.max_raw_mib:
        arguments = shlex.join(sys.argv[1:])
        raise DataError(
            f"data.sources: {plan.source.path or plan.source.kind!r} is "
            f"{'of unknown size' if size is None else f'{size:,.0f} MiB'}; only {data.max_raw_mib:,.0f} MiB "
            "(data.max_raw_mib) are tokenized at the start of a run. Tokenize it once, then train on kind = 'tokens':\n"
            f"    python recipes/prepare.py {arguments} --prepare.folder=tokens"
        )
    mine = f"raw-{socket.gethostname()}-{os.getpid()}"  # other nodes, other runs may be at it too
    tokenize_source(plan, TokenizerSpec(data.tokenizer, data.pattern, available_cpus()), folder, raw=mine)


def open_source(source: Source, data: Data, tokenizer: Tokenizer | None, vocab: int) -> Sequences:
    """An open source. DataError when its tokens are not of this tokenizer or do not fit into `vocab`.

    `tokenizer` is None only when every source is synthetic, which needs none.
    """
    if tokenizer is None:
        return Synthetic(vocab)
    if source.kind == "synthetic":
        return Synthetic(min(vocab, tokenizer.vocab))
    corpus = Corpus(cached_folder(data, plan_corpus(source, data, tokenizer, vocab)) if is_raw(source) else source.path)
    if corpus.header["tokenizer"] != tokenizer.fingerprint:
        raise DataError(
            f"{corpus.folder} holds tokens of {corpus.header['tokenizer']!r}, but data.tokenizer is "
            f"{data.tokenizer!r} ({tokenizer.fingerprint!r}): set it to the one the tokens were made with"
        )
    if corpus.header["max_token"] >= vocab:
        raise DataError(f"{corpus.folder} holds token id {corpus.header['max_token']} >= model.vocab = {vocab}")
    return corpus
