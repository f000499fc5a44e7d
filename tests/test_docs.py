"""What the pages of docs/ tell a reader to type works, and what they show is what comes out."""

import importlib.util
import json
import os
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, get_origin
from unittest import mock

import pytest
import torch

from recipes import evaluate
from recipes import generate as generate_recipe
from recipes.plan import plan_parser
from tests import workers
from tests.config.conftest import enter_empty_folder
from tests.recipes.warm import rank_of_torchrun
from tests.tiny_run import SMALL, free_port, metrics, process_as_it_was
from torchllm.config import Config, Model, Training, schema
from torchllm.config.errors import UserError
from torchllm.facts.parts.part import PartParameter
from torchllm.facts.parts.registry import mixer
from torchllm.models.decoder import build_model
from torchllm.tools.config.idle import condition
from torchllm.tools.config.load import load_config
from torchllm.tools.front.resolve import load_run
from torchllm.tools.front.start import load_configs
from torchllm.tools.hub.weights import load_weights
from torchllm.tools.planner.search.explain import ranking_table
from torchllm.tools.planner.search.question import read_hardware, read_model
from torchllm.tools.planner.search.search import Search
from torchllm.tools.proof.axes import TECHNIQUES
from torchllm.tools.proof.prove import ProofOptions, Prover
from torchllm.tools.proof.recipe import import_recipe

ROOT = Path(__file__).parent.parent
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", *DOCS]


def load_script(name: str):  # type: ignore[no-untyped-def]  # a module, whose type is not known before it is loaded
    return load_file(name, ROOT / "docs" / f"{name}.py")


def load_file(name: str, file: Path):  # type: ignore[no-untyped-def]  # as above
    specification = importlib.util.spec_from_file_location(name, file)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module
    specification.loader.exec_module(module)
    return module


generate = load_script("generate")
QUOTES = [(page, quote) for page in PAGES for quote in generate.quotes(page.read_text())]
REPEATED = [(page, quote) for page, quote in QUOTES if not quote.measured]
PLANNED = "rank --model llama_65b"
"""of the README, which quotes the first row of what is printed"""


def cases() -> list[Any]:
    """Return a case for each quote; those that take a quarter of a minute for the night."""
    listed = []
    for page, quote in REPEATED:
        is_long = "llama3_405b" in quote.command or PLANNED in quote.command
        marks = [pytest.mark.exhaustive] if is_long else []
        listed.append(pytest.param(page, quote, marks=marks, id=f"{page.name}: {quote.command}"))
    return listed


@pytest.mark.parametrize(("page", "quote"), cases())
def test_output_is_as_quoted(page: Path, quote) -> None:  # type: ignore[no-untyped-def]  # generate.Quote
    """If this fails because a text was changed: `python docs/generate.py`."""
    assert generate.shown(quote.command) == quote.output


def test_the_planned_layout_is_as_quoted() -> None:
    """Without the rest of what the command searches and prints: docs/plan.md has all of it, of another model."""
    (quote,) = (quote for _, quote in REPEATED if PLANNED in quote.command)
    words = shlex.split(quote.command.partition(" 2>&1")[0])
    options = plan_parser().parse_args(words[2:])
    model = read_model(options.model)
    training = Training(global_batch_size=options.global_batch_size, sequence_length=options.sequence_length)
    job = replace(model.job(read_hardware(options.cluster), *options.gpus.numbers), training=training)
    heading, row, *_ = ranking_table(job, Search(job, count=1).find_best().best)
    assert generate.wrapped(f"{heading}\n{row}") == quote.output


def wide_lines(page: Path) -> list[str]:
    """Return the lines of a page's blocks of code that are wider than the site shows."""
    wide, is_code = [], False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        is_fence = line.lstrip().startswith("```")
        is_code ^= is_fence
        if is_code and not is_fence and len(line) > generate.WIDTH:
            wide.append(f"{page.name}:{number}: {line}")
    return wide


def test_code_fits_in_the_width_of_the_site() -> None:
    """A wider line is cut there, and its reader does not see the end of a command."""
    assert [line for page in PAGES for line in wide_lines(page)] == []


def bash_commands() -> list[tuple[str, str]]:
    """Return (page, command) of every ```bash block that is not marked as not run."""
    commands = []
    for page in PAGES:
        for mark, block in re.findall(r"(<!-- not run: .*? -->\n)?```bash\n(.*?)```", page.read_text(), re.S):
            if mark:
                continue
            for line in re.sub(r"\\\n\s*", "", block).splitlines():
                command = re.split(r"(?:^|\s+)#", line)[0]
                if command:
                    commands.append((page.name, command.strip()))
    return commands


COMMANDS = bash_commands()


def test_every_command_of_the_pages_is_known() -> None:
    starts = ("pip install", "./run_train.sh", "python recipes/pretrain.py --help", "cp recipes/pretrain.py")
    assert COMMANDS
    for page, command in COMMANDS:
        program = re.sub(r"^([A-Z]+=\S+ )*", "", command)
        assert program.startswith(starts), f"{page}: {command}"


def test_run_commands_are_valid_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Checked, not run. Of a fork the original is checked."""
    enter_empty_folder(tmp_path, monkeypatch)
    (tmp_path / "book.txt").write_text("the reader's own text\n" * 1000)
    commands = [command for _, command in COMMANDS if "run_train.sh train_configs" in command]
    assert commands
    for command in commands:
        words = shlex.split(command)
        variables = dict(word.split("=", 1) for word in words if re.match("(NPROC|NNODES)=", word))
        environment = mock.patch.dict(os.environ, variables or {"NPROC": "2", "NPROC_IS_DEFAULT": "1"})
        with environment, pytest.raises(SystemExit) as ended:
            load_configs([*words[words.index("./run_train.sh") + 1 :], "--check"])
        assert ended.value.code == 0, f"{command}: {capsys.readouterr().err}"


def files_named(page: Path) -> list[str]:
    """Return the paths from the top of the repository that a page names, those of its images among them."""
    text = page.read_text()
    names = re.findall(r"`((?:recipes|torchllm|tests|train_configs|docs)/[\w./]*\w)`", text)
    for folder, stems in re.findall(r"`(torchllm/\w+/)\{([\w,]+)\}\.py`", text):
        names += [f"{folder}{stem}.py" for stem in stems.split(",")]
    names += [f"{page.parent.relative_to(ROOT)}/{name}" for name in re.findall(r"!\[[^]]*\]\(([^)]+)\)", text)]
    return [name for name in names if name != "recipes/mine.py" and "NAME" not in name]


GUIDES = re.findall(
    r"^(?:  - Start|      - .*): (\w+\.md)$", (ROOT / "mkdocs.yml").read_text().split("  - Reference:")[0], re.M
)


def test_every_page_is_in_the_navigation_and_a_guide_begins_with_its_use_and_a_command() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().split("nav:")[1]
    assert sorted(re.findall(r"\w+\.md", navigation)) == [page.name for page in DOCS]
    assert len(GUIDES) == 13
    for name in GUIDES:
        text = (ROOT / "docs" / name).read_text()
        assert re.match(r"# .+\n\nAfter this page [^\n]+(\n[^\n]+)?\.\n\n(<!-- .* -->\n)?```", text), name


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as Python-Markdown makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def test_links_and_files_lead_somewhere() -> None:
    missing = [f"{page.name}: {name}" for page in PAGES for name in files_named(page) if not (ROOT / name).exists()]
    assert missing == []
    pages = [*PAGES, ROOT / "BENCHMARKS.md", ROOT / "CONTRIBUTING.md", ROOT / "tests/README.md"]
    broken = []
    for page in pages:
        text = re.sub(r"`[^`\n]*`", "", page.read_text())
        for target in re.findall(r"(?<!!)\]\((?!https?:)([^)\s]+)\)", text):
            path, _, anchor = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            if not file.exists() or (anchor and anchor not in anchors(file)):
                broken.append(f"{page.name}: {target}")
    assert broken == []


def test_names_are_in_the_files_where_pages_look_for_them() -> None:
    """Of the form `NAME` in `torchllm/FILE.py`, or of it, or with the file in parentheses."""
    place = re.compile(r"`(\w+)` (?:of |in |\()`((?:torchllm|tests|docs|evidence|recipes)/[\w./]+\.py)`")
    named = []
    for page in PAGES:
        prose = " ".join(re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S).split())
        named += [(page.name, name, file) for name, file in place.findall(prose)]
    assert len(named) > 15
    missing = [f"{page}: {name} in {file}" for page, name, file in named if not has_word(ROOT / file, name)]
    assert missing == []


def has_word(file: Path, word: str) -> bool:
    return re.search(rf"\b{word}\b", file.read_text()) is not None


def test_the_key_and_the_parameter_of_a_new_feature_are_the_library_s() -> None:
    """The example of docs/add_a_model.md: norms of queries and keys."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/add_a_model.md").read_text(), re.S)
    _, key, declaration, style, _ = blocks
    for block, file in ((key, "torchllm/config/schema.py"), (style, "torchllm/parallel/tensor.py")):
        assert " ".join(block.split()) in " ".join((ROOT / file).read_text().split())
    declared: PartParameter = eval(declaration, {"PartParameter": PartParameter})
    with_norms = Model(qk_norm="head")
    (of_library,) = (parameter for parameter in mixer(with_norms).parameters if parameter.name == declared.name)
    assert declared.rule == of_library.rule
    assert declared.shape(with_norms) == of_library.shape(with_norms) == (32,)
    assert declared.shape(Model()) is None


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


def test_works_are_named_and_listed() -> None:
    """By author and year; with their numbers in docs/references.md."""
    dangling = re.compile(r"\b([Tt]he lecture|DESIGN|[Tt]he papers?'s?)\b")
    texts = {str(file.relative_to(ROOT)): file.read_text() for file in tracked_text() if file != Path(__file__)}
    assert [name for name, text in texts.items() if dangling.search(text)] == []
    cited = {number for text in texts.values() for number in re.findall(r"arXiv\s+#?\s*(\d{4}\.\d{5})", text)}
    assert len(cited) > 20
    listed = (ROOT / "docs/references.md").read_text()
    assert [number for number in sorted(cited) if number not in listed] == []


def code_of_section(title: str) -> list[str]:
    """Return the blocks of Python below a heading of docs/fork_a_recipe.md."""
    _, _, text = (ROOT / "docs/fork_a_recipe.md").read_text().partition(f"\n## {title}\n")
    return re.findall(r"```python\n(.*?)```", text.partition("\n## ")[0], re.S)


def z_loss_fork(tmp_path: Path) -> Path:
    """Return recipes/pretrain.py with all changes that docs/fork_a_recipe.md describes."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/fork_a_recipe.md").read_text(), re.S)
    settings, read_config, loss, call, check, add_sink, sink, add_observer, observer, learning_rate, *_ = blocks
    text = (ROOT / "recipes/pretrain.py").read_text()
    guard = 'if __name__ == "__main__":'
    head, body = text.split(guard, 1)
    text = f"{head}{settings}\n\n{guard}{body}"
    text, replaced = re.subn(r"    CONFIGS = load_configs\(sys\.argv\[1:\]\)\n", lambda _: read_config, text)
    assert replaced == 1
    text = text.replace("\ndef train(", f"\n{loss}\n\n{check}\n\n{sink}\n\n{observer}\n\ndef train(", 1)
    text, inserted = re.subn(r"(    stages = parallelize\((?:.|\n)*?\)\n)", lambda match: match[1] + call, text)
    assert inserted == 1
    text, inserted = re.subn(r"(    monitor\.begin\(.*\)\n)", lambda match: add_observer + match[1] + add_sink, text)
    assert inserted == 1
    text, replaced = re.subn(r"    learning_rate = LearningRate\(.*\)\n", lambda _: learning_rate, text)
    assert replaced == 1
    fork = tmp_path / "mine.py"
    fork.write_text(text)
    return fork


def test_the_types_of_a_fork_s_keys_are_on_the_page_of_forks() -> None:
    page = (ROOT / "docs/fork_a_recipe.md").read_text()
    section = page.partition("\n## Types of keys, and errors\n")[2].partition("\n## ")[0]
    aliases = {name for name, value in vars(schema).items() if get_origin(value) is Annotated} - {"Degree"}
    for name in (*aliases, "Bound", "Needs", "AppliedBy", "Unsupported"):
        assert f"`{name}" in section or f", {name}(" in section, name
    (words,) = re.findall(r"`Needs\('(.*)'\)`", section)
    assert condition(words)(Config(training=Training(steps=101)))
    assert not condition(words)(Config(training=Training(steps=100)))
    (code,) = code_of_section("Types of keys, and errors")
    names: dict[str, Any] = {}
    exec(code, names)
    config = SimpleNamespace(z_loss=SimpleNamespace(weight=1.0), training=SimpleNamespace(z_loss=0.1))
    with pytest.raises(UserError, match="set one"):
        names["check"](config)
    assert "python -m pydoc torchllm.recipe.Monitor" in (ROOT / "docs/api.md").read_text()


def test_fork_of_the_tutorial_trains(tmp_path: Path) -> None:
    fork, folder = z_loss_fork(tmp_path), tmp_path / "run"
    overrides = ["--training.steps=3", "--schedule.warmup_steps=1", "--metrics.log_interval=1", "--z_loss.weight=1"]
    overrides += ["--evaluate.interval=0", "--generate.after_training=false", f"--run.folder={folder}"]
    overrides += ["--model.hidden=32", "--model.ffn=64", "--training.sequence_length=32"]
    overrides += ["--data.workers=0", "--metrics.tensorboard=false"]
    arguments = [str(ROOT / "train_configs/debug.toml"), *overrides]
    workers.run(train_on_rank, 1, fork, arguments, free_port())
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if "loss" in record]
    assert "[z_loss]" in (folder / "config.toml").read_text()
    rates = [record["learning_rate"] for record in records if "loss" in record]
    assert rates == pytest.approx([3e-3 / 20, 3e-3 / 10, 9e-3 / 20])
    assert len((folder / "loss.txt").read_text().splitlines()) == 3
    assert len(losses) == 3
    assert losses[0] > 25  # cross entropy is near ln(264) = 5.6 at first, and log(Z)^2 near its square


def test_the_observer_of_the_tutorial_forgets_norms_that_are_not_finite(capsys: pytest.CaptureFixture[str]) -> None:
    (_, observer) = code_of_section("An observer")
    names: dict[str, Any] = {}
    exec(observer, names)
    watch = names["NormWatch"]()
    for step, norm in enumerate((1.0, float("nan"), float("inf"), 4.0), 1):
        watch.logged(step, {"grad_norm": norm})
    assert capsys.readouterr().out == "step 4: gradient norm 4, usually 1\n"


@pytest.mark.exhaustive  # by default its loss is computed, and other forks are proven: test_fork_pages.py
def test_fork_of_the_tutorial_trains_the_same_model_with_tensor_parallelism(tmp_path: Path) -> None:
    """By `torchllm prove`."""
    fork = z_loss_fork(tmp_path)
    arguments = [str(ROOT / "train_configs/debug.toml"), "--z_loss.weight=1"]
    config = load_config(arguments, import_recipe(fork).schema, one_device=True)
    prover = Prover(fork, config, ProofOptions(2, "float32", 0, seed=0), tmp_path, workers.POOL)
    (tensor_parallel,) = (technique for technique in TECHNIQUES if technique.name == "tp=2")
    layout = prover.layout_with(tensor_parallel)
    assert layout is not None
    result = prover.prove(layout)
    assert result.is_right, result.agreement.findings


def average_fork(tmp_path: Path) -> Path:
    """Return recipes/pretrain.py with the average of the weights of docs/fork_a_recipe.md, and a section of its own."""
    settings, read_config, *_ = code_of_section("Example: z-loss in 20 lines")
    average, make, begin, follow, log = code_of_section("State and logs of a fork")
    extra_state = "extra_state=average.tensors | step.expert_balance.tensors"
    assert f"`{extra_state} | warmed.tensors`" in (ROOT / "docs/fork_a_recipe.md").read_text()
    text = (ROOT / "recipes/pretrain.py").read_text()
    guard = 'if __name__ == "__main__":'
    for old, new in (
        (guard, f"{settings}\n\n{guard}"),
        ("    CONFIGS = load_configs(sys.argv[1:])\n", read_config),
        ("\ndef train(", f"\n{average}\n\ndef train("),
        ("    optimizer = build_optimizer(stages, config.optimizer)\n", f"\\g<0>{make}"),
        (f"{extra_state},", f"{extra_state} | warmed.tensors,"),
        ("    restored = checkpoints.resume()\n", f"\\g<0>{begin}"),
        ("            result = step(n, packed.unpack(device))\n", f"\\g<0>{follow}"),
        ("            if monitor.log(n, result, validation_loss, force=last):\n", log),
    ):
        text, replaced = re.subn(re.escape(old), lambda _, old=old, new=new: new.replace("\\g<0>", old), text, count=1)
        assert replaced == 1, old
    fork = tmp_path / "mine.py"
    fork.write_text(text)
    return fork


def iterable_fork(tmp_path: Path) -> Path:
    lines, load, call = code_of_section("An iterable of token lists")
    text = (ROOT / "recipes/pretrain.py").read_text().replace("\ndef train(", f"\n{lines}\n\ndef train(", 1)
    text, replaced = re.subn(r"    CONFIGS = load_configs\(.*\n", lambda _: load, text)
    assert replaced == 1
    text, replaced = re.subn(r"    data = build_loader\((?:.|\n)*?\n    \)\n", lambda _: call, text)
    assert replaced == 1
    fork = tmp_path / "mine.py"
    fork.write_text(re.sub(r'Lines\("(.*?)"\)', rf'Lines("{ROOT}/\1")', text))
    return fork


def test_fork_on_an_iterable_trains_the_same_in_every_layout_and_resumes(tmp_path: Path) -> None:
    fork = iterable_fork(tmp_path)
    given = ("--training.steps=", "--evaluate.", "--schedule.")
    common = [word for word in SMALL if not word.startswith(given)]
    common += [
        "--schedule.name=constant",
        "--schedule.warmup_steps=0",
        "--evaluate.interval=2",
        "--evaluate.sequences=5",
    ]
    common += ["--metrics.tensorboard=false", str(ROOT / "train_configs/debug.toml")]
    runs = {
        "alone": [(3, 1, [])],
        "layouts": [(2, 2, ["--parallel.dp_shard=2"]), (3, 2, ["--parallel.cp=2", "--parallel.dp_shard=1"])],
    }
    losses = {}
    for name, parts in runs.items():
        for steps, ranks, layout in parts:
            arguments = [*common, f"--training.steps={steps}", f"--run.folder={tmp_path / name}", *layout]
            workers.run(train_on_rank, ranks, fork, arguments, free_port())
        records = [record for record in metrics(tmp_path / name) if "loss" in record]
        losses[name] = [record[key] for record in records for key in ("loss", "validation_loss") if record.get(key)]
    assert len(losses["alone"]) == 5  # three steps, and after the second and the last the held-out loss
    assert losses["layouts"] == pytest.approx(losses["alone"], rel=1e-5)


def train_on_rank(file: Path, arguments: list[str], port: int) -> None:
    module = load_file("a_recipe", file)
    with mock.patch.object(sys, "argv", [str(file)]), rank_of_torchrun(port):
        module.main(*load_configs(arguments, getattr(module, "MyConfig", Config)))


def weights_of(run: Path, step: int, prefix: str) -> dict[str, torch.Tensor]:
    """Return weights, or what a fork has saved in their place, of a checkpoint."""
    model = build_model(load_run([str(run / "config.toml")], one_device=True).model)
    load_weights(run / f"checkpoints/step-{step:08d}", [model], prefix=prefix)
    return model.state_dict()


def test_a_forks_state_may_be_added_and_dropped_and_resumes_on_another_layout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run of which steps 3 to 5 are a fork's: on two ranks, then on one."""
    fork, plain, run = average_fork(tmp_path), ROOT / "recipes/pretrain.py", tmp_path / "run"
    common = [
        word
        for word in SMALL
        if not word.startswith(("--training.steps=", "--checkpoint.", "--schedule.", "--evaluate.seq"))
    ]
    common += ["--training.global_batch_size=4", "--training.micro_batch_size=4", "--evaluate.sequences=4"]
    common += [f"--run.folder={run}", "--checkpoint.interval=1", "--checkpoint.keep=0", "--schedule.warmup_steps=0"]
    common += ["--data.workers=0", "--metrics.tensorboard=false", str(ROOT / "train_configs/debug.toml")]
    for file, steps, ranks, layout in (
        (plain, 2, 1, []),
        (fork, 4, 2, ["--parallel.tp=2", "--parallel.dp_shard=1"]),
        (fork, 5, 1, []),
        (plain, 6, 1, []),
    ):
        arguments = [*common, f"--training.steps={steps}", *layout]
        workers.run(train_on_rank, ranks, file, arguments, free_port())
        if steps != 5:
            continue
        assert "[z_loss]" in (run / "config.toml").read_text()
        config = load_run([str(run / "config.toml")], one_device=True)
        err = capsys.readouterr().err
        assert "z_loss: of a forked recipe, not read here" in err
        with process_as_it_was():
            evaluate.main(config)
            generate_recipe.main(config)
        assert "step 5  validation loss" in (out := capsys.readouterr().out)
        assert "--- step 5, " in out

    average = weights_of(run, 2, "model.")
    for step in (3, 4, 5):
        keep = step / (step + 10)
        for name, weight in weights_of(run, step, "model.").items():
            average[name] = average[name].lerp(weight, 1 - keep)
        for name, saved in weights_of(run, step, "extra.average.").items():
            assert torch.allclose(saved, average[name], rtol=1e-5, atol=1e-7), (step, name)
    logged = {record["step"]: record.get("average/keep") for record in metrics(run) if "loss" in record}
    assert logged == pytest.approx({1: None, 2: None, 3: 3 / 13, 4: 4 / 14, 5: 5 / 15, 6: None})
