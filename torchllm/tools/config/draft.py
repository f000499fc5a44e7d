"""A config while it is being read: `read_draft` reads it, `resolve.py` fills it in and `refuse.py` checks it.

The command line of a recipe is `[CONFIG.toml] [--section.key=value ...] [--check] [--gpus=N] [--json] [--help]`. The
config is a file, or a run: its folder, or the folder of a checkpoint in it.
"""

import os
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, get_args, get_origin

from torchllm.config.environment import HANDED
from torchllm.config.keys import KeyPath, dotted, field_types, plain_type
from torchllm.config.schema import AXES, KIND_KEYS, Config
from torchllm.config.toml import shown, toml_value
from torchllm.tools.config.environment import Ranks, read_ranks
from torchllm.tools.config.read import ConfigError, read_table, type_at
from torchllm.tools.config.toml_files import Layer, parse_value, read_files
from torchllm.tools.resources import find_config, find_run

FLAGS = "--check, --gpus=N, --json and --help"


@dataclass
class Arguments:
    """A command line, sorted by kind."""

    words: Sequence[str]
    """the whole command line, as given"""
    file: str = ""
    """the config; "" if there is none"""
    overrides: dict[str, str] = field(default_factory=dict)
    """"section.key" to the text of its value"""
    check: bool = False
    gpus: int | None = None
    """ranks of a run that is only checked, or of a dry run; None: the environment says it"""
    help: bool = False


def parse_arguments(words: Sequence[str], errors: list[str]) -> Arguments:
    """Parse a command line. Appends a line to `errors` for each word that is not a valid argument."""
    arguments = Arguments(words)
    waiting = deque(words)
    while waiting:
        word = waiting.popleft()
        flag, equals, value = word.partition("=")
        if word in ("--help", "-h"):
            arguments.help = True
        elif word == "--check":
            arguments.check = True
        elif flag == "--gpus":
            text = value if equals or not waiting else waiting.popleft()
            if re.fullmatch("[1-9][0-9]{0,8}", text):
                arguments.gpus = int(text)
            else:
                errors.append(f"--gpus: must be a whole number of at least 1, not {shown(text)}")
        elif word == "--json":
            arguments.overrides["run.json"] = "true"
        elif _has_spaces_around_equals(word, waiting):
            errors.append(f"{flag}: no spaces around the equals sign: {flag}={_take_value(waiting)}")
        elif word.startswith("--") and equals and flag not in ("--check", "--json", "--help"):
            first = arguments.overrides.setdefault(flag[2:], value)
            if first != value:
                errors.append(f"{flag}: given twice: {shown(first)} and {shown(value)}")
        elif word.startswith("--") and "." in word and not equals:
            errors.append(f"{flag}: needs a value: {flag}={_take_value(waiting)}")
        elif word.startswith("-"):
            errors.append(f"{word}: unknown flag; overrides are --section.key=value, flags {FLAGS}")
        elif arguments.file:
            errors.append(
                f"{word}: one config file only, and {arguments.file} is given; overrides are --section.key=value"
            )
        else:
            arguments.file = find_config(word)
            run = find_run(word)
            if run is not None and run.step is not None:
                waiting.appendleft(f"--checkpoint.resume={run.step}")
    return arguments


def _has_spaces_around_equals(word: str, following: Sequence[str]) -> bool:
    """Whether a word and those after it are `--key = value`, `--key =value` or `--key= value`."""
    if not word.startswith("--") or "." not in word or not following:
        return False
    if word.endswith("="):  # an empty value is valid if the next word is another argument
        return word.count("=") == 1 and not following[0].startswith("-") and not following[0].endswith(".toml")
    return "=" not in word and following[0].startswith("=")


def _take_value(waiting: deque[str]) -> str:
    """Remove a value that was separated from its flag by a space, and return it; "VALUE" if there is none."""
    is_value = False
    if waiting and waiting[0] == "=":
        waiting.popleft()
        is_value = bool(waiting)  # any word, e.g. -1
    elif waiting:
        is_value = not waiting[0].startswith("-") and not waiting[0].endswith(".toml")
    return waiting.popleft().removeprefix("=") if is_value else "VALUE"


def override(layer: Layer, schema: type, path: KeyPath, text: str, errors: list[str]) -> None:
    """Write one override into the tables. An unknown key or a wrong value is reported when they are read.

    The index of an array names an existing element; the array's length as index appends one. An array that only the
    defaults have is copied into the table first.
    """
    origin = f"--{'.'.join(path)}"
    kind, _ = plain_type(type_at(schema, path))
    if isinstance(kind, type) and is_dataclass(kind):
        first = KIND_KEYS[0] if path[:2] == ("model", "kinds") else next(iter(field_types(kind)))
        errors.append(f"{origin}: is a table: give its keys one by one, such as {origin}.{first}=")
        return
    container: Any = layer.table
    for depth, part in enumerate(path, start=1):
        inside = path[:depth]
        is_last = depth == len(path)
        key: Any = part
        if isinstance(container, list):
            if not re.fullmatch("[0-9]{1,9}", part) or int(part) > len(container):
                size = len(container)
                errors.append(f"{origin}: {dotted(path[: depth - 1])} has {size} elements: the index is 0 to {size}")
                return
            key = int(part)
            if key == len(container):
                container.append({})
                layer.origins[inside] = origin
        elif not isinstance(container, dict):
            return  # the file has a value where a table belongs: reported when it is read
        elif not is_last and part not in container:
            container[part] = _default(schema, inside)
            layer.origins[inside] = origin
        if is_last:
            layer.forget(path)
            container[key] = _parse(text, kind)
            layer.origins[path] = origin
        else:
            container = container[key]


def _default(schema: type, path: KeyPath) -> Any:
    """Return the container for an override that the file lacks: an array's default elements, or an empty table."""
    if get_origin(plain_type(type_at(schema, path))[0]) is not tuple:
        return {}
    section, _ = plain_type(type_at(schema, path[:-1]))
    return plain_value(getattr(section(), path[-1]))


def plain_value(value: Any) -> Any:
    """Return dataclasses and tuples as the tables and arrays that TOML would give."""
    if isinstance(value, tuple):
        return [plain_value(item) for item in value]
    if is_dataclass(value):
        return {field.name: plain_value(getattr(value, field.name)) for field in fields(value)}
    return value


def _parse(text: str, kind: Any) -> Any:
    """Return an override's value: a string key needs no quotes, all others are TOML; text that is not TOML stays text.

    An array of scalars may be comma-separated, without brackets. Text of nothing but \\n, \\r and \\t is line ends and
    tabs, because a shell passes the backslashes on.
    """
    if get_origin(kind) is tuple and text[:1] != "[":
        item, _ = plain_type(get_args(kind)[0])
        if not is_dataclass(item):
            return [_parse(word, item) for word in text.split(",")] if text else []
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    is_text = kind is str or (choices and all(isinstance(choice, str) for choice in choices))
    if is_text and re.fullmatch(r"(\\[nrt])+", text):
        text = f'"{text}"'
    if is_text and text[:1] not in ("'", '"'):
        return text
    try:
        return parse_value(text)
    except ValueError:
        return text


C = TypeVar("C", bound=Config)

TRAINING_ONLY = ("optimizer", "schedule")
"""sections that a recipe ignores if it only uses the weights of a run: a fork may have added keys to them"""
RESOLVED_SECTIONS = (
    *("run", "cluster", "model", "data", "training", "optimizer", "schedule", "parallel", "recompute", "compile"),
    *("checkpoint", "metrics", "evaluate", "generate"),
)
"""keys in the config.toml of every run folder, whatever version wrote it"""


@dataclass
class Draft(Generic[C]):
    """A config while it is being read: its values, their origins, and the errors so far."""

    arguments: Arguments
    layer: Layer
    config: C
    """wrong keys have their default"""
    ranks: Ranks | None
    """processes of the run; None: the environment is invalid"""
    one_device: bool
    """the recipe runs in one process, whatever [parallel] says"""
    uses_weights: bool = False
    """the recipe only uses the weights of a run"""
    published: dict[KeyPath, str] = field(default_factory=dict)
    """keys that no file sets, with the file of the published model that they are from"""
    wrong: set[str] = field(default_factory=set)
    """keys ("training.steps") whose value is wrong"""
    errors: list[str] = field(default_factory=list)
    """lines for stderr, each with its file and line"""
    notes: list[str] = field(default_factory=list)
    """lines for stderr that are no errors"""

    @property
    def file(self) -> str:
        """The config file, for messages."""
        return self.arguments.file or "defaults"

    @property
    def is_readable(self) -> bool:
        """Whether each key has a value that somebody has chosen, or its default."""
        return self.layer.is_complete and not self.wrong

    @property
    def is_rank_of_launcher(self) -> bool:
        """Whether this process is a rank, whose launcher has had the config and the files checked already."""
        return "WORLD_SIZE" in os.environ and not self.arguments.check

    @property
    def is_started(self) -> bool:
        """Whether this process is a rank of the run, or the only one."""
        return self.one_device or (self.ranks is not None and self.ranks.are_started)

    @property
    def may_start_fewer_ranks(self) -> bool:
        """Whether fewer ranks may be started than asked for; a running rank cannot change their number."""
        parallel = self.config.parallel
        has_open_degree = -1 in (parallel.dp_shard, parallel.dp_replicate)
        return has_open_degree and (self.arguments.check or self.config.run.dry_run)

    def origin(self, path: KeyPath) -> str:
        """Return the origin of a key ("x.toml:3", "--training.steps"), or of its table in an array; else the file.

        The line of a [section] is no help for a key that the section lacks; the line of one table of an array is.
        """
        for length in range(len(path), 0, -1):
            origin = self.layer.origins.get(path[:length])
            if origin and (length == len(path) or length > 1):
                return origin
        return self.published.get(path, self.file)

    def is_overridden(self, path: KeyPath) -> bool:
        """Whether a key's value is from the command line."""
        return self.origin(path) == f"--{dotted(path)}"

    def located(self, path: KeyPath, message: str) -> str:
        """Return a line that says where a key was written, which one it is, and the message."""
        return f"{self.place(path)}: {message}"

    def place(self, path: KeyPath) -> str:
        """Return a key after its origin: "x.toml:3: training.steps"."""
        return f"--{dotted(path)}" if self.is_overridden(path) else f"{self.origin(path)}: {dotted(path)}"

    @property
    def is_resolved(self) -> bool:
        """Whether the file is the config of a run folder: it has every section, the folder and every degree.

        The user did not choose each key in such a file, and keys without effect were reported at the first start.
        """
        paths: list[KeyPath] = [(section,) for section in RESOLVED_SECTIONS]
        paths += [("run", "folder"), *(("parallel", axis) for axis in AXES)]
        written = self.layer.files[-1].origins if self.layer.files else {}
        return all(path in written for path in paths)

    def is_asked_about(self, path: KeyPath) -> bool:
        """Whether the user chose a key for this command: none of a resolved file or model, or of an unused section."""
        if self.is_overridden(path):
            return True
        if path in self.published:
            return False
        return not self.is_resolved and not (self.uses_weights and path[0] in TRAINING_ONLY)

    def report(self, path: KeyPath, message: str) -> None:
        """Add an error."""
        self.errors.append(self.located(path, message))


def read_draft(
    words: Sequence[str], schema: type[C], *, one_device: bool = False, uses_weights: bool = False
) -> Draft[C]:
    """Read the command line, the files and the environment into a draft, whose `errors` has a line per error.

    Each key is checked alone. SystemExit(0) after printing the help text if the command line asks for it.
    `uses_weights`: the recipe only uses the weights of a run, which a fork with more keys may have trained. Keys of the
    run's config.toml that `schema` lacks become `notes`; all errors in TRAINING_ONLY sections are ignored.
    """
    errors: list[str] = []
    arguments = parse_arguments(words, errors)
    if arguments.help:
        from torchllm.tools.config.help import print_help  # rarely needed

        print_help(schema)
        raise SystemExit(0)

    layer = read_files(arguments.file, errors) if arguments.file else Layer({}, {})
    for key, text in arguments.overrides.items():
        override(layer, schema, tuple(key.split(".")), text, errors)
        if one_device and key.startswith("parallel."):
            errors.append(f"--{key}: this recipe runs on one device")

    faults: list[ConfigError] = []
    config: C = read_table(schema, layer.table, faults)
    is_for_start = not config.run.dry_run and (not arguments.check or HANDED in os.environ)
    if arguments.gpus and (one_device or is_for_start):
        errors.append("--gpus: only --check and the dry run of a training take it; set NPROC (and NNODES)")
    if one_device:
        alone = type(config.parallel)(pp=1, dp_replicate=1, dp_shard=1, cp=1, tp=1)
        config = replace(config, parallel=alone)
        ranks: Ranks | None = Ranks(world=1, per_node=1)
    elif arguments.gpus:
        ranks = Ranks(world=arguments.gpus, per_node=arguments.gpus)
    else:
        ranks = read_ranks(config.run.dry_run, errors)

    draft = Draft(arguments, layer, config, ranks, one_device, uses_weights, errors=errors)
    for fault in faults:
        is_in_file = draft.is_resolved and not draft.is_overridden(fault.path)
        if uses_weights and fault.path[0] in TRAINING_ONLY and not draft.is_overridden(fault.path):
            draft.wrong.add(fault.key)
        elif uses_weights and fault.is_unknown and is_in_file:
            draft.notes.append(draft.located(fault.path, "of a forked recipe, not read here"))
        else:
            draft.report(fault.path, fault.message)
            draft.wrong.add(fault.key)
    _take_folder_of_copy(draft)
    return draft


def _take_folder_of_copy(draft: Draft[C]) -> None:
    """Use the folder that holds a run's config.toml as the run folder; add a note if the config names another one.

    The config.toml of a copied or renamed run folder still names the original folder, which would be trained,
    exported or sampled instead of the copy.
    """
    file, path = Path(draft.arguments.file), ("run", "folder")
    if file.name != "config.toml" or not draft.is_resolved or draft.is_overridden(path):
        return
    folder, named = file.parent, draft.config.run.folder
    is_run = (folder / "lease").is_dir() or any((folder / "checkpoints").glob("step-*"))
    if is_run and os.path.realpath(named) != os.path.realpath(folder):
        draft.config = replace(draft.config, run=replace(draft.config.run, folder=str(folder)))
        if not os.path.exists(named):  # the run folder was renamed, or the working directory differs
            return
        message = f"is {toml_value(named)}, which is another folder: {folder} is used, where this file lies"
        draft.notes.append(draft.located(path, message))
