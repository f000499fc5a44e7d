"""Wrong configs, each with the exact lines it gets."""

import os
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.config.conftest import refusal
from torchllm.config.schema import KIND_KEYS
from torchllm.tools.config.load import load_config

pytestmark = pytest.mark.quick


class Refusal(NamedTuple):
    text: str
    """what is in x.toml"""
    arguments: list[str]
    """further arguments"""
    lines: list[str]
    """what is on stderr"""


ONE_LINE: dict[str, tuple[str, str]] = {
    "unknown key": (
        "[training]\nsteps = 3\nstep = 4",
        "x.toml:3: training.step: unknown key; did you mean training.steps?",
    ),
    "key outside of its section": (
        "steps = 3",
        "x.toml:1: steps: unknown section or key; did you mean training.steps?",
    ),
    "unknown key with a line break": (
        '[run]\n"a\\nb" = 1',
        'x.toml:2: run."a\\nb": unknown key; --help lists all keys',
    ),
    "resume from a URL": (
        '[checkpoint]\nresume = "s3://bucket/run/step-00000010"',
        "x.toml:2: checkpoint.resume: is a URL: set checkpoint.remote to the URL of the run, whose newest step is "
        "loaded, or download the step",
    ),
    "MXFP8": (
        '[float8]\nrecipe = "mxfp8"',
        'x.toml:2: float8.recipe: must be one of "none", "rowwise", "rowwise_with_gw_hp", "tensorwise", not '
        '"mxfp8": MXFP8 needs a GPU with sm_100, such as B200, and cannot be tested without one',
    ),
    "weights in bfloat16 with low-rank updates": (
        '[training]\nweights_dtype = "bfloat16"\n[lora]\nrank = 2',
        'x.toml:2: training.weights_dtype: is "bfloat16", and lora.rank is set, but updates are float32, and the '
        "weights are frozen: remove one",
    ),
    "weights in bfloat16 with another optimizer": (
        '[training]\nweights_dtype = "bfloat16"\n[optimizer]\nname = "muon"',
        'x.toml:2: training.weights_dtype: is "bfloat16", and optimizer.name is set, but AdamW alone rounds such '
        "weights without bias: remove one",
    ),
    "width rule of another optimizer": (
        '[model]\nbase_width = 64\n[optimizer]\nname = "muon"',
        'x.toml:2: model.base_width: has the rules of AdamW, not of muon: set optimizer.name = "adamw", or it to 0',
    ),
    "width rule with low-rank updates": (
        "[model]\nbase_width = 64\n[lora]\nrank = 4",
        "x.toml:2: model.base_width: has no rule for low-rank updates: set it to 0, or lora.rank to 0",
    ),
    "width rule with a tied head": (
        "[model]\nhidden = 256\nbase_width = 64\ntied_embeddings = true",
        "x.toml: model.logit_divisor: logits of a tied head are divided by hidden / base_width: set it to 4.0, or "
        "model.tied_embeddings to false",
    ),
    "epochs of a source to evaluate on": (
        '[[data.validation]]\nkind = "text"\npath = "a.txt"\nmax_epochs = 1.0',
        "x.toml:4: data.validation.0.max_epochs: limits training, and this source is evaluated on: leave it out",
    ),
    "string for a bool": ('[compile]\nnorm = "false"', 'x.toml:2: compile.norm: must be true or false, not "false"'),
    "bool for a number": (
        "[optimizer]\nlearning_rate = true",
        "x.toml:2: optimizer.learning_rate: must be a number over 0, not true",
    ),
    "date for a string": (
        "[run]\nfolder = 2025-01-02",
        "x.toml:2: run.folder: must be a string, not the date or time 2025-01-02",
    ),
    "array for a number": (
        "[training]\nsteps = [\n1,\n]",
        "x.toml:2: training.steps: must be a whole number of at least 1, not an array",
    ),
    "table for an array": (
        "[data.sources]\nkind = 'stdlib'",
        "x.toml:1: data.sources: must be an array, each a table, not a table",
    ),
    "string in an array of tables": (
        '[data]\nsources = [\n  {kind = "stdlib"},\n  "text",\n]',
        'x.toml:4: data.sources.1: must be a table, not "text"',
    ),
    "long string": (
        f'[optimizer]\nname = "{"a" * 999}"',
        f'x.toml:2: optimizer.name: must be one of "adamw", "sgd", "muon", not "{"a" * 55} ...',
    ),
    "nan": ("[optimizer]\nlearning_rate = nan", "x.toml:2: optimizer.learning_rate: must be a finite number, not nan"),
    "above the range": (
        "[data]\nvalidation_fraction = 0.6",
        "x.toml:2: data.validation_fraction: must be a number from 0.0 to 0.5, not 0.6",
    ),
    "below a range without its lower end": (
        "[float8]\nrecipe = 'none'\n[optimizer]\nlearning_rate = 0",
        "x.toml:4: optimizer.learning_rate: must be a number over 0, not 0",
    ),
    "key that all blocks share": (
        "[model]\npattern = ['a']\n[model.kinds.a]\nhidden = 8",
        f"x.toml:4: model.kinds.a.hidden: has one value for all blocks: a kind of blocks has {', '.join(KIND_KEYS)}",
    ),
    "unknown key of a kind": (
        "[model]\npattern = ['a']\n[model.kinds.a]\nwindw = 8",
        "x.toml:4: model.kinds.a.windw: unknown key; did you mean model.kinds.a.window?",
    ),
    "kind that is no table": (
        "[model]\npattern = ['a']\n[model.kinds]\na = 8",
        "x.toml:4: model.kinds.a: must be a table of keys of [model], not 8",
    ),
    "kinds that are no tables": (
        "[model]\nkinds = [1]",
        "x.toml:2: model.kinds: must be tables of keys of [model], not an array",
    ),
    "value of a kind": (
        "[model]\npattern = ['a']\n[model.kinds.a]\nwindow = -1",
        "x.toml:4: model.kinds.a.window: must be a whole number of at least 0, not -1",
    ),
    "kind without a table": (
        "[model]\npattern = ['a', 'b', 'a']\n[model.kinds.b]",
        "x.toml:2: model.pattern: 'a' has no table [model.kinds.a], which may be empty",
    ),
    "kind of no block": (
        "[model]\npattern = ['a']\n[model.kinds.a]\n[model.kinds.b]\nwindow = 8",
        "x.toml:4: model.kinds.b: is not in model.pattern: remove this table from its file, or add the kind to the "
        "pattern",
    ),
    "kind without a name": (
        "[model]\npattern = ['']\n[model.kinds.'']\nwindow = 8",
        'x.toml:3: model.kinds."": is no name of a kind: use letters, digits, _ and -',
    ),
    "key that is gone, but for its default in config.toml of earlier runs": (
        "[data]\npattern = 'gpt2'",
        "x.toml:2: data.pattern: unknown key; did you mean model.pattern?",
    ),
    "pattern that is longer than the model": (
        "[model]\nlayers = 2\npattern = ['a', 'a', 'a']\n[model.kinds.a]",
        "x.toml:3: model.pattern: has 3 blocks, more than model.layers = 2",
    ),
    "pattern of registered blocks": (
        "[model]\nblock = 'mine'\npattern = ['a']\n[model.kinds.a]",
        "x.toml:2: model.block: 'mine' does not combine with model.pattern: remove one of the keys",
    ),
    "pairs of features of a kind": (
        "[model]\npattern = ['a']\n[model.kinds.a]\nrotary_fraction = 0.1",
        "x.toml:4: model.kinds.a.rotary_fraction: 0.1 of a head of 32 features are 3: rotary positions turn pairs of "
        "features",
    ),
    "order of two keys of a kind": (
        "[model]\npattern = ['a']\n[model.kinds.a]\nrope_scaling_factor = 8.0\nrope_high_frequency_factor = 0.5",
        "x.toml:5: model.kinds.a.rope_high_frequency_factor: must be over model.rope_low_frequency_factor",
    ),
    "experts of a kind": (
        "[model]\nexperts = 4\npattern = ['a', 'b']\n[model.kinds.a]\nexperts = 2\n[model.kinds.b]\nexperts = 0",
        "x.toml:5: model.kinds.a.experts: 2 is neither 0 nor model.experts = 4: all blocks with experts have as many",
    ),
    "experts of no kind": (
        "[model]\nexperts = 4\npattern = ['a']\n[model.kinds.a]\nexperts = 0",
        "x.toml:2: model.experts: 4, but no kind of model.pattern has experts: set it to 0",
    ),
    "heads of a kind": (
        "[model]\npattern = ['a']\n[model.kinds.a]\nheads = 6\nhead_dim = 32\nkv_heads = 4",
        "x.toml:6: model.kinds.a.kv_heads: 4 key-value heads do not divide 6 heads",
    ),
    "over 64 bits": ("[training]\nsteps = 9223372036854775808", "x.toml:2: training.steps: must fit into 64 bits"),
    "unprintably long number": (
        f"[compile]\nnorm = 0x{'f' * 9999}",
        "x.toml:2: compile.norm: must be true or false, not a number of more than 64 bits",
    ),
    "syntax": ("[training]\nsteps 3", "x.toml:2: Expected '=' after a key in a key/value pair"),
    "bare word": (
        "[training]\n\nsteps = False",
        "x.toml:3: invalid value: text needs quotes, and it is true and false",
    ),
    "duplicate key": ("[training]\nsteps = 3\n\nsteps = 4", "x.toml:4: a key is given twice"),
    "string without its closing quote": ('[run]\nfolder = "a\nseed = 1', "x.toml:2: a string has no closing quote"),
    "duplicate section": ("[training]\nsteps = 3\n[training]", "x.toml:3: section [training] is given twice"),
    "nested too deeply": (f"a = {'[' * 9999}", "x.toml:1: "),
    "byte order mark": (
        "\ufeff[run]\nseed = 1",
        "x.toml:1: starts with a byte order mark: save it as UTF-8 without one (without BOM)",
    ),
    "NUL": ("[run]\nseed = 1\n\0", "x.toml:3: Invalid statement"),
    "base of a wrong type": ("base = 5", "x.toml:1: base: must name a file, not 5"),
    "missing base": ("\nbase = 'parents.toml'", "x.toml:2: parents.toml: no such file; did you mean parent.toml?"),
    "cycle": ("base = 'sub/a.toml'", "sub/b.toml:1: base: a cycle: sub/a.toml -> sub/b.toml -> sub/a.toml"),
    "layout that nobody plans": (
        "[parallel]\nlayout = 'auto'",
        'x.toml:2: parallel.layout: is "auto", but this recipe does not plan: set the degrees',
    ),
}
"""what is in x.toml, and the only line on stderr; where it ends in ": ", the words after that are the interpreter's"""
REFUSALS = {
    "unknown key after many lines": Refusal(
        '[generate]\nprompt = """\n[run]\nsteps = 1 # no\n\\""" """\n[data]\nsources = [ # [\n  {kind = "stdlib"},\n\n'
        "  {kind = 'synthetic',  weihgt = 1.0},\n]\n[training]\nstep = 1",
        [],
        [
            "x.toml:10: data.sources.1.weihgt: unknown key; did you mean data.sources.1.weight?",
            "x.toml:13: training.step: unknown key; did you mean training.steps?",
        ],
    ),
    "problem in a base": Refusal(
        "base = 'parent.toml'\n[model]\nheads = 3",
        [],
        [
            "parent.toml:3: model.hiden: unknown key; did you mean model.hidden?",
            "parent.toml:5: training.steps: must be a whole number of at least 1, not 0",
            "x.toml:3: model.heads: 3 heads do not divide hidden 256; set model.head_dim",  # hidden is the default
        ],
    ),
    "all at once": Refusal(
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
    "not what follows from another mistake": Refusal(  # the batch may divide by what micro_batch_size was to be
        "[training]\nglobal_batch_size = 3\nmicro_batch_size = '2'\n[model]\nlayers = 2\n[recompute]\nk = 3",
        [],
        [
            'x.toml:3: training.micro_batch_size: must be a whole number of at least 1, not "2"',
            "x.toml:7: recompute.k: 3 is over model.layers 2",
            "x.toml:7: recompute.k: does nothing in this run: "
            'it needs recompute.mode = "segment" or "every_k"; or remove it',
        ],
    ),
    "override of a wrong type": Refusal(
        "",
        ["--training.steps=abc", "--compile.norm=False", "--training.loss_chunk=1.7"],
        [
            '--training.steps: must be a whole number of at least 1, not "abc"',
            "--training.loss_chunk: must be a whole number of at least 0, not 1.7",
            '--compile.norm: must be true or false, not "False"',
        ],
    ),
    "override that smuggles a key": Refusal(
        "",
        ["--training.steps=1\nfoo = 2"],
        ['--training.steps: must be a whole number of at least 1, not "1\\nfoo = 2"'],
    ),
    "override without a value": Refusal(
        "",
        ["--training.steps", "100", "--run.seed"],
        [
            "--training.steps: needs a value: --training.steps=100",
            "--run.seed: needs a value: --run.seed=VALUE",
        ],
    ),
    "override with spaces": Refusal(
        "",
        ["--training.steps", "=", "5", "--run.seed=", "-1", "--data.workers", "=2", "--training.loss_chunk", "=", "-1"],
        [
            "--training.steps: no spaces around the equals sign: --training.steps=5",
            "-1: unknown flag; overrides are --section.key=value, flags --check, --gpus=N, --json and --help",
            "--data.workers: no spaces around the equals sign: --data.workers=2",
            "--training.loss_chunk: no spaces around the equals sign: --training.loss_chunk=-1",
            '--run.seed: must be a whole number from 0 to 9223372036854775807, not ""',
        ],
    ),
    "override given twice": Refusal(
        "",
        ["--run.seed=1", "--run.seed=1", "--run.seed=2"],
        ['--run.seed: given twice: "1" and "2"'],
    ),
    "override of a section": Refusal(
        "",
        ["--training={steps = 3}"],
        ["--training: is a table: give its keys one by one, such as --training.steps="],
    ),
    "override of a kind": Refusal(
        "",
        ["--model.kinds.local={window = 3}"],
        ["--model.kinds.local: is a table: give its keys one by one, such as --model.kinds.local.window="],
    ),
    "override of a missing element": Refusal(
        "",
        ["--data.sources.2.kind=stdlib"],
        ["--data.sources.2.kind: data.sources has 1 elements: the index is 0 to 1"],
    ),
    "override of no element": Refusal(
        "",
        ["--data.sources.kind=stdlib"],
        ["--data.sources.kind: data.sources has 1 elements: the index is 0 to 1"],
    ),
    "argument that is not UTF-8": Refusal("", ["--run.folder=a\udcff"], ["--run.folder: must be UTF-8"]),
    "folder with a line break": Refusal(
        "",
        ["--run.folder=a\nNPROC=9"],
        ['--run.folder: must be printable, not "a\\nNPROC=9"'],
    ),
    "unknown flags": Refusal(
        "",
        ["--dry", "-n", "--check=1"],
        [
            f"{flag}: unknown flag; overrides are --section.key=value, flags --check, --gpus=N, --json and --help"
            for flag in ("--dry", "-n", "--check=1")
        ],
    ),
    "second file": Refusal(
        "",
        ["parent.toml"],
        ["parent.toml: one config file only, and x.toml is given; overrides are --section.key=value"],
    ),
}


def test_wrong_configs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "parent.toml").write_text("[model]\nheads = 4\nhiden = 5\n[training]\nsteps = 0\n")
    (folder / "sub").mkdir()
    (folder / "sub" / "a.toml").write_text("base = 'b.toml'")
    (folder / "sub" / "b.toml").write_text("base = 'a.toml'")
    refusals = {name: Refusal(text, [], [line]) for name, (text, line) in ONE_LINE.items()} | REFUSALS
    for name, (text, arguments, expected) in refusals.items():
        (folder / "x.toml").write_text(text)
        lines = refusal(capsys, partial(load_config, ["x.toml", *arguments]))
        if expected[0].endswith(": "):
            lines = [line[: len(expected[0])] for line in lines]
        assert lines == expected, name


def test_files_that_cannot_be_read(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "train_configs" / "models").mkdir(parents=True)
    (folder / "train_configs" / "models" / "debug.toml").touch()
    assert refusal(capsys, lambda: load_config(["debgu.toml"])) == [
        "debgu.toml: no such file; did you mean train_configs/models/debug.toml?"
    ]
    assert refusal(capsys, lambda: load_config(["."])) == [".: is a folder without a config.toml, so it is no run"]
    os.mkfifo("pipe.toml")  # reading it would not end
    assert refusal(capsys, lambda: load_config(["pipe.toml"])) == ["pipe.toml: is not a file"]
    Path("latin.toml").write_bytes(b"[run]\nfolder = '\xe9'\n")
    assert refusal(capsys, lambda: load_config(["latin.toml"])) == ["latin.toml:2: is not UTF-8"]
