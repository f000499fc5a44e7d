"""What a file, its bases and the command line make of a config."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.config.conftest import refusal
from torchllm.config import Config, Kinds, Parallel, Source
from torchllm.tools.config.load import load_config
from torchllm.tools.config.read import ConfigError, read_table

pytestmark = pytest.mark.quick


def test_bases_and_overrides(folder: Path) -> None:
    (folder / "models").mkdir()
    (folder / "root.toml").write_text("[model]\nlayers = 2\nhidden = 64\n[run]\nfolder = 'root'\n")
    (folder / "models" / "parent.toml").write_text(
        "base = '../root.toml'\nmodel.layers = 3\n[[data.sources]]\nkind='text'\npath='a'\n[[data.sources]]\n"
    )
    (folder / "x.toml").write_text(
        "base = 'models/parent.toml'\n[data]\nsources = [{kind = 'jsonl', path = 'b'}]\n"
        "[optimizer]\nlearning_rate = 1\n"
    )
    config = load_config(
        [
            "x.toml",
            "--data.sources.0.path=c = d",
            "--data.sources.1.weight=2",
            '--generate.prompt="a\\tb"',
            "--data.cache='' and so on",
            "--optimizer.name=sgd",
            '--recompute.mode="full"',
            "--schedule.final_fraction=1e-1",
            "--compile.loss=true",
        ]
    )
    assert config == replace(
        Config(),
        run=replace(config.run, folder="root"),
        model=replace(config.model, layers=3, hidden=64),
        data=replace(
            config.data,
            sources=(Source(kind="jsonl", path="c = d"), Source(weight=2.0)),
            cache="'' and so on",
        ),
        optimizer=replace(config.optimizer, learning_rate=1.0, name="sgd"),
        recompute=replace(config.recompute, mode="full"),
        schedule=replace(config.schedule, final_fraction=0.1),
        compile=replace(config.compile, loss=True),
        generate=replace(config.generate, prompt="a\tb"),
        parallel=Parallel(dp_shard=1),
    )
    assert type(config.optimizer.learning_rate) is float


def test_a_base_that_is_a_run_is_named_as_any_run_and_keeps_its_folder(folder: Path) -> None:
    """A variant does not go on in the run's folder."""
    run = folder / "old run"
    run.mkdir()
    (run / "config.toml").write_text(f"[run]\nfolder = '{run}'\nseed = 7\n[model]\nlayers = 3\n")
    for name in ("old run", "old run/config.toml"):
        (folder / "x.toml").write_text(f"base = '{name}'\n[optimizer]\nlearning_rate = 1\n")
        config = load_config(["x.toml"])
        assert (config.run.folder.startswith("runs/x-"), config.run.seed, config.model.layers) == (True, 7, 3)
    assert load_config(["old run"]).run.folder == str(run)


def test_keys_of_kinds_in_a_base_a_file_and_the_command_line(folder: Path) -> None:
    (folder / "base.toml").write_text(
        "[model]\npattern = ['local', 'full']\n[model.kinds.local]\nwindow = 16\nrope_theta = 5.0\n[model.kinds.full]\n"
    )
    (folder / "x.toml").write_text(
        "base = 'base.toml'\n[model]\npattern = ['local', 'none', 'full']\n[model.kinds.local]\nwindow = 32\n"
        "[model.kinds.none]\nrotary_fraction = 0\n"
    )
    kinds = {"local": {"window": 32, "rope_theta": 5.0}, "full": {}, "none": {"rotary_fraction": 0.0}}
    config = load_config(["x.toml"])
    assert config.model == replace(Config().model, pattern=("local", "none", "full"), kinds=Kinds(kinds))
    assert type(config.model.kinds["none"]["rotary_fraction"]) is float
    changed = load_config(["x.toml", "--model.kinds.local.window=8", "--model.kinds.full.rope_truncate=false"]).model
    assert changed.kinds["local"] == {"window": 8, "rope_theta": 5.0}
    assert changed.kinds["full"] == {"rope_truncate": False}


def test_the_files_warmup_is_cut_to_the_steps_of_the_command_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "x.toml").write_text("[run]\nfolder = 'a'\n[training]\nsteps = 100\n[schedule]\nwarmup_steps = 20\n")
    assert load_config(["x.toml", "--training.steps=5"]).schedule.warmup_steps == 5
    assert capsys.readouterr().err == "x.toml:6: schedule.warmup_steps: 20 is cut to 5, the steps of the run\n"
    assert load_config(["x.toml", "--training.steps=20"]).schedule.warmup_steps == 20
    assert capsys.readouterr().err == ""


def test_the_files_decay_is_cut_to_what_the_warmup_leaves(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "x.toml").write_text(
        "[run]\nfolder = 'a'\n[schedule]\nname = 'wsd'\nwarmup_steps = 20\ndecay_steps = 100\n"
    )
    schedule = load_config(["x.toml", "--training.steps=50"]).schedule
    assert (schedule.warmup_steps, schedule.decay_steps) == (20, 30)
    assert capsys.readouterr().err == (
        "x.toml:6: schedule.decay_steps: 100 is cut to 30, the steps that the warmup leaves\n"
    )
    schedule = load_config(["x.toml", "--training.steps=5"]).schedule
    assert (schedule.warmup_steps, schedule.decay_steps) == (5, 0)


def test_a_warmup_from_where_the_steps_are_from_is_not_cut(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    over = "schedule.warmup_steps: 6 is over training.steps 5"
    wsd = ["--training.steps=5", "--schedule.name=wsd", "--schedule.decay_steps=6"]
    for file, arguments, line in (
        ("steps = 5\n[schedule]\nwarmup_steps = 6", [], f"x.toml:4: {over}"),
        ("steps = 9\n", ["--training.steps=5", "--schedule.warmup_steps=6"], f"--{over}"),
        ("steps = 5\n", ["--schedule.warmup_steps=6"], f"--{over}"),
        ("steps = 9\n", wsd, "--schedule.decay_steps: warmup and decay together are over training.steps 5"),
    ):
        (folder / "x.toml").write_text(f"[training]\n{file}")
        assert refusal(capsys, partial(load_config, ["x.toml", *arguments])) == [line]


def test_line_ends_may_be_spelled_as_a_shell_hands_them_over(folder: Path) -> None:
    for text, delimiter in (
        (r"\n\n", "\n\n"),
        (r'"\n\n"', "\n\n"),
        (r"\r\n", "\r\n"),
        (r"\t", "\t"),
        (r"\n--", r"\n--"),
    ):
        config = load_config(
            [r"--data.sources.0.kind=text", "--data.sources.0.path=a", f"--data.sources.0.delimiter={text}"]
        )
        assert config.data.sources[0].delimiter == delimiter


def test_any_array_may_be_values_with_commas(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layers = ["--parallel.pp=2", "--parallel.dp_shard=1", "--run.dry_run=true", "--model.layers=3", "--lora.rank=2"]
    config = load_config([*layers, "--lora.targets=q_proj", "--parallel.split=1,2"])
    assert (config.lora.targets, config.parallel.split) == (("q_proj",), (1, 2))
    for text, tasks in (("arc_easy,my tasks", ("arc_easy", "my tasks")), ('["a,b"]', ("a,b",)), ("", ())):
        assert load_config([f"--evaluate.tasks={text}"]).evaluate.tasks == tasks
    lines = refusal(capsys, lambda: load_config([*layers, "--parallel.split=1,x", "--data.sources=book.txt"]))
    assert lines == [
        '--parallel.split: parallel.split.1: must be a whole number of at least 1, not "x"',
        '--data.sources: must be an array, each a table, not "book.txt"',
    ]


def test_an_override_mends_the_file(folder: Path) -> None:
    (folder / "x.toml").write_text("[training]\nsteps = 'abc'")
    assert load_config(["x.toml", "--training.steps=7"]).training.steps == 7


def test_a_path_begins_with_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    faults: list[ConfigError] = []
    table = {"run": {"folder": "~/runs/x"}, "export": {"folder": "~/model"}, "cluster": {"name": "~/c.toml"}}
    table |= {"checkpoint": {"initial": "~/a", "resume": "auto"}, "model": {"from_hf": "~/b"}}
    config = read_table(Config, table, faults)
    assert (config.run.folder, config.export.folder) == ("/home/me/runs/x", "/home/me/model")
    assert (config.checkpoint.initial, config.checkpoint.resume) == ("/home/me/a", "auto")
    assert (config.cluster.name, config.model.from_hf) == ("/home/me/c.toml", "/home/me/b")
    assert read_table(Config, {"run": {"folder": "runs/$no_such_variable"}}, faults).run.folder.endswith("_variable")
    assert faults == []
    read_table(Config, {"run": {"folder": "${HOME}/runs"}}, faults)
    read_table(Config, {"run": {"folder": "~no.such.user/runs"}}, faults)
    assert [fault.message.partition(":")[0] for fault in faults] == [
        "${HOME} is not expanded in a config",
        "~no.such.user/runs is not expanded in a config",
    ]
