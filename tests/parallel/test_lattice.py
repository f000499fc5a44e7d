"""Every layout trains the same model: loss, every gradient, the norm, the updated weights, against one process.

`python -m tests.lattice draw` compares others: see tests/lattice.py.
"""

import functools
import json
from collections.abc import Iterable, Sequence
from typing import get_args

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

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
    read_sample,
    settings_of,
)
from tests.lattice_report import BEGIN, END, PAGE, RESULTS, markdown_table
from tests.parity import Settings, check, check_bfloat16, tiny
from tests.workers import run
from torchllm.config import Model
from torchllm.config.keys import field_types, plain_type
from torchllm.runtime.torch_compat import local_region
from torchllm.tools.config.checks import problems
from torchllm.tools.proof.layouts import AXES, MICRO_BATCH, LayoutSpace, describe_layout

exhaustive = pytest.mark.exhaustive
sample = functools.cache(read_sample)
random_layouts = functools.cache(functools.partial(at_random, 50, seed=1, space=SPACE))
random_layouts_of_experts = functools.cache(functools.partial(experts_at_random, 50, seed=1))


# -- the sample


def test_the_first_layouts_of_the_sample_have_every_setting() -> None:
    """After a new setting `python -m tests.lattice sample` draws it anew."""
    assert all(map(SPACE.is_valid, [*sample().first, *sample().rest]))
    found = set().union(*map(settings_of, sample().first))
    expected = {(key, value) for key, values in {**LAYOUT, **OPTIONS}.items() for value in values}
    of_degrees = {(axis, degree) for axis in AXES for degree in (1, 2, 3)}
    without_effect = {pair for pair in expected if pair[0] in (*AXES, MICRO_BATCH, "parallel.ep")}
    assert found == (expected - without_effect) | of_degrees | {(MICRO_BATCH, True), (MICRO_BATCH, False)}


UNDRAWN = {
    **dict.fromkeys(("from_hf", "upcycle", "upcycle_noise"), "where weights come from: tests/tools/hub"),
    "block": "of forks: tests/tools/proof/test_prove.py",
    **dict.fromkeys(("hidden", "max_sequence_length"), "sizes without further cases"),
    "initial_std": "of the start alone: tests/parallel/test_initialize.py",
    "base_width": "of the start and of rates: tests/optim/test_base_width.py",
}
"""keys of [model] that have one value in all layouts, and why"""
UNDRAWN_CHOICES = {("attention", "flash"), ("attention", "flex")}
"""values of keys that have a list of them: those without a backward on a CPU"""


def test_the_sample_changes_every_key_of_the_model() -> None:
    """Not drawn are data.packing and optimizer.state_dtype: the tests make the batches, and compare with torch's AdamW.
    tests/data/test_best_fit.py and tests/optim/test_rounded.py have their layouts."""
    models = [SPACE.config(layout).model for layout in (*sample().first, *sample().rest)]
    views = {view for model in models for view in (model, *model.views)}
    drawn = {name: {repr(getattr(view, name)) for view in views} for name in field_types(Model)}
    assert {name for name, values in drawn.items() if len(values) == 1} == UNDRAWN.keys()
    missing = set()
    for name, annotated in field_types(Model).items():
        choices = [value for value in get_args(plain_type(annotated)[0]) if isinstance(value, str)]
        missing |= {(name, choice) for choice in choices if repr(choice) not in drawn[name]}
    assert missing == UNDRAWN_CHOICES


@pytest.mark.parametrize(
    "index", [*range(FIRST // 3), *(pytest.param(index, marks=exhaustive) for index in range(FIRST // 3, FIRST))]
)  # each has the pairs of settings that most of those before it lack
def test_a_sample_trains_the_same_model(index: int) -> None:
    compare(sample().first[index])


def compare_all(some: Iterable[Layout], space: LayoutSpace = SPACE) -> None:
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
    assert len(all_layouts) == 62_608
    assert len({frozenset(layout.items()) for layout in all_layouts}) == 62_608


@exhaustive
def test_the_sample_has_every_pair_of_settings() -> None:
    assert draw_sample() == sample()
    sampled = set().union(*map(pairs_of, [*sample().first, *sample().rest]))
    for layout in (*lattice(), *at_random(500, seed=1, space=SPACE)):  # these have options
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


def test_vocabularies_that_torch_misplaces_are_refused() -> None:
    vocabularies = range(88, 104)
    assert set().union(*run(rows_misplaced, 6, 6, vocabularies)) == {91, 97, 103}
    for shards, uneven in ((2, set()), (3, set(range(89, 104, 2)))):
        settings = {**UNEVEN, "parallel.dp_shard": shards}
        refused = {v for v in vocabularies for _ in problems(tiny({**settings, "model.vocab": v}), 2 * shards)}
        assert refused == uneven, shards


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


# -- the table of docs/measurements.md


def test_the_page_shows_what_composes() -> None:
    lines = markdown_table({"together": {"GPipe & ZeRO 3": 7, "DDP & TP": 5}}).splitlines()
    heads, gpipe, ddp = (lines[row].split(" | ") for row in (0, 3, 10))
    assert (gpipe[0], gpipe[heads.index("ZeRO 3")], gpipe[heads.index("ring")]) == ("| GPipe", "7", "–")
    assert (ddp[0], ddp[heads.index("TP")]) == ("| DDP", "5")
    _, rest = PAGE.read_text().split(BEGIN)
    assert rest.split(END)[0] == markdown_table(json.loads(RESULTS.read_text()))
