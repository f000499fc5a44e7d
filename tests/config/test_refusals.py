"""Wrong configs, each with the exact lines it gets."""

import os
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.config.conftest import refusal
from torchllm.tools.config.load import load_config

pytestmark = pytest.mark.quick


class Refusal(NamedTuple):
    """A config that is refused."""

    text: str
    """what is in x.toml"""
    arguments: list[str]
    """further arguments"""
    lines: list[str]
    """what is on stderr; the words of an only line that ends in ": " are the interpreter's"""


REFUSALS = {
    # Keys.
    "unknown key": Refusal(
        "[training]\nsteps = 3\nstep = 4",
        [],
        ["x.toml:3: training.step: unknown key; did you mean training.steps?"],
    ),
    "key outside of its section": Refusal(
        "steps = 3",
        [],
        ["x.toml:1: steps: unknown section or key; did you mean training.steps?"],
    ),
    "unknown key of a source": Refusal(
        "[[data.sources]]\nkind = 'stdlib'\n[[data.sources]]\nkind = 'stdlib'\nwieght = 2.0",
        [],
        ["x.toml:5: data.sources.1.wieght: unknown key; did you mean data.sources.1.weight?"],
    ),
    "unknown key with a line break": Refusal(
        '[run]\n"a\\nb" = 1',
        [],
        ['x.toml:2: run."a\\nb": unknown key; --help lists all keys'],
    ),
    "unknown key after many lines": Refusal(
        '[generate]\nprompt = """\n[run]\nsteps = 1 # no\n\\""" """\n[data]\nsources = [ # [\n  {kind = "stdlib"},\n\n'
        "  {kind = 'synthetic',  weihgt = 1.0},\n]\n[training]\nstep = 1",
        [],
        [
            "x.toml:10: data.sources.1.weihgt: unknown key; did you mean data.sources.1.weight?",
            "x.toml:13: training.step: unknown key; did you mean training.steps?",
        ],
    ),
    "checkpoints kept for good that are never saved": Refusal(
        "[checkpoint]\ninterval = 500\nkeep_every = 700",
        [],
        ["x.toml:3: checkpoint.keep_every: 700 is no multiple of checkpoint.interval 500"],
    ),
    "tasks between checkpoints": Refusal(
        '[checkpoint]\ninterval = 500\n[evaluate]\ntasks = ["arc_easy"]\ntasks_interval = 700',
        [],
        [
            "x.toml:5: evaluate.tasks_interval: 700 is no multiple of checkpoint.interval 500: tasks are evaluated on "
            "checkpoints"
        ],
    ),
    # Words.
    "MXFP8": Refusal(
        '[float8]\nrecipe = "mxfp8"',
        [],
        [
            'x.toml:2: float8.recipe: must be one of "none", "rowwise", "rowwise_with_gw_hp", "tensorwise", not '
            '"mxfp8": MXFP8 needs a GPU with sm_100, such as B200, and cannot be tested without one'
        ],
    ),
    "FlashAttention 4": Refusal(
        "",
        ["--model.attention=flash4"],
        [
            '--model.attention: must be one of "eager", "sdpa", "flash", "flex", not "flash4": FlashAttention 4 was '
            "not tried: sdpa takes the fastest kernel that torch has for a GPU"
        ],
    ),
    "width that float8 cannot take": Refusal(
        '[model]\nffn = 1032\n[float8]\nrecipe = "rowwise"',
        [],
        [
            "x.toml:4: float8.recipe: model.ffn = 1032 is no multiple of 16, which float8 products need: change "
            'it, or set float8.recipe = "none"'
        ],
    ),
    # Types.
    "string for a bool": Refusal(
        '[compile]\nnorm = "false"',
        [],
        ['x.toml:2: compile.norm: must be true or false, not "false"'],
    ),
    "bool for a number": Refusal(
        "[optimizer]\nlearning_rate = true",
        [],
        ["x.toml:2: optimizer.learning_rate: must be a number over 0, not true"],
    ),
    "string for a number": Refusal(
        '[optimizer]\nlearning_rate = "1e-3"',
        [],
        ['x.toml:2: optimizer.learning_rate: must be a number over 0, not "1e-3"'],
    ),
    "number for a string": Refusal("[run]\nfolder = 5", [], ["x.toml:2: run.folder: must be a string, not 5"]),
    "date for a string": Refusal(
        "[run]\nfolder = 2025-01-02",
        [],
        ["x.toml:2: run.folder: must be a string, not the date or time 2025-01-02"],
    ),
    "array for a number": Refusal(
        "[training]\nsteps = [\n1,\n]",
        [],
        ["x.toml:2: training.steps: must be a whole number of at least 1, not an array"],
    ),
    "table for a number": Refusal(
        "[training.steps]\na = 1",
        [],
        ["x.toml:1: training.steps: must be a whole number of at least 1, not a table"],
    ),
    "table for an array": Refusal(
        "[data.sources]\nkind = 'stdlib'",
        [],
        ["x.toml:1: data.sources: must be an array, each a table, not a table"],
    ),
    "string in an array of tables": Refusal(
        '[data]\nsources = [\n  {kind = "stdlib"},\n  "text",\n]',
        [],
        ['x.toml:4: data.sources.1: must be a table, not "text"'],
    ),
    "long string": Refusal(
        f'[optimizer]\nname = "{"a" * 999}"',
        [],
        [f'x.toml:2: optimizer.name: must be one of "adamw", "sgd", "muon", not "{"a" * 55} ...'],
    ),
    # Limits.
    "zero learning rate": Refusal(
        "[optimizer]\nlearning_rate = 0",
        [],
        ["x.toml:2: optimizer.learning_rate: must be a number over 0, not 0"],
    ),
    "nan": Refusal(
        "[optimizer]\nlearning_rate = nan",
        [],
        ["x.toml:2: optimizer.learning_rate: must be a finite number, not nan"],
    ),
    "infinity": Refusal(
        "[optimizer]\nlearning_rate = 1e999",
        [],
        ["x.toml:2: optimizer.learning_rate: must be a finite number, not inf"],
    ),
    "above the range": Refusal(
        "[data]\nvalidation_fraction = 0.6",
        [],
        ["x.toml:2: data.validation_fraction: must be a number from 0.0 to 0.5, not 0.6"],
    ),
    "over 64 bits": Refusal(
        "[training]\nsteps = 9223372036854775808",
        [],
        ["x.toml:2: training.steps: must fit into 64 bits"],
    ),
    "unprintably long number": Refusal(
        f"[compile]\nnorm = 0x{'f' * 9999}",
        [],
        ["x.toml:2: compile.norm: must be true or false, not a number of more than 64 bits"],
    ),
    "degree 0": Refusal(
        "[parallel]\ndp_shard = 0",
        [],
        ["x.toml:2: parallel.dp_shard: must be at least 1, or -1 for the ranks that the other degrees leave"],
    ),
    # TOML itself.
    "syntax": Refusal(
        "[training]\nsteps 3",
        [],
        ["x.toml:2: Expected '=' after a key in a key/value pair"],
    ),
    "bare word": Refusal(
        "[training]\n\nsteps = False",
        [],
        ["x.toml:3: invalid value: text needs quotes, and it is true and false"],
    ),
    "duplicate key": Refusal("[training]\nsteps = 3\n\nsteps = 4", [], ["x.toml:4: a key is given twice"]),
    "string without its closing quote": Refusal(
        '[run]\nfolder = "a\nseed = 1',
        [],
        ["x.toml:2: a string has no closing quote"],
    ),
    "literal string without its closing quote": Refusal(
        "[run]\nfolder = 'a",
        [],
        ["x.toml:2: a string has no closing quote"],
    ),
    "duplicate section": Refusal(
        "[training]\nsteps = 3\n[training]",
        [],
        ["x.toml:3: section [training] is given twice"],
    ),
    "nested too deeply": Refusal(f"a = {'[' * 9999}", [], ["x.toml:1: "]),
    "byte order mark": Refusal(
        "\ufeff[run]\nseed = 1",
        [],
        ["x.toml:1: starts with a byte order mark: save it as UTF-8 without one (without BOM)"],
    ),
    "NUL": Refusal("[run]\nseed = 1\n\0", [], ["x.toml:3: Invalid statement"]),
    # Bases.
    "base of a wrong type": Refusal("base = 5", [], ["x.toml:1: base: must name a file, not 5"]),
    "missing base": Refusal(
        "\nbase = 'parents.toml'",
        [],
        ["x.toml:2: parents.toml: no such file; did you mean parent.toml?"],
    ),
    "cycle": Refusal(
        "base = 'sub/a.toml'", [], ["sub/b.toml:1: base: a cycle: sub/a.toml -> sub/b.toml -> sub/a.toml"]
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
    "base outside of the top": Refusal(
        "[run]\nbase = 'parent.toml'",
        [],
        ["x.toml:2: run.base: unknown key; --help lists all keys"],
    ),
    # Between keys.
    "degrees and world size": Refusal(
        "[parallel]\ndp_shard = 1\ntp = 2",
        [],
        [
            "x.toml:3: parallel.tp: pp 1 x dp_replicate 1 x dp_shard 1 x cp 1 x tp 2 = 2 ranks, but there are 1; "
            "set one to match"
        ],
    ),
    "two open degrees": Refusal(
        "[parallel]\ndp_replicate = -1",
        [],
        ["x.toml:2: parallel.dp_replicate: only one of dp_replicate and dp_shard may be -1"],
    ),
    "a share of a head that is not pairs": Refusal(
        "[model]\nhead_dim = 12\nrotary_fraction = 0.25",
        [],
        [
            "x.toml:3: model.rotary_fraction: 0.25 of a head of 12 features are 3: rotary positions turn pairs of "
            "features"
        ],
    ),
    "experts": Refusal(
        "[model]\nexperts = 4\ntop_k = 5\ndense_layers = 4\n[float8]\nrecipe = 'rowwise'",
        [],
        [
            "x.toml:3: model.top_k: 5 is over model.experts 4",
            "x.toml:4: model.dense_layers: 4 leaves no block with experts: model.layers is 4",
            'x.toml:6: float8.recipe: has no products of experts: set it to "none"',
        ],
    ),
    "experts of a dense model": Refusal(
        "[model]\nexperts = 4\nupcycle = true\nexpert_ffn = 32\nshared_experts = 1\n[checkpoint]\ninitial = 'dense'",
        [],
        [
            "x.toml:7: checkpoint.initial: this recipe reads no weights to start from: remove the key, or use "
            "recipes/pretrain.py",
            "x.toml:4: model.expert_ffn: 32 is not the width of the layers that model.upcycle copies, model.ffn = "
            "1024: remove the key",
            "x.toml:5: model.shared_experts: in addition to the experts that model.upcycle copies, a shared "
            "expert would add the dense layer a second time: set it to 0",
        ],
    ),
    "one expert whose weight is always 1": Refusal(
        "[model]\nexperts = 4\ntop_k = 1",
        [],
        [
            "x.toml: model.router_renormalize: with top_k = 1 the one score is divided by itself, and the router "
            "learns nothing: set it to false"
        ],
    ),
    "experts of a family that has none": Refusal(
        "[model]\nexperts = 4\nfamily = 'gpt'",
        [],
        ['x.toml:2: model.experts: model.family = "gpt" has no experts: take "llama"'],
    ),
    "experts and LoRA": Refusal(
        "[model]\nexperts = 4\n[lora]\nrank = 4",
        [],
        ["x.toml:4: lora.rank: has no low-rank updates of experts: set it to 0, which trains all weights"],
    ),
    "width of experts": Refusal(
        "[model]\nexperts = 4\nexpert_ffn = 33\n[parallel]\ntp = 2",
        [],
        [
            "x.toml: parallel.dp_shard: is -1, but 1 ranks are no multiple of pp 1 x dp_replicate 1 x cp 1 x tp 2 = 2",
            "x.toml:5: parallel.tp: 2 does not divide model.expert_ffn = 33",
        ],
    ),
    "batch": Refusal(
        "[training]\nglobal_batch_size = 10\nmicro_batch_size = 4",
        [],
        ["x.toml:2: training.global_batch_size: 10 is no multiple of micro_batch_size 4 x 1 data-parallel ranks = 4"],
    ),
    "uneven rows of the vocabulary": Refusal(
        "[run]\ndry_run = true\n[model]\nvocab = 265\nvocab_padding = 1\n[parallel]\ndp_shard = 4\ntp = 4",
        [],
        [
            "x.toml:4: model.vocab: 266 rows are no multiple of tp 4: torch 2.13 misplaces uneven rows silently on "
            "more than two ranks of dp x cp; choose a tp that divides them, or in a new run set "
            "model.vocab_padding = 3, rows that the softmax leaves out"
        ],
    ),
    "source without a path": Refusal(
        "[[data.sources]]\nkind = 'stdlib'\n\n[[data.sources]]\nkind = 'text'",
        [],
        ["x.toml:4: data.sources.1.path: a source of kind 'text' needs a path"],
    ),
    "no source": Refusal(
        "[data]\nsources = []", [], ["x.toml:2: data.sources: is empty: name at least one [[data.sources]]"]
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
    # Arguments.
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
            "-1: unknown flag; overrides are --section.key=value, flags --check, --json and --help",
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
    "override of an unknown section": Refusal(
        "",
        ["--optim.learning_rate=1e-3"],
        ["--optim.learning_rate: optim: unknown section or key; did you mean optimizer?"],
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
    "problem that an override makes": Refusal(
        "[model]\nheads = 8",
        ["--model.kv_heads=3"],
        ["--model.kv_heads: 3 key-value heads do not divide 8 heads"],
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
            f"{flag}: unknown flag; overrides are --section.key=value, flags --check, --json and --help"
            for flag in ("--dry", "-n", "--check=1")
        ],
    ),
    "JSON of a run": Refusal(
        "", ["--json"], ["--run.json: does nothing in this run: it needs run.dry_run = true; or remove it"]
    ),
    "layout that nobody plans": Refusal(
        "[parallel]\nlayout = 'auto'",
        [],
        ['x.toml:2: parallel.layout: is "auto", but this recipe does not plan: set the degrees'],
    ),
    "second file": Refusal(
        "",
        ["parent.toml"],
        ["parent.toml: one config file only, and x.toml is given; overrides are --section.key=value"],
    ),
    # LoRA.
    "low-rank updates of a family that PEFT cannot name": Refusal(
        "[model]\nfamily = 'gpt'\n[lora]\nrank = 4",
        [],
        [
            'x.toml:4: lora.rank: model.family = "gpt" has no LoRA here: Hugging Face\'s GPT-2 has q, k and v in one '
            "transposed matrix (Conv1D), which takes one update. Set it to 0, which trains all weights, or take "
            "another family"
        ],
    ),
    "low-rank updates of nothing, or twice, or in float8": Refusal(
        "[lora]\nrank = 4\ntargets = []\n[float8]\nrecipe = 'rowwise'",
        [],
        [
            'x.toml:5: float8.recipe: float8.recipe = "rowwise" has no products for the low-rank updates of lora.rank '
            "= 4: set one of them to its default",
            "x.toml:3: lora.targets: is empty, so nothing would be trained: name at least one matrix",
        ],
    ),
    "low-rank updates of a matrix twice": Refusal(
        "[lora]\nrank = 4\ntargets = ['q_proj', 'q_proj']",
        [],
        ["x.toml:3: lora.targets: names q_proj 2 times"],
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_wrong(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, arguments, expected = REFUSALS[name]
    (folder / "x.toml").write_text(text)
    (folder / "parent.toml").write_text("[model]\nheads = 4\nhiden = 5\n[training]\nsteps = 0\n")
    (folder / "sub").mkdir()
    (folder / "sub" / "a.toml").write_text("base = 'b.toml'")
    (folder / "sub" / "b.toml").write_text("base = 'a.toml'")
    lines = refusal(capsys, lambda: load_config(["x.toml", *arguments]))
    if expected[0].endswith(": "):  # the words are the interpreter's
        lines = [line[: len(expected[0])] for line in lines]
    assert lines == expected


def test_files_that_cannot_be_read(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "train_configs" / "models").mkdir(parents=True)
    (folder / "train_configs" / "models" / "debug.toml").touch()
    assert refusal(capsys, lambda: load_config(["debgu.toml"])) == [
        "debgu.toml: no such file; did you mean train_configs/models/debug.toml?"
    ]
    assert refusal(capsys, lambda: load_config(["."])) == [".: is not a file"]
    os.mkfifo("pipe.toml")  # reading it would not end
    assert refusal(capsys, lambda: load_config(["pipe.toml"])) == ["pipe.toml: is not a file"]
    Path("latin.toml").write_bytes(b"[run]\nfolder = '\xe9'\n")
    assert refusal(capsys, lambda: load_config(["latin.toml"])) == ["latin.toml:2: is not UTF-8"]
