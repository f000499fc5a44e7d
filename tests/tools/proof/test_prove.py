"""`torchllm prove`: what it draws, what it finds wrong in a fork, what it says about it."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from recipes import prove as recipe
from tests import workers
from tests.tiny_run import ROOT
from tests.tools.proof import forks, planted
from tests.tools.proof.forks import Change, write_fork
from torchllm.config import Config, Float8, Kinds, Model, Optimizer, Recompute, Source, gradient_accumulation
from torchllm.config.errors import UserError
from torchllm.config.schema import MixtureStage
from torchllm.facts.parts.gated_delta import DeltaSizes, delta_sizes
from torchllm.tools.config.checks import problems
from torchllm.tools.config.read import read_table
from torchllm.tools.config.toml_files import read_files
from torchllm.tools.proof import prove
from torchllm.tools.proof.axes import TECHNIQUES, Technique
from torchllm.tools.proof.compare import Agreement
from torchllm.tools.proof.float64 import Float64
from torchllm.tools.proof.layouts import Settings, with_settings
from torchllm.tools.proof.pool import WorkerFailed
from torchllm.tools.proof.prove import ProofOptions, ProvenLayout, Prover, error_line
from torchllm.tools.proof.recipe import MODULE, import_recipe
from torchllm.tools.proof.record import Trained
from torchllm.tools.proof.report import culprits
from torchllm.tools.proof.sample import LayoutSampler, covering
from torchllm.tools.proof.shrink import one_process, shrink

exhaustive = pytest.mark.exhaustive
PRETRAIN = ROOT / "recipes" / "pretrain.py"
OPTIONS = ProofOptions(ranks=2, dtype="float32", layouts=0, seed=0)
CONFIG = Config()
MIXTURE = Config(model=Model(experts=4))
"""a config in which every technique can be used"""


def technique(name: str) -> Technique:
    (found,) = (technique for technique in TECHNIQUES if technique.name == name)
    return found


def proven(
    recipe: Path, name: str, folder: Path, config: Config = CONFIG, options: ProofOptions = OPTIONS
) -> ProvenLayout:
    """Return what comes of the smallest layout with a technique."""
    prover = Prover(recipe, config, options, folder, workers.POOL)
    layout = prover.layout_with(technique(name))
    assert layout is not None
    return prover.prove(layout, technique(name))


RESUMED = "checkpoint.resume=auto"
"""no technique of a layout, but a run that is saved and resumed"""
OTHER_BATCH = r"step 1(, [\w.]+: gradient|: loss) differs"
FOUND = {
    "mean over local tokens": ("cp=2 cp_method=ring", OTHER_BATCH),
    "mean over local sequences": ("micro_batch_size=1", OTHER_BATCH),
    "past the residual stream": ("pp=2", OTHER_BATCH),
    "changing state": ("recompute.mode=full", OTHER_BATCH),
    "loss of a chunk": ("loss_chunk=20", OTHER_BATCH),
    "mean per rank": ("dp_replicate=2", OTHER_BATCH),
    "largest local head": ("tp=2", OTHER_BATCH),
    "trust ratio of local norms": ("dp_shard=2", "step 1, .*: the update is wrong, not the gradient"),
    "local positions": ("tp=2 sequence_parallel=True", OTHER_BATCH),
    "detached under tp": ("tp=2", OTHER_BATCH),
    "clipped per stage": ("pp=2", ".*: the update is wrong, not the gradient"),
    "balance of local tokens": ("micro_batch_size=1", OTHER_BATCH),
    "dropout by place": ("cp=2 cp_method=ulysses", OTHER_BATCH),
    "tied by hand": ("dp_replicate=2", ""),
    "average on the first rank": ("dp_replicate=2", "extra state after step 3, own.*: ranks differ"),
    "data by the rank among all": ("dp_shard=2 tp=2", OTHER_BATCH),
    "state that is not saved": (RESUMED, "step 3, .*: gradient differs"),
    "nothing is resumed": (RESUMED, "begins at step 1: train.. saves no checkpoint, or resumes none"),
    "a ten-thousandth of an auxiliary loss per micro batch": ("micro_batch_size=1", OTHER_BATCH),
}
"""by which technique a mistake is found, and what is said of it"""
QUICKLY_FOUND = ("mean over local sequences",)


def prove_fork(fork: Path, name: str, mixture: bool = False) -> ProvenLayout:
    """Return what comes of one technique alone, or of a run that is resumed."""
    config = MIXTURE if mixture else CONFIG
    if name == RESUMED:
        return Prover(fork, config, OPTIONS, fork.parent, workers.POOL).prove_resumed()
    return proven(fork, name, fork.parent, config, OPTIONS._replace(ranks=4 if "dp_shard=2 tp=2" in name else 2))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICKLY_FOUND else exhaustive) for name in FOUND]
)
def test_a_planted_mistake_is_found(name: str, tmp_path: Path) -> None:
    technique_name, finding = FOUND[name]
    fork = write_fork(tmp_path / "fork.py", planted.MISTAKES[name])
    result = prove_fork(fork, technique_name, mixture=name == "balance of local tokens")
    assert result.agreement.findings
    assert re.match(finding, result.agreement.findings[0])
    assert [one.name for one in culprits([result])] == [technique_name]


@pytest.mark.parametrize("name", ["state that is not saved", "nothing is resumed"])
def test_a_mistake_of_resuming_is_found_in_one_process(name: str, tmp_path: Path) -> None:
    """In float32 alone; above, at night, in several layouts."""
    fork = write_fork(tmp_path / "fork.py", planted.MISTAKES[name])
    prover = Prover(fork, CONFIG, OPTIONS._replace(ranks=1), tmp_path, workers.POOL)
    config = prover.space.config(prover.layout_like({}))
    finding, *_ = prover.agreement_in(config, config, in_float64=False).findings
    assert re.match(FOUND[name][1], finding)


def test_a_resumed_run_that_is_wrong_in_one_process_too_is_said_to_be(tmp_path: Path) -> None:
    prover = Prover(PRETRAIN, CONFIG, OPTIONS, tmp_path, workers.POOL)
    for verdict_alone in ("right", "wrong"):
        of_layout, alone = Mock(verdict="wrong"), Mock(verdict=verdict_alone)
        with patch.object(Prover, "_prove_resumed", side_effect=[of_layout, alone]) as proven_pairs:
            assert prover.prove_resumed() is (of_layout if verdict_alone == "right" else alone)
        assert proven_pairs.call_args.args == (prover.layout_like({}),) * 2


TRIED = {
    "z-loss": ("cp=2 cp_method=ring", "tp=2 sequence_parallel=True", "pp=2"),
    "Lion": ("dp_shard=2", "tp=2 sequence_parallel=True", RESUMED),
    "inverse square root": ("micro_batch_size=1", RESUMED),
    "scaled feed-forward": ("dp_shard=2", "tp=2 sequence_parallel=True"),
    "soft cap": ("micro_batch_size=1", "cp=2 cp_method=ring", "tp=2 sequence_parallel=True"),
    "a counter of the module": ("micro_batch_size=1", "pp=2", RESUMED),
}
"""by change: the techniques that share what it computes or keeps"""
RIGHT = [(name, technique_name) for name in planted.RIGHT for technique_name in TRIED[name]]
QUICKLY_RIGHT = (("a counter of the module", RESUMED),)


@pytest.mark.parametrize(
    ("name", "technique_name"),
    [pytest.param(*case, marks=() if case in QUICKLY_RIGHT else exhaustive) for case in RIGHT],
)
def test_a_change_that_is_right_is_not_called_wrong(name: str, technique_name: str, tmp_path: Path) -> None:
    result = prove_fork(write_fork(tmp_path / "fork.py", planted.RIGHT[name]), technique_name)
    assert result.is_right, result.agreement.findings
    assert result.agreement.error < 1e-5


OPTIMIZERS = ("Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam", "RMSprop", "SGD")
OPTIMIZERS += ("Adam fused", "AdamW fused")
"""of torch.optim; torch has no rule to shard an operation of Adafactor, Rprop, and SGD and Adagrad with fused=True"""


@exhaustive
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers_of_torch_work_in_a_fork(optimizer: str, tmp_path: Path) -> None:
    """tests/checkpoint/test_resume_optimizers.py saves and resumes them."""
    cls, _, is_fused = optimizer.partition(" ")
    change = planted.of_optimizer(f"torch.optim.{cls}({planted.PARAMETERS}{', fused=True' if is_fused else ''})")
    result = prove_fork(write_fork(tmp_path / "fork.py", change), "dp_shard=2 tp=2")
    assert result.is_right, result.agreement.findings


ROUNDED = Model(attention="eager", norm_position="after", norm_epsilon=1e-6, initial_std=1.0)
"""OLMo 2's form with sharp attention: the values that a token sees are nearly equal, so gradients of scores cancel"""


@exhaustive  # by default a fork whose attention is float32, below
@pytest.mark.parametrize("name", ["tp=2", "cp=2 cp_method=ring"])
def test_rounding_is_told_from_a_mistake_in_float64(name: str, tmp_path: Path) -> None:
    """With other micro batches one process is right in float32: its error, 9e-7, is no measure of rounding."""
    result = proven(PRETRAIN, name, tmp_path, Config(model=ROUNDED))
    assert result.is_right, result.agreement.findings
    assert result.agreement.rounding > 1e-3
    assert 0 < result.agreement.error < 1e-9


IN_FLOAT32 = """
def hook(core, inputs):
    core.register_forward_hook(back)
    return tuple({} if torch.is_tensor(x) and x.is_floating_point() else x for x in inputs)


def back(core, inputs, output):
    return output.to(torch.get_default_dtype())
"""


@exhaustive
@pytest.mark.parametrize(
    ("convert", "finding"),
    [
        ("x.float()", ""),
        (
            "x.to(torch.zeros((), dtype=torch.float32))",
            r"rounding is not known, for in float64 the recipe still rounds to float32 \(.*fork.py:\d+\)$",
        ),
    ],
)
def test_a_fork_that_attends_in_float32_is_tried_in_float64_or_said(convert: str, finding: str, tmp_path: Path) -> None:
    """Both are right models. The second rounds in a way that is not widened."""
    change = planted.of_blocks(IN_FLOAT32.format(convert), "self_attn.core")
    config = Config(model=replace(ROUNDED, layers=2))
    agreement = proven(write_fork(tmp_path / "fork.py", change), "cp=2 cp_method=ring", tmp_path, config).agreement
    if finding:
        assert re.search(finding, agreement.findings[0])
    else:
        assert (agreement.findings, agreement.rounding > 1e-5) == ([], True)
        assert 0 < agreement.error < 1e-9


def test_float64_holds_in_a_recomputation() -> None:
    with Float64():
        x = torch.ones(3, requires_grad=True)
        checkpoint(lambda x: x.float().exp().sum(), x, use_reentrant=False).backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones(3, dtype=torch.float64).exp())


@exhaustive
@pytest.mark.parametrize("name", [technique.name for technique in TECHNIQUES if technique.settings])
def test_in_float64_nothing_is_rounded_to_float32(name: str, tmp_path: Path) -> None:
    config = Config(model=replace(MIXTURE.model, qk_norm="width", attention="eager", balance_loss="sequence"))
    config = with_settings(config, {"training.z_loss": 0.1})
    prover = Prover(PRETRAIN, config, OPTIONS._replace(ranks=4), tmp_path, workers.POOL)
    layout = prover.layout_with(technique(name))
    assert layout is not None
    agreement = prover.agreement_in(prover.decided(prover.space.config(layout)), None, in_float64=True)
    assert (agreement.findings, agreement.error) == ([], pytest.approx(0.0, abs=1e-12))


def test_a_fork_that_fails_in_float64_is_judged_in_float32(tmp_path: Path) -> None:
    change = planted.of_blocks("""
def hook(mlp, inputs):
    x = inputs[0]
    mean = x.mean(dim=0, keepdim=True) @ torch.eye(x.shape[-1], dtype=torch.float32)
    return (x - mean,)
""")
    result = prove_fork(write_fork(tmp_path / "fork.py", change), "micro_batch_size=1")
    assert result.agreement.findings[0].endswith("if by rounding is not known, for the recipe fails in float64")


@exhaustive  # by default forks of it are: below, and in tests/test_fork_pages.py
def test_the_reference_recipe_is_right(tmp_path: Path) -> None:
    config = Config(model=Model(qk_norm="head", tied_embeddings=True, kv_heads=4, vocab=263))
    prover = Prover(PRETRAIN, config, OPTIONS, tmp_path, workers.POOL)
    assert prover.base.model.vocab % 8 == 7
    layout = prover.layout_with(technique("tp=2 sequence_parallel=True"))
    assert layout is not None
    result = prover.prove(layout)
    assert result.is_right, result.agreement.findings
    assert 0 < result.agreement.error < 1e-5
    assert not list(tmp_path.rglob("step-*"))  # nothing is saved


@exhaustive
@pytest.mark.parametrize("is_broken", [False, True], ids=["right", "broken"])
def test_float8_is_measured_by_one_processs_own_error(is_broken: bool, tmp_path: Path) -> None:
    recipe = write_fork(tmp_path / "fork.py", forks.documented_change()) if is_broken else PRETRAIN
    config = Config(float8=Float8("rowwise"))
    result = proven(recipe, "tp=2", tmp_path, config, OPTIONS._replace(dtype="bfloat16"))
    assert result.is_right is not is_broken, result.agreement.findings
    assert result.agreement.error > 0.05  # bfloat16's is 1e-2


def test_the_command_names_layout_parameter_and_axis(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The example of docs/prove.md, with one of the techniques, and in bfloat16, in which nothing is repeated."""
    fork = write_fork(tmp_path / "mine.py", forks.documented_change())
    monkeypatch.setenv("RECIPE", str(fork))
    monkeypatch.setattr(prove, "TECHNIQUES", [technique("tp=2")])
    arguments = [str(ROOT / "train_configs/debug.toml"), "--ranks=2", "--layouts=0", "--dtype=bfloat16"]
    assert recipe.main(arguments, workers.POOL) == 1
    lines = capsys.readouterr().out.splitlines()
    (wrong,) = (index for index, line in enumerate(lines) if line.startswith("    wrong: "))
    assert " tp=2" in lines[wrong - 1]
    assert re.search(r"layers\.\d\.self_attn\.[qk]_proj\.weight", lines[wrong - 1])
    assert any(line.startswith("tp=2: each rank has some of the heads") for line in lines[wrong:])


def test_a_fork_that_fails_in_one_process_is_an_error(tmp_path: Path) -> None:
    fork = write_fork(tmp_path / "fork.py", Change("def change(stages):\n    raise ValueError('rotten')\n"))
    with pytest.raises(UserError, match=r"fork.py fails in one process(?s:.*)ValueError: rotten"):
        proven(fork, "tp=2", tmp_path)


def test_a_layout_that_fails_has_the_error_as_its_finding(tmp_path: Path) -> None:
    change = "def change(stages):\n    if torch.distributed.get_world_size() > 1:\n        raise ValueError('rotten')\n"
    fork = write_fork(tmp_path / "fork.py", Change(change))
    assert proven(fork, "tp=2", tmp_path).agreement.findings == ["ValueError: rotten"]


def test_the_error_of_a_traceback_is_named_not_the_end_of_its_message() -> None:
    text = "  File ...\nValueError: first\n\n  File ...\ntorch.CheckpointError: differs.\n\nTip: see more\n"
    assert error_line(text) == "torch.CheckpointError: differs."
    assert error_line("rank 0 of 2:\nthe process died") == "the process died"


@exhaustive
def test_every_pair_of_settings_is_drawn_and_each_technique_has_a_layout_of_its_own(tmp_path: Path) -> None:
    prover = Prover(PRETRAIN, MIXTURE, OPTIONS._replace(ranks=4), tmp_path, workers.POOL)
    drawn = covering(prover.space, prover.layouts, prover.seed)
    assert len(drawn) < 145
    for technique in TECHNIQUES:
        if technique.settings:
            assert any(technique.is_used(prover.space.config(layout)) for layout in drawn), technique.name
    for layout in drawn:
        config = prover.space.config(layout)
        assert not problems(config, config.parallel.ranks)
        assert config.parallel.ranks <= 4
    accumulations = {gradient_accumulation(prover.space.config(layout).training, 1) for layout in drawn}
    assert len(accumulations) > 2
    for technique in TECHNIQUES:
        layout = prover.layout_with(technique)
        if not technique.settings:
            assert layout is None  # compiled, which this config is not
            continue
        assert layout is not None, technique.name
        used = [other.name for other in TECHNIQUES if other.is_used(prover.space.config(layout))]
        assert technique.name in used
        allowed = {technique.name, "micro_batch_size=1", "tp=2", "pp=2", "dp_shard=2", "cp=2 cp_method=ring"}
        allowed |= {"dp_shard=2 ep=2"} if "parallel.expert" in str(technique.settings) else set()
        assert set(used) <= allowed, (technique.name, used)


WINDOWS = """
from torchllm.recipe import BlockKind, register_block


def windowed(block, model, index):
    block.self_attn.core.window = 12
    return block


register_block(BlockKind(name="windowed", build=windowed, parameters=()))
"""


def test_a_layout_that_the_model_refuses_is_not_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A ring would drop the windows that a right fork gives its blocks."""
    fork = write_fork(tmp_path / "fork.py", Change(WINDOWS, ""))
    monkeypatch.setenv("RECIPE", str(fork))
    arguments = [str(ROOT / "train_configs/debug.toml"), "--model.block=windowed", "--model.layers=1", "--ranks=2"]
    assert recipe.main([*arguments, "--only=cp=2 cp_method=ring"], workers.POOL) == 0
    _, line, reason, *_, summary = capsys.readouterr().out.splitlines()
    assert line.split()[0] == "-"
    assert reason.startswith("    refused: parallel.cp_method: a ring would replace the attention core")
    assert summary == "1 layout of up to 2 ranks in float32: 1 refused"


def test_a_layout_that_is_refused_is_not_resumed(tmp_path: Path) -> None:
    prover = Prover(PRETRAIN, CONFIG, OPTIONS, tmp_path, workers.POOL)
    refused = Agreement("", 0.0, [], refusal="heads")
    with (
        patch.object(Prover, "agreement", return_value=refused),
        patch.object(Prover, "decided", lambda _, config: config),
    ):
        layout = prover.layout_like({"parallel.tp": 2})
        assert not prover.prove(layout).is_right
        assert prover.layout_like({"parallel.tp": 2}) == prover.layout_like({}) != layout


def test_a_resume_that_is_refused_is_wrong(tmp_path: Path) -> None:
    """Its layouts were trained before: what is refused is the checkpoint."""
    prover = Prover(PRETRAIN, CONFIG, OPTIONS, tmp_path, workers.POOL)
    config = prover.space.config(prover.layout_like({"parallel.tp": 2}))
    text = "rank 1 of 2:\nTraceback ...\ntorchllm.config.errors.UserError: no\n\nTraceback ...\n"
    failed = WorkerFailed(f"{text}torchllm.tools.proof.record.LayoutRefused: no\n")
    with patch.object(Prover, "train", side_effect=failed), patch.object(Prover, "expected", return_value=Trained()):
        resumed = prover.agreement_in(config, config, in_float64=False)
        fresh = prover.agreement_in(config, None, in_float64=False)
    assert (resumed.findings, resumed.refusal) == (["torchllm.config.errors.UserError: no"], "")
    assert (fresh.findings, fresh.refusal) == ([], "no")


def test_a_number_of_layouts_counts_the_techniques_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """0: the techniques alone."""
    monkeypatch.setattr(prove, "covering", lambda *_: [{}] * 100)
    monkeypatch.setattr(Prover, "prove", lambda self, layout, technique=None: Mock(verdict="right", layout=layout))
    monkeypatch.setattr(Prover, "prove_resumed", lambda self: Mock(layout=None))
    numbers = {}
    for layouts in (3, 14, 0):
        results = list(prove.prove(PRETRAIN, CONFIG, OPTIONS._replace(layouts=layouts), workers.POOL))
        numbers[layouts] = len(results)
    assert numbers == {3: 3, 14: 14, 0: 12}
    results[:] = prove.prove(PRETRAIN, CONFIG, OPTIONS._replace(only="pp=2 recompute.mode=full"), workers.POOL)
    assert [prove.name_of(result.layout) for result in results] == [
        "pp=2 schedule=GPipe virtual_stages=1 recompute.mode=full"
    ]


def test_the_name_of_a_layout_that_was_drawn_names_it(tmp_path: Path) -> None:
    prover = Prover(PRETRAIN, CONFIG, OPTIONS, tmp_path, workers.POOL)
    few = prover.layouts[::20]
    sampler = LayoutSampler(prover.space, few, seed=0, exact=False)
    for layout in map(sampler.complete, few):
        name = prove.name_of(layout)
        assert prover.space.config(prover.layout_named(name)) == prover.space.config(layout), name


def test_the_name_of_a_resumed_run_names_it(tmp_path: Path) -> None:
    """Also of a run that is saved and resumed in one process, which `prove_resumed` tries if the other one is wrong."""
    prover = Prover(PRETRAIN, CONFIG, OPTIONS, tmp_path, workers.POOL)
    alone = prover.layout_like({})
    with patch.object(Prover, "decided", lambda _, config: config), patch.object(Prover, "agreement") as agreement:
        agreement.return_value = Agreement("", 0.0, [])
        for printed in (prover.prove_resumed(), prover._prove_resumed(alone, alone), prover.prove(alone)):
            named = prover.prove_named(printed.name)
            assert (named.layout, named.saved, named.config) == (printed.layout, printed.saved, printed.config)
    name = "dp_shard=2, saved; tp=2, resumed"
    prover.kept = {"checkpoint.resume"}
    with pytest.raises(UserError, match=f"--only: {name}: checkpoint.resume is given"):
        prover.prove_named(name)
    prover.is_bfloat16 = True
    with pytest.raises(UserError, match=f"--only: {name}: a resumed run is compared in float32"):
        prover.prove_named(name)


def test_stages_of_data_are_left_out_and_a_copy_without_layouts_says_why(tmp_path: Path) -> None:
    """The small copy has one source."""
    sources = (replace(Source(), kind="stdlib"),) * 2
    stages = (MixtureStage(until=10, weights=(1.0, 2.0)), MixtureStage(weights=(2.0, 1.0)))
    config = replace(CONFIG, data=replace(CONFIG.data, sources=sources, stage=stages))
    assert Prover(PRETRAIN, config, OPTIONS, tmp_path, workers.POOL).layouts
    with pytest.raises(UserError, match=r"data\.stage\.0\.weights: .* \(small copy\)"):
        Prover(PRETRAIN, config, OPTIONS, tmp_path, workers.POOL, kept={"data.stage"})


def test_the_page_says_what_a_fork_sees(tmp_path: Path) -> None:
    page = " ".join((ROOT / "docs/prove.md").read_text().split())
    small = Prover(PRETRAIN, CONFIG, OPTIONS, tmp_path, workers.POOL).base
    training = small.training
    assert prove.FLOAT32_STEPS == training.steps - 1 == small.evaluate.interval == 3
    assert (
        f"A fork sees three steps (one in bfloat16) of {training.global_batch_size} sequences of "
        f"{training.sequence_length} tokens, at a learning rate of {small.optimizer.learning_rate} without warmup, and "
        f"an evaluation of {small.evaluate.sequences} sequences after the last one."
    ) in page
    lengths = [len(json.loads(line)["text"]) for line in (tmp_path / "documents.jsonl").open()]
    long = [length for length in lengths if length > 1]
    assert (min(long) >= 100, max(long) <= 400, set(lengths) - set(long)) == (True, True, {1})
    assert (
        "documents of 100 to 400 random letters, digits and signs, each followed by up to 60 of one character." in page
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tp=3", "--only: tp=3: with --ranks=2 tp is one of 1, 2"),
        ("tp", "--only: tp: with --ranks=2 tp is one of 1, 2"),
        (
            "micro_batch_size=5",
            "--only: micro_batch_size=5: with --ranks=2 micro_batch_size is one of 12, 6, 4, 3, 2, 1",
        ),
        ("color=red", "--only: color=red: a layout has no such setting; it has pp, dp_replicate, "),
        ("tp=2 dp_shard=2", "--only: tp=2 dp_shard=2: has 4 ranks: give --ranks=4 too"),
        (
            "tp=1 virtual_stages=2",
            "--only: tp=1 virtual_stages=2: no such layout is valid: one of its settings has no effect",
        ),
        ("recompute.k=3", "--only: recompute.k=3: no such layout is valid: recompute.k: "),
    ],
)
def test_a_name_of_no_layout_is_refused(name: str, message: str, tmp_path: Path) -> None:
    prover = Prover(PRETRAIN, CONFIG, OPTIONS, tmp_path, workers.POOL)
    with pytest.raises(UserError) as error:
        prover.layout_named(name)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("options", [["--ranks=0"], ["--layouts=-1"], ["--layouts=3", "--only=tp=2"]])
def test_numbers_that_mean_nothing_are_refused(options: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        recipe.main([str(ROOT / "train_configs/debug.toml"), *options], workers.POOL)
    assert exit_.value.code == 2


def test_one_process_that_is_not_finite_is_no_measure(tmp_path: Path) -> None:
    change = planted.of_loss("        return whole(logits, labels) * float('nan')")
    with pytest.raises(UserError, match=r"fork.py: a loss, a gradient or a weight of one process is not finite"):
        prove_fork(write_fork(tmp_path / "fork.py", change), "loss_chunk=20")


FEATURES = ("family", "tied_embeddings", "qkv_bias", "qk_norm", "norm_position", "norm_epsilon", "rope_theta")
FEATURES += ("rope_scaling", "rope_scaling_factor")


def test_a_small_copy_keeps_the_features(tmp_path: Path) -> None:
    for file in sorted((ROOT / "train_configs" / "models").glob("*.toml")):
        config: Config = read_table(Config, read_files(str(file), []).table, [])
        small = shrink(config, 4, 3, tmp_path)
        assert not problems(one_process(small), 1), file
        model, small_model = config.model, small.model
        for name in FEATURES:
            assert getattr(model, name) == getattr(small_model, name), file
        assert (small_model.heads > small_model.kv) == (model.heads > model.kv), file
        assert small_model.vocab % 8 == model.vocab % 8, file
        assert small_model.hidden <= 128, file
        has_head_width = model.heads * model.head_width != model.hidden
        assert (small_model.heads * small_model.head_width != small_model.hidden) == has_head_width, file


def test_a_small_copy_in_float8_has_sizes_that_ranks_can_multiply(tmp_path: Path) -> None:
    model = Model(hidden=4096, heads=32, kv_heads=8, head_dim=64, ffn=14336)
    small = shrink(Config(model=model, float8=Float8("rowwise")), 4, 3, tmp_path)
    for tp in (1, 2, 4):
        assert not problems(with_settings(small, {"parallel.dp_shard": 1, "parallel.tp": tp}), tp)


def test_a_small_copy_keeps_experts(tmp_path: Path) -> None:
    for number, (layers, top_k) in enumerate([(1, 8), (2, 1), (94, 160)]):
        folder = tmp_path / str(number)
        folder.mkdir()
        model = Model(layers=layers, hidden=4096, heads=32, kv_heads=8, ffn=12288, experts=160, top_k=top_k)
        model = replace(
            model,
            router_renormalize=top_k > 1,
            expert_ffn=1536,
            shared_experts=1,
            dense_layers=min(3, layers - 1),
            router_score="sigmoid",
            router_groups=8,
            router_top_groups=8 if top_k == 160 else 4,
        )
        small = shrink(Config(model=model), 4, 3, folder).model
        for tp in (1, 2, 4):
            config = with_settings(Config(model=small), {"parallel.dp_shard": 1, "parallel.tp": tp})
            assert not problems(config, tp), layers
        assert 1 < small.experts <= 12, layers
        assert (small.top_k == small.experts) == (top_k == 160), layers
        assert (small.router_groups, small.router_top_groups) == (3, 3 if top_k == 160 else 2), layers
        assert small.expert_width < small.ffn, layers
        assert (small.shared_experts, small.router_score) == (1, "sigmoid"), layers
        assert (small.dense_layers > 0) == (layers > 1), layers
        assert any(view.experts for view in small.views), layers


def test_a_small_copy_keeps_latent_attention(tmp_path: Path) -> None:
    for q_width in (1536, 0):
        folder = tmp_path / str(q_width)
        folder.mkdir()
        model = Model(mixer="latent_attention", layers=61, hidden=7168, heads=128, ffn=18432, latent_q_width=q_width)
        model = replace(model, latent_kv_width=512, nope_head_dim=128, rope_head_dim=64, v_head_dim=128)
        small = shrink(Config(model=model), 4, 3, folder).model
        for tp in (1, 2, 4):
            assert not problems(with_settings(Config(model=small), {"parallel.dp_shard": 1, "parallel.tp": tp}), tp)
        assert (small.latent_q_width > 0) == (q_width > 0)
        assert small.v_head_dim < small.head_width < 16


def test_a_small_copy_has_few_heads_of_a_recurrence(tmp_path: Path) -> None:
    kinds = Kinds(recurrent={"mixer": "gated_delta"}, full={})
    model = Model(layers=48, hidden=2048, heads=16, kv_heads=2, head_dim=256, kinds=kinds)
    model = replace(model, pattern=("recurrent", "recurrent", "recurrent", "full"))
    model = replace(model, delta_key_heads=16, delta_value_heads=32, delta_key_dim=128, delta_value_dim=128)
    small = shrink(Config(model=model), 4, 3, tmp_path).model
    assert [view.mixer for view in small.views] == ["gated_delta"] * 3 + ["attention"]
    assert delta_sizes(small.of_kind("recurrent")) == DeltaSizes(2, 8, 12, 12, kernel=4)


KINDS = Kinds(
    local={"window": 1024, "rotary_fraction": 0.0},
    mid={"window": 512, "rotary_fraction": 0.25, "rope_original_length": 7},
    wide={"window": 8192},
    full={"rope_theta": 1e6, "rope_scaling": "yarn", "rope_scaling_factor": 8.0, "rope_original_length": 4096},
)
PATTERNS = ("local local local local local full", "local full", "local mid full", "wide mid full local")


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_small_copy_keeps_the_kinds_of_blocks(pattern: str, tmp_path: Path) -> None:
    names = tuple(pattern.split())
    kinds = Kinds({name: KINDS[name] for name in names})
    model = Model(layers=48, hidden=4096, heads=32, window=1024, pattern=names, kinds=kinds)
    small = shrink(Config(model=model), 4, 3, tmp_path)
    assert not problems(one_process(small), 1)
    assert small.model.layers == 4
    assert {small.model.kind_of(index) for index in range(small.model.layers)} == set(names)
    windows = {view.window % 8192 for view in model.views}  # one of 8192 is none for sequences of 2048
    assert len({view.window for view in small.model.views}) == len(windows)
    for name in names:
        before, after = model.of_kind(name), small.model.of_kind(name)
        assert (after.rotary_fraction > 0) == (before.rotary_fraction > 0)
        assert (after.rotary_fraction < 1) == (before.rotary_fraction < 1)
        assert (after.rope_theta, after.rope_scaling) == (before.rope_theta, before.rope_scaling)
        if before.rope_scaling_factor > 1:
            assert after.rope_original_length == 16
    assert not problems(with_settings(small, {"parallel.dp_shard": 1, "parallel.cp": 4}), 4)
    blocks = [small.model.kind_of(index) for index in range(small.model.layers)]
    assert all(blocks[first:] != blocks[:-first] for first in range(1, len(blocks)))  # wherever a stage begins


def test_a_small_copy_keeps_the_shapes_of_kinds(tmp_path: Path) -> None:
    kinds = Kinds(
        few={"heads": 16, "kv_heads": 16, "head_dim": 256, "qk_norm": "head", "experts": 0, "ffn": 10_000},
        usual={"attention": "flash", "expert_ffn": 1024},
        many={"heads": 64, "norm_position": "after", "experts": 0},
    )
    sizes = {"layers": 12, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 11_008, "experts": 16}
    model = Model(**sizes, pattern=("few", "usual", "many"), kinds=kinds)
    small = shrink(Config(model=model), 4, 3, tmp_path)
    assert not problems(one_process(small), 1)
    assert not problems(with_settings(small, {"parallel.dp_shard": 1, "parallel.tp": 4}), 4)
    assert small.model.attention_kernels == {"sdpa"}
    few, usual, many = (small.model.of_kind(kind) for kind in kinds)
    assert (few.heads // few.kv, usual.heads // usual.kv, many.heads // many.kv) == (1, 4, 4)
    assert len({few.head_width, usual.head_width, many.head_width}) == 2  # 256, 128, and 64, which is another one
    assert (few.qk_norm, many.norm_position, few.ffn != many.ffn) == ("head", "after", True)
    assert [view.experts for view in (few, usual, many)] == [0, 12, 0]
    assert usual.expert_width not in (few.ffn, many.ffn)


def test_keys_of_the_command_line_are_kept_and_varied_in_no_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config(model=Model(hidden=48, heads=4), optimizer=Optimizer(name="sgd", momentum=0.9))
    small = shrink(config, 4, 3, tmp_path, kept={"model.hidden"})
    assert small.model.hidden == 48
    assert small.optimizer.momentum == 0.9
    pattern = ("local",) * 5 + ("full",)
    model = Model(layers=12, pattern=pattern, kinds=Kinds(local={"window": 1024}, full={}))
    small = shrink(Config(model=model), 4, 3, tmp_path, kept={"model.kinds.local.window", "model.pattern"})
    assert (small.model.kinds, small.model.pattern, small.model.layers) == (model.kinds, pattern, 6)
    monkeypatch.setattr(prove, "TECHNIQUES", [technique("recompute.mode=full")])
    kept = {"recompute.mode", "checkpoint.resume"}
    assert list(prove.prove(PRETRAIN, Config(), OPTIONS, workers.POOL, kept)) == []


def test_a_key_of_recomputation_on_the_command_line_is_in_all_layouts(tmp_path: Path) -> None:
    prover = Prover(PRETRAIN, CONFIG, OPTIONS, tmp_path, workers.POOL, kept={"recompute.mode"})
    assert {prover.space.config(layout).recompute.mode for layout in prover.layouts} == {"none"}
    offload = replace(CONFIG, recompute=Recompute("full", offload=True))
    kept = {"recompute.offload"}
    (tmp_path / "offload").mkdir()
    prover = Prover(PRETRAIN, offload, OPTIONS, tmp_path / "offload", workers.POOL, kept)
    with pytest.raises(UserError, match=r"no layout of one process is valid with recompute\.offload as given"):
        prover.layout_like({})


COPIED: list[Settings] = [
    {"recompute.mode": "full", "recompute.offload": True},
    {"compile.graphs": True, "run.device": "cuda"},
    {"data.fim_rate": 0.5, "data.tokenizer": "tokenizer.json"},
    {"data.validation_fraction": 0.002},
    {"model.layers": 8, "model.frozen": r"layers\.[4-7]\..*"},
]


@pytest.mark.parametrize("settings", COPIED, ids=lambda settings: " ".join(settings))
def test_keys_that_do_not_fit_a_small_copy_are_left_out(settings: Settings, tmp_path: Path) -> None:
    small = shrink(with_settings(Config(), settings), 2, 3, tmp_path)
    assert not problems(small, 1)
    assert (small.recompute.offload, small.compile.graphs, small.data.fim_rate) == (False, False, 0)
    assert small.data.validation_fraction >= 0.1
    assert small.model.layers == (8 if small.model.frozen else 4)


SCHEMAS = """
from dataclasses import dataclass
from torchllm.config import Config

@dataclass(frozen=True)
class First(Config):
    pass

@dataclass(frozen=True)
class Second({base}):
    pass

def train(config, runtime, monitor):
    pass
"""


def test_the_config_of_a_fork_is_its_subclass(tmp_path: Path) -> None:
    fork = tmp_path / "fork.py"
    fork.write_text(SCHEMAS.format(base="First"))
    assert import_recipe(fork).schema.__name__ == "Second"
    assert import_recipe(PRETRAIN).schema is Config
    fork.write_text(SCHEMAS.format(base="Config"))
    with pytest.raises(UserError, match="First and Second are both subclasses of Config"):
        import_recipe(fork)
    fork.write_text("train = 1\n")
    del sys.modules[MODULE]
    with pytest.raises(UserError, match="has no train"):
        import_recipe(fork)
    with pytest.raises(UserError, match="there is no such file"):
        import_recipe(tmp_path / "none.py")
