"""Stages with their own batch sizes and lengths: the same sequences on any ranks, with any workers, after any stop."""

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from torchllm.config import Data, MixtureStage, Model, Source, Training
from torchllm.config.errors import DataError
from torchllm.config.stages import Progress, span_of
from torchllm.data.batch import Batch
from torchllm.data.loader import DataRanks, TrainLoader, build_loader
from torchllm.data.order import DataOrder, PlannedStage
from torchllm.data.stages import continue_stages, limit_epochs, plan_stages, steps_within

CPU = torch.device("cpu")
TRAINING = Training(steps=12, micro_batch_size=1, global_batch_size=8, sequence_length=20)
STAGES = (
    MixtureStage(until_tokens=430, global_batch_size=4, sequence_length=24, weights=(1.0, 0.0)),  # 5 steps
    MixtureStage(until=8, sequence_length=16, weights=(1.0, 2.0)),
    MixtureStage(sequence_length=48, global_batch_size=2),
)
Packing = Literal["concatenate", "best_fit"]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> tuple[Source, ...]:
    """Two texts, whose documents have 10 to 60 bytes."""
    folder = tmp_path_factory.mktemp("texts")
    files = []
    for name, count in (("a", 60), ("b", 40)):
        texts = [f"{name}{index:03d}" + chr(97 + index % 26) * (6 + 7 * index % 51) for index in range(count)]
        files.append(folder / f"{name}.jsonl")
        files[-1].write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return tuple(Source(kind="jsonl", path=str(file)) for file in files)


def loader_of(
    sources: tuple[Source, ...],
    rank: int = 0,
    ranks: int = 1,
    packing: Packing = "concatenate",
    training: Training = TRAINING,
    **changes: Any,
) -> TrainLoader:
    cache = str(Path(sources[0].path).parent / "cache")
    settings: dict[str, Any] = {"stage": STAGES, "workers": 0, "validation_fraction": 0.1} | changes
    data = Data(sources=sources, cache=cache, packing=packing, document_mask=packing == "best_fit", **settings)
    return build_loader(data, training, Model(vocab=258), 3, DataRanks(rank, ranks))


Step = list[tuple[int, ...]]


def rows(batches: list[Batch]) -> Step:
    return [tuple(row) for batch in batches for row in batch.tokens.tolist()]


def steps_of(loaders: list[TrainLoader], count: int) -> list[Step]:
    """Return the sequences of each step of all ranks, in the order of the run."""
    steps = []
    for _ in range(count):
        of_ranks = [loader.next_step().unpack(CPU) for loader in loaders]
        steps.append([row for batches in zip(*of_ranks, strict=True) for row in rows(list(batches))])
    return steps


@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
def test_other_ranks_and_workers_go_on_in_mid_stage(sources: tuple[Source, ...], packing: Packing) -> None:
    whole = steps_of([loader_of(sources, packing=packing)], 12)
    assert [len(step) for step in whole] == [4] * 5 + [8] * 3 + [2] * 4
    assert [{len(row) for row in step} for step in whole] == [{24}] * 5 + [{16}] * 3 + [{48}] * 4
    assert len({row for step in whole[:5] for row in step}) == 20  # nothing twice in an epoch
    for stop in (2, 5, 6, 8, 10):
        before = loader_of(sources, packing=packing, workers=1)
        assert steps_of([before], stop) == whole[:stop]
        state = json.loads(json.dumps(before.state()))
        before.close()
        assert state["tokens"] == sum(len(row) for step in whole[:stop] for row in step)
        resumed = [loader_of(sources, rank, 2, packing, workers=rank) for rank in range(2)]
        for loader in resumed:
            loader.load_state(state)
        assert steps_of(resumed, 12 - stop) == whole[stop:]
        for loader in resumed:
            loader.close()


def test_a_resumed_run_ends_its_stages_at_their_tokens_with_another_batch(sources: tuple[Source, ...]) -> None:
    before = loader_of(sources)
    steps_of([before], 2)
    state = json.loads(json.dumps(before.state()))
    changed = (replace(STAGES[0], global_batch_size=2), *STAGES[1:])
    resumed = loader_of(sources, stage=changed)
    resumed.load_state(state)
    assert [len(step) for step in steps_of([resumed], 6)] == [2] * 5 + [8]  # 192 + 5 x 48 tokens are 430 or more
    assert resumed.state()["tokens"] == 192 + 5 * 48 + 8 * 16
    later = loader_of(sources, stage=(MixtureStage(until_tokens=200, weights=(1.0, 0.0)), *STAGES[1:]))
    with pytest.raises(DataError, match=r"data\.stage: up to step 8 .*\[1\.0, 0\.0\] until step 7, .* of 16 tokens"):
        later.load_state(
            json.loads(json.dumps({**resumed.state(), "stages": [[7, 18, [1.0, 0.0]], [0, 0, [1.0, 1.0]]]}))
        )


def test_a_stage_that_another_batch_leaves_without_a_step_is_named(sources: tuple[Source, ...]) -> None:
    """It is to come: no checkpoint could have its end."""
    tokens = (MixtureStage(until_tokens=200), MixtureStage(until_tokens=300), MixtureStage())
    before = loader_of(sources, stage=tokens)
    state = json.loads(json.dumps(before.state()))
    larger = loader_of(sources, stage=(replace(tokens[0], global_batch_size=64), *tokens[1:]))
    with pytest.raises(DataError, match=r"data\.stage\.1\.until_tokens: the stage before it ends later, at step \d+"):
        larger.load_state(state)


def test_a_length_that_a_source_does_not_have_is_named(sources: tuple[Source, ...]) -> None:
    with pytest.raises(DataError, match=r"shorter than one sequence of data\.stage\.1\.sequence_length = 99999 tokens"):
        loader_of(sources, stage=(MixtureStage(until=3), MixtureStage(sequence_length=99_999)))


def test_sizes_are_described(sources: tuple[Source, ...], caplog: pytest.LogCaptureFixture) -> None:
    loader = loader_of(sources)
    epochs_before = [re.findall(r"\(([\d.]+) epochs before\)", line) for line in loader.describe_sources(12)[2:5]]
    assert epochs_before == [["0", "0"], ["0.248", "0"], ["0.317", "0.222"]]
    assert loader.describe_sources(12)[-3:] == [
        "from step 1 on: 4 sequences of 24 tokens per step",
        "from step 6 on: 8 sequences of 16 tokens per step",
        "from step 9 on: 2 sequences of 48 tokens per step",
    ]
    with caplog.at_level("INFO", logger="torchllm"):
        steps_of([loader], 6)
    assert "data: from step 6 on 0.333 of data.sources.0" in caplog.text
    assert re.findall(r"\(([\d.]+) epochs before\)", caplog.text)[-2:] == epochs_before[1]
    assert caplog.text.rstrip().endswith("; 8 sequences of 16 tokens per step")
    plain = loader_of(sources, stage=())
    assert not any("per step" in line for line in plain.describe_sources(12))
    assert "tokens" not in plain.state()


def test_another_length_goes_on_with_the_same_part_of_an_epoch() -> None:
    stages = [PlannedStage(0, 7, (1.0,)), PlannedStage(0, 10, (1.0,), 6)]
    sizes = {0: (10,), 6: (5,)}
    order = DataOrder(0, (10,), (1.0,), stages, sizes)
    assert order.epochs(0, 7) == 0.8  # 7 of 10, rounded up to 4 of 5
    assert [order.locate(n).epoch for n in range(7, 10)] == [0, 1, 1]
    assert order.epochs(0, 10) == 1.4  # 7 of 5 are 14 of 10
    locations = [order.locate(n) for n in range(10, 16)]
    assert [location.epoch for location in locations] == [1] * 6
    assert len({location.number for location in locations}) == 6
    assert Counter(order.locate(n).epoch for n in range(7)) == {0: 7}
    limited = limit_epochs([*stages, PlannedStage(0, 0, (1.0,))], sizes, (1.2,))
    assert limited.end == 9  # 2 sequences of 6 tokens end 1.2 epochs: 6 of 5


def test_a_step_knows_its_sequences_from_any_start() -> None:
    data = Data(stage=STAGES, sources=(Source(), Source()))
    spans = plan_stages(data, TRAINING).spans
    expected = [(4 * step, 4) for step in range(5)] + [(20 + 8 * step, 8) for step in range(3)]
    expected += [(44 + 2 * step, 2) for step in range(4)]
    for start in range(12):
        planned = plan_stages(data, TRAINING)
        progress = Progress(*span_of(spans, start).after(start)) if start else Progress()
        continued = continue_stages(data, TRAINING, planned.stages, progress)
        assert continued.stages == planned.stages
        assert not continued.differences
        for step in range(start + 1, 13):
            span = span_of(continued.spans, step)
            assert (span.after(step - 1).sequences, span.training.global_batch_size) == expected[step - 1]
            assert steps_within(continued.spans, span.after(step).sequences) == step
            assert steps_within(continued.spans, span.after(step).sequences - 1) == step - 1
