"""The file of a pipeline, and which of its stages are done: no torch.

A stage is done when FOLDER/stages.json says so with the stage's key: a hash of its command, of the TOML files that the
command names, and of the keys of the stages before it. Its results are in FOLDER/NAME.
"""

import difflib
import hashlib
import json
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

from torchllm.config.errors import UserError
from torchllm.config.schema import FilePath, Natural, NonNegative
from torchllm.tools.config.read import ConfigError, read_table
from torchllm.tools.config.toml_files import read_files

RECORDS = "stages.json"
FOLDER = "{folder}"
"""stands in a command for the folder of the pipeline"""
WITH_SETTINGS = ("tokenizer", "prepare", "train", "evaluate", "export", "generate")
"""commands of torchllm that take --section.key=value"""


@dataclass(frozen=True)
class PipelineStage:
    """One command of a pipeline."""

    name: str = ""
    """its results are in the folder of this name, in that of the pipeline"""
    run: str = ""
    """command, started in the working directory; NAME=VALUE words before it are environment variables, and {folder} is
    the pipeline's folder"""
    seconds: NonNegative = 0.0
    """duration on the machine that the pipeline names; 0: not known"""
    resumes: bool = False
    """the command goes on in its folder after an interruption; false: the folder is set aside and made anew"""
    needs_terminal: bool = False
    """it talks to the user: it is started by a terminal only, and each time"""


@dataclass(frozen=True)
class PipelineFile:
    """The file of a pipeline."""

    folder: FilePath = ""
    """of all results"""
    machine: str = ""
    """where the seconds of the stages come from"""
    gpus: Natural = 0
    """that the planner prices; 0: none"""
    dollars_per_gpu_hour: NonNegative = 0.0
    stages: tuple[PipelineStage, ...] = ()
    """[[stages]] tables, in order"""


@dataclass
class Record:
    """What is known of a stage that was started."""

    key: str
    inputs: dict[str, str]
    """its command and TOML files -> text or hash, to say what has changed"""
    is_done: bool = False
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    """of all calls that worked on it"""


class Planned(NamedTuple):
    """A stage, and how it stands."""

    stage: PipelineStage
    folder: Path
    key: str
    inputs: dict[str, str]
    record: Record | None

    @property
    def is_done(self) -> bool:
        """Whether it was finished from these inputs."""
        return self.record is not None and self.record.is_done and self.record.key == self.key

    @property
    def goes_on(self) -> bool:
        """Whether it was started from these inputs, and can go on."""
        return self.record is not None and self.record.key == self.key and self.stage.resumes

    @property
    def state(self) -> str:
        if self.record is None:
            return "to do"
        if self.record.key != self.key:
            old = self.record.inputs
            names = sorted(name for name in {*old, *self.inputs} if old.get(name) != self.inputs.get(name))
            return f"to do anew, changed: {', '.join(names) or 'an earlier stage'}"
        return "done" if self.record.is_done else "interrupted"


def read_pipeline(file: str, settings: Sequence[str] = ()) -> PipelineFile:
    """Read a pipeline's file, whose commands have its folder then. Raises UserError with a line per fault.

    settings: folder=FOLDER, or STAGE.section.key=value, which becomes an option of that stage's command.
    """
    errors: list[str] = []
    layer = read_files(file, errors)
    faults: list[ConfigError] = []
    pipeline = read_table(PipelineFile, layer.table, faults)
    for fault in faults:
        errors.append(f"{layer.origins.get(fault.path, file)}: {fault.key}: {fault.message}")
    names = [stage.name for stage in pipeline.stages]
    if not errors:
        if not pipeline.folder or not names:
            errors.append(f"{file}: needs a folder, and [[stages]] with name and run")
        for index, stage in enumerate(pipeline.stages):
            where = layer.origins.get(("stages", str(index)), file)
            if not stage.name or not stage.run.strip() or Path(stage.name).name != stage.name:
                errors.append(f"{where}: stages.{index}: needs a name, without /, and a run, a command")
            elif stage.name in names[:index]:
                errors.append(f"{where}: stages.{index}.name: {stage.name} is the name of an earlier stage")
    if not errors:
        for setting in settings:
            pipeline = change(pipeline, setting, errors)
    if errors:
        raise UserError("\n".join(errors))
    stages = [replace(stage, run=fill_in(stage.run, pipeline.folder)) for stage in pipeline.stages]
    return replace(pipeline, stages=tuple(stages))


def change(pipeline: PipelineFile, setting: str, errors: list[str]) -> PipelineFile:
    """Return a pipeline with a setting of the command line; a wrong one is an error."""
    key, _, value = setting.partition("=")
    name, _, option = key.partition(".")
    if key == "folder" and value:
        return replace(pipeline, folder=value)
    names = [stage.name for stage in pipeline.stages]
    if name not in names:
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {close[0]}?" if close else f"the stages are {', '.join(names)}"
        errors.append(f"--set {setting}: there is no stage {name!r}; {hint}")
    elif "." not in option or "=" not in setting:
        errors.append(f"--set {setting}: write {name}.section.key=value, as {name}.training.steps=20")
    stages = list(pipeline.stages)
    if not errors:
        index = names.index(name)
        if not re.search(rf"\btorchllm ({'|'.join(WITH_SETTINGS)})\b", stages[index].run):
            errors.append(f"--set {setting}: the command of {name} takes no settings: {stages[index].run}")
        others = [word for word in shlex.split(stages[index].run) if not word.startswith(f"--{option}=")]
        run = shlex.join([*others, f"--{option}={value}"])
        stages[index] = replace(stages[index], run=run, seconds=0.0)  # those of the file are of its settings
    return replace(pipeline, stages=tuple(stages))


def fill_in(command: str, folder: str) -> str:
    if FOLDER not in command:
        return command
    return shlex.join(word.replace(FOLDER, folder) for word in shlex.split(command))


def find_stages(pipeline: PipelineFile) -> list[Planned]:
    """Return how each stage stands. Raises UserError for a TOML file that cannot be read."""
    records = read_stage_records(Path(pipeline.folder))
    planned = []
    key = ""
    for stage in pipeline.stages:
        inputs = inputs_of(stage, Path(pipeline.folder))
        key = hash_of([key, sorted(inputs.items())])
        planned.append(Planned(stage, Path(pipeline.folder) / stage.name, key, inputs, records.get(stage.name)))
    return planned


def inputs_of(stage: PipelineStage, folder: Path) -> dict[str, str]:
    """Return a stage's command, and a hash of each TOML file that it names, with its bases.

    Files in the pipeline's folder are results of earlier stages.
    """
    inputs = {"its command": stage.run}
    for word in shlex.split(stage.run):
        file = word.rpartition("=")[2]
        if file.endswith(".toml") and not Path(file).resolve().is_relative_to(folder.resolve()):
            errors: list[str] = []
            table = read_files(file, errors).table
            if errors:
                raise UserError("\n".join(f"stage {stage.name}: {error}" for error in errors))
            inputs[file] = hash_of(table)
    return inputs


def hash_of(value: object) -> str:
    """Return a short hash of what JSON can hold; of other values their text."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def read_stage_records(folder: Path) -> dict[str, Record]:
    """Return the records of a pipeline's folder by stage. Raises UserError for a damaged file."""
    file = folder / RECORDS
    try:
        return {name: Record(**record) for name, record in json.loads(file.read_text("utf-8")).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{file}: cannot be read ({error}): restore it, or move {folder} away to begin anew") from error


def write_record(folder: Path, name: str, record: Record) -> None:
    """Replace the record of a stage in the file of all records, which is there whole or not at all."""
    records = read_stage_records(folder) | {name: record}
    temporary = folder / f"{RECORDS}.new"
    temporary.write_text(json.dumps({stage: asdict(one) for stage, one in records.items()}, indent=2) + "\n", "utf-8")
    os.replace(temporary, folder / RECORDS)


def set_aside(folder: Path) -> Path | None:
    """Rename a folder to the first free name NAME.old-N. None if there is none."""
    if not folder.exists():
        return None
    number = 1
    while (target := folder.with_name(f"{folder.name}.old-{number}")).exists():
        number += 1
    return folder.rename(target)
