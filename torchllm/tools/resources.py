"""Find the files that come with torchllm but are not modules: train_configs/, recipes/ and run_train.sh.

In a checkout they are at the top level, next to the package. A wheel has them inside the package (hatch_build.py).
"""

import os
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
_INSTALLED = (_PACKAGE / "train_configs").is_dir()
HOME = _PACKAGE if _INSTALLED else _PACKAGE.parent
"""the folder that holds train_configs/, recipes/ and run_train.sh"""


def resource(name: str) -> Path:
    """Return the path of a file or folder that comes with torchllm, for example "train_configs/models"."""
    return HOME / name


def find_config(file: str) -> str:
    """Return where to read a TOML file that a user named.

    It is `file` itself. A path such as "train_configs/debug.toml" that does not exist in the working directory means
    the file that comes with torchllm, so that a command of the documentation works in any folder.
    """
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


def name_base(file: str, directory: str) -> str:
    """Return the `base` of a new TOML file in `directory` for the parent `file`.

    A file of the train_configs that come with torchllm is named relative to their folder, which holds on every machine.
    """
    path = Path(file).resolve()
    train_configs = resource("train_configs").resolve()
    if path.is_relative_to(train_configs):
        name = path.relative_to(train_configs).as_posix()
        if Path(find_base(directory, name)).resolve() == path:
            return name
    return os.path.relpath(path, Path(directory).resolve())
