"""The cache of corpora: small raw sources are tokenized at the first run."""

import json
import logging
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from torchllm.config import Data, Source
from torchllm.config.errors import DataError
from torchllm.config.files import cache_root
from torchllm.data.checked_file import DamagedFile
from torchllm.data.corpus import Corpus
from torchllm.data.corpus_header import HEADER
from torchllm.data.readers import ReaderSettings, verified_records
from torchllm.tools.prepare.chosen_files import choose_files
from torchllm.tools.prepare.plan import CorpusPlan, may_write_calls
from torchllm.tools.prepare.source_files import SOURCE, changes_of, content_of

log = logging.getLogger(__name__)


def plan_corpus(
    source: Source, settings: ReaderSettings, shard_mib: float = 0.0, pins: Path | None = None
) -> CorpusPlan:
    """Return the plan of the corpus of a raw source; `shard_mib` as in `shard_size_mib`.

    pins: folder that remembers the commits of data sets of the hub; None: in the cache.

    Bad records of Python's standard library are always skipped, because no user can fix them. Raises DataError if the
    source has no file or cannot be found, or model.vocab is too small for the tokenizer's special tokens.
    """
    data, vocab, tokenizer, finetune, sequence_length = settings
    assert tokenizer is not None
    if max(*tokenizer.begins, tokenizer.end, 0) >= vocab:
        raise DataError(
            f"model.vocab = {vocab} has no room for the special tokens of data.tokenizer {tokenizer.name!r}: "
            f"set it to {tokenizer.vocab} or more"
        )
    fim = chat = None
    if data.fim_rate and source in data.sources:  # data.validation stays whole
        from torchllm.tools.prepare.fill_in_the_middle import plan_fim  # most text has none

        fim = plan_fim(data, tokenizer, vocab)
    if source.messages_key:
        if finetune is None:
            raise DataError(f"data.sources: {source.path!r} holds conversations: train on them by recipes/finetune.py")
        from torchllm.tools.prepare.chat.plan import plan_chat  # with packages for templates

        chat = plan_chat(data.tokenizer, finetune, sequence_length)
    revision = ""
    if source.kind == "hub":
        from torchllm.tools.prepare.hub_rows import hub_folder_version, pin_hub_source

        source = pin_hub_source(source, pins or cache_root(data) / "revisions")
        revision = hub_folder_version(source)
    files = choose_files(source, by_name=source not in data.validation)
    return CorpusPlan(
        source=replace(source, weight=1.0, max_epochs=0.0),
        files=[*files.train, *files.held_out],
        held_out=len(files.held_out),
        revision=revision,
        tokenizer=tokenizer.fingerprint,
        vocab=min(vocab, tokenizer.vocab),
        validation_fraction=data.validation_fraction,
        on_bad_record="skip" if source.kind == "stdlib" else data.on_bad_record,
        shard_mib=shard_mib,
        chat=chat,
        fim=fim,
        reads_calls=chat is not None and may_write_calls(chat.template),
    )


def cached_folder(data: Data, plan: CorpusPlan) -> Path:
    """Return the cache folder of the corpus of a plan; it depends on the absolute paths of the files."""
    if plan.source.path and plan.source.kind != "hub":
        files = [file._replace(path=os.path.abspath(file.path)) for file in plan.files]
        plan = replace(plan, source=replace(plan.source, path=os.path.abspath(plan.source.path)), files=files)
    return cache_root(data) / f"{plan.source.kind}-{plan.key}"


def is_cached(folder: Path) -> bool:
    """Return whether a folder of the cache holds a corpus. Raises DataError if it may not be read."""
    try:
        (folder / HEADER).open("rb").close()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except PermissionError as error:
        raise DataError(
            f"data.cache: {folder} cannot be read ({error.strerror}): another user has made it. Set data.cache to a "
            "folder of yours, or ask its owner to let you read it"
        ) from error
    return True


def find_cached(data: Data, plan: CorpusPlan) -> CorpusPlan | None:
    """Return a plan with the split of its corpus in the cache: by the text of documents, or the last tokens.

    None if there is no corpus of it. Raises DataError if the cache cannot be read.
    """
    candidates = (replace(plan, last_tokens=True), plan)
    return next((candidate for candidate in candidates if is_cached(cached_folder(data, candidate))), None)


def prepare_cached(plan: CorpusPlan, data: Data) -> Path:
    """Return the folder with the corpus of a raw source, after tokenizing the source if it is not cached or damaged.

    Raises DataError if it has to be tokenized and is over data.max_raw_mib.
    """
    if cached := find_cached(data, plan):
        plan = cached
    else:
        from torchllm.tools.prepare.fill_cache import with_split

        plan = with_split(plan, data)
    folder = cached_folder(data, plan)
    if is_cached(folder):
        damage = _find_damage(folder, data)
        if damage is None:
            _refuse_other_text(folder, plan)
            return folder
        log.warning("data.cache: %s; its source is tokenized again", damage)
    from torchllm.tools.prepare.fill_cache import tokenize_into  # of no use to a run whose corpora are cached

    tokenize_into(folder, plan, data)
    return folder


def _refuse_other_text(folder: Path, plan: CorpusPlan) -> None:
    """Raise DataError if a corpus in the cache was made from other text, though the files have its sizes and times."""
    try:
        recorded, content = json.loads((folder / SOURCE).read_bytes())
        changes = changes_of(plan.files)
        if changes == recorded:
            return
        if content == content_of(plan.files):
            from torchllm.tools.prepare.fill_cache import note_source  # of no use to a source that was not touched

            with suppress(OSError):  # of another user: then the next start reads the text again
                note_source(folder, json.dumps([changes, content]))
            return
    except (OSError, ValueError, TypeError):  # it was damaged, or removed
        return
    raise DataError(
        f"data.sources: the files of {plan.source.path or plan.source.kind!r} have other text than when {folder} was "
        "made from them, but the same sizes and modification times: `touch` one of them, and they are tokenized again"
    )


def _find_damage(folder: Path, data: Data) -> str | None:
    """Return the fault of a corpus in the cache, None if it is whole; files that were verified earlier are not read."""
    try:
        corpus = Corpus(folder, verified_records(data))
        for shard in corpus.check():
            corpus.verify(*shard)
    except DamagedFile as damage:
        return f"{damage.path} {damage.fault}"
    except DataError as error:
        return str(error)
    return None
