"""Find faults of a run outside its config: files, folders and the checkpoint that it names. No torch.

`torchllm.tools.front.resolve` calls it before any process is started. Facts that only the network or the text can tell
are listed as not checked. The libraries that read tokenizers and token shards are imported only by runs with some.
"""

import math
import os
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from torchllm.checkpoint.manifest import CheckpointError, read_manifest, step_folders, step_of
from torchllm.config import Config, Source
from torchllm.config.errors import DataError, UserError
from torchllm.config.files import cache_root, is_url
from torchllm.config.schema import IN_PLACE_KINDS
from torchllm.tools.config.read import ConfigError, config_error
from torchllm.tools.launch.compiler import count_gpus

if TYPE_CHECKING:
    from torchllm.checkpoint.index import TensorEntry
    from torchllm.data.corpus import SequenceSource
    from torchllm.data.readers import ReaderSettings
    from torchllm.data.tokenizer import Tokenizer
    from torchllm.tools.prepare.plan import CorpusPlan

BYTES_VOCAB = 258
"""ids of data.tokenizer = "bytes" """
_BEGIN_AND_END = 2
"""tokens around each document"""
_MOST_HELD_OUT = 0.5
"""largest data.validation_fraction"""
UPDATES_ALONE = (
    "holds low-rank updates, and not the weights below them: export its run, which merges both (python "
    "recipes/export.py RUN_FOLDER --export.folder=merged), and set model.from_hf to that folder in place of this key"
)
OF_ALL_SOURCES = ("data.cache", "data.fim_tokens", "data.packing", "finetune.chat_template")
"""keys with which errors of a source may begin, although they are not its own"""
NEW_FOLDERS = "runs"
"""where a run without run.folder gets one"""
WRITTEN = ("", "checkpoints", "tensorboard", "profile", "trackers")
"""folders that a run creates files in, relative to the run folder"""


@dataclass
class Inspection:
    """Findings before a start."""

    problems: list[ConfigError] = field(default_factory=list)
    """faults that would end the run"""
    unchecked: list[str] = field(default_factory=list)
    """parts that could not be checked, and why"""

    def report(self, key: str, message: str) -> None:
        """Add a problem."""
        self.problems.append(config_error(key, message))


def inspect_training(
    config: Config, wrong: Collection[str] = (), *, is_elsewhere: bool = False, reads_sources: bool = True
) -> Inspection:
    """Look at everything that a training run needs, except parts that depend on keys with a wrong value.

    is_elsewhere: the run is for another machine, whose GPUs and packages are unknown. reads_sources: False for a recipe
    with its own data.
    """
    inspection = Inspection()
    sections = {key.partition(".")[0] for key in wrong}
    if "run" not in sections:
        _inspect_run_folder(config, inspection)
    if "metrics" not in sections:
        _inspect_trackers(config, inspection)
    if not sections & {"run", "checkpoint"}:
        _inspect_named_checkpoint(config, inspection)
    if not wrong:
        _inspect_initial_checkpoint(config, inspection)
    if not sections & {"run", "model", "training", "float8"}:
        _inspect_kernels(config, inspection, trains=True, is_elsewhere=is_elsewhere)
    if reads_sources:
        _DataInspector(config, inspection, wrong).inspect()
    if config.evaluate.tasks_interval and not sections & {"evaluate", "data"}:
        _inspect_tasks(config, inspection, is_elsewhere=is_elsewhere)
    if config.generate.after_training and config.generate.prompts_file and "generate" not in sections:
        _inspect_prompts(config, inspection)
    return inspection


def inspect_used_model(config: Config) -> Inspection:
    """Check the inputs of a recipe that reads the weights of a model: a run's checkpoint, and the tokenizer."""
    inspection = Inspection()
    resume = config.checkpoint.resume
    root = Path(config.run.folder) / "checkpoints"
    is_published = config.model.from_hf and not config.run.folder
    if resume not in ("auto", "none"):
        _inspect_step_folder(Path(resume), inspection)
    elif not is_published and not step_folders(root):
        inspection.report("run.folder", f"{root} holds no checkpoint; name a run, or checkpoint.resume")
    if config.data.tokenizer != "bytes":
        _DataInspector(config, inspection).load_tokenizer()
    if config.trained.only_updates:
        _inspect_frozen_weights(config, inspection)
    return inspection


def inspect_generation(config: Config) -> Inspection:
    """Check the inputs of recipes/generate.py: besides weights and tokenizer the prompts, and a new file for texts."""
    inspection = inspect_used_model(config)
    _inspect_kernels(config, inspection, trains=False)
    _inspect_processes(inspection)
    _inspect_prompts(config, inspection)
    output = config.generate.output
    if output and os.path.lexists(output):
        inspection.report("generate.output", f"{output!r} exists, and nothing is overwritten: name another file")
    elif output and (reason := why_unwritable(Path(output).absolute().parent)):
        inspection.report("generate.output", f"{output!r} cannot be written: {reason}")
    return inspection


def _inspect_kernels(config: Config, inspection: Inspection, trains: bool, is_elsewhere: bool = False) -> None:
    """Check that the device and the packages are here that the config names; only torch knows its kernels for a GPU.

    trains: with a backward pass. is_elsewhere: as in `inspect_training`.
    """
    kernels, device, float8 = config.model.attention_kernels, config.run.device, trains and config.float8.is_on
    attention = "flash" if "flash" in kernels else "flex" if "flex" in kernels else ""
    asked = {"run.device": device == "cuda", "model.attention": attention != "", "float8.recipe": float8}
    if not any(asked.values()):
        return
    is_cpu = device == "cpu" or (not is_elsewhere and count_gpus() == 0)
    if is_cpu and device == "cuda":
        inspection.report("run.device", 'is "cuda", but no driver shows this process a GPU: use "auto" or "cpu"')
    elif is_cpu and (attention == "flash" or (attention == "flex" and trains)):
        inspection.report("model.attention", f'"{attention}" needs a GPU, and this is a CPU: use "sdpa" or "eager"')
    elif attention == "flash" and not (is_elsewhere or find_spec("flash_attn") or find_spec("flash_attn_interface")):
        advice = "install an extra (pip install -e '.[flash]', which compiles it, or '.[flash4]'), or use \"sdpa\""
        inspection.report("model.attention", f'"flash" needs the package flash-attn: {advice}')
    if float8 and not (is_elsewhere or find_spec("torchao")):
        advice = "install the extra (pip install -e '.[float8]'), or set it to none"
        inspection.report("float8.recipe", f"needs the package torchao: {advice}")
    if float8 and is_cpu and config.training.dtype == "auto":
        advice = "set it to bfloat16 (a CPU emulates float8, slowly), or float8.recipe to none"
        inspection.report("training.dtype", f"auto is float32 on a CPU, and float8 rounds bfloat16: {advice}")
    if not is_cpu:
        keys = ", ".join(key for key, is_asked in asked.items() if is_asked)
        inspection.unchecked.append(f"{keys}: whether torch has kernels for the GPUs of the run")


def _inspect_processes(inspection: Inspection) -> None:
    """Check that a recipe which runs in one process is not started in several."""
    ranks = os.environ.get("WORLD_SIZE", "1")
    if ranks != "1":
        message = f"this recipe uses one device, and a launcher has started {ranks} processes: start it without one"
        inspection.report("run.device", message)


def _inspect_prompts(config: Config, inspection: Inspection) -> None:
    """Check that the file of prompts can be read."""
    from torchllm.tools.front.prompts import read_prompts  # of no use to other runs

    try:
        read_prompts(config.generate)
    except UserError as error:
        inspection.report("generate.prompts_file", str(error).removeprefix("generate.prompts_file: "))


def inspect_export(config: Config) -> Inspection:
    """Check the inputs of an export: besides weights and tokenizer a new folder, and a family that the model fits."""
    inspection = inspect_used_model(config)
    _inspect_processes(inspection)
    folder = config.export.folder
    if not folder:
        inspection.report("export.folder", "is missing: name a new folder for the model, --export.folder=FOLDER")
    elif os.path.lexists(folder):
        inspection.report("export.folder", f"{folder!r} exists, and nothing is overwritten: name another folder")
    elif reason := why_unwritable(Path(folder).absolute().parent):
        inspection.report("export.folder", f"{folder!r} cannot be written: {reason}")
    if config.export.adapter and config.export.average > 1:
        inspection.report(
            "export.average",
            f"is {config.export.average}, but a mean of low-rank updates has another rank: set it to 1, or leave out "
            "export.adapter, and the mean of the merged models is written",
        )
    _inspect_exported_model(config, inspection)
    return inspection


def inspect_evaluation(config: Config) -> Inspection:
    """Check the inputs of an evaluation: checkpoint and tokenizer; for tasks also the harness."""
    inspection = inspect_used_model(config)
    _inspect_kernels(config, inspection, trains=False)
    if config.evaluate.tasks:
        _inspect_tasks(config, inspection)
        if reason := why_unwritable(Path(config.run.folder)):
            inspection.report("run.folder", f"{config.run.folder!r} cannot be written: {reason}")
    return inspection


def _inspect_tasks(config: Config, inspection: Inspection, *, is_elsewhere: bool = False) -> None:
    """Check that the harness is there, the folders of tasks, and that the model knows text."""
    if find_spec("lm_eval") is None and not is_elsewhere:
        inspection.report("evaluate.tasks", "need the package lm-eval: pip install 'torchllm[lm-eval]'")
    for task in config.evaluate.tasks:
        if os.path.isdir(task) and not list(Path(task).glob("*.yaml")):
            inspection.report("evaluate.tasks", f"the folder {task!r} has no .yaml file")
    if config.data.sources and all(source.kind == "synthetic" for source in config.data.sources):
        inspection.report("evaluate.tasks", "are texts, and the model has no tokenizer: its data are random tokens")


def _inspect_frozen_weights(config: Config, inspection: Inspection) -> None:
    """Check that frozen weights are there that no checkpoint holds; download a published model's."""
    from torchllm.tools.hub.hub import find_hub_model
    from torchllm.tools.hub.safetensors_header import HubFileError

    initial = config.checkpoint.initial
    if initial and not Path(initial).is_dir():
        inspection.report("checkpoint.initial", f"{initial!r} is no folder: its frozen weights are not there")
    if config.model.from_hf:
        try:
            find_hub_model(config.model.from_hf, weights=True, may_download=True)
        except HubFileError as error:
            inspection.report("model.from_hf", f"its frozen weights are not there: {error}")


def _inspect_exported_model(config: Config, inspection: Inspection) -> None:
    """Check that a run has the checkpoints that are exported, and that a family of models has the form of its model."""
    from torchllm.tools.hub.config_json import NoFamily, family_to_export
    from torchllm.tools.hub.exported import checkpoints_to_export, published_origin

    if inspection.problems:
        return
    try:
        newest, *_ = checkpoints_to_export(config)
        origin = published_origin(read_manifest(newest).record)
        family_to_export(config.model, origin.model_type)
    except CheckpointError as error:
        inspection.report("export.average", str(error).removeprefix("export.average: "))
    except NoFamily as error:
        inspection.report("model.family", str(error))


def why_unwritable(folder: Path) -> str:
    """Return why no file can be created in a folder, or in the nearest one above it that exists; "" if one can.

    It creates a file without a name: a permission says nothing about a read-only file system or a full one.
    """
    place = folder.absolute()
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    try:
        tempfile.TemporaryFile(dir=place).close()
    except OSError as error:
        return f"{place}: {error.strerror}"
    return ""


def _inspect_run_folder(config: Config, inspection: Inspection) -> None:
    """Check that the run can write where it will."""
    folder = Path(config.run.folder or NEW_FOLDERS)
    for reason in dict.fromkeys(why_unwritable(folder / name) for name in WRITTEN):
        if reason:
            inspection.report("run.folder", f"{str(folder)!r} cannot be written: {reason}")
    metrics = folder / "metrics.jsonl"
    if os.path.exists(metrics) and not os.access(metrics, os.W_OK):
        inspection.report("run.folder", f"{str(folder)!r} cannot be written: {metrics}: Permission denied")


def _inspect_trackers(config: Config, inspection: Inspection) -> None:
    """Check that the packages of the run's experiment trackers are installed."""
    for name in config.metrics.trackers:
        if find_spec(name) is None:
            inspection.report(f"metrics.{name}", f"the package {name} is missing: pip install 'torchllm[{name}]'")


def _inspect_named_checkpoint(config: Config, inspection: Inspection) -> None:
    """Check the checkpoint to resume from, if the config names one; of "auto" a damaged one is passed over."""
    resume = config.checkpoint.resume
    if resume == "auto":
        return
    folders = step_folders(Path(config.run.folder or NEW_FOLDERS) / "checkpoints")
    if resume == "none":
        if folders:
            inspection.report(
                "checkpoint.resume", f'is "none", but {folders[0]} exists: use "auto", or another run.folder'
            )
        return
    step = _inspect_step_folder(Path(resume), inspection)
    if step is not None and folders and step_of(folders[0]) > step:
        inspection.report(
            "checkpoint.resume",
            f"names step {step}, but {folders[0]} is newer and would be in the way: set another run.folder, or move "
            "the newer ones away",
        )


def _inspect_step_folder(folder: Path, inspection: Inspection) -> int | None:
    """Check manifest and file sizes of a checkpoint; return its step. None after a problem."""
    from torchllm.checkpoint.verify import check_sizes  # imports numpy

    try:
        manifest = read_manifest(folder)
        damages = check_sizes(folder, manifest)
    except (CheckpointError, OSError) as error:
        damages = [str(error)]
    for damage in damages:
        inspection.report("checkpoint.resume", damage)
    return None if damages else manifest.step


def _inspect_initial_checkpoint(config: Config, inspection: Inspection) -> None:
    """Check the checkpoint whose weights a fresh run starts from, and that its model is the run's."""
    initial = config.checkpoint.initial
    if not initial:
        return
    may_resume = config.checkpoint.resume != "none"
    if may_resume and config.run.folder and step_folders(Path(config.run.folder) / "checkpoints"):
        return
    if may_resume and config.checkpoint.remote and not os.path.exists(initial):  # a copy there is newer
        inspection.unchecked.append(
            f"checkpoint.initial: {initial} is missing; {config.checkpoint.remote} may have a checkpoint to resume"
        )
        return
    from torchllm.checkpoint.index import INDEX, parse_index  # imports numpy
    from torchllm.checkpoint.verify import check_sizes
    from torchllm.facts.parameters import is_low_rank_factor
    from torchllm.facts.shapes import parameter_shapes

    folder = next(iter(step_folders(Path(initial) / "checkpoints")), Path(initial))
    try:
        manifest = read_manifest(folder)
        damages = check_sizes(folder, manifest)
        if not damages:
            stored = parse_index((folder / INDEX).read_bytes(), folder / INDEX).tensors
            weights = [key for key in stored if key.startswith("model.")]
            if weights and all(map(is_low_rank_factor, weights)):
                damages = [f"{folder} {UPDATES_ALONE}"]
            else:
                model = replace(config.model, experts=0) if config.model.upcycle else config.model
                damages = _differing_shapes(parameter_shapes(model), stored)
    except (CheckpointError, OSError) as error:
        damages = [str(error)]
    for damage in damages:
        inspection.report("checkpoint.initial", damage)


def _differing_shapes(shapes: Mapping[str, tuple[int, ...]], stored: "Mapping[str, TensorEntry]") -> list[str]:
    """Return a line for each parameter of a model that a checkpoint lacks, or has in another shape."""
    lines = []
    for name, shape in shapes.items():
        entry = stored.get(f"model.{name}")
        if entry is None:
            lines.append(f"{name}: missing in the checkpoint, {list(shape)} by [model]")
        elif entry.grid.shape != shape:
            lines.append(f"{name}: {list(entry.grid.shape)} in the checkpoint, {list(shape)} by [model]")
    return lines


class _DataInspector:
    """Looks at tokenizer and sources of a run."""

    def __init__(self, config: Config, inspection: Inspection, wrong: Collection[str] = ()) -> None:
        """wrong: keys with an error; parts that depend on them are not looked at."""
        self.wrong = wrong
        self.config = config
        self.data = config.data
        self.inspection = inspection
        has_random_tokens = any(source.kind == "synthetic" for source in config.data.all_sources.values())
        self.held_out = None if has_random_tokens or self.data.validation else 0
        """held-out sequences of all sources; None: unknown, or of no matter"""
        self.tokens: dict[str, int] = {}
        """tokens of sources that hold some out, by their keys"""

    def inspect(self) -> None:
        """Look at all that data.sources needs."""
        sources = list(self._sources_of_text())
        if not sources:
            return
        if self._is_python_itself(sources):
            if self.config.model.vocab < BYTES_VOCAB and not self.wrong:
                self._report_vocab(BYTES_VOCAB)
            return
        tokenizer = None if "data.tokenizer" in self.wrong else self.load_tokenizer()
        if self.wrong:
            tokenizer, self.held_out = None, None
        is_tokenized_here = any(source.kind != "tokens" for _, source in sources)
        if tokenizer is not None and is_tokenized_here and tokenizer.vocab > self.config.model.vocab:
            self._report_vocab(tokenizer.vocab)
            tokenizer = None
        for key, source in sources:
            self._inspect_source(key, source, tokenizer)
        if self.config.evaluate.interval and self.held_out == 0:
            self.inspection.report("evaluate.interval", self._nothing_held_out())

    def _nothing_held_out(self) -> str:
        """Return the error that not a sequence is held out, with its cure."""
        length = self.config.training.sequence_length
        cure = "read more text"
        most = max(self.tokens.values(), default=0)
        least = math.ceil(1000 * (length + 2) / max(1, most)) / 1000  # a share is cut down to whole tokens
        if least <= _MOST_HELD_OUT:
            cure = f"set data.validation_fraction = {least:g} or more"
            if all(source.kind == "tokens" for source in self.data.sources):
                cure = f"prepare the tokens again with data.validation_fraction = {least:g} or more"
        return f"nothing is held out to evaluate on, or less than {length} tokens: set it to 0 or, in a new run, {cure}"

    def load_tokenizer(self) -> "Tokenizer | None":
        """Return data.tokenizer; None after a problem, or if none is needed."""
        from torchllm.data.tokenizer import load_tokenizer

        if not list(self._sources_of_text()):
            return None
        try:
            return load_tokenizer(self.data.tokenizer)
        except UserError as error:
            self.inspection.report("data.tokenizer", str(error).removeprefix("data.tokenizer: "))
        except Exception as error:  # of a library, or in another file of the tokenizer's folder
            self.inspection.report("data.tokenizer", f"{self.data.tokenizer} cannot be read: {error!r}")
        return None

    def _sources_of_text(self) -> Iterator[tuple[str, Source]]:
        """Yield the sources of text or of its tokens, with their keys; a missing path is an error already."""
        for key, source in self.data.all_sources.items():
            is_wrong = any(wrong.startswith(f"{key}.") for wrong in self.wrong)
            is_wrong |= is_url(source.path) and _is_wrong_url(source)
            if (source.path or source.kind == "stdlib") and not is_wrong:
                yield key, source

    def _is_python_itself(self, sources: list[tuple[str, Source]]) -> bool:
        """Return whether no file of the data can be missing: the text is the library of the running Python."""
        is_stdlib = all(source.kind == "stdlib" for _, source in sources) and not self.data.fim_rate
        return is_stdlib and self.data.tokenizer == "bytes" and not why_unwritable(cache_root(self.data))

    def _report_vocab(self, needed: int) -> None:
        self.inspection.report(
            "model.vocab",
            f"{self.config.model.vocab} is less than the {needed} ids of data.tokenizer {self.data.tokenizer!r}: set "
            f"it to {needed} or more",
        )

    def _inspect_source(self, key: str, source: Source, tokenizer: "Tokenizer | None") -> None:
        """Look at a source. tokenizer None: it is missing, or of no use with this model."""
        try:
            if source.kind == "tokens":
                self._inspect_shards(key, source, tokenizer)
            elif source.kind in IN_PLACE_KINDS:
                self._inspect_token_files(key, source, tokenizer)
            else:
                self._inspect_raw_source(key, source, tokenizer)
        except (UserError, OSError) as error:
            self.held_out = None
            place, _, message = str(error).partition(": ")
            is_of_source = place not in OF_ALL_SOURCES
            self.inspection.report(
                f"{key}.path" if is_of_source else place,
                str(error).removeprefix("data.sources: ") if is_of_source else message,
            )

    def _inspect_shards(self, key: str, source: Source, tokenizer: "Tokenizer | None") -> None:
        """Check a corpus of token shards: the size of every file. Raises DataError."""
        from torchllm.data.corpus import Corpus
        from torchllm.data.readers import corpus_folder, open_corpus

        settings = None if tokenizer is None else self._reader_settings(tokenizer)
        folder = corpus_folder(source.path, self.data)
        corpus = Corpus(folder) if settings is None else open_corpus(folder, settings)
        corpus.check()
        self._count_sequences(key, corpus)

    def _inspect_token_files(self, key: str, source: Source, tokenizer: "Tokenizer | None") -> None:
        """Look at the token files of another program. Raises DataError."""
        from torchllm.data.readers import reader_of

        self._inspect_cache_folder()
        if tokenizer is not None and (source.kind != "nanogpt" or self.data.dtype):  # else the config is refused
            reader, settings = reader_of(source.kind), self._reader_settings(tokenizer)
            corpus = reader.open(source, reader.prepare(source, settings), settings)
            if self.data.packing == "best_fit":
                from torchllm.data.best_fit import pack  # most runs need none

                pack(source, corpus, self.data, settings.sequence_length)
            self._count_sequences(key, corpus)

    def _reader_settings(self, tokenizer: "Tokenizer") -> "ReaderSettings":
        from torchllm.data.readers import ReaderSettings

        length = self.config.training.sequence_length
        return ReaderSettings(self.data, self.config.model.vocab, tokenizer, self.config.finetune, length)

    def _count_sequences(self, key: str, corpus: "SequenceSource") -> None:
        """Count the held-out sequences of a corpus. Raises UserError if it is too short to train or to evaluate on."""
        from torchllm.data.corpus import ShardStream
        from torchllm.data.shard import SPLITS, Split

        assert isinstance(corpus, ShardStream)
        length = self.config.training.sequence_length
        splits: tuple[Split, ...] = ("train",) if key.startswith("data.sources") else SPLITS
        counts = {split: corpus.count(split, length) for split in SPLITS}
        if self.data.packing == "best_fit" and not corpus.is_packed:  # which fills up a sequence that is too short
            counts = {split: min(1, corpus.tokens(split)) for split in SPLITS}
        if not any(counts[split] for split in splits):
            self._refuse_short(key, sum(corpus.tokens(split) for split in splits))
        if not corpus.is_packed:  # of conversations, the last are held out, whatever the share
            self.tokens[key] = corpus.tokens("train") + corpus.tokens("validation")
        if self.held_out is not None:
            self.held_out += counts["validation"]

    def _refuse_short(self, key: str, tokens: int) -> NoReturn:
        """Raise the error of a source that has less than a sequence to train on, or to evaluate on."""
        use = "train" if key.startswith("data.sources") else "evaluate"
        source, length = self.data.all_sources[key], self.config.training.sequence_length
        shorter = f"set that to {tokens - 1} or less, or " if tokens > 1 else ""
        raise UserError(
            f"{source.path or source.kind!r} is shorter than one sequence of training.sequence_length = {length} "
            f"tokens: it has {tokens:,} to {use} on; {shorter}read more text"
        )

    def _inspect_raw_source(self, key: str, source: Source, tokenizer: "Tokenizer | None") -> None:
        """Look at the files of a source that is tokenized when the run starts, or at its shards if it has been."""
        from torchllm.data.readers import open_corpus
        from torchllm.tools.prepare.cache import cached_folder, find_cached, plan_corpus
        from torchllm.tools.prepare.chosen_files import source_files
        from torchllm.tools.prepare.fill_cache import refuse_large_source

        if source.kind == "hub":
            self.held_out = None
            self.inspection.unchecked.append(f"{key} ({source.path}): the hub needs the network")
            return
        if tokenizer is None:
            self.held_out = None
            source_files(source, by_name=source not in self.data.validation)
            return
        settings = self._reader_settings(tokenizer)
        plan = plan_corpus(source, settings)
        if cached := find_cached(self.data, plan):
            with suppress(DataError):  # a damaged corpus in the cache is made again
                self._count_sequences(key, open_corpus(str(cached_folder(self.data, cached)), settings))
                return
        self._inspect_cache_folder()
        refuse_large_source(plan, self.data)
        self._look_at_text(key, plan)
        if source.kind != "stdlib":
            self.inspection.unchecked.append(f"{key} ({source.path}): its text is read when the run starts")

    def _look_at_text(self, key: str, plan: "CorpusPlan") -> None:
        """Look at the first documents of a source, and at its number of tokens where a byte is one.

        Raises UserError if they are of another kind, or too short.
        """
        from torchllm.tools.prepare.build import choose_split, refuse_first
        from torchllm.tools.prepare.unpack import compression_of_file

        refuse_first(plan)
        is_of_bytes = self.data.tokenizer == "bytes" and plan.source.kind == "text" and not plan.source.delimiter
        if is_of_bytes and choose_split(plan).last_tokens and self.data.packing != "best_fit":
            tokens = sum(file.size + _BEGIN_AND_END for file in plan.files if file.size)
            held_out = int(tokens * plan.validation_fraction)
            used = tokens - held_out if key.startswith("data.sources") else tokens
            length = self.config.training.sequence_length
            is_short = held_out <= length or used <= length
            if is_short and not any(compression_of_file(file.path) for file in plan.files):
                self.tokens[key] = tokens
                if used <= length:
                    self._refuse_short(key, used)
                return
        self.held_out = None

    def _inspect_cache_folder(self) -> None:
        """Check that the folder for tokenized text can be written."""
        folder = cache_root(self.data)
        if reason := why_unwritable(folder):
            self.inspection.report("data.cache", f"{str(folder)!r} cannot be written: {reason}")


def _is_wrong_url(source: Source) -> bool:
    """Return whether the URL of a source cannot be read."""
    from torchllm.tools.config.rare_parts import url_problem  # of no use to sources of files

    return url_problem(source) != ""
