"""Which files of ours the processes of a run have loaded at their end, by `sys.modules`.

python -m tests.loaded      prints the sizes, and writes the list loaded.txt that `test_loaded.py` compares with
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.launched import SCRIPT, clean
from tests.sizes import size_of
from tests.tiny_run import DEBUG, ROOT, SMALL, changed
from torchllm.config import Data, Source
from torchllm.data.readers import ReaderSettings, reader_of
from torchllm.data.tokenizer import load_tokenizer

LIST = Path(__file__).with_suffix(".txt")
HOOK = """
import atexit, os, sys

def write():
    files = {getattr(module, "__file__", None) or "" for module in list(sys.modules.values())}
    files.add(os.path.abspath(sys.argv[0]))  # at its end a script no longer has its __file__
    with open(os.path.join(os.environ["LOADED"], f"{os.environ.get('RANK', '')}.{os.getpid()}"), "w") as file:
        file.write("\\n".join(files))

def exit_after_it(status, leave=os._exit):  # as workers of the loader do
    write()
    leave(status)

atexit.register(write)
os._exit = exit_after_it
"""
"""sitecustomize.py: Python imports it at the start of each process"""
THREE = changed(SMALL, "--training.steps=3", "--evaluate.interval=2", "--checkpoint.interval=2")
STEPS = [*THREE, "--generate.after_training=false"]
LAUNCHED = [SCRIPT, DEBUG, *STEPS]
TRACKERS = Path(__file__).parent / "tools/watch/fake_trackers"


def minimal(folder: Path) -> set[str]:
    """recipes/minimal.py on a source of text whose corpus is cached."""
    return loaded_by([sys.executable, "recipes/minimal.py", DEBUG, *_steps_of_minimal()], folder)


def minimal_on_prepared_tokens(folder: Path) -> set[str]:
    return loaded_by([sys.executable, "recipes/minimal.py", *_prepared(folder), *_steps_of_minimal()], folder)


def debug(folder: Path) -> set[str]:
    """Rank 0 of a run of three steps, with an evaluation and checkpoints, whose corpus is cached."""
    return loaded_by([*LAUNCHED, f"--run.folder={folder}/run"], folder)


def prepared_tokens(folder: Path) -> set[str]:
    return loaded_by([SCRIPT, *_prepared(folder), *STEPS, f"--run.folder={folder}/run"], folder)


def resumed(folder: Path) -> set[str]:
    """A run that goes on from a checkpoint, and is long enough for a profiled step."""
    debug(folder)
    return loaded_by([*changed(LAUNCHED, "--training.steps=12"), f"--run.folder={folder}/run"], folder)


def planned(folder: Path) -> set[str]:
    return loaded_by([*LAUNCHED, f"--run.folder={folder}/run", "--parallel.layout=auto"], folder)


def tracked(folder: Path) -> set[str]:
    return loaded_by(
        [*LAUNCHED, f"--run.folder={folder}/run", "--metrics.trackio=bees"],
        folder,
        [str(TRACKERS)],
        {"FAKE_CALLS": str(folder / "calls")},
    )


RUNS = {
    run.__name__: run
    for run in (minimal, minimal_on_prepared_tokens, debug, prepared_tokens, resumed, planned, tracked)
}


def _steps_of_minimal() -> list[str]:
    return [word for word in STEPS if word.startswith(("--model", "--training", "--schedule"))]


def _prepared(folder: Path) -> list[str]:
    """Return words that train debug.toml on a corpus that is prepared."""
    text = folder / "text.txt"
    text.write_text("There is no end of bees. " * 1000)
    source, data = Source("text", str(text)), Data(cache=str(folder / "cache"), validation_fraction=0.1)
    corpus = _cached(source, data)
    config = folder / "prepared.toml"
    config.write_text(f'base = "{ROOT / DEBUG}"\n[[data.sources]]\nkind = "tokens"\npath = "{corpus}"\n')
    return [str(config)]


def _cached(source: Source, data: Data) -> str:
    """Return the folder of a source's corpus in the cache, after tokenizing it if it is not there."""
    return reader_of(source.kind).prepare(source, ReaderSettings(data, 258, load_tokenizer("bytes")))


def loaded_by(
    command: Sequence[str], folder: Path, path: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> set[str]:
    """Return the files of the library and its recipes that the process of rank 0, or the only one, has loaded."""
    _cached(Source(), Data())  # of debug.toml
    hook, lists = folder / "hook", folder / "lists"
    lists.mkdir(exist_ok=True)
    hook.mkdir(exist_ok=True)
    (hook / "sitecustomize.py").write_text(HOOK)
    for earlier in lists.iterdir():
        earlier.unlink()
    paths = os.pathsep.join([str(hook), *path, str(ROOT)])
    extra = {"LOADED": str(lists), "PYTHONPATH": paths, "NPROC": "2", **(environment or {})}
    done = subprocess.run(command, cwd=ROOT, env=clean(extra), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rank = "0" if command[0] == SCRIPT else ""
    processes = [written.read_text().splitlines() for written in sorted(lists.glob(f"{rank}.*"))]
    return _ours(max(processes, key=len))  # its loader's workers have loaded less; of ours perhaps as many files


def _ours(files: Sequence[str]) -> set[str]:
    inside = {Path(file).relative_to(ROOT).as_posix() for file in files if Path(file).is_relative_to(ROOT)}
    return {file for file in inside if file.startswith(("torchllm/", "recipes/"))}


def listed() -> dict[str, set[str]]:
    """Return the files of each run in loaded.txt."""
    files: dict[str, set[str]] = {name: set() for name in RUNS}
    for line in LIST.read_text(encoding="utf-8").splitlines():
        file, _, runs = line.partition(": ")
        for name in runs.split():
            files[name].add(file)
    return files


def lines_of(files: set[str]) -> int:
    return size_of(ROOT / file for file in files).lines


def main() -> None:
    runs: dict[str, list[str]] = {}
    for name, run in RUNS.items():
        with tempfile.TemporaryDirectory() as folder:
            files = run(Path(folder))
        print(f"{name}: {len(files)} files, {lines_of(files):,} lines", flush=True)
        for file in files:
            runs.setdefault(file, []).append(name)
    LIST.write_text("".join(f"{file}: {' '.join(runs[file])}\n" for file in sorted(runs)), encoding="utf-8")


if __name__ == "__main__":
    main()
