"""The question of a user of `plan.py`: a model, a cluster, and the keys of the command line. No torch."""

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from torchllm.config import Compile, Config
from torchllm.config.errors import UserError
from torchllm.config.keys import KeyPath
from torchllm.tools.config.draft import override, parse_arguments
from torchllm.tools.config.read import ConfigError, read_table
from torchllm.tools.config.toml_files import Layer, read_files
from torchllm.tools.planner.cluster import Hardware, read_cluster, unknown_cluster
from torchllm.tools.planner.search.auto import job_of
from torchllm.tools.planner.search.layouts import Job
from torchllm.tools.resources import find_config, resource

MODELS = resource("train_configs/models")
BOUNDED = {"micro_batch_size": "training.micro_batch_size"} | {
    name: f"parallel.{name}" for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "virtual_stages")
}
"""fields of `Layout` that --max takes, and their keys"""


@dataclass(frozen=True)
class Restrictions:
    """The keys of the command line, as every recipe takes them, and the bounds of others."""

    overrides: Mapping[str, str] = field(default_factory=dict)
    """"parallel.pp" to the text of its value"""
    most: Mapping[str, int] = field(default_factory=dict)
    """fields of `Layout` to their largest value"""

    @classmethod
    def parse(cls, words: Sequence[str], bounds: Sequence[str]) -> "Restrictions":
        """Parse `--section.key=value` words, and the values of --max, "parallel.tp=8".

        UserError for anything else.
        """
        errors: list[str] = []
        arguments = parse_arguments(words, errors)
        if arguments.file or arguments.check:
            errors.append(f"{arguments.file or '--check'}: unknown argument; overrides are --section.key=value")
        if "cluster.name" in arguments.overrides:
            errors.append("--cluster.name: give --cluster, which is written as this key")
        for key in arguments.overrides:
            if any(part.isdecimal() for part in key.split(".")):
                errors.append(f"--{key}: an element of an array has no effect on a plan: set it in the run's file")
        fields = {key: name for name, key in BOUNDED.items()}
        most = {}
        for bound in bounds:
            key, _, number = bound.partition("=")
            if key not in fields or not re.fullmatch("[1-9][0-9]{0,8}", number):
                errors.append(f"--max {bound}: must be KEY=NUMBER, and KEY one of {', '.join(fields)}")
            else:
                most[fields[key]] = int(number)
        if errors:
            raise UserError("\n".join(errors))
        return cls(arguments.overrides, most)


class PlannedModel(NamedTuple):
    """The model that --model names, and the run that its file describes."""

    name: str
    file: str
    layer: Layer
    """the file merged over its bases, with the keys of the command line"""
    config: Config
    restrictions: Restrictions

    def origin(self, path: KeyPath) -> str:
        """Return where a key was written, "base.toml:3"; the file if it is written nowhere."""
        return self.layer.origins.get(path, self.file)

    def job(self, hardware: Hardware, gpus: int) -> Job:
        """Return the question to the planner: keys of the command line are fixed, other keys of a layout are open."""
        written = self.restrictions.overrides
        job = replace(job_of(self.config, gpus, written, hardware), most=self.restrictions.most)
        if not any(key.startswith("compile.") for key in written):
            job = replace(job, compile=Compile(graphs=True) if self.config.compile.graphs else None)
        return job


def read_model(
    name: str,
    restrictions: Restrictions | None = None,
    schema: type[Config] = Config,
    further_problems: Callable[[dict[str, Any]], list[str]] = lambda table: [],
) -> PlannedModel:
    """Read the model that --model names. Raises UserError if it, or a key of the command line, is wrong.

    schema: of the recipe. further_problems: returns the errors that a fork finds in the file's table.
    """
    restrictions = restrictions or Restrictions()
    file = find_config(name)
    if not file.endswith(".toml"):
        file = str(MODELS / f"{name}.toml")
    if not Path(file).is_file():
        names = sorted(path.stem for path in MODELS.glob("*.toml"))
        close = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
        hint = f"did you mean {close[0]}?" if close else "or name a TOML file"
        raise UserError(f"--model {name} is not in train_configs/models ({', '.join(names)}); {hint}")
    problems: list[str] = []
    faults: list[ConfigError] = []
    layer = read_files(file, problems)
    for key, text in restrictions.overrides.items():
        override(layer, schema, tuple(key.split(".")), text, problems)
    config = read_table(schema, layer.table, faults)
    for fault in faults:
        origin = layer.origins.get(fault.path, file)
        key = "" if origin.startswith("--") else f"{fault.key}: "
        problems.append(f"{origin}: {key}{fault.message}")
    problems += further_problems(layer.table)
    if problems:
        raise UserError("\n".join(problems))
    return PlannedModel(Path(file).stem, file, layer, config, restrictions)


def read_hardware(name: str) -> Hardware:
    """Read the cluster that --cluster names. Raises UserError if it is wrong."""
    if unknown := unknown_cluster(name):
        raise UserError(f"--cluster {unknown}")
    problems: list[str] = []
    hardware = read_cluster(name, problems)
    if hardware is None:
        raise UserError("\n".join(problems))
    return hardware
