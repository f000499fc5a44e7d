"""The config of a run: a TOML file with its bases, overrides from the command line, and the number of ranks.

Everything wrong is found at once, before torch is imported, and printed one line each as

    train_configs/x.toml:12: parallel.tp: 3 does not divide model.heads = 8

then the process ends with exit status 2. Nothing is coerced and nothing is dropped.
"""

import math
import os
import re
import secrets
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar, get_args, get_origin, overload

from torchllm.config.arguments import override, split
from torchllm.config.checks import Problem, problems, resolve_degrees
from torchllm.config.errors import UserError
from torchllm.config.read import Fault, field_types, plain_type, read_table
from torchllm.config.schema import Config, data_ranks, gradient_accumulation
from torchllm.config.toml import KeyPath, Layer, dotted, read_files, shown, toml_value

C = TypeVar("C", bound=Config)


TUNED = 4
"""layouts that parallel.layout = "tune" measures"""


@overload
def load_config(arguments: Sequence[str], *, one_device: bool = False) -> Config: ...
@overload
def load_config(arguments: Sequence[str], schema: type[C], *, one_device: bool = False) -> C: ...
def load_config(arguments: Sequence[str], schema: type[Config] = Config, *, one_device: bool = False) -> Config:
    """The checked config, with its degrees and its run folder filled in; of `load_configs` the first."""
    return load_configs(arguments, schema, one_device=one_device)[0]


@overload
def load_configs(arguments: Sequence[str], *, one_device: bool = False) -> list[Config]: ...
@overload
def load_configs(arguments: Sequence[str], schema: type[C], *, one_device: bool = False) -> list[C]: ...
def load_configs(arguments: Sequence[str], schema: type[Any] = Config, *, one_device: bool = False) -> Any:
    """The checked config, with its degrees and its run folder filled in; with parallel.layout = "tune" several, which
    differ in their layouts, the planner's best first.

    `arguments` are `[CONFIG.toml] [--section.key=value ...] [--check] [--json] [--help]`. `schema` may add sections to
    `Config`. `one_device` replaces [parallel] by degrees of 1, for a recipe that runs in one process.

    --check prints what run_train.sh starts, as NPROC=, RUN_FOLDER=, SAMPLE= and maybe DRY_RUN= lines, and ends with
    SystemExit(0), as --help does. Without it the process must be a rank, unless it is to speak of them only (a dry
    run): more than one rank needs WORLD_SIZE in the environment.
    SystemExit(2) after the lines on stderr if anything is wrong. TypeError if `schema` has a field no TOML can fill.
    """
    from torchllm.spec.cluster import read_cluster, unknown_cluster

    found: list[str] = []
    words = split(arguments, found)
    if words.help:
        from torchllm.config.help import help_text

        print(help_text(schema))
        raise SystemExit(0)
    unread = len(found)
    layer = read_files(words.file, found) if words.file else Layer({}, {})
    all_read = len(found) == unread
    for key, text in words.overrides.items():
        override(layer, schema, tuple(key.split(".")), text, found)
        if one_device and key.startswith("parallel."):
            found.append(f"--{key}: this recipe runs on one device")

    def report(path: KeyPath, message: str) -> None:
        place = _place(layer, path, words.file)
        found.append(f"{place}: {message}" if place == f"--{dotted(path)}" else f"{place}: {dotted(path)}: {message}")

    faults: list[Fault] = []
    config: Config = read_table(schema, layer.table, faults)
    for fault in faults:
        report(fault.path, fault.message)
    suspects = [fault.meant for fault in faults] + [tuple(key.split(".")) for key in words.valueless]

    others: list[Config] = []
    sane, dry = len(found), config.run.dry_run
    ranks = started = _Ranks(1, 1, None, False) if one_device else _ranks(found, dry)
    worlds = (None, 1) if len(found) > sane else ()  # nonsense in the environment: what depends on it is not known
    if one_device:
        config = replace(config, parallel=type(config.parallel)(pp=1, dp_replicate=1, dp_shard=1, cp=1, tp=1))
    elif config.parallel.layout != "manual" and not found:
        config, *others = _planned(config, ranks, layer, report)
    elif (words.check or dry) and config.run.lower_ranks:
        started = _lowered(config, ranks)
    if all_read:
        for problem in _certain(config, worlds or (started.world,), suspects):
            report(tuple(problem.key.split(".")), problem.message)
    if config.cluster.name:
        if unknown := unknown_cluster(config.cluster.name):
            report(("cluster", "name"), unknown)
        else:
            read_cluster(config.cluster.name, found)
    if not config.run.folder.isprintable():
        report(("run", "folder"), f"must be printable, not {shown(config.run.folder)}")
    elif not config.run.folder:
        config = replace(config, run=replace(config.run, folder=_new_folder(words.file)))
        several = ranks.nodes > 1 or (not words.check and ranks.are_started and ranks.world != 1)
        if several and not dry and not _job_id():  # each rank would make up a name of its own
            report(("run", "folder"), "set it: there is no job id to name the folder after on all ranks alike")
    if found:
        _stop(found)

    degrees, _ = resolve_degrees(config.parallel, started.world)
    world = math.prod(degrees.values())
    if words.check:
        _print_check(config, degrees, ranks, world)
        raise SystemExit(0)
    if world > 1 and not ranks.are_started and not dry:
        recipe = "" if Path(sys.argv[0]).name == "pretrain.py" else f"RECIPE={shlex.quote(sys.argv[0])} "
        command = f"{recipe}NPROC={world // ranks.nodes} {shlex.join(['./run_train.sh', *arguments])}"
        _stop([f"{words.file or 'defaults'}: needs {world} ranks: start it with {command}"])
    # The only two that may have been -1.
    parallel = replace(config.parallel, dp_replicate=degrees["dp_replicate"], dp_shard=degrees["dp_shard"])
    return [replace(config, parallel=parallel), *(replace(other, run=config.run) for other in others)]


def _print_check(config: Config, degrees: dict[str, int], ranks: "_Ranks", world: int) -> None:
    """What run_train.sh reads, on stdout; what the user wants to know, on stderr."""
    per_node, uneven = divmod(world, ranks.nodes)
    if uneven:
        _stop([f"environment: NNODES: {ranks.nodes} nodes cannot share {world} ranks evenly"])
    print(f"NPROC={per_node}\nRUN_FOLDER={config.run.folder}\nSAMPLE={int(config.generate.after_training)}")
    if config.run.dry_run:
        print("DRY_RUN=1")
    training, size = config.training, data_ranks(degrees)
    if ranks.per_node not in (None, per_node):
        unfit = {problem.key for problem in problems(config, ranks.world)}
        batch = f"divide the batch of {training.global_batch_size} sequences"
        what = batch if "training.global_batch_size" in unfit else "divide into the degrees of [parallel]"
        _say(f"{ranks.per_node} processes do not {what}: starting {per_node}")
    _say(
        f"global batch {training.global_batch_size} sequences = {size} data ranks x {training.micro_batch_size} "
        f"micro batch x {gradient_accumulation(training, size)} accumulated"
    )


def dump_toml(config: Config) -> str:
    """Every key of a config as TOML that loads back to an equal one."""
    lines: list[str] = []

    def write(table: Any, path: KeyPath) -> None:
        tables: list[tuple[str, Any, KeyPath]] = []
        for field in fields(table):
            value, key = getattr(table, field.name), (*path, field.name)
            if is_dataclass(value):
                tables.append((f"[{dotted(key)}]", value, key))
            elif isinstance(value, tuple) and value and is_dataclass(value[0]):
                tables += [(f"[[{dotted(key)}]]", item, key) for item in value]
            else:
                lines.append(f"{dotted((field.name,))} = {toml_value(value)}")
        for header, value, key in tables:
            lines.extend(["", header])
            write(value, key)

    write(config, ())
    return "\n".join(lines).strip() + "\n"


def write_config(config: Config, path: Path) -> None:
    """Write `dump_toml(config)`: the file is whole or, after a crash, as it was."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8", newline="\n") as file:
        file.write(dump_toml(config))
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _place(layer: Layer, path: KeyPath, file: str) -> str:
    """Where a key was written: itself, or the table in an array it belongs to; else the file, which leaves it out."""
    for length in range(len(path), 0, -1):
        if path[:length] in layer.places and (length == len(path) or length > 1):
            return layer.places[path[:length]]
    return file or "defaults"


class _Ranks(NamedTuple):
    """How many processes there are; None: not known."""

    world: int | None
    nodes: int
    per_node: int | None
    are_started: bool  # this process is one of them


def _ranks(found: list[str], dry: bool) -> _Ranks:
    """From the environment: WORLD_SIZE under torchrun, else NNODES x NPROC.

    A dry run is not a rank, and the processes that run_train.sh would start by default say nothing of its layout.
    """
    number: dict[str, int] = {}
    given: tuple[str, ...] = ("WORLD_SIZE", "NNODES", "NPROC")
    if dry:
        given = ("NNODES",) if os.environ.get("NPROC_IS_DEFAULT") else ("NNODES", "NPROC")
    for name in given:
        text = os.environ.get(name, "")
        if re.fullmatch("[1-9][0-9]{0,8}", text):
            number[name] = int(text)
        elif text:
            found.append(f"environment: {name}: must be a whole number of at least 1, not {shown(text)}")
    nodes, per_node = number.get("NNODES", 1), number.get("NPROC")
    if "WORLD_SIZE" in number:
        return _Ranks(number["WORLD_SIZE"], nodes, None, True)
    return _Ranks(nodes * per_node if per_node else None, nodes, per_node, False)


def _planned(config: C, ranks: _Ranks, layer: Layer, report: Callable[[KeyPath, str], None]) -> list[C]:
    """With the planner's layouts for so many ranks, said; as it was where something is wrong, which is reported."""
    from torchllm.planner.search.auto import choose_layouts  # of no use to other runs

    key = ("parallel", "layout")
    if ranks.world is None:
        kind = config.parallel.layout
        report(key, f"is {kind}, but the number of ranks is not known: set NPROC (and NNODES)")
        return [config]
    written = {f"{section}.{name}" for section, table in layer.table.items() for name in table}
    try:
        found, line = choose_layouts(config, ranks.world, written, TUNED if config.parallel.layout == "tune" else 1)
    except UserError as error:
        report(key, str(error))
        return [config]
    _say(f"layout: {line}")
    return found


def _lowered(config: Config, ranks: _Ranks) -> _Ranks:
    """With fewer processes a node where that mends something: the most that leave the fewest problems."""
    if ranks.per_node is None or -1 not in (config.parallel.dp_shard, config.parallel.dp_replicate):
        return ranks
    fewer = range(min(ranks.per_node - 1, 1024), 0, -1)
    per_node = min((ranks.per_node, *fewer), key=lambda n: sum(1 for _ in problems(config, ranks.nodes * n)))
    return ranks._replace(world=ranks.nodes * per_node)


def _certain(config: Config, worlds: Iterable[int | None], suspects: Iterable[KeyPath]) -> list[Problem]:
    """Problems between keys, without those that come and go with a value that is wrong itself.

    A wrong key has its default in `config`. A problem counts if it is the same with the key's other values, and with
    each of `worlds`.
    """
    first, *others = worlds
    found = list(dict.fromkeys(problems(config, first)))
    variants = [(config, world) for world in others]
    variants += [(variant, first) for path in suspects for variant in _variants(config, path[:2])]
    for variant, world in variants:
        still = set(problems(variant, world))
        found = [problem for problem in found if problem in still]
    return found


def _variants(config: C, path: KeyPath) -> Iterator[C]:
    """The config with other values of a key, or of each key of a section."""
    section = getattr(config, path[0], None) if path else None
    if not is_dataclass(section) or isinstance(section, type):
        return
    types = field_types(type(section))
    for key in types.keys() & path[1:] or types:
        kind, _ = plain_type(types[key])
        value = getattr(section, key)
        if get_origin(kind) is tuple:
            others: tuple[Any, ...] = ((),)
        elif isinstance(value, bool):
            others = (not value,)
        elif isinstance(value, (int, float)):
            others = (value + 1, 3 * value + 4)
        else:
            others = get_args(kind) or (f"{value}?",)
        for other in others:
            changed: Any = {path[0]: replace(section, **{key: other})}
            yield replace(config, **changed)


def _job_id() -> str:
    """What all processes of a job, and the same job queued again, have in common; empty: nothing."""
    ids = (os.environ.get(name, "") for name in ("SLURM_JOB_ID", "PET_RDZV_ID", "TORCHELASTIC_RUN_ID"))
    return next((id for id in ids if id not in ("", "none")), "")


def _new_folder(file: str) -> str:
    job = re.sub(r"[^\w.-]", "_", _job_id()) or f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    return os.path.join("runs", f"{Path(file).stem or 'run'}-{job}")


def _say(line: str) -> None:
    if os.environ.get("LOCAL_RANK", "0") == "0":  # one process of a node speaks
        print(line, file=sys.stderr)


def _stop(found: Iterable[str]) -> NoReturn:
    for line in dict.fromkeys(found):
        _say(line)
    raise SystemExit(2)
