"""What the pages of docs/ tell a reader to type works, and what they show is what comes out."""

import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runtime.test_run_train import clean

ROOT = Path(__file__).parent.parent
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", *DOCS]


def load_script(name: str):  # type: ignore[no-untyped-def]  # a module, whose type is not known before it is loaded
    specification = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module
    specification.loader.exec_module(module)
    return module


generate = load_script("generate")
QUOTES = [(page, quote) for page in PAGES for quote in generate.quotes(page.read_text())]
REPEATED = [(page, quote) for page, quote in QUOTES if not quote.measured]


@pytest.mark.parametrize(("page", "quote"), REPEATED, ids=[f"{page.name}: {quote.command}" for page, quote in REPEATED])
def test_output_is_as_quoted(page: Path, quote) -> None:  # type: ignore[no-untyped-def]  # generate.Quote
    """If this fails because a text was changed: `python docs/generate.py`."""
    assert generate.run(quote.command) == quote.output


def bash_commands() -> list[tuple[str, str]]:
    """Return (page, command) of every ```bash block that is not marked as not run."""
    commands = []
    for page in PAGES:
        for mark, block in re.findall(r"(<!-- not run: .*? -->\n)?```bash\n(.*?)```", page.read_text(), re.S):
            if mark:
                continue
            for line in re.sub(r"\\\n\s*", "", block).splitlines():
                command = re.split(r"\s+#", line)[0]
                commands.append((page.name, command.strip()))
    return commands


COMMANDS = bash_commands()
RUN_COMMANDS = [command for _, command in COMMANDS if "run_train.sh train_configs" in command]


def test_every_command_of_the_pages_is_known() -> None:
    starts = ("pip install", "./run_train.sh", "python recipes/pretrain.py --help", "cp recipes/pretrain.py")
    assert COMMANDS
    for page, command in COMMANDS:
        program = re.sub(r"^([A-Z]+=\S+ )*", "", command)
        assert program.startswith(starts), f"{page}: {command}"


@pytest.mark.parametrize("command", RUN_COMMANDS)
def test_run_command_is_a_valid_run(command: str, tmp_path: Path) -> None:
    """Checked, not run. Of a fork the original is checked."""
    (tmp_path / "book.txt").write_text("the reader's own text\n")
    words = shlex.split(command)
    variables = dict(word.split("=", 1) for word in words if re.match("[A-Z]+=", word))
    variables.pop("RECIPE", "")
    arguments = words[words.index("./run_train.sh") + 1 :]
    environment = clean(variables | {"PYTHONPATH": str(ROOT)})
    started = [str(ROOT / "run_train.sh"), *arguments, "--check"]
    done = subprocess.run(started, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_named_exist(page: Path) -> None:
    text = page.read_text()
    names = re.findall(r"`((?:recipes|torchllm|tests|train_configs|docs)/[\w./]*\w)`", text)
    for folder, stems in re.findall(r"`(torchllm/\w+/)\{([\w,]+)\}\.py`", text):
        names += [f"{folder}{stem}.py" for stem in stems.split(",")]
    names += [f"{page.parent.relative_to(ROOT)}/{name}" for name in re.findall(r"!\[[^]]*\]\(([^)]+)\)", text)]
    assert [
        name for name in names if not (ROOT / name).exists() and name != "recipes/mine.py" and "NAME" not in name
    ] == []


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().split("nav:")[1]
    assert sorted(re.findall(r"\w+\.md", navigation)) == [page.name for page in DOCS]


def test_drawings_are_up_to_date() -> None:
    for name, text in load_script("drawings").drawings().items():
        assert (ROOT / "docs/images" / name).read_text() == text


def tracked_text() -> list[Path]:
    """Return the files whose comments and prose a reader meets."""
    files = list(ROOT.glob("*.md"))
    for folder in ("torchllm", "recipes", "tests", "docs", "train_configs"):
        for kind in ("py", "md", "toml"):
            files += (ROOT / folder).rglob(f"*.{kind}")
    return files


def test_no_reference_leads_nowhere() -> None:
    """Works are named by author and year, and listed in docs/references.md."""
    dangling = re.compile(r"\b([Tt]he lecture|DESIGN|[Tt]he papers?'s?)\b")
    texts = {str(file.relative_to(ROOT)): file.read_text() for file in tracked_text() if file != Path(__file__)}
    assert [name for name, text in texts.items() if dangling.search(text)] == []


def test_every_cited_work_is_listed() -> None:
    listed = (ROOT / "docs/references.md").read_text()
    texts = [file.read_text() for file in tracked_text()]
    cited = {number for text in texts for number in re.findall(r"arXiv\s+#?\s*(\d{4}\.\d{5})", text)}
    assert len(cited) > 20
    assert [number for number in sorted(cited) if number not in listed] == []


def z_loss_fork(tmp_path: Path) -> Path:
    """Return recipes/pretrain.py with all changes that docs/fork_a_recipe.md describes."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/fork_a_recipe.md").read_text(), re.S)
    settings, read_config, loss, call, add_sink, sink, learning_rate = blocks
    text = (ROOT / "recipes/pretrain.py").read_text()
    guard = 'if __name__ == "__main__":'
    head, body = text.split(guard, 1)
    text = f"{head}{settings}\n\n{guard}{body}"
    text, replaced = re.subn(r"    CONFIGS = load_configs\(sys\.argv\[1:\]\)\n", lambda _: read_config, text)
    assert replaced == 1
    text = text.replace("\ndef train(", f"\n{loss}\n\n{sink}\n\ndef train(", 1)
    text, inserted = re.subn(r"(    stages = parallelize\((?:.|\n)*?\)\n)", lambda match: match[1] + call, text)
    assert inserted == 1
    text, inserted = re.subn(r"(    monitor\.begin\(.*\)\n)", lambda match: match[1] + add_sink, text)
    assert inserted == 1
    text, replaced = re.subn(r"    learning_rate = LearningRate\(.*\)\n", lambda _: learning_rate, text)
    assert replaced == 1
    fork = tmp_path / "mine.py"
    fork.write_text(text)
    return fork


def test_fork_of_the_tutorial_trains_the_same_model_with_tensor_parallelism(tmp_path: Path) -> None:
    fork = z_loss_fork(tmp_path)
    losses = {}
    for processes, layout in [("1", []), ("2", ["--parallel.tp=2"])]:
        folder = tmp_path / processes
        overrides = ["--training.steps=3", "--schedule.warmup_steps=1", "--metrics.log_interval=1", "--z_loss.weight=1"]
        overrides += ["--evaluate.interval=0", "--generate.after_training=false", f"--run.folder={folder}", *layout]
        command = [str(ROOT / "run_train.sh"), str(ROOT / "train_configs/debug.toml"), *overrides]
        environment = clean({"NPROC": processes, "RECIPE": str(fork), "PYTHONPATH": str(ROOT)})
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        losses[processes] = [record["loss"] for record in records if "loss" in record]
        assert "[z_loss]" in (folder / "config.toml").read_text()
        rates = [record["learning_rate"] for record in records if "loss" in record]
        assert rates == pytest.approx([3e-3 / 20, 3e-3 / 10, 9e-3 / 20])
        assert len((folder / "loss.txt").read_text().splitlines()) == 3
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    assert len(losses["1"]) == 3
    assert losses["1"][0] > 25  # cross entropy is near ln(264) = 5.6 at first, and log(Z)^2 near its square
    assert losses["2"] == pytest.approx(losses["1"], rel=1e-5)
