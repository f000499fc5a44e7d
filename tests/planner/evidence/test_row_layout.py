"""The layout and the batch of a row: nothing that changes the prediction is read silently."""

import pytest

from tests.planner.evidence.test_score import ROW
from torchllm.config import Model, Parallel, Training
from torchllm.planner.evidence.cells import Cells
from torchllm.planner.evidence.row_layout import even_split, parallel_of, training_of
from torchllm.planner.evidence.stacks import STACKS

DENSE = Model(layers=16)
SPARSE = Model(layers=16, experts=8)


def read(cells: dict[str, str], model: Model = DENSE) -> tuple[Parallel, Training, list[str]]:
    row = Cells({**ROW, **cells}, [])
    parallel = parallel_of(row, model, STACKS["torchllm"])
    return parallel, training_of(row, parallel), row.assumed


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"micro_batch": ""}, "micro_batch is missing"),
        ({"micro_batch": "0"}, "does not divide by micro batch 0"),
        (
            {"global_batch_seqs": "30", "micro_batch": "4"},
            "global_batch_seqs 30 does not divide by micro batch 4 x dp 8",
        ),
        ({"global_batch_seqs": "", "step_time_s": "1"}, "global_batch_seqs and grad_accum are missing"),
        ({"dp": "", "tp": ""}, "tp is missing"),
        ({"dp": "", "pp": ""}, "pp is missing"),
        ({"schedule": "backwards", "pp": "2", "dp": "4"}, "schedule 'backwards' is unknown"),
        ({"gpus": "12", "dp": "8", "tp": "8", "step_time_s": "1"}, "12 GPUs are not pp 1 x dp 8 x cp 1 x tp 8"),
        ({"gpus": "2", "dp": "", "tp": "4"}, "2 GPUs are fewer than pp 1 x cp 1 x tp 4"),
        (
            {"pp": "8", "dp": "1", "schedule": "1F1B", "global_batch_seqs": "1"},
            "1F1B on 8 pipeline ranks needs at least 8 micro batches; a step has 1",
        ),
    ],
)
def test_what_is_missing_or_impossible_is_said(cells: dict[str, str], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read(cells)


def test_a_micro_batch_is_what_the_batch_leaves() -> None:
    training = read({"micro_batch": "", "global_batch_seqs": "64", "grad_accum": "4"})[1]
    assert (training.micro_batch_size, training.global_batch_size) == (2, 64)


def test_a_row_without_a_time_needs_no_number_of_micro_batches() -> None:
    training = read({"global_batch_seqs": "", "dp": "2", "pp": "4", "schedule": "1F1B"})[1]
    assert training.global_batch_size == 2 * 4


@pytest.mark.parametrize(
    ("word", "virtual", "name", "stages"),
    [
        ("1f1b", "1", "1F1B", 1),
        ("1F1B", "3", "Interleaved1F1B", 3),
        ("interleaved_1f1b", "4", "Interleaved1F1B", 4),
        ("ZB-2p", "1", "ZB-H2", 1),
        ("", "", "1F1B", 1),
    ],
)
def test_schedules_by_their_names(word: str, virtual: str, name: str, stages: int) -> None:
    parallel, _, assumed = read({"pp": "2", "dp": "4", "schedule": word, "interleave_v": virtual})
    assert (parallel.schedule, parallel.stages_per_rank) == (name, stages)
    assert assumed == ([] if word else ["schedule 1F1B"])


@pytest.mark.parametrize(
    ("note", "replicate", "shard"),
    [("", 1, 8), ("states sharded over 4 GPUs (hybrid)", 2, 4), ("sharded over all data ranks", 1, 8)],
)
def test_a_note_says_over_how_many_gpus_is_sharded(note: str, replicate: int, shard: int) -> None:
    parallel = read({"note": note})[0]
    assert (parallel.dp_replicate, parallel.dp_shard) == (replicate, shard)


@pytest.mark.parametrize(
    ("cells", "ep"), [({"ep": "4", "etp": "1"}, 4), ({"ep": "1", "etp": "2"}, 1), ({"ep": ""}, 1), ({"ep": "8"}, 8)]
)
def test_the_degree_of_expert_parallelism(cells: dict[str, str], ep: int) -> None:
    assert read({"dp": "4", "tp": "2", **cells}, SPARSE)[0].ep == ep
    assert read({"dp": "4", "tp": "2", **cells}, DENSE)[0].ep == 1


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"ep": "2", "etp": "2"}, "etp 2 with ep 2 and tp 2"),
        ({"ep": "1", "etp": "1"}, "etp 1 with ep 1 and tp 2"),
        ({"ep": "16"}, "ep 16 does not divide 8 ranks"),
    ],
)
def test_experts_sharded_in_another_way_are_refused(cells: dict[str, str], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read({"dp": "4", "tp": "2", **cells}, SPARSE)


@pytest.mark.parametrize(
    ("layers", "stages", "split"),
    [
        (8, 4, (2, 2, 2, 2)),
        (22, 8, (2, 3, 3, 3, 3, 3, 3, 2)),
        (22, 24, (0, *[1] * 22, 0)),
        (10, 4, (2, 3, 3, 2)),
        (9, 4, ()),
    ],
)
def test_blocks_are_split_as_megatron_does(layers: int, stages: int, split: tuple[int, ...]) -> None:
    assert even_split(layers, stages) == split
