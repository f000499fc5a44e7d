"""Every layout trains the same model: loss, every gradient, the norm, the updated weights, against one process.

`python -m tests.lattice draw` compares others: see tests/lattice.py.
"""

import functools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

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
    FIRST,
    LAYOUT,
    OPTIONS,
    SIZES,
    SPACE,
    Failed,
    Layout,
    at_random,
    compare,
    compare_bfloat16,
    draw_sample,
    experts_at_random,
    lattice,
    pairs_of,
    read_config,
    read_sample,
    settings_of,
)
from tests.lattice_report import BEGIN, END, PAGE, RESULTS, features, markdown_table, read, sum_up
from tests.parity import CPU, Settings, check, check_bfloat16, reference, step_batch, tiny
from tests.workers import run
from torchllm.config import Config
from torchllm.models.decoder import build_model
from torchllm.models.head import IGNORED
from torchllm.parallel.initialize import initialize
from torchllm.runtime.torch_compat import local_region
from torchllm.tools.config.checks import problems
from torchllm.tools.proof.compare import gradient_errors, root_mean_square
from torchllm.tools.proof.layouts import AXES, MICRO_BATCH, LayoutSpace, describe_layout

exhaustive = pytest.mark.exhaustive
sample = functools.cache(read_sample)
random_layouts = functools.cache(functools.partial(at_random, 50, seed=1, space=SPACE))
random_layouts_of_experts = functools.cache(functools.partial(experts_at_random, 50, seed=1))

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


# -- the sample


def test_the_first_layouts_of_the_sample_have_every_setting() -> None:
    """After a new setting `python -m tests.lattice sample` draws it anew."""
    assert all(map(SPACE.is_valid, [*sample().first, *sample().rest]))
    found = set().union(*map(settings_of, sample().first))
    expected = {(key, value) for key, values in {**LAYOUT, **OPTIONS}.items() for value in values}
    of_degrees = {(axis, degree) for axis in AXES for degree in (1, 2, 3)}
    without_effect = {pair for pair in expected if pair[0] in (*AXES, MICRO_BATCH, "parallel.ep")}
    assert found == (expected - without_effect) | of_degrees | {(MICRO_BATCH, True), (MICRO_BATCH, False)}


@pytest.mark.parametrize("index", range(FIRST))
def test_a_sample_trains_the_same_model(index: int) -> None:
    compare(sample().first[index])


def compare_all(some: Iterable[Layout], space: LayoutSpace = SPACE) -> None:
    """Compare several layouts with one process, and fail with all that differ."""
    failed = []
    for layout in some:
        try:
            compare(layout, space)
        except Failed as error:
            failed.append(str(error))
    assert not failed, "\n\n".join(failed)


@exhaustive
@pytest.mark.parametrize("part", range(49))
def test_the_rest_of_the_sample_trains_the_same_model(part: int) -> None:
    compare_all(sample().rest[part::49])


@exhaustive
@pytest.mark.parametrize("part", range(25))
def test_layouts_at_random_train_the_same_model(part: int) -> None:
    compare_all(random_layouts()[part::25])


@exhaustive
@pytest.mark.parametrize("index", range(50))
def test_layouts_at_random_add_no_error_in_bfloat16(index: int) -> None:
    compare_bfloat16(random_layouts()[index])


@exhaustive
@pytest.mark.parametrize("part", range(25))
def test_layouts_of_experts_at_random_train_the_same_model(part: int) -> None:
    compare_all(random_layouts_of_experts()[part::25], EXPERT_SPACE)


@exhaustive
def test_all_layouts() -> None:
    all_layouts = lattice()
    assert len(all_layouts.layouts) == 62_608
    assert len({frozenset(layout.items()) for layout in all_layouts.layouts}) == 62_608
    assert set(all_layouts.refusals) == REFUSALS


@exhaustive
def test_the_sample_has_every_pair_of_settings() -> None:
    assert draw_sample() == sample()
    sampled = set().union(*map(pairs_of, [*sample().first, *sample().rest]))
    for layout in (*lattice().layouts, *at_random(500, seed=1, space=SPACE)):  # these have options
        assert pairs_of(layout) <= sampled, layout


# -- bfloat16

BFLOAT16 = [
    {"parallel.tp": 2, "parallel.sequence_parallel": True, "parallel.dp_shard": 2, "recompute.mode": "full"},
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


# -- vocabularies that torch cuts wrongly


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


@pytest.mark.parametrize(
    ("shards", "misplaced"),
    [
        pytest.param(2, set(), marks=exhaustive),
        (3, {91, 97, 103}),
        pytest.param(4, {89, 97}, marks=exhaustive),
    ],
)
def test_vocabularies_that_torch_misplaces_are_refused(shards: int, misplaced: set[int]) -> None:
    vocabularies = range(88, 104)
    assert set().union(*run(rows_misplaced, 2 * shards, 2 * shards, vocabularies)) == misplaced
    settings = {**UNEVEN, "parallel.dp_shard": shards}
    refused = {v for v in vocabularies for _ in problems(tiny({**settings, "model.vocab": v}), 2 * shards)}
    assert refused == (set(range(89, 104, 2)) if shards > 2 else set())
    assert misplaced <= refused


DRIFTING: Settings = {
    **UNEVEN,
    "parallel.dp_shard": 3,
    "parallel.zero_stage": 0,
    "parallel.sequence_parallel": True,
    "model.vocab": 97,
    "model.family": "gpt",
    "model.tied_embeddings": True,
    "training.micro_batch_size": 8,
    "training.sequence_length": 48,
}


def test_uneven_vocabularies_that_let_copies_drift_are_refused() -> None:
    assert [problem.key for problem in problems(tiny(DRIFTING), 6)] == ["model.vocab"]


@exhaustive
def test_copies_of_an_uneven_vocabulary_drift() -> None:
    """gloo sums a buffer in pieces, in another order each; tp's ranks have the same weights at other places in it."""
    with pytest.raises(AssertionError, match="ranks differ"):
        check(DRIFTING, ragged=True)


# -- the commands


def wrong(config: Config, ragged: bool) -> float:
    raise AssertionError("step 1, lm_head.weight: gradient differs")


def test_a_failure_says_how_to_see_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "check_config", wrong)
    layout = sample().first[0]
    with pytest.raises(Failed, match=r"step 1, lm_head\.weight") as failure:
        compare(layout)
    message, toml = str(failure.value).split("\n\n", 1)
    assert "python -m tests.lattice FILE.toml" in message
    (tmp_path / "FILE.toml").write_text(toml)
    assert read_config(str(tmp_path / "FILE.toml")) == SPACE.config(layout)


def test_a_drawn_layout_that_fails_is_in_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right, broken = sample().first[:2]
    monkeypatch.setattr(layouts, "drawn", lambda count, seed, done: ([right, broken], SPACE))
    monkeypatch.setattr(layouts, "check_config", lambda config, ragged: 1e-6)
    fail_second = [lambda config, ragged: 1e-2, wrong]
    monkeypatch.setattr(layouts, "check_bfloat16", lambda config, ragged: fail_second.pop(0)(config, ragged))
    report = tmp_path / "report.jsonl"
    assert layouts.main(["draw", "--count=2", "--seed=3", f"--report={report}"]) == 1
    first, second = map(json.loads, report.read_text().splitlines())
    assert (first["layout"], first["error"]) == (right, 1e-6)
    assert second["layout"] == broken
    assert "gradient differs" in second["failed"]
    assert "error" not in second


def test_a_report_has_the_last_record_of_each_valid_layout(tmp_path: Path) -> None:
    layout_a, layout_b = sample().first[:2]
    refused = {**layout_a, "parallel.tp": 5}
    records = [
        {"layout": layout, "seconds": second} for second, layout in enumerate((layout_a, layout_b, refused, layout_a))
    ]
    (tmp_path / "report.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert read(str(tmp_path / "report.jsonl")) == [records[3], records[1]]
    assert read(str(tmp_path / "none.jsonl")) == []


def test_results_are_summed_up() -> None:
    base = dict.fromkeys(AXES, 1) | {"recompute.mode": "none", "model.family": "gpt", "model.tied_embeddings": False}
    sharded = {**base, "parallel.dp_shard": 2, "parallel.zero_stage": 2, "data.document_mask": True}
    replicated = {**base, "parallel.dp_replicate": 2, "recompute.mode": "full", "data.document_mask": False}
    ulysses = {**replicated, "parallel.cp": 2, "parallel.cp_method": "ulysses", "parallel.zero_stage": 1}
    run_of = {"seconds": 1.6, "torch": "2.13.0"}
    results = sum_up(
        [
            {"layout": sharded, "error": 1e-6, **run_of},
            {"layout": replicated, "error": 3e-6, **run_of},
            {"layout": ulysses, "failed": "why", **run_of},
        ]
    )
    together = results.pop("together")
    assert (together["GPT & no pipeline"], together["DDP & full"], together["ZeRO 2 & documents"]) == (2, 1, 1)
    assert "DDP & documents" not in together
    assert results == {"layouts": 2, "failed": 1, "worst_gradient_error": 3e-6, "seconds": 5, "torch": ["2.13.0"]}
    assert features(ulysses) == ["no pipeline", "full", "ZeRO 1", "HSDP", "Ulysses", "GPT"]


def test_the_page_shows_what_composes() -> None:
    lines = markdown_table({"together": {"GPipe & ZeRO 3": 7, "DDP & TP": 5}}).splitlines()
    heads, gpipe, ddp = (lines[row].split(" | ") for row in (0, 3, 10))
    assert (gpipe[0], gpipe[heads.index("ZeRO 3")], gpipe[heads.index("ring")]) == ("| GPipe", "7", "–")
    assert (ddp[0], ddp[heads.index("TP")]) == ("| DDP", "5")
    _, rest = PAGE.read_text().split(BEGIN)
    assert rest.split(END)[0] == markdown_table(json.loads(RESULTS.read_text()))
