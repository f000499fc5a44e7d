"""Find the files that a user names: those that come with torchllm (train_configs/, recipes/, run_train.sh), and runs.

In a checkout they are at the top level, next to the package. A wheel has them inside the package (hatch_build.py).
"""

import os
from pathlib import Path
from typing import NamedTuple

_PACKAGE = Path(__file__).parents[1]
_INSTALLED = os.path.isdir(_PACKAGE / "train_configs")
HOME = _PACKAGE if _INSTALLED else _PACKAGE.parent
"""the folder that holds train_configs/, recipes/ and run_train.sh"""


def resource(name: str) -> Path:
    """Return the path of a file or folder that comes with torchllm, for example "train_configs/models"."""
    return HOME / name


RUN_CONFIG = "config.toml"
"""of every run folder"""


class NamedRun(NamedTuple):
    """A run that a user names: by its folder, by its config.toml, or by the folder of a checkpoint in it."""

    folder: Path
    step: Path | None
    """the absolute path of the checkpoint, if it was named"""


def find_run(name: str | Path) -> NamedRun | None:
    """Return the run that a path names; None if it names none. Each command that takes a run asks this function."""
    path = Path(name)
    if path.name == RUN_CONFIG and path.is_file():
        return NamedRun(path.parent, None)
    if (path / RUN_CONFIG).is_file():
        return NamedRun(path, None)
    step = path.absolute()
    if step.parent.name == "checkpoints" and (step.parents[1] / RUN_CONFIG).is_file():
        return NamedRun(step.parents[1], step)
    return None


def find_config(file: str) -> str:
    """Return where to read a TOML file that a user named.

    It is `file` itself, or the config.toml of the run that it names. A path such as "train_configs/debug.toml" that
    does not exist in the working directory means the file that comes with torchllm, so that a command of the
    documentation works in any folder.
    """
    run = find_run(file) if os.path.isdir(file) else None
    if run is not None:
        return str(run.folder / RUN_CONFIG)
    shipped = resource(file)
    if not os.path.exists(file) and Path(file).parts[:1] == ("train_configs",) and shipped.is_file():
        return str(shipped)
    return file


def find_base(directory: str, base: str, folder: str = "train_configs") -> str:
    """Return where to read the parent of a TOML file in `directory` that says `base = "models/debug.toml"`.

    A base is relative to the file that names it. If there is none, it is looked up in `folder` and in the train_configs
    that come with torchllm, so that your run file can build on a shipped model from any folder.
    """
    path = Path(directory) / base
    shipped = (resource(folder) / base, resource("train_configs") / base)
    return str(next(filter(Path.is_file, shipped), path) if not os.path.exists(path) else path)
