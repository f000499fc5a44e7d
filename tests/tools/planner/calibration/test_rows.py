"""A config's row is read back as the same layout."""

from collections.abc import Sequence

import pytest

import evidence.measurements
import torchllm
from tests.parity import Settings, tiny
from tests.tools.planner.calibration import sweeps
from torchllm.config import Model
from torchllm.tools.planner.calibration.rows import COLUMNS, measurement_of, read_row
from torchllm.tools.planner.case import Case
from torchllm.tools.planner.predict import predict

LAYOUTS: dict[str, Settings] = {
    "HSDP": {"parallel.dp_replicate": 2, "parallel.dp_shard": 2, "parallel.zero_stage": 3},
    "tensor and sequence": {"parallel.tp": 2, "parallel.sequence_parallel": True, "recompute.mode": "full"},
    "pipeline": {"parallel.pp": 2, "parallel.schedule": "Interleaved1F1B", "training.micro_batch_size": 1},
    "context": {"parallel.cp": 4, "parallel.cp_method": "ulysses", "model.attention": "eager"},
    "grouped heads": {"model.kv_heads": 2, "model.tied_embeddings": True},
    "as OLMo 2": {"model.qk_norm": "width", "model.norm_position": "after"},
    "biases and window": {"model.qkv_bias": True, "model.window": 8},
    "heads as in Qwen3": {"model.kv_heads": 2, "model.head_dim": 32, "model.qk_norm": "head"},
}
GPUS = {"HSDP": 4, "tensor and sequence": 2, "pipeline": 2, "context": 4}
"""of the layouts; all others have one"""
MESH = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "zero", "sequence_parallel")
MODEL = ("layers", "hidden", "heads", "kv", "head_width", "ffn", "vocab")
MODEL += ("family", "qkv_bias", "qk_norm", "norm_position", "window", "tied_embeddings")
BATCH = ("micro_batch_size", "global_batch_size", "sequence_length")


def read_on_cpu(cells: dict[str, str]) -> Case:
    row = read_row({**cells, "cluster": "this_cpu"})
    assert row.case is not None, row.problem
    return row.case


def assert_equal_fields(section: object, expected: object, names: Sequence[str]) -> None:
    """Check that two sections of a config agree in these fields."""
    for name in names:
        assert getattr(section, name) == getattr(expected, name), name


def test_a_row_is_the_layout() -> None:
    for name in LAYOUTS:
        config = tiny(LAYOUTS[name])
        gpus = GPUS.get(name, 1)
        case = read_on_cpu(measurement_of(config, gpus))
        assert case.ranks == gpus, name
        assert_equal_fields(case.parallel, config.parallel, MESH)
        if config.parallel.pp > 1:
            assert_equal_fields(case.parallel, config.parallel, ["schedule", "stages"])
        if config.parallel.cp > 1:
            assert case.parallel.cp_method == config.parallel.cp_method, name
        assert_equal_fields(case.model, config.model, MODEL)
        assert_equal_fields(case.training, config.training, BATCH)
        assert case.recompute.mode == config.recompute.mode, name


def test_a_row_that_the_columns_cannot_describe_is_not_read_as_another_one() -> None:
    kinds: Settings = {"model.pattern": ("local", "full"), "model.kinds": {"local": {"window": 8}, "full": {}}}
    plain = measurement_of(tiny({}), 1) | {"cluster": "this_cpu"}
    for cells, problem in (
        (measurement_of(tiny(kinds), 1), "model.window: must be a whole number of at least 0, not"),
        (plain | {"precision": "float8 rowwise"}, "precision 'float8 rowwise': a plan is of products in 16 bits"),
        (plain | {"stack": "nemo"}, "stack 'nemo': rows of other frameworks are for python -m evidence score"),
        (plain | {"stack": ""}, "no layout that was measured"),
        (plain | {"gpus": "2"}, "parallel.pp: "),
        (plain | {"hidden": "x"}, "model.hidden: "),
        (plain | {"cluster": "this_gpu"}, '"this_gpu" is not in train_configs/clusters'),
        (plain | {"cluster": ""}, "the row names no cluster"),
    ):
        row = read_row(cells)
        assert row.case is None, problem
        assert row.problem.startswith(problem)


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer.name": "muon"},
        {"optimizer.offload": True},
        {"optimizer.ema_decay": 0.9},
        {"training.weights_dtype": "bfloat16"},
        {"parallel.regather": True},
        {"parallel.keep_last_block": False},
        {"recompute.mode": "every_k", "recompute.k": 2},
        {"lora.rank": 2},
    ],
)
def test_a_row_with_a_key_that_has_no_column_is_not_read(settings: Settings) -> None:
    key = "frozen weights" if "lora.rank" in settings else [*settings][-1]
    row = read_row(measurement_of(tiny(settings), 1) | {"cluster": "this_cpu"})
    assert row.case is None
    assert f"with {key}" in row.problem


@pytest.mark.parametrize("text", ["fast", "-1", "nan", "inf"])
def test_a_wrong_number_is_named_by_its_column(text: str) -> None:
    row = read_row(measurement_of(tiny({}), 1) | {"cluster": "this_cpu", "step_time_s": text})
    assert row.problem == f"step_time_s: must be a number over 0, not {text!r}"


def test_a_mixture_of_experts_is_in_the_columns() -> None:
    sizes = {"experts": 8, "top_k": 2, "expert_ffn": 32, "shared_experts": 1, "dense_layers": 1, "kv_heads": 2}
    settings: Settings = {"parallel.tp": 2, "parallel.ep": 2}
    for key, value in sizes.items():
        settings[f"model.{key}"] = value
    cells = measurement_of(tiny(settings), 2)
    expected = {"experts": "8", "top_k": "2", "moe_ffn": "32", "shared_experts": "1", "dense_layers": "1"}
    expected |= {"ep": "2", "etp": "1", "tp_overlap": "none"}
    assert expected.items() <= cells.items()
    assert cells.keys() <= set(COLUMNS)
    case = read_on_cpu(cells)
    assert_equal_fields(case.model, tiny(settings).model, list(sizes))
    assert case.parallel.ep == 2


def test_a_table_without_columns_for_parts_of_the_model_is_read() -> None:
    """Measurements taken before there were columns for them."""
    config = tiny({})
    cells = measurement_of(config, 1)
    assert cells.keys() <= set(COLUMNS)
    assert [cells[column] for column in ("cp_method", "schedule", "interleave_v", "tp_overlap")] == [""] * 4
    assert cells["software"] == torchllm.__version__
    assert cells["fold"].startswith("torchllm/llama-")
    for column in ("head_dim", "qkv_bias", "qk_norm", "norm_position", "window"):
        del cells[column]
    model = read_on_cpu(cells).model
    assert model.head_width == config.model.hidden // config.model.heads
    assert_equal_fields(model, Model(), ["qkv_bias", "qk_norm", "norm_position", "window"])


def test_the_reader_of_the_evidence_predicts_a_row_as_this_one_does() -> None:
    for row in sweeps.made():
        other = evidence.measurements.read_row(row.cells | {"rmsnorm_kernel": "1"})  # as all GPUs have it
        assert row.case is not None
        assert other.case is not None
        assert predict(other.case).step == pytest.approx(predict(row.case).step)
