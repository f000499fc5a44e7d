"""The console command `torchllm`: start a recipe, copy one out to edit it, or describe this machine.

It only finds files and starts them, so every option is one of run_train.sh or of the recipe.
"""

import argparse
import difflib
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from torchllm import __version__
from torchllm.config import Config, Model
from torchllm.config.errors import UserError
from torchllm.config.keys import dotted
from torchllm.config.toml import toml_value
from torchllm.tools.config.environment import system_errors_on_one_line
from torchllm.tools.resources import HOME, resource

USAGE = """\
usage: torchllm COMMAND [ARGUMENTS]

  torchllm train [CONFIG.toml] [--section.key=value ...]
      Train on all GPUs of this machine, or on all nodes of a Slurm or Kubernetes job. Same as ./run_train.sh in a
      checkout: NPROC, NNODES and RECIPE mean the same. Without a config it trains train_configs/debug.toml.
  torchllm plan rank --model llama3_8b --cluster dgx_h100 --gpus 64 --sequence-length 8192 --global-batch-size 512
      Predict the fastest layouts. Same as python recipes/plan.py.
  torchllm size --params 1B --tokens 20B      or --hours 10 --cluster dgx_h100 --gpus 8
      Print a config whose sizes, steps, batch and learning rate follow published laws (docs/size.md).
  torchllm prove CONFIG.toml [--section.key=value ...]
      Train a small copy of a config under many layouts on this CPU and compare each with one process. With
      RECIPE=mine.py: the model, the loss and the sections of a fork.
  torchllm copy NAME [TARGET]
      Copy a recipe, a config, a manifest for Kubernetes or run_train.sh to edit it. Without a NAME: list all of them.
          torchllm copy pretrain mine.py && RECIPE=mine.py torchllm train
          torchllm copy train_configs/debug.toml mine.toml && torchllm train mine.toml
  torchllm model FOLDER_OR_HUB_ID
      Print the sizes of a published model, from its config.json alone, as a TOML file for plan rank --model.
  torchllm convert FILE [--gpus=N]
      Print our config for one of torchtitan, transformers, Megatron-LM, nanochat or litgpt (docs/coming_from.md).
  torchllm pipeline laptop [FOLDER]
      Tokenizer, pretraining, fine-tuning, evaluation, export and a chat, one after another (docs/pipeline.md).
  torchllm RECIPE [ARGUMENTS]
      Run another recipe in one process: {recipes}.

A path train_configs/... that does not exist here is read from {home}.
`base = "models/NAME.toml"` in a config of your own is looked up next to it, then there.
`torchllm train --help` and `torchllm RECIPE --help` list the options.
"""

COMMANDS = ("train", "copy", "model", "convert", "size", "pipeline")
"""besides the recipes"""


def recipes() -> dict[str, Path]:
    """Return the path of each recipe by name. A recipe is a file, or a folder with a __main__.py."""
    files = {file.stem: file for file in resource("recipes").glob("*.py")}
    folders = {file.parent.name: file.parent for file in resource("recipes").glob("*/__main__.py")}
    return dict(sorted({**files, **folders}.items()))


@system_errors_on_one_line()
def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command. SystemExit with 2 if there is no such command or a copy is refused."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    command = words[0] if words else "--help"
    rest = words[1:]
    if command in ("--help", "-h"):
        print(usage(), end="")
    elif command == "--version":
        print(__version__)
    elif command == "train":
        os.environ.setdefault("PYTHON", sys.executable)
        start(["bash", str(resource("run_train.sh")), *rest])
    elif command == "copy":
        copy(rest)
    elif command == "model":
        print(model_toml(rest), end="")
    elif command == "convert":
        print(our_config(rest), end="")
    elif command == "size":
        from torchllm.tools.planner.search.size import main as size

        size(rest)
    elif command == "pipeline":
        pipeline(rest)
    elif command in recipes():
        start([sys.executable, str(recipes()[command]), *rest])
    else:
        close = difflib.get_close_matches(command, [*COMMANDS, *recipes()], n=1)
        hint = f"did you mean {close[0]}?" if close else "torchllm --help lists them"
        exit_refused(f"{command}: unknown command; {hint}")


def usage() -> str:
    """Return the text of `torchllm --help`."""
    names = [name for name in recipes() if name not in ("plan", "pretrain", "prove")]
    return USAGE.format(recipes=", ".join(names), home=HOME)


def start(command: list[str]) -> NoReturn:
    """Replace this process, so that the command gets its signals and returns its exit status."""
    sys.stdout.flush()
    os.execvp(command[0], command)


def pipeline(arguments: Sequence[str]) -> NoReturn:
    """Start a script of train_configs/pipeline."""
    names = sorted(script.stem for script in resource("train_configs/pipeline").glob("*.sh") if script.stem != "stages")
    if not 1 <= len(arguments) <= 2 or arguments[0] not in names:
        exit_refused(f"usage: torchllm pipeline {{{','.join(names)}}} [FOLDER]")
    os.environ.setdefault("PYTHON", sys.executable)
    start(["bash", str(resource(f"train_configs/pipeline/{arguments[0]}.sh")), *arguments[1:]])


def copy(arguments: Sequence[str]) -> None:
    """Copy a file or recipe of torchllm to a path that does not exist yet."""
    sources = copyable()
    if not arguments:
        print("\n".join(sources))
        return
    if len(arguments) > 2 or arguments[0].startswith("-"):
        exit_refused("usage: torchllm copy NAME [TARGET]")
    name = arguments[0]
    if name not in sources:
        close = difflib.get_close_matches(name, sources, n=1)
        hint = f"; did you mean {close[0]}?" if close else "; torchllm copy lists the names"
        exit_refused(f"copy: {name}: nothing of this name{hint}")
    source = sources[name]
    target = Path(arguments[1] if len(arguments) > 1 else source.name)
    if target.is_dir() and source.is_file():
        target /= source.name
    if target.exists():
        exit_refused(f"copy: {target} exists already; name another target")
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy(source, target)
    print(f"copied {source} to {target}")


def model_toml(arguments: Sequence[str]) -> str:
    """Return the [model] of a published model as TOML, without keys at their default."""
    from torchllm.tools.config.checks import problems
    from torchllm.tools.hub.files import read_hub_config
    from torchllm.tools.hub.hub import find_hub_model

    if len(arguments) != 1 or arguments[0].startswith("-"):
        exit_refused("usage: torchllm model FOLDER_OR_HUB_ID")
    try:
        found = find_hub_model(arguments[0], weights=False, may_download=True)
        model = read_hub_config(found.folder).model
    except UserError as error:
        exit_refused(f"model: {error}")
    refused = problems(Config(model=model), world_size=1)
    lines = [f"# config.json of {found.pinned}"]
    lines += [f"# In a run, --check refuses {problem.key}: {problem.message}" for problem in refused]
    lines.append("[model]")
    for key, value in vars(model).items():
        if key != "kinds" and value != getattr(Model(), key):
            lines.append(f"{key} = {toml_value(value)}")
    for kind, values in model.kinds.items():
        lines += ["", f"[{dotted(('model', 'kinds', kind))}]"]
        lines += [f"{key} = {toml_value(value)}" for key, value in values.items()]
    return "\n".join(lines) + "\n"


def our_config(arguments: Sequence[str]) -> str:
    """Return our TOML for a config of another program."""
    from torchllm.tools.front.convert import converted_config
    from torchllm.tools.planner.search.size import whole_number

    parser = argparse.ArgumentParser(
        prog="torchllm convert",
        description="Print our TOML for a config of another program (docs/coming_from.md).",
    )
    parser.add_argument("file", metavar="FILE", help="a file, or FILE.py:NAME for one function of a Python file")
    parser.add_argument("--gpus", type=whole_number, default=0, metavar="N", help="number of GPUs")
    options = parser.parse_args(arguments)
    try:
        return converted_config(options.file, options.gpus)
    except UserError as error:
        exit_refused(f"convert: {error}")


def copyable() -> dict[str, Path]:
    """Return the path of all that can be copied: recipes by name, the other files by their path."""
    configs = sorted(resource("train_configs").rglob("*.toml"))
    manifests = sorted(resource("train_configs/kubernetes").glob("*.yaml"))
    files = [resource("run_train.sh"), resource("train_configs"), *configs, *manifests]
    return recipes() | {str(file.relative_to(HOME)): file for file in files}


def exit_refused(message: str) -> NoReturn:
    """Exit with status 2; no file was changed."""
    print(f"torchllm: {message}", file=sys.stderr)
    raise SystemExit(2)
