"""Small tables of published figures, typed in with their source: what the planner is held to wherever the tests run.

BENCHMARKS.md has the errors on whole sweeps.
"""

import itertools
from statistics import mean
from typing import Any, NamedTuple

import pytest

from tests.planner.evidence.tables import case_of
from torchllm.planner.evidence.layer import layer_seconds
from torchllm.planner.evidence.measurements import MeasuredRow, read_row
from torchllm.planner.peak import counted
from torchllm.planner.predict import predict

A100: dict[str, Any] = {"gpu": "A100-80GB", "cluster": "dgx_a100", "status": "ok", "precision": "bf16"}


class MegatronRun(NamedTuple):
    """A run of Narayanan et al. 2021 (arXiv 2104.04473), by the columns of a row of measurements."""

    model: str
    """billions of parameters"""
    layers: int
    hidden: int
    heads: int
    tp: int
    pp: int
    gpus: int
    global_batch_seqs: int
    micro_batch: int
    interleave_v: int
    """of its published scripts, as the micro batch"""
    step_time_s: float
    """from its tokens per second"""


# Table 1
TABLE_1 = (
    MegatronRun("1.7B", 24, 2304, 24, 1, 1, 32, 512, 16, 1, 3.528),
    MegatronRun("3.6B", 30, 3072, 32, 2, 1, 64, 512, 16, 1, 3.697),
    MegatronRun("7.5B", 36, 4096, 32, 4, 1, 128, 512, 16, 1, 3.696),
    MegatronRun("18B", 40, 6144, 48, 8, 1, 256, 1024, 8, 1, 9.399),
    MegatronRun("39B", 48, 8192, 64, 8, 2, 512, 1536, 4, 1, 14.453),
    MegatronRun("76B", 60, 10240, 80, 8, 4, 1024, 1792, 2, 3, 16.058),
    MegatronRun("145B", 80, 12288, 96, 8, 8, 1536, 2304, 2, 2, 24.817),
    MegatronRun("310B", 96, 16384, 128, 8, 16, 1920, 2160, 1, 2, 37.614),
    MegatronRun("530B", 105, 20480, 128, 8, 35, 2520, 2520, 1, 3, 54.085),
    MegatronRun("1T", 128, 25600, 160, 8, 64, 3072, 3072, 1, 1, 102.63),
)


class TimedLayer(NamedTuple):
    """One layer of the 22B model of Korthikanti et al. 2022 (arXiv 2205.05198), tp 8, micro batch 4."""

    seq_parallel: int
    act_ckpt: str
    forward_ms: float
    backward_ms: float


# Table 4
TABLE_4 = (
    TimedLayer(0, "none", 7.7, 11.9),
    TimedLayer(1, "none", 7.2, 11.8),
    TimedLayer(0, "full", 7.7, 19.5),
    TimedLayer(0, "selective", 7.7, 13.2),
    TimedLayer(1, "selective", 7.2, 13.1),
)


class PipelineModel(NamedTuple):
    """A model of Qi et al. 2023 (arXiv 2401.10241)."""

    model: str
    layers: int
    hidden: int
    heads: int
    micro_batch: int


class ScheduleRun(NamedTuple):
    """A schedule of that paper."""

    schedule: str
    interleave_v: int
    seconds: dict[int, float]
    """by the number of micro batches, from its samples per second"""
    peak: float
    """GB"""


MICRO_BATCHES = (24, 32, 64)
# Tables 3 to 5
ZERO_BUBBLE = {
    PipelineModel("1.5B", 22, 2304, 24, 6): (
        ScheduleRun("1F1B", 1, {24: 1.525, 32: 1.92, 64: 3.529}, 30),
        ScheduleRun("Interleaved1F1B", 3, {24: 1.374, 32: 1.791, 64: 3.453}, 40),
        ScheduleRun("ZB-1p", 1, {24: 1.395, 32: 1.791, 64: 3.38}, 32),
        ScheduleRun("ZB-2p", 1, {24: 1.241, 32: 1.622, 64: 3.221}, 59),
    ),
    PipelineModel("6.2B", 30, 4096, 32, 3): (
        ScheduleRun("1F1B", 1, {24: 2.571, 32: 3.243, 64: 5.955}, 39),
        ScheduleRun("Interleaved1F1B", 4, {24: 2.244, 32: 2.941, 64: 5.728}, 48),
        ScheduleRun("ZB-1p", 1, {24: 2.32, 32: 3.0, 64: 5.714}, 42),
        ScheduleRun("ZB-2p", 1, {24: 2.083, 32: 2.759, 64: 5.467}, 70),
    ),
}


class FoundryRun(NamedTuple):
    """A run of MosaicML's llm-foundry, by the columns of a row of measurements, but for the last ones."""

    gpu: str
    layers: int
    hidden: int
    heads: int
    seq_len: int
    micro_batch: int
    accumulated: int
    """micro batches per step and rank"""
    act_ckpt: str
    tokens: int
    """per second per GPU"""


FOUNDRY_CLUSTERS = {"A100-80GB": "mosaic_a100_80gb", "H100-80GB": "mosaic_h100", "A100-40GB": "mosaic_a100_40gb"}
# github.com/mosaicml/llm-foundry, scripts/train/benchmarking/README.md
FOUNDRY = (
    FoundryRun("A100-80GB", 40, 5120, 40, 1024, 40, 3, "full", 2330),
    FoundryRun("A100-80GB", 32, 4096, 32, 2048, 6, 2, "none", 4641),
    FoundryRun("A100-80GB", 32, 2560, 20, 4096, 5, 6, "none", 9457),
    FoundryRun("A100-80GB", 24, 2048, 16, 16384, 2, 4, "none", 9956),
    FoundryRun("A100-80GB", 24, 1024, 16, 4096, 16, 2, "none", 49555),
    FoundryRun("H100-80GB", 40, 5120, 40, 4096, 10, 3, "full", 4717),
    FoundryRun("H100-80GB", 32, 4096, 32, 4096, 16, 2, "full", 8611),
    FoundryRun("H100-80GB", 32, 2560, 20, 8192, 3, 6, "none", 16578),
    FoundryRun("H100-80GB", 24, 2048, 16, 16384, 2, 4, "none", 19649),
    FoundryRun("A100-40GB", 32, 4096, 32, 16384, 1, 4, "full", 2249),
    FoundryRun("A100-40GB", 32, 2560, 20, 512, 20, 8, "none", 11324),
    FoundryRun("A100-40GB", 24, 2048, 16, 1024, 16, 8, "none", 20959),
)


def read(**cells: Any) -> MeasuredRow:
    """Return a row of a table; it can be read."""
    texts = {column: str(value) for column, value in (A100 | cells).items()}
    row = read_row(texts)
    assert row.case is not None, row.problem
    return row


def error(row: MeasuredRow) -> float:
    """Return how far off the predicted step is, as a share of the measured one."""
    assert row.seconds is not None
    prediction = predict(case_of(row))
    return abs(prediction.step / row.seconds - 1)


def read_megatron(run: MegatronRun) -> MeasuredRow:
    """Return the row of a run: full recomputation, sequences of 2,048 tokens, no sharded states."""
    cells = run._asdict()
    cells["stack"] = "megatron-2021"
    cells["dp"] = run.gpus // run.tp // run.pp
    cells["schedule"] = "1F1B" if run.interleave_v == 1 else "Interleaved1F1B"
    return read(**cells, seq_len=2048, vocab=51200, zero_stage=0, act_ckpt="full")


def test_megatron_from_a_billion_to_a_trillion_parameters() -> None:
    errors = [error(read_megatron(run)) for run in TABLE_1]
    assert mean(errors) <= 0.045


def read_layer(timed: TimedLayer) -> MeasuredRow:
    """Return the row of one layer on one node."""
    layer = {"stack": "megatron-2022", "model": "22B", "layers": 1, "hidden": 6144, "heads": 64, "ffn": 24576}
    layout = {"seq_len": 2048, "gpus": 8, "tp": 8, "micro_batch": 4}
    return read(**layer, **layout, seq_parallel=timed.seq_parallel, act_ckpt=timed.act_ckpt)


def test_one_layer_forward_and_backward() -> None:
    errors = []
    for timed in TABLE_4:
        row = read_layer(timed)
        forward, backward = layer_seconds(case_of(row))
        errors.append(abs(1e3 * forward / timed.forward_ms - 1))
        errors.append(abs(1e3 * backward / timed.backward_ms - 1))
    assert mean(errors) <= 0.045


def read_schedule(model: PipelineModel, run: ScheduleRun, micro_batches: int) -> MeasuredRow:
    """Return the row of a step of `micro_batches` on 8 pipeline ranks of one node."""
    cells = model._asdict()
    cells["stack"] = "megatron-zero-bubble-2023"
    cells["ffn"] = 4 * model.hidden
    cells["schedule"] = run.schedule
    cells["interleave_v"] = run.interleave_v
    cells["grad_accum"] = micro_batches
    cells["step_time_s"] = run.seconds[micro_batches]
    layout = {"seq_len": 1024, "gpus": 8, "pp": 8, "zero_stage": 0}
    return read(**cells, **layout, attn_impl="fused_softmax", act_ckpt="none")


class TimedSchedule(NamedTuple):
    """A schedule with the seconds of its step."""

    schedule: str
    measured: float
    predicted: float


def test_schedules_in_their_order_and_their_peaks() -> None:
    """The order: of every pair of schedules whose measured times differ by over 8 %, the faster is predicted faster."""
    errors, peak_errors = [], []
    for model, micro_batches in itertools.product(ZERO_BUBBLE, MICRO_BATCHES):
        schedules = []
        for run in ZERO_BUBBLE[model]:
            row = read_schedule(model, run, micro_batches)
            case = case_of(row)
            prediction = predict(case)
            peak = counted(prediction.memory, case.software) / 2**30
            errors.append(error(row))
            peak_errors.append(abs(peak / run.peak - 1))
            seconds = run.seconds[micro_batches]
            schedules.append(TimedSchedule(run.schedule, seconds, prediction.step))
        for fast, slow in itertools.permutations(schedules, 2):
            if fast.measured < 0.92 * slow.measured:
                assert fast.predicted < slow.predicted, (model, micro_batches, fast, slow)
    assert mean(errors) <= 0.07
    assert mean(peak_errors) <= 0.08


def read_foundry(run: FoundryRun) -> MeasuredRow:
    """Return the row of a run of FSDP on the eight GPUs of a node."""
    sequences = 8 * run.micro_batch * run.accumulated
    cells = run._asdict()
    tokens_per_second = 8 * cells.pop("tokens")
    del cells["accumulated"]
    cells["cluster"] = FOUNDRY_CLUSTERS[run.gpu]
    cells["ffn"] = 4 * run.hidden
    cells["global_batch_seqs"] = sequences
    cells["step_time_s"] = sequences * run.seq_len / tokens_per_second
    settings = {"stack": "llm-foundry-2023", "vocab": 50368, "tied_emb": 1, "gpus": 8, "dp_shard": 8, "zero_stage": 3}
    return read(**cells, **settings)


@pytest.mark.parametrize("gpu", FOUNDRY_CLUSTERS)
def test_fsdp_on_eight_gpus(gpu: str) -> None:
    errors = [error(read_foundry(run)) for run in FOUNDRY if run.gpu == gpu]
    assert mean(errors) <= 0.08
