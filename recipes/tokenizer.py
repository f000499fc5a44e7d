"""Train a tokenizer on the raw sources of a config, and say how well it splits text that it was not trained on.

    python recipes/tokenizer.py CONFIG.toml --tokenizer.folder=tokenizers/mine [--tokenizer.size=32768]

Byte-level byte-pair encoding of the tokenizers library, split by Llama 3's pattern. The folder gets tokenizer.json and
tokenizer_config.json, with a chat template (ChatML), as transformers reads them. `data.tokenizer =
"FOLDER/tokenizer.json"` uses it. The report is on the documents that runs hold out (data.validation_fraction).
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from torchllm.config import Bound, Config, FilePath, Source
from torchllm.tools.front.resolve import load_sizes


@dataclass(frozen=True)
class TokenizerSection:
    """The tokenizer that recipes/tokenizer.py writes."""

    folder: FilePath = ""
    """folder to write to; it must not hold a tokenizer.json"""
    size: Annotated[int, Bound(at_least=260, at_most=2**20)] = 32768
    """tokens, with the 256 bytes and the special ones"""
    text_mib: Annotated[float, Bound(over=0.0)] = 1024.0
    """text to train on, in MiB: the first bytes of each source, in proportion to its weight"""


@dataclass(frozen=True)
class TokenizerConfig(Config):
    """The config of a run, with a section on its tokenizer."""

    tokenizer: TokenizerSection = field(default_factory=TokenizerSection)


from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Encoder

from torchllm.config.errors import DataError
from torchllm.config.schema import RAW_KINDS
from torchllm.config.stages import mixture_stages, span_of, spans_of
from torchllm.data.tokenizer import Tokenizer, load_tokenizer
from torchllm.runtime.error_report import report_errors
from torchllm.runtime.signs_of_life import signs_of_life
from torchllm.tools.prepare.bad_records import BadShare, RecordTally, check_not_empty
from torchllm.tools.prepare.chosen_files import choose_files
from torchllm.tools.prepare.open_source import open_raw_source
from torchllm.tools.prepare.sources import ShardRange

END, BEGIN_TURN, END_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Llama 3's regular expression for the pieces of a text within which bytes are merged"""
HELD_OUT_MIB = 8
"""most held-out text that the report is on"""


def main(config: TokenizerConfig) -> None:
    """Train, write and report. Raises DataError for a wrong source or folder."""
    folder = Path(config.tokenizer.folder)
    if not config.tokenizer.folder:
        raise DataError("tokenizer.folder is empty: say where to write, --tokenizer.folder=tokenizers/mine")
    if (folder / "tokenizer.json").exists():
        raise DataError(f"{folder} holds a tokenizer.json already: choose another tokenizer.folder, or delete that one")
    held_out: list[str] = []
    encoder = train_encoder(texts(config, held_out), config.tokenizer.size)
    write_folder(encoder, folder)
    print_report(config, load_tokenizer(str(folder / "tokenizer.json")), held_out)


def texts(config: TokenizerConfig, held_out: list[str]) -> Iterator[str]:
    """Yield the text to train on, in blocks; `held_out` gets the text of other documents. Raises DataError."""
    shares = source_shares(config)
    for index, source in enumerate(config.data.sources):
        if source.kind not in RAW_KINDS or source.messages_key:
            raise DataError(f"data.sources.{index}: a tokenizer is trained on text, this source has none")
        if shares[index]:
            yield from source_texts(source, config, shares[index], held_out)


def source_shares(config: TokenizerConfig) -> list[float]:
    """Return the share of each source in the training sequences, over all stages."""
    shares = [0.0] * len(config.data.sources)
    steps, spans = config.training.steps, spans_of(config.data, config.training)
    total = span_of(spans, steps).after(steps).tokens
    for span, mixture in zip(spans, mixture_stages(config.data), strict=True):
        tokens = span.after(min(span.until or steps, steps)).tokens - span.before.tokens
        for index, weight in enumerate(mixture.weights):
            shares[index] += weight / sum(mixture.weights) * max(0, tokens) / total
    return shares


def source_texts(source: Source, config: TokenizerConfig, share: float, held_out: list[str]) -> Iterator[str]:
    """Yield the text of a source up to its share. Raises DataError for bad records as recipes/prepare.py does."""
    data, is_stdlib = config.data, source.kind == "stdlib"
    opened = open_raw_source(source, choose_files(source).train)
    tally = RecordTally(source, "skip" if is_stdlib else data.on_bad_record)
    skipped: Counter[str] = Counter()
    name, trained = source.path or source.kind, 0
    left, left_out = config.tokenizer.text_mib * 2**20 * share, HELD_OUT_MIB * 2**20 * share
    held_out_before = len(held_out)
    for record in opened.records(ShardRange(0, 0, opened.total)):
        if record.fault:
            tally.bad(record)
            skipped[record.fault] += 1
            continue
        if record.ids is not None:
            raise DataError(
                f"{record.origin.describe()}: holds token ids, and a tokenizer is trained on text: set text_key of "
                "this source to a column of text, or take the source out of data.sources"
            )
        tally.good(record)
        is_held_out = record.is_held_out(data.validation_fraction)
        for text in record.blocks():
            size = len(text.encode())
            if not is_held_out and left > 0:
                left -= size
                trained += size
                yield text
            elif is_held_out and left_out > 0:
                left_out -= size
                held_out.append(text)
        if left <= 0:
            break
    if not trained and len(held_out) > held_out_before:  # all would be, as may happen to one file
        del held_out[held_out_before:]
        yield from source_texts(source, replace(config, data=replace(data, validation_fraction=0.0)), share, held_out)
        return
    tally.finish()
    bad_share = BadShare(1.0 if is_stdlib else data.max_bad_share)
    bad_share.add(tally.tallies())
    bad_share.finish()
    check_not_empty(name, trained, skipped)
    for fault, count in skipped.items():
        print(f"{name}: skipped {count:,} records: {fault}")


def train_encoder(documents: Iterator[str], size: int) -> Encoder:
    """Return a byte-level BPE of `size` tokens."""
    encoder = Encoder(models.BPE())
    splits = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    encoder.pre_tokenizer = pre_tokenizers.Sequence([splits, byte_level])
    encoder.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END, BEGIN_TURN, END_TURN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    encoder.train_from_iterator(documents, trainer)
    if encoder.get_vocab_size() < size:
        print(f"the text has pairs for {encoder.get_vocab_size():,} tokens only, not for {size:,}")
    return encoder


def write_folder(encoder: Encoder, folder: Path) -> None:
    """Write the files that transformers reads."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    encoder.save(str(folder / "tokenizer.json"))


def print_report(config: TokenizerConfig, trained: Tokenizer, held_out: list[str]) -> None:
    """Print how well the tokenizer splits the held-out text, and the keys of a config that uses it."""
    if held_out:
        print_comparison(config, trained, held_out)
    else:
        print(
            "no document is held out, so nothing was measured: read more documents; a delimiter makes many of one file"
        )
    rounded = -(-trained.vocab // 128) * 128
    print(f"\n[model]\nvocab = {rounded}  # a multiple of 128: parallel.tp and the kernels divide it")
    print(f"\n[data]\ntokenizer = {json.dumps(str(Path(config.tokenizer.folder) / 'tokenizer.json'))}")


def print_comparison(config: TokenizerConfig, trained: Tokenizer, held_out: list[str]) -> None:
    """Print bytes per token and used ids of the trained and the configured tokenizer on the held-out text."""
    size = sum(len(text.encode()) for text in held_out)
    print(f"{config.tokenizer.folder}: {trained.vocab:,} tokens; {size / 2**20:.2f} MiB of held-out text:")
    rows = {"trained": trained, config.data.tokenizer: load_tokenizer(config.data.tokenizer)}
    for name, tokenizer in rows.items():
        documents = tokenizer.encode_documents(held_out)
        tokens = sum(len(ids) for ids in documents)
        used = len({int(token) for ids in documents for token in ids})
        print(f"  {size / tokens:.3f} bytes per token, {used:,} of {tokenizer.vocab:,} ids used: {name}")


if __name__ == "__main__":
    tokenizer_config = load_sizes(sys.argv[1:], TokenizerConfig)
    report_errors()
    with signs_of_life("tokenizer"):
        main(tokenizer_config)
