"""Every layout trains the same model: loss, every gradient, the norm, the updated weights, against one process.

pytest tests/parallel/test_lattice.py               # 20 layouts with all settings, 72 % of pairs; 1 or 2 others
pytest -m lattice --count=50 --seed=1               # all others of that sample, with which all occur, and 50 at random
pytest -m lattice --count=all-meshes --report=FILE  # every mesh x schedule x cp method x sequence parallelism
pytest -m lattice --count=all-expert-meshes --report=FILE tests/parallel/test_lattice.py  # x ep, of experts
"""

import functools
import itertools
import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

from tests import lattice as layouts
from tests.lattice import (
    EXPERT_SPACE,
    SIZES,
    SPACE,
    Failed,
    Layout,
    at_random,
    compare,
    covering,
    describe_failure,
    every_expert_mesh,
    every_mesh,
    expert_lattice,
    lattice,
    read_config,
)
from tests.lattice_report import BEGIN, END, PAGE, RESULTS, features, markdown_table, read, sum_up
from tests.parity import CPU, Settings, check, check_bfloat16, reference, step_batch, tiny
from tests.sampling import part_of
from tests.workers import run
from torchllm.config import Config
from torchllm.config.checks import problems
from torchllm.models.decoder import build_model
from torchllm.models.head import IGNORED
from torchllm.parallel.initialize import initialize
from torchllm.proof.compare import gradient_errors, root_mean_square
from torchllm.proof.layouts import AXES, MICRO_BATCH, LayoutSpace, describe_layout
from torchllm.proof.sample import MESH
from torchllm.runtime.torch_compat import local_region

FIRST = 20
"""layouts of the sample that every run of the tests compares"""
ALL_EXPERT_MESHES = "all-expert-meshes"
PARTS = 4
"""of these"""
PARTS_OF_THE_REST = 64
"""of which a run compares one, each commit another; `-m lattice` compares all"""
sample = functools.cache(lambda: covering(seed=0))

REFUSALS = {
    "parallel.tp: # does not divide model.heads = #",
    "parallel.tp: # does not divide model.kv_heads = #",
    "parallel.pp: # stages need a block each, but model.layers is #",
    *(
        f"parallel.virtual_stages: {schedule} has # per rank, not #"
        for schedule in ("GPipe", "#F#B", "ZBVZeroBubble", "DualPipeV")
    ),
    "parallel.cp: ulysses gives each rank whole key-value heads, but # do not divide by # ranks: set it to #, or use "
    'parallel.cp_method = "ring"',
    "parallel.cp: ulysses gives each rank whole key-value heads, but # (model.kv_heads # / tp #) do not divide by # "
    'ranks: set it to #, or use parallel.cp_method = "ring"',
}


def test_all_layouts() -> None:
    all_layouts = lattice()
    assert len(all_layouts.layouts) == 62_608
    assert len({frozenset(layout.items()) for layout in all_layouts.layouts}) == 62_608
    assert set(all_layouts.refusals) == REFUSALS


@pytest.mark.parametrize("stride", [29, pytest.param(1, marks=pytest.mark.every_run)])
def test_the_sample_has_every_pair_of_settings(stride: int) -> None:
    """stride: every n-th layout of the lattice is looked at."""

    def settings(layout: Layout) -> frozenset[Any]:
        """Degrees over 2 are one setting, and so are several micro batches."""
        batch = SPACE.sized(layout).training.global_batch_size
        of_rank = batch // (layout["parallel.dp_replicate"] * layout["parallel.dp_shard"])
        is_single = layout.get(MICRO_BATCH, 1) == of_rank
        return frozenset({**layout, **{axis: min(layout[axis], 3) for axis in AXES}, MICRO_BATCH: is_single}.items())

    def pairs(several: Iterable[Layout]) -> set[frozenset[Any]]:
        return {frozenset(pair) for some in set(map(settings, several)) for pair in itertools.combinations(some, 2)}

    sampled = pairs(sample())
    assert pairs(lattice().layouts[::stride]) <= sampled
    assert pairs(at_random(500, seed=1, space=SPACE)) <= sampled  # and their options
    assert all(map(SPACE.is_valid, sample()))
    assert len(sample()) >= 80
    assert set().union(*map(settings, sample()[:FIRST])) == set().union(*map(settings, sample()))


@pytest.mark.every_run
def test_every_mesh_is_drawn() -> None:
    def meshes(several: Iterable[Layout]) -> set[Any]:
        return {tuple(map(layout.get, MESH)) for layout in several}

    drawn = every_mesh(seed=2)
    assert all(map(SPACE.is_valid, drawn))
    assert meshes(drawn) == meshes(lattice().layouts)
    interrupted = drawn[:-20]
    rest = every_mesh(seed=2, done=interrupted)
    assert meshes(rest) | meshes(interrupted) == meshes(drawn)
    assert len(rest) < 40  # the other pairs of settings are done


@pytest.mark.every_run
def test_every_expert_mesh_is_drawn() -> None:
    def meshes(several: Iterable[Layout]) -> set[Any]:
        return {tuple(map(layout.get, MESH)) for layout in several}

    drawn = every_expert_mesh(seed=2)
    assert all(map(EXPERT_SPACE.is_valid, drawn))
    assert meshes(drawn) == meshes(expert_lattice().layouts)
    assert {layout.get("parallel.ep") for layout in drawn} == {None, 1, 2, 4}


@pytest.mark.parametrize("part", range(PARTS))
def test_a_sample_trains_the_same_model(part: int) -> None:
    compare_all(sample()[:FIRST][part::PARTS])


def test_one_part_of_the_rest_trains_the_same_model() -> None:
    compare_all(part_of(sample()[FIRST:], PARTS_OF_THE_REST))


@pytest.mark.lattice
@pytest.mark.parametrize("part", range(PARTS_OF_THE_REST))
def test_the_rest_of_the_sample_trains_the_same_model(part: int) -> None:
    compare_all(sample()[FIRST:][part::PARTS_OF_THE_REST])


def compare_all(drawn: Iterable[Layout]) -> None:
    """Compare several layouts with one process, and fail with all that differ."""
    failed = []
    for layout in drawn:
        try:
            compare(layout)
        except Failed as error:
            failed.append(str(error))
    assert not failed, "\n\n".join(failed)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The layouts that the command line asks for, where it asks."""
    if "drawn" in metafunc.fixturenames:
        option = metafunc.config.option
        drawn: list[Layout] = []
        if "not lattice" not in option.markexpr:
            if option.count == "all-meshes":
                drawn = every_mesh(option.seed, done_by(option.report))
            elif option.count != ALL_EXPERT_MESHES:
                drawn = at_random(int(option.count), option.seed)
        metafunc.parametrize("drawn", drawn, ids=describe_layout)
    if "drawn_experts" in metafunc.fixturenames:
        option = metafunc.config.option
        drawn = []
        if "not lattice" not in option.markexpr and option.count == ALL_EXPERT_MESHES:
            drawn = every_expert_mesh(option.seed, done_by(option.report))
        metafunc.parametrize("drawn_experts", drawn, ids=describe_layout)


def done_by(report: str) -> list[Layout]:
    """Return the layouts of a report that trained the same model."""
    return [record["layout"] for record in read(report) if "error" in record]


BFLOAT16 = [
    {"parallel.tp": 2, "parallel.sequence_parallel": True, "parallel.dp_shard": 2, "recompute.mode": "full"},
    {"parallel.cp": 2, "parallel.tp": 2, "model.family": "gpt", "training.loss_chunk": 20},
    {"parallel.pp": 2, "parallel.schedule": "ZBVZeroBubble", "model.tied_embeddings": True},
    {"parallel.dp_replicate": 2, "parallel.cp": 2, "parallel.cp_method": "ulysses", "data.document_mask": True},
]
"""each technique once, in pairs"""


@pytest.mark.parametrize("settings", BFLOAT16, ids=describe_layout)
def test_bfloat16_adds_no_error_to_that_of_one_process(settings: Settings) -> None:
    check_bfloat16(tiny({**SIZES, "training.micro_batch_size": 6, **settings}), ragged=True)


def test_float32_stands_for_exact_gradients() -> None:
    """Beside the error of bfloat16, 1e-2, that of one process in float32 does not count."""
    config = tiny({})
    model = build_model(config.model)
    initialize([model], config.model, CPU, config.run.seed)
    model.double()
    batch = step_batch(config, 1, ragged=True)
    loss = model(batch.tokens, batch.positions, batch.document_ids, batch.labels)
    (loss / (batch.labels != IGNORED).sum()).backward()
    exact = {name: parameter.grad.numpy() for name, parameter in model.named_parameters() if parameter.grad is not None}
    errors = gradient_errors(reference({}, ragged=True).gradients[0], exact, root_mean_square)
    assert len(errors) == len(list(model.parameters()))
    assert max(errors.values()) < 1e-5


@pytest.mark.lattice
def test_drawn_layouts_add_no_error_in_bfloat16(drawn: Layout) -> None:
    try:
        check_bfloat16(SPACE.config(drawn), ragged=True)
    except Exception as error:
        raise Failed(describe_failure(drawn, error)) from error


@pytest.mark.lattice
def test_drawn_layouts_train_the_same_model(drawn: Layout, request: pytest.FixtureRequest) -> None:
    compare_and_report(drawn, SPACE, request.config.option.report)


@pytest.mark.lattice
def test_expert_meshes_train_the_same_model(drawn_experts: Layout, request: pytest.FixtureRequest) -> None:
    compare_and_report(drawn_experts, EXPERT_SPACE, request.config.option.report)


def compare_and_report(drawn: Layout, space: LayoutSpace, file: str) -> None:
    """Compare a layout with one process. file: gets a line with the result; "": none does."""
    started, record = time.monotonic(), {"layout": drawn, "torch": torch.__version__}
    try:
        record["error"] = compare(drawn, space)
    except Failed as error:
        record["failed"] = str(error)
        raise
    finally:
        record["seconds"] = time.monotonic() - started
        if file:
            with open(file, "a") as report:
                report.write(json.dumps(record) + "\n")


def test_a_failure_says_how_to_see_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(config: Config, ragged: bool) -> float:
        raise AssertionError("step 1, lm_head.weight: gradient differs")

    monkeypatch.setattr(layouts, "check_config", wrong)
    (layout,) = at_random(1, seed=3)
    with pytest.raises(Failed, match=r"step 1, lm_head\.weight") as failure:
        compare(layout)
    message, toml = str(failure.value).split("\n\n", 1)
    assert "python -m tests.lattice FILE.toml" in message
    (tmp_path / "FILE.toml").write_text(toml)
    assert read_config(str(tmp_path / "FILE.toml")) == layouts.SPACE.config(layout)


def rows_misplaced(ranks: int, vocabularies: Sequence[int]) -> list[int]:
    """Return the vocabularies of which this rank, of dp x tp 2, holds other rows than torch says it holds."""
    wrong = []
    for vocab in vocabularies:
        mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "tp"))
        embedding = nn.Embedding(vocab, 1)
        embedding.weight.data = torch.arange(vocab, dtype=torch.float32).unsqueeze(1)
        parallelize_module(embedding, mesh["tp"], RowwiseParallel(input_layouts=Replicate()))
        fully_shard(embedding, mesh=mesh["dp"])
        (rows, _), (first, _) = local_region(embedding.weight)
        held = embedding.weight.to_local().flatten().tolist()
        if held != list(range(first, first + rows)):
            wrong.append(vocab)
    return wrong


UNEVEN: Settings = {"parallel.tp": 2, "training.global_batch_size": 24}


@pytest.mark.parametrize(("shards", "misplaced"), [(2, set()), (3, {91, 97, 103}), (4, {89, 97})])
def test_vocabularies_that_torch_misplaces_are_refused(shards: int, misplaced: set[int]) -> None:
    vocabularies = range(88, 104)
    assert set().union(*run(rows_misplaced, 2 * shards, 2 * shards, vocabularies)) == misplaced
    settings = {**UNEVEN, "parallel.dp_shard": shards}
    refused = {v for v in vocabularies for _ in problems(tiny({**settings, "model.vocab": v}), 2 * shards)}
    assert refused == (set(range(89, 104, 2)) if shards > 2 else set())
    assert misplaced <= refused


def test_uneven_vocabularies_that_let_copies_drift_are_refused() -> None:
    """gloo sums a buffer in pieces, in another order each; tp's ranks have the same weights at other places in it."""
    settings = {**UNEVEN, "parallel.dp_shard": 3, "parallel.zero_stage": 0, "parallel.sequence_parallel": True}
    settings |= {"model.vocab": 97, "model.family": "gpt", "model.tied_embeddings": True}
    settings |= {"training.micro_batch_size": 8, "training.sequence_length": 48}
    assert [problem.key for problem in problems(tiny(settings), 6)] == ["model.vocab"]
    with pytest.raises(AssertionError, match="ranks differ"):
        check(settings, ragged=True)


def test_results_are_summed_up() -> None:
    base = dict.fromkeys(AXES, 1) | {"recompute.mode": "none", "model.family": "gpt", "model.tied_embeddings": False}
    sharded = {**base, "parallel.dp_shard": 2, "parallel.zero_stage": 2, "data.document_mask": True}
    replicated = {**base, "parallel.dp_replicate": 2, "recompute.mode": "full", "data.document_mask": False}
    pipelined = {
        **replicated,
        "parallel.pp": 2,
        "parallel.schedule": "GPipe",
        "parallel.tp": 2,
        "parallel.sequence_parallel": True,
    }
    ulysses = {**replicated, "parallel.cp": 2, "parallel.cp_method": "ulysses", "parallel.zero_stage": 1}
    run_of = {"seconds": 1.6, "torch": "2.13.0"}
    results = sum_up(
        [
            {"layout": sharded, "error": 1e-6, **run_of},
            {"layout": replicated, "error": 3e-6, **run_of},
            {"layout": pipelined, "error": 2e-6, **run_of},
            {"layout": ulysses, "failed": "why", **run_of},
        ]
    )
    assert results.pop("together") == {
        "DDP & GPT": 2,
        "DDP & GPipe": 1,
        "DDP & TP + SP": 1,
        "DDP & full": 2,
        "DDP & no pipeline": 1,
        "GPT & GPipe": 1,
        "GPT & TP + SP": 1,
        "GPT & ZeRO 2": 1,
        "GPT & documents": 1,
        "GPT & full": 2,
        "GPT & no pipeline": 2,
        "GPT & none": 1,
        "GPipe & TP + SP": 1,
        "GPipe & full": 1,
        "TP + SP & full": 1,
        "ZeRO 2 & documents": 1,
        "ZeRO 2 & no pipeline": 1,
        "ZeRO 2 & none": 1,
        "documents & no pipeline": 1,
        "documents & none": 1,
        "full & no pipeline": 1,
        "no pipeline & none": 1,
    }
    assert results == {
        "layouts": 3,
        "failed": 1,
        "worst_gradient_error": 3e-6,
        "seconds": 6,
        "torch": ["2.13.0"],
    }
    assert features(ulysses) == ["no pipeline", "full", "ZeRO 1", "HSDP", "Ulysses", "GPT"]
    lines = markdown_table({"together": {"GPipe & ZeRO 3": 7, "DDP & TP": 5}}).splitlines()
    heads, gpipe, ddp = (lines[row].split(" | ") for row in (0, 3, 10))
    assert (gpipe[0], gpipe[heads.index("ZeRO 3")], gpipe[heads.index("ring")]) == ("| GPipe", "7", "–")
    assert (ddp[0], ddp[heads.index("TP")]) == ("| DDP", "5")


def test_a_report_has_the_last_record_of_each_valid_layout(tmp_path: Path) -> None:
    layout_a, layout_b = at_random(2, seed=4)
    refused = {**layout_a, "parallel.tp": 5}
    records = [
        {"layout": layout, "seconds": second} for second, layout in enumerate((layout_a, layout_b, refused, layout_a))
    ]
    (tmp_path / "report.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert read(str(tmp_path / "report.jsonl")) == [records[3], records[1]]
    assert read(str(tmp_path / "none.jsonl")) == []


@pytest.mark.skipif(not RESULTS.exists(), reason="the lattice has not been run yet")
def test_the_readme_shows_what_composes() -> None:
    _, rest = PAGE.read_text().split(BEGIN)
    assert rest.split(END)[0] == markdown_table(json.loads(RESULTS.read_text()))
