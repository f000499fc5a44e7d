"""Rows of CSV as cases: what is read, what is assumed and said, what is refused with its reason."""

from pathlib import Path

import pytest

from tests.planner.evidence.test_score import ROW
from torchllm.planner.evidence.measurements import CLUSTER_ALIASES, CLUSTER_OF_GPU, read_row, read_rows
from torchllm.planner.experts import IMBALANCE
from torchllm.spec.cluster import FOLDER


def test_a_row_is_read() -> None:
    row = read_row({**ROW, "tp": "2", "dp": "4", "seq_parallel": "1", "kv_heads": "4", "step_time_s": "1.5"})
    assert row.case is not None, row.problem
    case = row.case
    assert (case.model.family, case.model.kv, case.model.ffn, case.model.vocab) == ("llama", 4, 5632, 32000)
    assert (case.parallel.tp, case.parallel.dp_shard, case.parallel.sequence_parallel) == (2, 4, True)
    assert (case.ranks, case.micro_batches, case.recompute.mode) == (8, 16, "none")
    assert (row.seconds, row.out_of_memory, row.assumed) == (1.5, False, [])


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"heads": ""}, "heads is missing"),
        ({"micro_batch": ""}, "micro_batch is missing"),
        ({"act_ckpt": "sometimes"}, "act_ckpt 'sometimes' is unknown"),
        ({"stack": "Abacus"}, "stack 'Abacus' is unknown (known: megatron-2021"),
        ({"gpu": "Abacus", "cluster": ""}, "GPU 'Abacus' is unknown"),
        ({"tp_overlap": "much"}, "tp_overlap 'much' is unknown (none, async)"),
        ({"note": "RL trainer step: fp32 logprobs"}, "the step of a reinforcement learner"),
        ({"dispatcher": "pigeons"}, "dispatcher 'pigeons' is unknown (alltoall, deepep, hybridep)"),
        ({"assumed": "as always"}, "assumed = 'as always' is not"),
    ],
)
def test_what_cannot_be_understood_is_said(cells: dict[str, str], reason: str) -> None:
    row = read_row({**ROW, **cells})
    assert row.case is None
    assert reason in row.problem


def test_what_is_left_out_is_assumed_and_said() -> None:
    row = read_row({**ROW, "gpus": "16", "dp": "16", "cluster": "somewhere", "stack": "torchtitan-2030", "vocab": ""})
    assert row.case is not None, row.problem
    assert row.case.hardware.gpu == "A100-SXM4-80GB"
    assert row.case.software.name == "torchtitan"
    assert row.assumed == [
        "cluster 'somewhere' is unknown: the network of dgx_a100, for its GPU",
        "stack 'torchtitan-2030' is unknown: as torchtitan",
        "vocab 51,200",
    ]


def test_every_cluster_of_a_gpu_or_another_name_has_a_file() -> None:
    named = {cluster for _, cluster in CLUSTER_OF_GPU} | set(CLUSTER_ALIASES.values())
    for cluster in named:
        assert (FOLDER / f"{cluster}.toml").is_file(), cluster
    aliased = read_row({**ROW, "gpus": "16", "dp": "16", "cluster": "DGX-GB200", "gpu": "GB200"})
    assert aliased.case is not None, aliased.problem
    assert (aliased.case.hardware.gpus_per_node, aliased.assumed) == (4, [])


def test_on_one_node_a_gpu_settles_the_cluster() -> None:
    assert read_row({**ROW, "cluster": "somewhere"}).assumed == []


def test_what_the_source_says_of_the_framework_replaces_the_fact() -> None:
    for overlap in ("async", "none"):
        row = read_row({**ROW, "stack": "nemo", "tp": "2", "dp": "4", "tp_overlap": overlap})
        assert row.case is not None, row.problem
        assert row.case.software.overlaps_products == (overlap == "async")
    assert not row.case.software.overlaps_tensor_parallel
    gathered = read_row({**ROW, "precision": "float8 tensorwise + fp8 all-gather"}).case
    assert gathered is not None
    assert (gathered.kernels.float8, gathered.software.gathered) == (0.8, 1.0)


def test_zero_3_on_megatron_is_deepspeed() -> None:
    case = read_row({**ROW, "stack": "megatron-2021"}).case
    assert case is not None
    assert case.software.one_card


@pytest.mark.parametrize(
    ("gpu", "memory"),
    [
        ("A100-40GB", 42.3e9),
        ("H100-80GB", 84.9e9),
        ("H100-96GB", 101.9e9),
        ("H200", 149.2e9),
        ("B200-192GB", 191.5e9),
        ("B300-288GB", 262.5e9),
        ("GB200-192GB", 186e9),
        ("MI300X-192GB", 206.1e9),
    ],
)
def test_a_gpu_has_its_usual_cluster(gpu: str, memory: float) -> None:
    row = read_row({**ROW, "cluster": "", "gpu": gpu})
    assert row.case is not None
    assert row.case.hardware.memory == memory


def test_a_file_that_is_no_table_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("")
    with pytest.raises(ValueError, match="not a table of layouts"):
        read_rows(str(tmp_path / "a.csv"))


def test_a_benchmark_that_balances_its_experts_has_no_imbalance() -> None:
    experts = {**ROW, "experts": "8", "top_k": "2", "moe_ffn": "1024", "kv_heads": "4"}
    learned = read_row(experts)
    assert learned.case is not None, learned.problem
    assert learned.case.imbalance == IMBALANCE
    assert learned.assumed == [f"the busiest rank's experts have {IMBALANCE} times the mean of rows"]
    forced = read_row({**experts, "note": "force-balanced, dropless"})
    assert forced.case is not None, forced.problem
    assert (forced.case.imbalance, forced.assumed) == (1.0, [])


@pytest.mark.parametrize(
    ("dispatcher", "once"), [("", False), ("alltoall", False), ("deepep", True), ("hybridep", True)]
)
def test_how_rows_travel(dispatcher: str, once: bool) -> None:
    row = read_row({**ROW, "dispatcher": dispatcher})
    assert row.case is not None, row.problem
    assert row.case.software.sends_tokens_once is once
