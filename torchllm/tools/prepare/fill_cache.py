"""Tokenizes a raw source into the cache, at the first run that reads it."""

import json
import shlex
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

from torchllm.config import Data
from torchllm.config.errors import DataError
from torchllm.data.tokenizer import load_tokenizer
from torchllm.runtime.host_limits import usable_cores
from torchllm.tools.prepare.build import choose_split, write_corpus
from torchllm.tools.prepare.corpus_writer import replacing
from torchllm.tools.prepare.hub_rows import raw_mib
from torchllm.tools.prepare.plan import CorpusPlan
from torchllm.tools.prepare.source_files import SOURCE, changes_of, content_of


def refuse_large_source(plan: CorpusPlan, data: Data) -> None:
    """Raise DataError if the raw source of a plan is over data.max_raw_mib, or of the hub and of unknown size."""
    size = raw_mib(plan.source, plan.files)
    if size is None or size > data.max_raw_mib:
        arguments = [word for word in sys.argv[1:] if word != "--check" and not word.startswith("--run.folder=")]
        size_text = "of unknown size" if size is None else f"{size:,.0f} MiB"
        raise DataError(
            f"data.sources: {plan.source.path or plan.source.kind!r} is {size_text}; only {data.max_raw_mib:,.0f} MiB "
            "(data.max_raw_mib) are tokenized at the start of a run. Tokenize it once, then train on kind = 'tokens':\n"
            f"    python recipes/prepare.py {shlex.join(arguments)} --prepare.folder=tokens"
        )


def with_split(plan: CorpusPlan, data: Data) -> CorpusPlan:
    """Return a plan with the split of its corpus. Raises DataError as `refuse_large_source`."""
    refuse_large_source(plan, data)
    return choose_split(plan)


def tokenize_into(folder: Path, plan: CorpusPlan, data: Data) -> None:
    """Write the corpus of a plan into a folder. Raises DataError if its source is over data.max_raw_mib."""
    refuse_large_source(plan, data)
    load = partial(load_tokenizer, data.tokenizer, usable_cores())
    source = _described(plan)  # before it is read: a later change shows
    write_corpus(plan, load, folder, max_bad_share=data.max_bad_share)
    note_source(folder, source)


def _described(plan: CorpusPlan) -> str:
    """Return JSON of the changes and the content of a source; "" if a file cannot be read."""
    with suppress(OSError):
        return json.dumps([changes_of(plan.files), content_of(plan.files)])
    return ""


def note_source(folder: Path, source: str) -> None:
    """Write which text a corpus was made from; a job that shares the cache reads all of it, old or new."""
    with replacing([folder / SOURCE]) as (file,):
        file.write(source.encode())
