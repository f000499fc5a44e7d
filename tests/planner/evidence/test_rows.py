"""A config's row is read back as the same layout."""

import pytest

import torchllm
from tests.parity import Settings, tiny
from torchllm.config import Model
from torchllm.planner.evidence.cells import COLUMNS, Cells
from torchllm.planner.evidence.measurements import read_row
from torchllm.planner.evidence.row_layout import parallel_of
from torchllm.planner.evidence.row_model import model_of
from torchllm.planner.evidence.rows import measurement_of
from torchllm.planner.evidence.stacks import STACKS

LAYOUTS: dict[str, tuple[int, Settings]] = {
    "HSDP": (4, {"parallel.dp_replicate": 2, "parallel.dp_shard": 2, "parallel.zero_stage": 3}),
    "tensor and sequence": (2, {"parallel.tp": 2, "parallel.sequence_parallel": True, "recompute.mode": "full"}),
    "pipeline": (2, {"parallel.pp": 2, "parallel.schedule": "Interleaved1F1B", "training.micro_batch_size": 1}),
    "context": (4, {"parallel.cp": 4, "parallel.cp_method": "ulysses", "model.attention": "eager"}),
    "grouped heads": (1, {"model.kv_heads": 2, "model.tied_embeddings": True}),
    "as OLMo 2": (1, {"model.qk_norm": "width", "model.norm_position": "after"}),
    "biases and window": (1, {"model.qkv_bias": True, "model.window": 8}),
    "heads as in Qwen3": (1, {"model.kv_heads": 2, "model.head_dim": 32, "model.qk_norm": "head"}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_row_is_the_layout(name: str) -> None:
    gpus, settings = LAYOUTS[name]
    config = tiny(settings)
    row = read_row({**measurement_of(config, gpus), "cluster": "this_cpu"})
    assert row.case is not None, row.problem
    case = row.case
    assert case.ranks == gpus
    for key in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "zero_stage", "sequence_parallel"):
        assert getattr(case.parallel, key) == getattr(config.parallel, key), key
    if config.parallel.pp > 1:
        assert (case.parallel.schedule, case.parallel.stages) == (config.parallel.schedule, config.parallel.stages)
    if config.parallel.cp > 1:
        assert case.parallel.cp_method == config.parallel.cp_method
    for key in (
        "family",
        "layers",
        "hidden",
        "heads",
        "kv",
        "head_width",
        "qkv_bias",
        "qk_norm",
        "norm_position",
        "window",
        "ffn",
        "vocab",
        "tied_embeddings",
    ):
        assert getattr(case.model, key) == getattr(config.model, key), key
    for key in ("micro_batch_size", "global_batch_size", "sequence_length"):
        assert getattr(case.training, key) == getattr(config.training, key), key
    assert case.recompute.mode == config.recompute.mode


def test_a_mixture_of_experts_is_in_the_columns() -> None:
    sizes = {"experts": 8, "top_k": 2, "expert_ffn": 32, "shared_experts": 1, "dense_layers": 1, "kv_heads": 2}
    config = tiny({"parallel.tp": 2, "parallel.ep": 2, **{f"model.{key}": value for key, value in sizes.items()}})
    cells = measurement_of(config, 2)
    columns = ("experts", "top_k", "moe_ffn", "shared_experts", "dense_layers", "ep", "etp", "tp_overlap")
    assert [cells[column] for column in columns] == ["8", "2", "32", "1", "1", "2", "1", "none"]
    model = model_of(Cells(cells, []), STACKS["torchllm"])
    for key, value in sizes.items():
        assert getattr(model, key) == value, key
    assert parallel_of(Cells(cells, []), model, STACKS["torchllm"]).ep == 2
    without_ep = tiny({"parallel.tp": 2, "model.experts": 8, "model.expert_ffn": 32})
    assert measurement_of(without_ep, 2)["etp"] == "2"
    assert "experts" not in measurement_of(tiny({}), 1)


def test_every_cell_has_a_column() -> None:
    config = tiny({"parallel.tp": 2, "model.experts": 8, "model.expert_ffn": 32})
    assert set(measurement_of(config, 2)) <= set(COLUMNS)


def test_a_row_names_the_software_and_its_fold() -> None:
    cells = measurement_of(tiny({}), 1)
    assert cells["software"] == torchllm.__version__
    assert cells["fold"].startswith("torchllm/llama-")


def test_a_table_without_columns_for_parts_of_the_model_is_read() -> None:
    """Measurements taken before there were columns for them, and published tables."""
    config = tiny({})
    cells = {**measurement_of(config, 1), "cluster": "this_cpu"}
    for column in ("head_dim", "qkv_bias", "qk_norm", "norm_position", "window"):
        del cells[column]
    row = read_row(cells)
    assert row.case is not None, row.problem
    assert row.case.model.head_width == config.model.hidden // config.model.heads
    defaults = Model()
    for key in ("qkv_bias", "qk_norm", "norm_position", "window"):
        assert getattr(row.case.model, key) == getattr(defaults, key)
