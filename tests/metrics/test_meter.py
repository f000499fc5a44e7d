import math
import re
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

import torchllm.metrics.meter as meter_module
from tests.tiny_run import ROOT
from torchllm.config import Kinds, Metrics, Model, Recompute, Training
from torchllm.facts.flops import flops_per_token, recomputed_flops_per_token
from torchllm.metrics.expert_load import ExpertLoads
from torchllm.metrics.meter import Meter, memory_gib, peak_flops, read_gpu
from torchllm.metrics.sinks import Record, TensorBoard
from torchllm.optim.router_balance import StepRouting
from torchllm.parallel.optimistic import Padding
from torchllm.tools.launch.lease import LeaseLost
from torchllm.train.evaluate import HeldOutLoss
from torchllm.train.step import StepResult

MODEL = Model(layers=2, hidden=32, heads=4, ffn=64, vocab=50)
TRAINING = Training(steps=7, global_batch_size=8, sequence_length=16)
CPU = torch.device("cpu")


class Clock:
    """Stands in for the module `time`."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


class RecordingSink:
    """A sink as a fork would write one."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.closed = False

    def write(self, step: int, record: Record) -> None:
        assert record["step"] == step
        self.records.append(record)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(meter_module, "time", clock)
    return clock


def make(sink: RecordingSink, interval: int = 3, peak: float | None = 1e9, **changed: Any) -> Meter:
    return Meter(
        Metrics(log_interval=interval),
        MODEL,
        partial(recomputed_flops_per_token, MODEL, Recompute("full")),
        TRAINING,
        device=CPU,
        world_size=4,
        peak_flops=peak,
        sinks=[sink],
        **changed,
    )


def result(loss: float = 2.5, document: int = 16) -> StepResult:
    """A step of 8 sequences of 16 tokens, in documents of `document` tokens."""
    values = {
        "pairs": 8 * (torch.arange(16) % document + 1).sum(),
        "loss": torch.tensor(loss),
        "grad_norm": torch.tensor(0.7, dtype=torch.float64),
        "tokens": torch.tensor(128),
        "learning_rate": 1e-3,
        "skipped": torch.tensor(2),
    }
    return StepResult(**{name: values.get(name) for name in StepResult._fields})  # type: ignore[arg-type]


def unread() -> StepResult:
    """A step of which nothing may be read; its pairs and targets are only added up, on the device."""
    summed = {"pairs": result().pairs, "tokens": result().tokens}
    return StepResult(**dict.fromkeys(StepResult._fields) | summed)  # type: ignore[arg-type]


def test_a_record_is_the_mean_over_its_interval(clock: Clock) -> None:
    sink = RecordingSink()
    meter = make(sink, tokens=80 * 16)
    for step in range(1, 8):
        with meter.data_wait():
            clock.now += 0.25
        clock.now += 1.75
        if step == 5:
            with meter.pause("checkpoint"):  # a checkpoint, an evaluation
                clock.now += 1000
        meter.log(step, result() if step in (1, 3, 6, 7) else unread())
    meter.close()
    assert sink.closed
    assert [record["step"] for record in sink.records] == [1, 3, 6, 7]
    rate = 8 * 16 / 2.0
    palm, recomputed = flops_per_token(MODEL, 16), recomputed_flops_per_token(MODEL, Recompute("full"), 16)
    assert recomputed > 0
    record = dict(sink.records[2])
    assert record.pop("memory_gib") == pytest.approx(memory_gib(CPU), abs=0.5)
    assert record == {
        "step": 6,
        "loss": 2.5,
        "grad_norm": 0.7,
        "learning_rate": 1e-3,
        "tokens": (80 + 6 * 8) * 16,
        "tokens_per_second": rate,
        "targets_per_second": rate,
        "step_seconds": 2.0,
        "data_seconds": 0.25,
        "mfu": rate * palm / 4e9,
        "mfu_unmasked": rate * flops_per_token(MODEL, 16, 8.5) / 4e9,
        "hfu": rate * (palm + recomputed) / 4e9,
        "skipped_steps": 2,
    }


def test_steps_of_other_sizes_count_with_their_own(clock: Clock) -> None:
    """Of stages of the training: the first step is logged alone, then one with two sizes in an interval."""
    sink = RecordingSink()
    meter = make(sink, tokens=1000, interval=3)
    for step, (sequences, length) in enumerate([(8, 16), (8, 16), (4, 32)], 1):
        clock.now += 1.0
        meter.log(step, result()._replace(sequences=sequences, length=length))
    tokens, (_, record) = {16: 128, 32: 128}, sink.records
    assert record["tokens"] == 1000 + 3 * 128
    assert record["tokens_per_second"] == 128
    flops = sum(count * flops_per_token(MODEL, length) for length, count in tokens.items()) / 2
    again = sum(count * recomputed_flops_per_token(MODEL, Recompute("full"), n) for n, count in tokens.items()) / 2
    assert record["mfu"] == pytest.approx(flops / 4e9)
    assert record["hfu"] == pytest.approx((flops + again) / 4e9)
    assert flops_per_token(MODEL, 32) > flops_per_token(MODEL, 16)


EQUAL = torch.tensor([[8, 8, 8, 8], [8, 8, 8, 8]])
ROUTING = StepRouting(
    torch.tensor([[30, 2, 0, 0], [8, 8, 8, 8]]),
    torch.tensor(0.5 * math.log(4), dtype=torch.float64),
    {"balance_loss": torch.tensor(0.25, dtype=torch.float64)},
)


def test_loads_of_experts_are_logged(clock: Clock) -> None:
    sink, loads_file = RecordingSink(), RecordingSink()
    model = replace(MODEL, layers=3, dense_layers=1, experts=4, top_k=1, router_renormalize=False)
    meter = make(sink, interval=1, loads_file=loads_file)
    meter.model = model
    for step, tokens in enumerate((ROUTING.tokens_per_expert, EQUAL), start=1):
        clock.now += 1
        routing = ROUTING._replace(tokens_per_expert=tokens)
        meter.log(step, result()._replace(routing=routing, padding=None if step == 1 else Padding(0.25, 3)))
    assert {key: value for key, value in sink.records[0].items() if key.startswith("experts/")} == {
        "experts/largest_load": 3.75,
        "experts/entropy": pytest.approx(0.5),
        "experts/dead": 2,
        "experts/dropped_tokens": 0,
        "experts/balance_loss": 0.25,
    }
    assert (sink.records[1]["experts/padding"], sink.records[1]["experts/repeated_steps"]) == (0.25, 3)
    assert loads_file.records[0] == {"step": 1, "layers.1": [30, 2, 0, 0], "layers.2": [8, 8, 8, 8]}
    kinds = Kinds(sparse={}, dense={"experts": 0})
    meter.model = replace(model, dense_layers=0, pattern=("sparse", "dense", "sparse"), kinds=kinds)
    clock.now += 1
    meter.log(3, result()._replace(routing=ROUTING))
    assert loads_file.records[-1] == {"step": 3, "layers.0": [30, 2, 0, 0], "layers.2": [8, 8, 8, 8]}
    assert sink.records[1]["experts/largest_load"] == 1.0


def test_what_happens_once_is_in_the_first_record_alone(clock: Clock) -> None:
    sink = RecordingSink()
    meter = make(sink)
    for step in (41, 42, 43, 44, 45):  # resumed after step 40
        clock.now += 60 if step == 41 else 2
        meter.log(step, result())
    assert [(record["step"], record["step_seconds"]) for record in sink.records] == [(41, 60), (42, 2), (45, 2)]


def test_a_run_that_lost_its_folder_writes_no_record(clock: Clock) -> None:
    def lose() -> None:
        raise LeaseLost("the folder belongs to another job")

    sink = RecordingSink()
    meter = make(sink, check_owner=lose)
    clock.now += 1.0
    with pytest.raises(LeaseLost):
        meter.log(1, result())
    assert sink.records == []


def test_document_masks_count_the_pairs_they_leave(clock: Clock) -> None:
    sink = RecordingSink()
    meter = make(sink)
    for step in (1, 2, 3):
        clock.now += 2
        meter.log(step, result(document=4 if step == 2 else 8))
    expected = [flops_per_token(MODEL, 16, keys) * 64 / 4e9 for keys in (4.5, (2.5 + 4.5) / 2)]
    assert [record["mfu_unmasked"] for record in sink.records] == pytest.approx(expected, rel=1e-12)


def test_evaluated_and_forced_steps_are_logged_once(clock: Clock) -> None:
    sink = RecordingSink()
    meter = make(sink, interval=100)
    for step in range(1, 6):
        clock.now += 1
        meter.log(step, result(), validation_loss=2.0 if step == 3 else None, force=step == 4)
    assert [record["step"] for record in sink.records] == [1, 3, 4]
    assert [record.get("validation_loss") for record in sink.records] == [None, 2.0, None]
    assert "validation_loss" not in sink.records[0]


def test_every_key_is_described_on_its_page_and_has_its_curve(clock: Clock) -> None:
    meter = make(RecordingSink(), peak=None)
    clock.now += 1
    evaluated = HeldOutLoss(1.0)
    evaluated.bits_per_byte = 0.5
    evaluated.by_source = {"wiki": HeldOutLoss(2.0)}
    record = meter.log(
        1, result(math.nan)._replace(z_loss=torch.tensor(0.25), mtp_loss=torch.tensor(0.5)), validation_loss=evaluated
    )
    assert record is not None
    assert (record["mfu"], record["mfu_unmasked"], record["hfu"]) == (None, None, None)  # of an unknown device
    assert (record["z_loss"], record["mtp_loss"]) == (0.25, 0.5)
    assert (record["validation_loss"], record["validation_bits_per_byte"]) == (1.0, 0.5)
    assert record.pop("validation_loss/wiki") == 2.0
    keys = record.keys() | {"memory_reserved_gib", "allocation_retries"}  # these two are of a GPU
    assert keys - {"step"} == TensorBoard.TAGS.keys()
    experts = ExpertLoads([[1, 2]], 0.5, {"balance_loss": 0.1, "router_z_loss": 0.1}).as_record()
    described = re.findall(r"^    ([a-z][a-z_/]+)", meter_module.__doc__ or "", re.M)
    text = re.sub(r"\s+", " ", meter_module.__doc__ or "")
    assert [key for key in keys | experts.keys() if not re.search(rf" {key}[ ,]", text)] == []
    page = (ROOT / "docs/watch.md").read_text().partition("## Keys of metrics.jsonl")[2]
    assert len(described) > 20
    assert [key for key in described if f"`{key}" not in page] == []


def test_memory_of_a_cpu_process_is_what_is_resident() -> None:
    empty = memory_gib(CPU)
    held = torch.ones(2**26)  # a quarter of a GiB
    # 0.05: other threads and the allocator may give memory back meanwhile.
    assert memory_gib(CPU) - empty == pytest.approx(0.25, abs=0.05)
    assert held.numel() == 2**26


def test_memory_is_unknown_where_it_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_descriptor(path: Path) -> str:
        raise OSError(24, "Too many open files", str(path))

    monkeypatch.setattr(Path, "read_text", no_descriptor)
    assert math.isnan(memory_gib(CPU))


def test_peak_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    for name, dtype, precision, expected in (
        ("NVIDIA H200", torch.bfloat16, "highest", 989.5e12),
        ("NVIDIA H200", torch.float32, "high", 494.5e12),
        ("NVIDIA H200", torch.float32, "highest", None),
        ("NVIDIA H20", torch.bfloat16, "highest", None),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda precision=precision: precision)
        assert peak_flops(Metrics(), gpu, dtype) == expected
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert peak_flops(Metrics(), gpu, torch.bfloat16, float8=True) == 1979e12
    assert peak_flops(Metrics(peak_tflops=2.0), gpu, torch.bfloat16, float8=True) == 2e12


def test_a_cpu_has_the_peak_that_the_user_gives_and_no_other() -> None:
    assert peak_flops(Metrics(), CPU, torch.float32) is None
    assert peak_flops(Metrics(peak_tflops=0.05), CPU, torch.float32) == 0.05e12


def test_a_share_of_the_peak_over_1_is_left_out(clock: Clock) -> None:
    sink = RecordingSink()
    rate = 8 * 16 / 2.0
    meter = make(sink, peak=rate * flops_per_token(MODEL, 16) / 4)  # of four ranks: MFU is 1, HFU more
    for step in (1, 2):
        clock.now += 2 if step == 1 else 1
        meter.log(step, result(), force=True)
    assert [(record["mfu"], record["hfu"]) for record in sink.records] == [(1.0, None), (None, None)]


def test_goodput_is_told_what_was_no_step(clock: Clock) -> None:
    lost: Counter[str] = Counter()
    meter = Meter(
        Metrics(log_interval=2), MODEL, lambda length: 0, TRAINING,
        device=CPU, world_size=1, peak_flops=None, sinks=[], spend=lambda cause, seconds: lost.update({cause: seconds}),
    )  # fmt: skip
    start = clock.now
    waits = (8.0, 0.25, 0.25, 0.25)  # the loader's workers start in the first step
    for step, (data_seconds, seconds) in enumerate(zip(waits, (5.0, 1.0, 1.0, 1.0), strict=True), 1):
        with meter.data_wait():
            clock.now += data_seconds
        clock.now += seconds
        with meter.pause("checkpoint"):
            clock.now += 0.5
        meter.log(step, result())
    meter.close()
    assert lost == {"data": 8.75, "checkpoint": 2.0, "compile": 4.0}
    assert clock.now - start - sum(lost.values()) == 4 * 1.0  # every second is charged once


def test_it_reads_the_gpu_that_torch_uses_and_leaves_out_what_that_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 3)
    values = {"utilization": 93, "power_draw": 651_500, "clock_rate": 1830, "temperature": 61}  # percent, milliwatts
    for name, value in values.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: {gpu: value}[device])
    assert read_gpu(gpu) == {"gpu/busy": 0.93, "gpu/watts": 651.5, "gpu/mhz": 1830.0, "gpu/celsius": 61.0}

    def not_supported(device: torch.device) -> NoReturn:
        raise RuntimeError("a virtual GPU")

    monkeypatch.setattr(torch.cuda, "power_draw", not_supported)
    assert read_gpu(gpu).keys() == {"gpu/busy", "gpu/mhz", "gpu/celsius"}
