"""Rows of CSV as cases: what is read, what is assumed and said, what is refused with its reason."""

from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from evidence.cells import Cells
from evidence.measurements import CLUSTER_ALIASES, CLUSTER_OF_GPU, file_of_cluster, read_row, read_rows
from evidence.row_layout import even_split
from evidence.stacks import KINDS, OTHER_NAMES, STACKS, stack_of
from tests.evidence.tables import case_of
from tests.tools.planner.calibration.sweeps import ROW
from torchllm.facts.flops import parameter_count
from torchllm.tools.planner.parameters import different_views

QWEN3_30B = ROW | {
    "layers": "48",
    "heads": "32",
    "kv_heads": "4",
    "ffn": "",
    "vocab": "151936",
    "seq_len": "4096",
    "experts": "128",
    "top_k": "8",
    "moe_ffn": "768",
    "note": "head_dim 128; all layers MoE",
}
"""Qwen3-30B-A3B, as huggingface.co/Qwen/Qwen3-30B-A3B describes it"""

READ: list[tuple[dict[str, str], dict[str, Any]]] = [
    (
        {"tp": "2", "dp": "4", "seq_parallel": "1", "kv_heads": "4"},
        {
            "model.family": "llama",
            "model.kv": 4,
            "model.ffn": 5632,
            "model.vocab": 32000,
            "parallel.tp": 2,
            "parallel.dp_shard": 4,
            "parallel.sequence_parallel": True,
            "ranks": 8,
            "micro_batches": 16,
            "recompute.mode": "none",
        },
    ),
    # of the batch
    ({"micro_batch": "", "grad_accum": "4"}, {"training.micro_batch_size": 2, "training.global_batch_size": 64}),
    ({"global_batch_seqs": "", "grad_accum": "3"}, {"training.global_batch_size": 8 * 3}),
    ({"global_batch_seqs": "", "dp": "2", "pp": "4", "schedule": "1F1B"}, {"training.global_batch_size": 2 * 4}),
    # of shards, of another name of a cluster
    ({"note": "states sharded over 4 GPUs (hybrid)"}, {"parallel.dp_replicate": 2, "parallel.dp_shard": 4}),
    ({"gpus": "16", "dp": "16", "cluster": "DGX-GB200", "gpu": "GB200"}, {"hardware.gpus_per_node": 4}),
    # of words for recomputation, which mean what they mean to the framework
    ({"stack": "megatron-core", "act_ckpt": "selective"}, {"software.recomputes_attention_only": True}),
    ({"stack": "megatron-core", "act_ckpt": "selective op"}, {"software.recomputes_attention_only": False}),
]
"""changes of the usual row, and fields of its case"""
RECOMPUTATION = {
    "disabled": ("none", False),
    "full": ("full", False),
    "selective": ("selective", False),
    "selective op": ("selective", False),
    "selective (core_attn)": ("selective", True),
    "selective (layernorm, moe_act)": ("selective", False),
    "selective layer (every other)": ("every_k", False),
}
"""word -> the mode, and whether attention alone is recomputed"""

NOT_READ: list[tuple[dict[str, str], str]] = [
    ({"heads": ""}, "heads is missing"),
    ({"tp": "x"}, "tp = 'x' is not a number"),
    ({"tp": "1.5"}, "tp = 1.5 is not a whole number"),
    ({"tp": "-1"}, "tp = -1 is not a whole number"),
    ({"assumed": "as always"}, "assumed = 'as always' is not \"column=value; column=value\""),
    ({"assumed": "speed=2"}, "assumed names 'speed', which is no column"),
    ({"note": "RL trainer step: fp32 logprobs"}, "the step of a reinforcement learner"),
    ({"gpu": "Abacus", "cluster": ""}, "GPU 'Abacus' is unknown"),
    ({"stack": "Abacus"}, "stack 'Abacus' is unknown (known: megatron-2021"),
    ({"stack": ""}, "is unknown"),
    ({"qk_norm": "some"}, "qk_norm = 'some' is not one of none, head, width"),
    # batch and degrees
    ({"micro_batch": ""}, "micro_batch is missing"),
    ({"micro_batch": "0"}, "micro_batch = 0: there is nothing to predict"),
    ({"micro_batch": "4", "global_batch_seqs": "30"}, "global_batch_seqs 30 does not divide by micro batch 4 x dp 8"),
    ({"global_batch_seqs": "", "step_time_s": "1"}, "global_batch_seqs and grad_accum are missing"),
    ({"dp": "", "tp": ""}, "tp is missing"),
    ({"dp": "", "pp": ""}, "pp is missing"),
    ({"gpus": "12", "tp": "8", "step_time_s": "1"}, "12 GPUs are not pp 1 x dp 8 x cp 1 x tp 8"),
    ({"gpus": "2", "dp": "", "tp": "4"}, "2 GPUs are fewer than pp 1 x cp 1 x tp 4"),
    ({"pp": "2", "dp": "4", "schedule": "backwards"}, "schedule 'backwards' is unknown"),
    (
        {"pp": "8", "dp": "1", "schedule": "1F1B", "global_batch_seqs": "1"},
        "1F1B on 8 pipeline ranks needs at least 8 micro batches; a step has 1",
    ),
    # kernels
    ({"act_ckpt": ""}, "act_ckpt is missing"),
    ({"act_ckpt": "selective (mlp)"}, "act_ckpt 'selective (mlp)' is unknown"),
    ({"attn_impl": "magic"}, "attn_impl 'magic' is unknown"),
    ({"precision": "nvfp4"}, "is unknown, or does not apply to all products"),
    ({"precision": "mxfp8 linears"}, "is unknown, or does not apply to all products"),
    ({"tp_overlap": "much"}, "tp_overlap 'much' is unknown (none, async)"),
    ({"dispatcher": "pigeons"}, "dispatcher 'pigeons' is unknown (alltoall, deepep, hybridep)"),
    # a mixture of experts
    (QWEN3_30B | {"kv_heads": ""}, "latent attention"),
    (QWEN3_30B | {"moe_ffn": ""}, "moe_ffn is missing"),
    (QWEN3_30B | {"dense_layers": "1"}, "ffn is missing"),
    (QWEN3_30B | {"dp": "4", "tp": "2", "ep": "2", "etp": "2"}, "etp 2 with ep 2 and tp 2"),
    (QWEN3_30B | {"dp": "4", "tp": "2", "ep": "1", "etp": "1"}, "etp 1 with ep 1 and tp 2"),
    (QWEN3_30B | {"dp": "4", "tp": "2", "ep": "16"}, "ep 16 does not divide 8 ranks"),
    # what the trainer refuses
    ({"layers": "0"}, "layers = 0: there is nothing to predict"),
    ({"gpus": "0"}, "gpus = 0: there is nothing to predict"),
    ({"heads": "7"}, "model.heads: "),
    ({"kv_heads": "3"}, "model.kv_heads: 3 key-value heads do not divide"),
    ({"cp": "5", "gpus": "40"}, "parallel.cp: training.sequence_length = 2048 does not divide into 10"),
    ({"pp": "128", "dp": "1", "gpus": "128", "global_batch_seqs": "512"}, "parallel.pp: 128 stages need a block each"),
]
"""changes of the usual row, and why there is no case"""

ASSUMED: list[tuple[dict[str, str], list[str]]] = [
    ({"gpus": "16", "dp": "16", "cluster": "DGX-GB200", "gpu": "GB200"}, []),
    (
        {"gpus": "16", "dp": "16", "cluster": "somewhere", "vocab": ""},
        ["cluster 'somewhere' is unknown: the network of dgx_a100, for its GPU", "vocab 51,200"],
    ),
    ({"model": "145B", "layers": "80", "hidden": "12288", "heads": "96", "ffn": ""}, ["ffn 4 x hidden"]),
    ({"attn_impl": "", "precision": ""}, ["attention flash2", "precision bf16"]),
    ({"stack": "torchtitan-2030"}, ["stack 'torchtitan-2030' is unknown: as torchtitan"]),
]
STATED = ["micro_batch=1", "act_ckpt = selective op", "gpus=8"]
"""in the column `assumed`"""


def test_a_row_is_read() -> None:
    for cells, expected in READ:
        case = case_of(read_row(ROW | cells))
        for name, value in expected.items():
            assert attrgetter(name)(case) == value, (cells, name)
    for word, expected_recomputation in RECOMPUTATION.items():
        case = case_of(read_row(ROW | {"stack": "torchtitan", "act_ckpt": word}))
        assert (case.recompute.mode, case.software.recomputes_attention_only) == expected_recomputation, word


def test_what_cannot_be_understood_is_said() -> None:
    for cells, reason in NOT_READ:
        row = read_row(ROW | cells)
        assert row.case is None, cells
        assert reason in row.problem, cells


def test_what_is_assumed_is_said() -> None:
    for cells, assumed in ASSUMED:
        row = read_row(ROW | cells)
        assert (row.problem, row.assumed) == ("", assumed), cells
    without_column = {column: text for column, text in ROW.items() if column != "act_ckpt"}
    row = read_row(without_column)
    assert (case_of(row).recompute.mode, row.assumed) == ("none", ["act_ckpt none"])
    for between in ["; ", ", ", " "]:
        row = read_row(ROW | {"micro_batch": "32", "assumed": between.join(STATED)})
        assert case_of(row).training.micro_batch_size == 1, between
        assert row.assumed == ["micro_batch = 1 instead of 32", "act_ckpt = selective op instead of none", "gpus = 8"]


def test_an_empty_cell_is_the_default() -> None:
    cells = Cells({"tp": "", "pp": "2.0", "compile": "0"}, [])
    assert [cells.number_or(column, 4) for column in ("tp", "pp", "cp")] == [4, 2, 4]
    assert not cells.is_set("compile", default=True)
    assert cells.is_set("tied_emb", default=True)


def test_the_family_is_the_one_with_the_published_number_of_parameters() -> None:
    """A feed-forward layer of 4 hidden is a GPT's, but for a model that says it has three matrices."""
    cells = ROW | {"ffn": "8192", "heads": "32", "vocab": "131072", "tied_emb": "1"}
    gated = case_of(read_row(cells | {"model": "1B", "n_params": "1342177280"})).model
    assert gated.family == "llama"
    assert parameter_count(gated) == pytest.approx(1342177280, rel=1e-3)
    assert case_of(read_row(cells | {"model": "0.8B"})).model.family == "gpt"
    mixture = case_of(read_row(QWEN3_30B)).model
    assert (mixture.experts, mixture.top_k, mixture.expert_width, mixture.head_width) == (128, 8, 768, 128)
    assert parameter_count(mixture) == pytest.approx(30.53e9, rel=1e-3)


def test_another_version_of_a_stack_is_said() -> None:
    other_versions = {
        "Megatron-DeepSpeed": "megatron-deepspeed-2023",
        "NeMo 3": "nemo",
        "Megatron 9": "megatron-core",
    }
    for name, stack in other_versions.items():
        assumed: list[str] = []
        assert stack_of(name, assumed) == STACKS[stack], name
        assert assumed == [f"stack {name!r} is unknown: as {stack}"], name


def test_every_other_name_is_that_of_a_stack_or_a_cluster() -> None:
    assert {*OTHER_NAMES.values(), *KINDS.values()} <= STACKS.keys()
    for name in [*STACKS, *OTHER_NAMES, *KINDS]:
        assert name == name.lower()
    for cluster in {cluster for _, cluster in CLUSTER_OF_GPU} | set(CLUSTER_ALIASES.values()):
        assert file_of_cluster(cluster), cluster


def test_blocks_are_split_as_megatron_does() -> None:
    assert even_split(8, 4) == (2, 2, 2, 2)
    assert even_split(10, 4) == (2, 3, 3, 2)
    assert even_split(22, 8) == (2, 3, 3, 3, 3, 3, 3, 2)
    assert even_split(22, 24) == (0, *(1,) * 22, 0)
    assert even_split(9, 4) == ()  # nor do they divide with a block less on both ends


def test_a_file_that_is_no_table_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("")
    with pytest.raises(ValueError, match="not a table of layouts"):
        read_rows(str(file))


GPT_OSS = {
    **ROW,
    **{"stack": "megatron-bridge", "model": "GPT OSS 20B", "layers": "24", "hidden": "2880", "heads": "64"},
    **{"kv_heads": "8", "ffn": "", "n_params": "", "vocab": "201088", "experts": "32", "top_k": "4", "moe_ffn": "2880"},
    "note": "head_dim 64, biases, alternating 128-token sliding window",
}


def test_a_row_that_names_a_shipped_model_has_its_blocks() -> None:
    """Tables have no columns for sinks, and windows of every second block."""
    model = case_of(read_row(GPT_OSS)).model
    assert model.sinks
    assert [view.window for view in different_views(model)] == [128, 0]


def test_blocks_that_no_column_and_no_file_describes_are_refused() -> None:
    for note, part in (
        ("2 x sliding window", "sliding window"),
        ("attention sinks", "sinks"),
        ("MLA (kv_lora 512)", "MLA"),
    ):
        row = read_row({**GPT_OSS, "model": "GPT OSS 21B", "note": note})
        assert row.problem == f"{part}: the planner would need a file of the model in train_configs/models"
    cut = read_row({**GPT_OSS, "layers": "12"})  # the name of another size
    assert cut.problem.startswith("sliding window: ")


def test_automodel_is_not_nemo() -> None:
    row = read_row({**ROW, "stack": "nemo-automodel (FSDP2)"})
    assert case_of(row).software.fsdp
    assert "stack 'nemo-automodel (FSDP2)' is unknown: as automodel" in row.assumed
