"""Rows of CSV as cases: what is read, what is assumed and said, what is refused with its reason."""

from pathlib import Path

import pytest

from tests.planner.evidence.test_score import ROW
from torchllm.planner.evidence.measurements import even_split, read_row, read_rows
from torchllm.spec.flops import parameter_count


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
        ({"micro_batch": "x"}, "micro_batch = 'x' is not a number"),
        ({"heads": ""}, "heads is missing"),
        ({"tp": "1.5"}, "tp = 1.5 is not a whole number"),
        (
            {"global_batch_seqs": "30", "micro_batch": "4"},
            "global_batch_seqs 30 does not divide by micro batch 4 x dp 8",
        ),
        ({"act_ckpt": "sometimes"}, "act_ckpt 'sometimes' is unknown"),
        ({"attn_impl": "magic"}, "attn_impl 'magic' is unknown"),
        ({"schedule": "backwards"}, "schedule 'backwards' is unknown"),
        ({"gpu": "Abacus", "cluster": ""}, "GPU 'Abacus' is unknown"),
        ({"gpus": "12", "dp": "8", "tp": "8", "step_time_s": "1"}, "12 GPUs are not pp 1 x dp 8 x cp 1 x tp 8"),
    ],
)
def test_what_cannot_be_understood_is_said(cells: dict[str, str], reason: str) -> None:
    row = read_row({**ROW, **cells})
    assert row.case is None
    assert reason in row.problem


def test_what_is_left_out_is_assumed_and_said() -> None:
    row = read_row({**ROW, "cluster": "somewhere", "stack": "megatron-2030", "attn_impl": "", "vocab": ""})
    assert row.case is not None, row.problem
    assert row.case.hardware.gpu == "A100-SXM4-80GB"
    assert row.case.software.name == "megatron"
    assert row.assumed == [
        "stack 'megatron-2030' is unknown: as megatron-2022",
        "cluster 'somewhere' is unknown: dgx_a100, for its GPU",
        "vocab 51,200",
        "attention fused_softmax",
    ]


@pytest.mark.parametrize(("gpu", "memory"), [("A100-40GB", 42.3e9), ("H100-80GB", 84.9e9), ("H200", 149.2e9)])
def test_a_gpu_has_its_usual_cluster(gpu: str, memory: float) -> None:
    row = read_row({**ROW, "cluster": "", "gpu": gpu})
    assert row.case is not None
    assert row.case.hardware.memory == memory


def test_the_family_is_the_one_with_the_published_number_of_parameters() -> None:
    """A feed-forward layer of 4 hidden is a GPT's, but for a model that says it has three matrices."""
    square = {**ROW, "model": "1B", "hidden": "2048", "ffn": "8192", "heads": "32", "vocab": "131072", "tied_emb": "1"}
    row = read_row({**square, "n_params": "1342177280"})
    assert row.case is not None
    assert row.case.model.family == "llama"
    assert parameter_count(row.case.model) == pytest.approx(1342177280, rel=1e-3)
    plain = read_row({**square, "model": "0.8B"}).case
    assert plain is not None
    assert plain.model.family == "gpt"


def test_a_published_model_without_a_feed_forward_width_is_a_gpt() -> None:
    row = read_row(
        {**ROW, "model": "145B", "layers": "80", "hidden": "12288", "heads": "96", "ffn": "", "vocab": "51200"}
    )
    assert row.case is not None
    assert (row.case.model.family, row.case.model.ffn) == ("gpt", 49152)


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


def test_a_file_that_is_no_table_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("")
    with pytest.raises(ValueError, match="not a table of layouts"):
        read_rows(str(tmp_path / "a.csv"))
