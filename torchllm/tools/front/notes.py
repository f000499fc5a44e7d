"""Lines about a training whose user may not have meant what its config says. They change nothing."""

from collections.abc import Iterator
from typing import Any

from torchllm.tools.config.draft import Draft
from torchllm.tools.config.idle import describe_idle_keys, keys_of_other_recipes
from torchllm.tools.launch.compiler import AMD_DRIVER, count_gpus

MOST_OF_BYTES = 512
"""rows of a vocabulary of bytes with special tokens, at most"""


def notes_before_start(draft: Draft[Any], is_finetuning: bool, reads_sources: bool) -> Iterator[str]:
    """Yield the lines. is_finetuning: the recipe is recipes/finetune.py. reads_sources: as in `load_configs`."""
    if not draft.errors:
        yield from _longer_sequences(draft)
        yield from _single_chunk(draft)
    yield from _keys_of_other_recipes(draft, is_finetuning)
    yield from _unprinted_sample(draft)
    if reads_sources:
        yield from _data_of_a_plan(draft)
    yield from _unused_amd_driver(draft)


def _longer_sequences(draft: Draft[Any]) -> Iterator[str]:
    """Note that the run trains on longer sequences than its model says."""
    config = draft.config
    if config.longest_text > config.model.max_sequence_length:
        yield draft.located(
            ("training", "sequence_length"),
            f"{config.training.sequence_length} is over model.max_sequence_length {config.model.max_sequence_length}: "
            "an export says the longer one, and a text may be as long",
        )


def _single_chunk(draft: Draft[Any]) -> Iterator[str]:
    """Note that training.loss_chunk does not divide the tokens of a micro batch."""
    training, path = draft.config.training, ("training", "loss_chunk")
    tokens = training.micro_batch_size * training.sequence_length // draft.config.parallel.cp
    if training.loss_chunk >= tokens and draft.is_asked_about(path):
        message = f"{training.loss_chunk} is not under the {tokens} tokens of a micro batch, so it divides nothing"
        yield draft.located(path, message)


def _keys_of_other_recipes(draft: Draft[Any], is_finetuning: bool) -> Iterator[str]:
    """Note, on one line, the keys that a training of this recipe does not read."""
    idle = keys_of_other_recipes(draft.config, is_finetuning)
    found = [idle_key for idle_key in idle if draft.is_asked_about(tuple(idle_key.key.split(".")))]
    if found and not draft.config.run.dry_run:
        yield describe_idle_keys(found, lambda key: draft.place(tuple(key.split("."))))


def _unprinted_sample(draft: Draft[Any]) -> Iterator[str]:
    """Note that a process which run_train.sh has not started prints no sample, if its command line asks for one."""
    path = ("generate", "after_training")
    if draft.config.generate.after_training and draft.is_overridden(path) and not draft.arguments.check:
        yield draft.located(path, "does nothing in this run: it is run_train.sh that prints the sample")


def _data_of_a_plan(draft: Draft[Any]) -> Iterator[str]:
    """Note that a run of a published model's size trains on the stand-in for a corpus that plan.py writes."""
    data, vocab = draft.config.data, draft.config.model.vocab
    is_stand_in = data.tokenizer == "bytes" and all(source.kind == "stdlib" for source in data.sources)
    if is_stand_in and vocab > MOST_OF_BYTES and not draft.is_resolved and not draft.config.run.dry_run:
        yield (
            f"{draft.file}: data.sources: is Python's standard library as bytes, to try the layout, and model.vocab = "
            f"{vocab:,} is of another tokenizer: put your corpus and tokenizer in its place"
        )


def _unused_amd_driver(draft: Draft[Any]) -> Iterator[str]:
    """Note that the run is on the CPU of a machine that may have AMD GPUs; a processor's graphics unit looks alike."""
    config = draft.config
    if config.run.device == "auto" and not config.run.dry_run and AMD_DRIVER.exists() and count_gpus() == 0:
        yield (
            f"{draft.file}: run.device: auto is the CPU, but this machine has AMD's driver ({AMD_DRIVER}): to use its "
            "GPUs, install torch's build for ROCm, and join the group of that file"
        )
