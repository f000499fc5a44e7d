"""Rows of CSV as cases: what is read, what is assumed and said, what is refused with its reason."""

from pathlib import Path

import pytest

from tests.tools.planner.evidence.tables import case_of
from tests.tools.planner.evidence.test_score import ROW
from torchllm.tools.planner.case import Case
from torchllm.tools.planner.cluster import FOLDER
from torchllm.tools.planner.evidence.measurements import (
    CLUSTER_ALIASES,
    CLUSTER_OF_GPU,
    MeasuredRow,
    read_row,
    read_rows,
)


def row_with(**cells: str) -> MeasuredRow:
    return read_row(ROW | cells)


def case_with(**cells: str) -> Case:
    """Return the case of the usual row with these cells."""
    return case_of(row_with(**cells))


def test_a_row_is_read() -> None:
    row = row_with(tp="2", dp="4", seq_parallel="1", kv_heads="4", step_time_s="1.5")
    case = case_of(row)
    model = case.model
    assert (model.family, model.kv, model.ffn, model.vocab) == ("llama", 4, 5632, 32000)
    assert case.parallel.tp == 2
    assert case.parallel.dp_shard == 4
    assert case.parallel.sequence_parallel
    assert case.ranks == 8
    assert case.micro_batches == 16
    assert case.recompute.mode == "none"
    assert row.seconds == 1.5
    assert row.out_of_memory is False
    assert row.assumed == []


def test_what_cannot_be_understood_is_said() -> None:
    for column, text, reason in [
        ("heads", "", "heads is missing"),
        ("micro_batch", "", "micro_batch is missing"),
        ("act_ckpt", "sometimes", "act_ckpt 'sometimes' is unknown"),
        ("stack", "Abacus", "stack 'Abacus' is unknown (known: megatron-2021"),
        ("tp_overlap", "much", "tp_overlap 'much' is unknown (none, async)"),
        ("note", "RL trainer step: fp32 logprobs", "the step of a reinforcement learner"),
        ("dispatcher", "pigeons", "dispatcher 'pigeons' is unknown (alltoall, deepep, hybridep)"),
        ("assumed", "as always", "assumed = 'as always' is not"),
    ]:
        row = row_with(**{column: text})
        assert row.case is None, column
        assert reason in row.problem, column


def test_an_unknown_gpu_without_a_cluster_is_said() -> None:
    row = row_with(gpu="Abacus", cluster="")
    assert row.case is None
    assert "GPU 'Abacus' is unknown" in row.problem


def test_what_is_left_out_is_assumed_and_said() -> None:
    row = row_with(gpus="16", dp="16", cluster="somewhere", stack="torchtitan-2030", vocab="")
    case = case_of(row)
    assert case.hardware.gpu == "A100-SXM4-80GB"
    assert case.software.name == "torchtitan"
    assert row.assumed == [
        "cluster 'somewhere' is unknown: the network of dgx_a100, for its GPU",
        "stack 'torchtitan-2030' is unknown: as torchtitan",
        "vocab 51,200",
    ]


def test_every_cluster_of_a_gpu_or_another_name_has_a_file() -> None:
    clusters = {cluster for _, cluster in CLUSTER_OF_GPU}
    clusters |= set(CLUSTER_ALIASES.values())
    for cluster in clusters:
        assert (FOLDER / f"{cluster}.toml").is_file(), cluster


def test_another_name_of_a_cluster_is_no_assumption() -> None:
    row = row_with(gpus="16", dp="16", cluster="DGX-GB200", gpu="GB200")
    assert case_of(row).hardware.gpus_per_node == 4
    assert row.assumed == []


def test_a_file_that_is_no_table_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("")
    with pytest.raises(ValueError, match="not a table of layouts"):
        read_rows(str(file))
