"""Wrong configs, each with the exact lines it gets; right ones: bases, overrides, ranks, folders, writing."""

import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchllm.config import Bound, Config, Parallel, Run, Source, Training, load_config, write_config
from torchllm.config.inert import contradictions
from torchllm.config.read import field_types, plain_type
from torchllm.config.write import dump_toml

ROOT = Path(__file__).parents[2]
RANKS = (
    "WORLD_SIZE",
    "NNODES",
    "NPROC",
    "NPROC_IS_DEFAULT",
    "LOCAL_RANK",
    "SLURM_JOB_ID",
    "PET_RDZV_ID",
    "TORCHELASTIC_RUN_ID",
)
UNKNOWN_RANKS = "is -1, but the number of ranks is unknown: set NPROC (and NNODES), or give a degree"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder and an environment of one rank."""
    monkeypatch.chdir(tmp_path)
    for name in RANKS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "1")
    return tmp_path


Wrong = tuple[str, list[str], list[str]]
WRONG: dict[str, Wrong] = {  # what is in x.toml, further arguments, the lines on stderr
    # Keys.
    "unknown key": (
        "[training]\nsteps = 3\nstep = 4",
        [],
        ["x.toml:3: training.step: unknown key; did you mean training.steps?"],
    ),
    "unknown key of another section": (
        "[training]\nlearning_rate = 1e-3",
        [],
        ["x.toml:2: training.learning_rate: unknown key; did you mean optimizer.learning_rate?"],
    ),
    "unknown key like none": (
        "[training]\nzzzzzz = 1",
        [],
        ["x.toml:2: training.zzzzzz: unknown key; --help lists all keys"],
    ),
    "unknown section": (
        "\n[trainig]\nsteps = 3",
        [],
        ["x.toml:2: trainig: unknown section or key; did you mean training?"],
    ),
    "key outside of its section": (
        "steps = 3",
        [],
        ["x.toml:1: steps: unknown section or key; did you mean training.steps?"],
    ),
    "unknown key of a source": (
        "[[data.sources]]\nkind = 'stdlib'\n[[data.sources]]\nkind = 'stdlib'\nwieght = 2.0",
        [],
        ["x.toml:5: data.sources.1.wieght: unknown key; did you mean data.sources.1.weight?"],
    ),
    "unknown key with a line break": (
        '[run]\n"a\\nb" = 1',
        [],
        ['x.toml:2: run."a\\nb": unknown key; --help lists all keys'],
    ),
    "unknown dotted key": (
        "training.stops = 3",
        [],
        ["x.toml:1: training.stops: unknown key; did you mean training.steps?"],
    ),
    "unknown key in an inline table": (
        "training = {micro_batch_size = 1,\tsteps_ = 1}",
        [],
        ["x.toml:1: training.steps_: unknown key; did you mean training.steps?"],
    ),
    "unknown key after many lines": (
        '[generate]\nprompt = """\n[run]\nsteps = 1 # no\n\\""" """\n[data]\nsources = [ # [\n  {kind = "stdlib"},\n\n'
        "  {kind = 'synthetic',  weihgt = 1.0},\n]\n[training]\nstep = 1",
        [],
        [
            "x.toml:10: data.sources.1.weihgt: unknown key; did you mean data.sources.1.weight?",
            "x.toml:13: training.step: unknown key; did you mean training.steps?",
        ],
    ),
    # Types.
    "string for a bool": (
        '[compile]\nnorm = "false"',
        [],
        ['x.toml:2: compile.norm: must be true or false, not "false"'],
    ),
    "number for a bool": ("[compile]\nnorm = 0", [], ["x.toml:2: compile.norm: must be true or false, not 0"]),
    "fraction for a whole number": (
        "[training]\nsteps = 1.7",
        [],
        ["x.toml:2: training.steps: must be a whole number of at least 1, not 1.7"],
    ),
    "whole fraction for a whole number": (
        "[training]\nsteps = 2.0",
        [],
        ["x.toml:2: training.steps: must be a whole number of at least 1, not 2.0"],
    ),
    "bool for a whole number": (
        "[training]\nsteps = true",
        [],
        ["x.toml:2: training.steps: must be a whole number of at least 1, not true"],
    ),
    "bool for a number": (
        "[optimizer]\nlearning_rate = true",
        [],
        ["x.toml:2: optimizer.learning_rate: must be a number over 0, not true"],
    ),
    "string for a number": (
        '[optimizer]\nlearning_rate = "1e-3"',
        [],
        ['x.toml:2: optimizer.learning_rate: must be a number over 0, not "1e-3"'],
    ),
    "number for a string": ("[run]\nfolder = 5", [], ["x.toml:2: run.folder: must be a string, not 5"]),
    "date for a string": (
        "[run]\nfolder = 2025-01-02",
        [],
        ["x.toml:2: run.folder: must be a string, not the date or time 2025-01-02"],
    ),
    "array for a number": (
        "[training]\nsteps = [\n1,\n]",
        [],
        ["x.toml:2: training.steps: must be a whole number of at least 1, not an array"],
    ),
    "table for a number": (
        "[training.steps]\na = 1",
        [],
        ["x.toml:1: training.steps: must be a whole number of at least 1, not a table"],
    ),
    "value for a section": ("training = 5", [], ["x.toml:1: training: must be a table, not 5"]),
    "table for an array": (
        "[data.sources]\nkind = 'stdlib'",
        [],
        ["x.toml:1: data.sources: must be an array, each a table, not a table"],
    ),
    "string in an array of tables": (
        '[data]\nsources = [\n  {kind = "stdlib"},\n  "text",\n]',
        [],
        ['x.toml:4: data.sources.1: must be a table, not "text"'],
    ),
    "choice": (
        '[optimizer]\nname = "adam"',
        [],
        ['x.toml:2: optimizer.name: must be one of "adamw", "sgd", not "adam"'],
    ),
    "long string": (
        f'[optimizer]\nname = "{"a" * 999}"',
        [],
        [f'x.toml:2: optimizer.name: must be one of "adamw", "sgd", not "{"a" * 55} ...'],
    ),
    # Limits.
    "negative": (
        "[training]\nsteps = -1",
        [],
        ["x.toml:2: training.steps: must be a whole number of at least 1, not -1"],
    ),
    "zero": (
        "[training]\nmicro_batch_size = 0",
        [],
        ["x.toml:2: training.micro_batch_size: must be a whole number of at least 1, not 0"],
    ),
    "zero learning rate": (
        "[optimizer]\nlearning_rate = 0",
        [],
        ["x.toml:2: optimizer.learning_rate: must be a number over 0, not 0"],
    ),
    "nan": (
        "[optimizer]\nlearning_rate = nan",
        [],
        ["x.toml:2: optimizer.learning_rate: must be a finite number, not nan"],
    ),
    "infinity": (
        "[optimizer]\nlearning_rate = 1e999",
        [],
        ["x.toml:2: optimizer.learning_rate: must be a finite number, not inf"],
    ),
    "above the range": (
        "[data]\nvalidation_fraction = 0.6",
        [],
        ["x.toml:2: data.validation_fraction: must be a number from 0.0 to 0.5, not 0.6"],
    ),
    "over 64 bits": (
        "[training]\nsteps = 9223372036854775808",
        [],
        ["x.toml:2: training.steps: must fit into 64 bits"],
    ),
    "unprintably long number": (
        f"[compile]\nnorm = 0x{'f' * 9999}",
        [],
        ["x.toml:2: compile.norm: must be true or false, not a number of more than 64 bits"],
    ),
    "degree 0": (
        "[parallel]\ndp_shard = 0",
        [],
        ["x.toml:2: parallel.dp_shard: must be at least 1, or -1 for what the other degrees leave"],
    ),
    "degree -2": (
        "[parallel]\ndp_shard = -2",
        [],
        ["x.toml:2: parallel.dp_shard: must be a whole number of at least -1, not -2"],
    ),
    # TOML itself.
    "syntax": (
        "[training]\nsteps 3",
        [],
        ["x.toml:2: Expected '=' after a key in a key/value pair"],
    ),
    "bare word": (
        "[training]\n\nsteps = False",
        [],
        ["x.toml:3: invalid value: text needs quotes, and it is true and false"],
    ),
    "unclosed": ("[data]\nsources = [\n", [], ["x.toml:2: "]),
    "duplicate key": ("[training]\nsteps = 3\n\nsteps = 4", [], ["x.toml:4: a key is given twice"]),
    "string without its closing quote": (
        '[run]\nfolder = "a\nseed = 1',
        [],
        ["x.toml:2: a string has no closing quote"],
    ),
    "literal string without its closing quote": (
        "[run]\nfolder = 'a",
        [],
        ["x.toml:2: a string has no closing quote"],
    ),
    "section of a section twice": (
        "[a.b]\n[a.b]",
        [],
        ["x.toml:2: section [a.b] is given twice"],
    ),
    "duplicate section": (
        "[training]\nsteps = 3\n[training]",
        [],
        ["x.toml:3: section [training] is given twice"],
    ),
    "nested too deeply": (f"a = {'[' * 9999}", [], ["x.toml:1: "]),
    "byte order mark": (
        "\ufeff[run]\nseed = 1",
        [],
        ["x.toml:1: starts with a byte order mark: save it as UTF-8 without one (without BOM)"],
    ),
    "NUL": ("[run]\nseed = 1\n\0", [], ["x.toml:3: Invalid statement"]),
    # Bases.
    "base of a wrong type": ("base = 5", [], ["x.toml:1: base: must name a file, not 5"]),
    "missing base": (
        "\nbase = 'parents.toml'",
        [],
        ["x.toml:2: parents.toml: no such file; did you mean parent.toml?"],
    ),
    "base is itself": ("base = 'x.toml'", [], ["x.toml:1: base: a cycle: x.toml -> x.toml"]),
    "cycle": ("base = 'sub/a.toml'", [], ["sub/b.toml:1: base: a cycle: sub/a.toml -> sub/b.toml -> sub/a.toml"]),
    "problem in a base": (
        "base = 'parent.toml'\n[model]\nheads = 3",
        [],
        [
            "parent.toml:3: model.hiden: unknown key; did you mean model.hidden?",
            "parent.toml:5: training.steps: must be a whole number of at least 1, not 0",
            "x.toml:3: model.heads: 3 heads do not divide hidden 256; set model.head_dim",  # hidden is the default
        ],
    ),
    "base outside of the top": (
        "[run]\nbase = 'parent.toml'",
        [],
        ["x.toml:2: run.base: unknown key; --help lists all keys"],
    ),
    # Between keys.
    "degrees and world size": (
        "[parallel]\ndp_shard = 1\ntp = 2",
        [],
        [
            "x.toml:3: parallel.tp: pp 1 x dp_replicate 1 x dp_shard 1 x cp 1 x tp 2 = 2 ranks, but there are 1; "
            "set one to match"
        ],
    ),
    "open degree": (
        "[parallel]\ntp = 2",
        [],
        ["x.toml: parallel.dp_shard: is -1, but 1 ranks are no multiple of pp 1 x dp_replicate 1 x cp 1 x tp 2 = 2"],
    ),
    "two open degrees": (
        "[parallel]\ndp_replicate = -1",
        [],
        ["x.toml:2: parallel.dp_replicate: only one of dp_replicate and dp_shard may be -1"],
    ),
    "heads": (
        "[model]\nhidden = 100\nheads = 3\nhead_dim = 2\nkv_heads = 2",
        [],
        ["x.toml:5: model.kv_heads: 2 key-value heads do not divide 3 heads"],
    ),
    "batch": (
        "[training]\nglobal_batch_size = 10\nmicro_batch_size = 4",
        [],
        ["x.toml:2: training.global_batch_size: 10 is no multiple of micro_batch_size 4 x 1 data-parallel ranks = 4"],
    ),
    "source without a path": (
        "[[data.sources]]\nkind = 'stdlib'\n\n[[data.sources]]\nkind = 'text'",
        [],
        ["x.toml:4: data.sources.1.path: a source of kind 'text' needs a path"],
    ),
    "no source": ("[data]\nsources = []", [], ["x.toml:2: data.sources: is empty: name at least one [[data.sources]]"]),
    "all at once": (
        "[training]\nsteps = 1.5\n[model]\nkv_heads = 3\n[modle]\nheads = 4\n[compile]\nnorm = 'no'",
        ["--run.sed=1"],
        [
            "x.toml:2: training.steps: must be a whole number of at least 1, not 1.5",
            "x.toml:5: modle: unknown section or key; did you mean model?",
            'x.toml:8: compile.norm: must be true or false, not "no"',
            "--run.sed: unknown key; did you mean run.seed?",
            "x.toml:4: model.kv_heads: 3 key-value heads do not divide 8 heads",  # heads is the default
        ],
    ),
    "not what follows from another mistake": (  # the batch may divide by what micro_batch_size was to be
        "[training]\nglobal_batch_size = 3\nmicro_batch_size = '2'\n[model]\nlayers = 2\n[recompute]\nk = 3",
        [],
        [
            'x.toml:3: training.micro_batch_size: must be a whole number of at least 1, not "2"',
            "x.toml:7: recompute.k: 3 is over model.layers 2",
            'x.toml:7: recompute.k: does nothing in this run: it needs recompute.mode = "segment" or "every_k"',
        ],
    ),
    # Arguments.
    "override of a wrong type": (
        "",
        ["--training.steps=abc", "--compile.norm=False", "--training.loss_chunk=1.7"],
        [
            '--training.steps: must be a whole number of at least 1, not "abc"',
            "--training.loss_chunk: must be a whole number of at least 0, not 1.7",
            '--compile.norm: must be true or false, not "False"',
        ],
    ),
    "override hides the file": (
        "[training]\nsteps = 'abc'",
        ["--training.steps=0"],
        ["--training.steps: must be a whole number of at least 1, not 0"],
    ),
    "override with an empty value": (
        "",
        ["--training.steps="],
        ['--training.steps: must be a whole number of at least 1, not ""'],
    ),
    "override that smuggles a key": (
        "",
        ["--training.steps=1\nfoo = 2"],
        ['--training.steps: must be a whole number of at least 1, not "1\\nfoo = 2"'],
    ),
    "override without a value": (
        "",
        ["--training.steps", "100", "--run.seed"],
        [
            "--training.steps: needs a value: --training.steps=100",
            "--run.seed: needs a value: --run.seed=VALUE",
        ],
    ),
    "override with spaces": (
        "",
        ["--training.steps", "=", "5", "--run.seed=", "-1", "--data.workers", "=2", "--training.loss_chunk", "=", "-1"],
        [
            "--training.steps: no spaces around the equals sign: --training.steps=5",
            "-1: unknown flag; overrides are --section.key=value, flags --check, --json and --help",
            "--data.workers: no spaces around the equals sign: --data.workers=2",
            "--training.loss_chunk: no spaces around the equals sign: --training.loss_chunk=-1",
            '--run.seed: must be a whole number from 0 to 9223372036854775807, not ""',
        ],
    ),
    "override with a space": (
        "",
        ["--training.steps=", "5"],
        ["--training.steps: no spaces around the equals sign: --training.steps=5"],
    ),
    "override given twice": (
        "",
        ["--run.seed=1", "--run.seed=1", "--run.seed=2"],
        ['--run.seed: given twice: "1" and "2"'],
    ),
    "override of a section": (
        "",
        ["--training={steps = 3}"],
        ["--training: is a table: give its keys one by one, such as --training.steps="],
    ),
    "override of an unknown section": (
        "",
        ["--optim.learning_rate=1e-3"],
        ["--optim.learning_rate: optim: unknown section or key; did you mean optimizer?"],
    ),
    "override of a missing element": (
        "",
        ["--data.sources.2.kind=stdlib"],
        ["--data.sources.2.kind: data.sources has 1 elements: the index is 0 to 1"],
    ),
    "override of no element": (
        "",
        ["--data.sources.kind=stdlib"],
        ["--data.sources.kind: data.sources has 1 elements: the index is 0 to 1"],
    ),
    "problem that an override makes": (
        "[model]\nheads = 8",
        ["--model.kv_heads=3"],
        ["--model.kv_heads: 3 key-value heads do not divide 8 heads"],
    ),
    "argument that is not UTF-8": ("", ["--run.folder=a\udcff"], ["--run.folder: must be UTF-8"]),
    "folder with a line break": (
        "",
        ["--run.folder=a\nNPROC=9"],
        ['--run.folder: must be printable, not "a\\nNPROC=9"'],
    ),
    "unknown flags": (
        "",
        ["--dry", "-n", "--check=1"],
        [
            f"{flag}: unknown flag; overrides are --section.key=value, flags --check, --json and --help"
            for flag in ("--dry", "-n", "--check=1")
        ],
    ),
    "JSON of a run": ("", ["--json"], ["--run.json: does nothing in this run: it needs run.dry_run = true"]),
    "layout that nobody plans": (
        "[parallel]\nlayout = 'auto'",
        [],
        ['x.toml:2: parallel.layout: is "auto", but this recipe does not plan: set the degrees'],
    ),
    "second file": (
        "",
        ["parent.toml"],
        ["parent.toml: one config file only, and x.toml is given; overrides are --section.key=value"],
    ),
}


def _stderr_of_failure(capsys: pytest.CaptureFixture[str], load: Callable[[], object]) -> list[str]:
    with pytest.raises(SystemExit) as stop:
        load()
    assert stop.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err.splitlines()


@pytest.mark.parametrize("name", WRONG)
def test_wrong(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, arguments, expected = WRONG[name]
    (folder / "x.toml").write_text(text)
    (folder / "parent.toml").write_text("[model]\nheads = 4\nhiden = 5\n[training]\nsteps = 0\n")
    (folder / "sub").mkdir()
    (folder / "sub" / "a.toml").write_text("base = 'b.toml'")
    (folder / "sub" / "b.toml").write_text("base = 'a.toml'")
    lines = _stderr_of_failure(capsys, lambda: load_config(["x.toml", *arguments]))
    if expected[0].endswith(": "):  # the words are the interpreter's
        lines = [line[: len(expected[0])] for line in lines]
    assert lines == expected


WRONG_RANKS: dict[str, tuple[dict[str, str], list[str], list[str]]] = {  # environment, arguments, lines
    "WORLD_SIZE": (
        {"WORLD_SIZE": "two"},
        [],
        ['environment: WORLD_SIZE: must be a whole number of at least 1, not "two"'],
    ),
    "NNODES and NPROC": (
        {"NNODES": "0", "NPROC": "-1"},
        ["--check"],
        [
            'environment: NNODES: must be a whole number of at least 1, not "0"',
            'environment: NPROC: must be a whole number of at least 1, not "-1"',
        ],
    ),
    "not known": ({}, ["--check"], [f"x.toml: parallel.dp_shard: {UNKNOWN_RANKS}"]),
    "not started": (
        {},
        ["--parallel.dp_shard=4"],
        ["x.toml: needs 4 ranks: start it with NPROC=4 ./run_train.sh x.toml --parallel.dp_shard=4"],
    ),
    "not started on two nodes": (
        {"NNODES": "2", "NPROC": "4", "SLURM_JOB_ID": "7"},
        [],
        ["x.toml: needs 8 ranks: start it with NPROC=4 ./run_train.sh x.toml"],
    ),
    "nodes that share unevenly": (
        {"NNODES": "3"},
        ["--check", "--parallel.dp_shard=4", "--run.folder=a"],
        ["environment: NNODES: 3 nodes cannot share 4 ranks evenly"],
    ),
    "no common folder": (
        {"NNODES": "2", "NPROC": "1", "TORCHELASTIC_RUN_ID": "none"},
        ["--check"],
        ["x.toml: run.folder: set it: there is no job id to name the folder after on all ranks alike"],
    ),
    "no common folder of ranks": (
        {"WORLD_SIZE": "2"},
        [],
        ["x.toml: run.folder: set it: there is no job id to name the folder after on all ranks alike"],
    ),
}


@pytest.mark.parametrize("name", WRONG_RANKS)
def test_wrong_ranks(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    environment, arguments, expected = WRONG_RANKS[name]
    (folder / "x.toml").write_text("")
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setattr(sys, "argv", ["recipes/pretrain.py"])
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    assert _stderr_of_failure(capsys, lambda: load_config(["x.toml", *arguments])) == expected


def test_a_fork_is_told_to_start_itself(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setattr(sys, "argv", ["recipes/mine.py"])
    lines = _stderr_of_failure(capsys, lambda: load_config(["--parallel.dp_shard=2"]))
    assert lines == [
        "defaults: needs 2 ranks: start it with RECIPE=recipes/mine.py NPROC=2 ./run_train.sh --parallel.dp_shard=2"
    ]


def test_only_one_process_of_a_node_speaks(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert _stderr_of_failure(capsys, lambda: load_config(["--training.steps=0"])) == []


def test_files_that_cannot_be_read(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "train_configs" / "models").mkdir(parents=True)
    (folder / "train_configs" / "models" / "debug.toml").touch()
    assert _stderr_of_failure(capsys, lambda: load_config(["debgu.toml"])) == [
        "debgu.toml: no such file; did you mean train_configs/models/debug.toml?"
    ]
    assert _stderr_of_failure(capsys, lambda: load_config(["."])) == [".: is not a file"]
    os.mkfifo("pipe.toml")  # reading it would not end
    assert _stderr_of_failure(capsys, lambda: load_config(["pipe.toml"])) == ["pipe.toml: is not a file"]
    Path("latin.toml").write_bytes(b"[run]\nfolder = '\xe9'\n")
    assert _stderr_of_failure(capsys, lambda: load_config(["latin.toml"])) == ["latin.toml:2: is not UTF-8"]


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


@pytest.mark.parametrize(
    ("file", "arguments", "line"),
    [
        ("steps = 5\n[schedule]\nwarmup_steps = 6", [], "x.toml:4: schedule.warmup_steps: 6 is over training.steps 5"),
        (
            "steps = 9\n",
            ["--training.steps=5", "--schedule.warmup_steps=6"],
            "--schedule.warmup_steps: 6 is over training.steps 5",
        ),
        (
            "steps = 5\n",
            ["--schedule.warmup_steps=6"],
            "--schedule.warmup_steps: 6 is over training.steps 5",
        ),
        (
            "steps = 9\n",
            ["--training.steps=5", "--schedule.name=wsd", "--schedule.decay_steps=6"],
            "--schedule.decay_steps: warmup and decay together are over training.steps 5",
        ),
    ],
)
def test_a_warmup_from_where_the_steps_are_from_is_not_cut(
    file: str, arguments: list[str], line: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "x.toml").write_text(f"[training]\n{file}")
    assert _stderr_of_failure(capsys, lambda: load_config(["x.toml", *arguments])) == [line]


def test_override_reaches_into_the_default_array(folder: Path) -> None:
    config = load_config(["--data.sources.0.kind=text", "--data.sources.0.path=a", "--data.sources.1.weight=0.5"])
    assert config.data.sources == (Source(kind="text", path="a"), Source(weight=0.5))


def test_an_override_mends_the_file(folder: Path) -> None:
    (folder / "x.toml").write_text("[training]\nsteps = 'abc'")
    assert load_config(["x.toml", "--training.steps=7"]).training.steps == 7


@pytest.mark.parametrize(
    ("environment", "world"),
    [
        ({"WORLD_SIZE": "6", "NNODES": "3", "NPROC": "9"}, 6),
        ({"WORLD_SIZE": "1"}, 1),
        ({"NPROC": "1"}, 1),
    ],
)
def test_open_degree_is_filled_in(
    environment: dict[str, str], world: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE")
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    config = load_config(["--run.folder=a", f"--training.global_batch_size={world}"])
    assert config.parallel == Parallel(dp_shard=world)


@pytest.mark.parametrize(
    ("environment", "arguments", "degrees"),
    [
        ({}, ["--parallel.pp=16", "--parallel.dp_shard=128", "--parallel.tp=8"], (16, 1, 128, 1, 8)),
        ({"NPROC": "8", "NNODES": "4"}, [], (1, 1, 32, 1, 1)),
        ({"WORLD_SIZE": "2", "NPROC": "4"}, [], (1, 1, 4, 1, 1)),  # it is no rank of the job that starts it
        ({"NPROC": "2", "NPROC_IS_DEFAULT": "1"}, ["--parallel.dp_shard=64"], (1, 1, 64, 1, 1)),
    ],
)
def test_a_dry_run_is_of_any_number_of_ranks(
    environment: dict[str, str],
    arguments: list[str],
    degrees: tuple[int, ...],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("WORLD_SIZE")
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    big = ["--model.layers=16", "--training.global_batch_size=2048", "--run.dry_run=true"]
    parallel = load_config([*big, *arguments]).parallel
    assert (parallel.pp, parallel.dp_replicate, parallel.dp_shard, parallel.cp, parallel.tp) == degrees
    assert list(folder.iterdir()) == []


def test_a_dry_run_needs_to_know_its_ranks(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setenv("NPROC", "2")
    monkeypatch.setenv("NPROC_IS_DEFAULT", "1")
    with pytest.raises(SystemExit):
        load_config(["--run.dry_run=true"])
    assert capsys.readouterr().err == f"defaults: parallel.dp_shard: {UNKNOWN_RANKS}\n"


def test_check_and_json_of_a_dry_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        load_config(["--run.dry_run=true", "--json", "--parallel.dp_shard=1", "--check"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.splitlines()[-1] == "DRY_RUN=1"
    assert load_config(["--run.dry_run=true", "--json", "--parallel.dp_shard=1"]).run.json


def _check(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, str], list[str]]:
    with pytest.raises(SystemExit) as stop:
        load_config([*arguments, "--check"])
    assert stop.value.code == 0
    out, err = capsys.readouterr()
    lines = [line.partition("=") for line in out.splitlines()]
    assert [key for key, _, _ in lines] == ["NPROC", "RUN_FOLDER", "SAMPLE"]
    return {key: value for key, _, value in lines}, err.splitlines()


CHECKS: dict[str, tuple[dict[str, str], list[str], str, list[str]]] = {  # environment, arguments, NPROC, stderr
    "as many as there are": (
        {"NPROC": "2"},
        [],
        "2",
        ["global batch 16 sequences = 2 data ranks x 4 micro batch x 2 accumulated"],
    ),
    "the product": (
        {},
        ["--parallel.dp_shard=2", "--parallel.tp=2"],
        "4",
        ["global batch 16 sequences = 2 data ranks x 4 micro batch x 2 accumulated"],
    ),
    "of two nodes": (
        {"NNODES": "2", "NPROC": "2", "SLURM_JOB_ID": "1"},
        ["--parallel.dp_replicate=2"],
        "2",
        ["global batch 16 sequences = 4 data ranks x 4 micro batch x 1 accumulated"],
    ),
    "lowered": (
        {"NPROC": "6"},
        ["--run.lower_ranks=true"],
        "4",
        [
            "6 processes do not divide the batch of 16 sequences: starting 4",
            "global batch 16 sequences = 4 data ranks x 4 micro batch x 1 accumulated",
        ],
    ),
    "lowered for tp": (
        {"NPROC": "3"},
        ["--run.lower_ranks=true", "--parallel.tp=2"],
        "2",
        [
            "3 processes do not divide into the degrees of [parallel]: starting 2",
            "global batch 16 sequences = 1 data ranks x 4 micro batch x 4 accumulated",
        ],
    ),
    "lowered on two nodes": (
        {"NNODES": "2", "NPROC": "8", "SLURM_JOB_ID": "1"},
        ["--run.lower_ranks=true"],
        "2",
        [
            "8 processes do not divide the batch of 16 sequences: starting 2",
            "global batch 16 sequences = 4 data ranks x 4 micro batch x 1 accumulated",
        ],
    ),
}


@pytest.mark.parametrize("name", CHECKS)
def test_check(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    environment, arguments, processes, expected = CHECKS[name]
    (folder / "x.toml").write_text("[training]\nmicro_batch_size = 4\nglobal_batch_size = 16")
    monkeypatch.delenv("WORLD_SIZE")
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    out, err = _check(["x.toml", *arguments], capsys)
    assert (out["NPROC"], out["SAMPLE"], err) == (processes, "0", expected)


def test_lowering_mends_only_the_layout(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "x.toml").write_text(
        "[run]\nlower_ranks = true\n[training]\nmicro_batch_size = 4\nglobal_batch_size = 16\n[recompute]\nk = 9"
    )
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setenv("NPROC", "6")
    assert _stderr_of_failure(capsys, lambda: load_config(["x.toml", "--check"])) == [
        "x.toml:7: recompute.k: 9 is over model.layers 4",
        'x.toml:7: recompute.k: does nothing in this run: it needs recompute.mode = "segment" or "every_k"',
    ]


def test_run_folder(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "my run.toml").write_text("[generate]\nafter_training = true")
    first, _ = _check(["my run.toml"], capsys)
    second, _ = _check(["my run.toml"], capsys)
    assert re.fullmatch(r"runs/my run-\d{8}-\d{6}-[0-9a-f]{4}", first["RUN_FOLDER"])
    assert first["RUN_FOLDER"] != second["RUN_FOLDER"]
    assert first["SAMPLE"] == "1"
    for name, value, expected in (
        ("TORCHELASTIC_RUN_ID", "uuid", "runs/my run-uuid"),
        ("PET_RDZV_ID", "a/../b", "runs/my run-a_.._b"),
        ("SLURM_JOB_ID", "123", "runs/my run-123"),
    ):
        monkeypatch.setenv(name, value)
        assert _check(["my run.toml"], capsys)[0]["RUN_FOLDER"] == expected
    assert _check(["my run.toml", "--run.folder=a b"], capsys)[0]["RUN_FOLDER"] == "a b"
    assert list(folder.iterdir()) == [folder / "my run.toml"]


def test_one_device(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "x.toml").write_text("[run]\nfolder='a'\n[parallel]\ntp = 8\ndp_shard = 64\nsequence_parallel = true\n")
    for name, value in (("WORLD_SIZE", "4"), ("NNODES", "2"), ("NPROC", "x")):  # of the job, not of this process
        monkeypatch.setenv(name, value)
    assert load_config(["x.toml"], one_device=True).parallel == Parallel(dp_shard=1)
    assert _stderr_of_failure(capsys, lambda: load_config(["x.toml", "--parallel.tp=2"], one_device=True)) == [
        "--parallel.tp: this recipe runs on one device"
    ]


@dataclass(frozen=True)
class Teacher:
    """A model to learn from."""

    path: str = ""
    """where it is"""


@dataclass(frozen=True)
class Distill:
    """Learning from another model."""

    teachers: tuple[Teacher, ...] = ()
    """one table each"""
    main: Teacher = field(default_factory=Teacher)
    """the first"""
    layers: tuple[Annotated[int, Bound(at_least=0)], ...] = (1, 2)
    """blocks to match"""
    power: Literal[1, 2] = 2
    """of the distance"""


@dataclass(frozen=True)
class MyTraining(Training):
    """With one key more."""

    patience: float = 0.5
    """how long"""


@dataclass(frozen=True)
class MyConfig(Config):
    training: MyTraining = field(default_factory=MyTraining)
    distill: Distill = field(default_factory=Distill)


def test_forked_schema(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "x.toml").write_text(
        "[training]\npatience = 1\n[distill]\nlayers = [\n0,\n3]\nmain.path = 'a'\n[[distill.teachers]]\npath = 'b'\n"
    )
    config = load_config(["x.toml", "--run.folder=a", "--distill.power=1"], MyConfig)
    assert config.training.patience == 1.0
    assert config.distill == Distill((Teacher("b"),), Teacher("a"), (0, 3), 1)
    write_config(config, folder / "again.toml")
    assert load_config(["again.toml"], MyConfig) == config

    arguments = ["x.toml", "--distill.layers.1=-1", "--distill.power=3", "--distill.main.pth=a", "--data.patience=2"]
    assert _stderr_of_failure(capsys, lambda: load_config(arguments, MyConfig)) == [
        "--distill.layers.1: must be a whole number of at least 0, not -1",
        "--distill.main.pth: unknown key; did you mean distill.main.path?",
        "--distill.power: must be one of 1, 2, not 3",
        "--data.patience: unknown key; did you mean training.patience?",
    ]
    with pytest.raises(SystemExit):
        load_config(["--help"], MyConfig)
    help_text = capsys.readouterr().out
    assert "distill.main.path" in help_text
    assert "training.patience = 0.5    (a number)\n      how long" in help_text
    assert "training.steps = 1000" in help_text


@pytest.mark.parametrize("kind", [dict[str, int], int | None, list[int], tuple[int, int], tuple[tuple[int, ...], ...]])
def test_schema_that_toml_cannot_fill(kind: Any, folder: Path) -> None:
    bad: Any = dataclass(frozen=True)(type("Bad", (), {"__annotations__": {"x": kind}, "x": None}))
    schema: Any = dataclass(frozen=True)(type("BadConfig", (Config,), {"__annotations__": {"bad": bad}, "bad": bad()}))
    with pytest.raises(TypeError, match="cannot be"):
        load_config([], schema)


def test_schema_without_a_default(folder: Path) -> None:
    bad: Any = dataclass(frozen=True)(type("Bad", (), {"__annotations__": {"x": int}}))
    schema: Any = dataclass(frozen=True)(type("BadConfig", (Config,), {"__annotations__": {"bad": bad}, "bad": None}))
    with pytest.raises(TypeError, match=r"Bad\.x needs a default"):
        load_config([], schema)


def _values(annotated: Any) -> st.SearchStrategy[Any]:
    kind, bound = plain_type(annotated)
    if get_origin(kind) is Literal:
        return st.sampled_from(get_args(kind))
    if get_origin(kind) is tuple:
        return st.lists(_values(get_args(kind)[0]), min_size=1, max_size=3).map(tuple)
    if kind is bool:
        return st.booleans()
    if kind is int:
        return st.integers(int(max(bound.at_least, -(2**63))), int(min(bound.at_most, 2**63 - 1)))
    if kind is float:
        low = max(bound.at_least, bound.over, -1e308)
        return st.floats(low, min(bound.at_most, 1e308), exclude_min=bound.over == low)
    if kind is str:
        return st.text(st.characters(codec="utf-8"))
    return st.builds(kind, **{name: _values(item) for name, item in field_types(kind).items()})


# These may take any value without a problem between keys, and are all kinds of value there are.
FREE = st.builds(
    Config,
    run=st.builds(Run, folder=st.just("a"), seed=_values(field_types(Run)["seed"]), timeout=_values(float)),
    data=st.builds(
        lambda sources, tokenizer, cache: replace(Config().data, sources=sources, tokenizer=tokenizer, cache=cache),
        st.lists(_values(Source), min_size=1, max_size=3).map(
            lambda items: tuple(replace(item, path=item.path or "x") for item in items)
        ),
        _values(str),
        _values(str),
    ),
    optimizer=_values(type(Config().optimizer)),
    compile=st.builds(
        lambda block, loss: replace(Config().compile, block=block, loss=loss), st.booleans(), st.booleans()
    ),
    metrics=st.builds(
        lambda metrics, steps: replace(metrics, profile_steps=steps),
        _values(type(Config().metrics)),
        st.sampled_from(["", "10:13"]),
    ),
    generate=_values(type(Config().generate)),
    parallel=st.just(Parallel(dp_shard=1)),
)


def without_contradictions(config: Config) -> Config:
    """Set keys that do nothing, for another key says so, to their defaults."""
    for inert in contradictions(config):
        section, *place, key = inert.key.split(".")
        table = getattr(config, section)
        if place:
            index = int(place[1])
            source = replace(table.sources[index], **{key: getattr(Source(), key)})
            changed: Any = {"sources": (*table.sources[:index], source, *table.sources[index + 1 :])}
        else:
            changed = {key: getattr(type(table)(), key)}
        changed_section: Any = {section: replace(table, **changed)}
        config = replace(config, **changed_section)
    return config


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(config=FREE.filter(lambda config: config.run.timeout > 0))
def test_written_config_loads_back(config: Config, folder: Path) -> None:
    config = without_contradictions(config)
    write_config(config, folder / "config.toml")
    assert load_config(["config.toml"]) == config
    assert [path.name for path in folder.iterdir()] == ["config.toml"]


def test_every_field_is_written() -> None:
    text = dump_toml(Config())
    for section in fields(Config):
        for item in fields(getattr(Config(), section.name)):
            assert re.search(rf"^({item.name} = |\[\[{section.name}\.{item.name}\]\])", text, re.MULTILINE), item.name
