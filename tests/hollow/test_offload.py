"""Offload to the host on a GPU: memory, copies and waits of a step, as torch's CUDA build makes them."""

import pytest

from tests.hollow.launches import Report, measure_all
from tests.hollow.layouts import Arguments, Settings, as_arguments
from tests.hollow.memory import CONFIGS, EAGER, GIB, WITHIN, peaks
from torchllm.facts.flops import parameter_count
from torchllm.tools.config.load import load_config

pytestmark = pytest.mark.timeout(900)

SMALL: Settings = EAGER | {"model.layers": 2, "model.hidden": 1024, "model.ffn": 4096, "training.global_batch_size": 16}
"""on one of eight ranks 45 million parameters, whose moments really take memory of this machine"""
OFFLOAD: Settings = {"optimizer.offload": True}
BFLOAT16: Settings = {"training.weights_dtype": "bfloat16"}


def arguments(*settings: Settings) -> Arguments:
    merged = dict(SMALL)
    for some in settings:
        merged |= some
    return as_arguments(CONFIGS["8b"], merged)


def copies(report: Report) -> tuple[int, int]:
    """Return the numbers of copies to the host and to the device."""
    return report["copies"].get("to the host", 0), report["copies"].get("to the device", 0)


def test_the_moments_leave_the_device_and_each_parameter_goes_there_and_back() -> None:
    cases = {
        "device": arguments(),
        "host": arguments(OFFLOAD),
        "device, bfloat16": arguments(BFLOAT16),
        "host, bfloat16": arguments(BFLOAT16, OFFLOAD),
    }
    reports = measure_all(cases)
    parameters = 2 * 9 + 3  # of the blocks, and embedding, norm, head
    model = load_config([*arguments(), "--run.dry_run=true"]).model
    moments = 8 * parameter_count(model) / 8  # bytes of each, over as many ranks
    for name in ("", ", bfloat16"):
        device, host = reports[f"device{name}"], reports[f"host{name}"]
        assert device["live"] - host["live"] == pytest.approx(moments / GIB, rel=0.02)  # blocks of an allocator
        out, back = copies(host)
        assert (out, back) == (2 * parameters + 1, copies(device)[1] + parameters)  # and whether the step is applied
        assert host["syncs"] == {"cudaEventSynchronize": parameters, "cudaStreamSynchronize": 1}
        assert host["launches"] < device["launches"]


def test_the_dry_run_predicts_the_peak() -> None:
    for peak in peaks(arguments(OFFLOAD), 8):
        assert abs(peak.difference) <= WITHIN, peak


def test_the_average_leaves_the_device_and_each_weight_is_copied_there() -> None:
    average: Settings = {"optimizer.ema_decay": 0.999}
    moved = average | {"optimizer.ema_offload": True}
    reports = measure_all({"device": arguments(average), "host": arguments(moved)})
    device, host = reports["device"], reports["host"]
    parameters = 2 * 9 + 3
    model = load_config([*arguments(), "--run.dry_run=true"]).model
    assert device["live"] - host["live"] == pytest.approx(4 * parameter_count(model) / 8 / GIB, rel=0.02)
    out, back = copies(host)
    assert (out, back) == (copies(device)[0] + parameters + 1, copies(device)[1])  # and whether the step is applied
    assert host["launches"] < device["launches"]
    for peak in peaks(arguments(moved), 8):
        assert abs(peak.difference) <= WITHIN, peak


def test_inputs_of_blocks_leave_the_device() -> None:
    """Without a wait: at the peak, which is at the loss, all have left."""
    recompute: Settings = {"recompute.mode": "full", "model.layers": 12, "training.loss_chunk": 1024}
    moved = recompute | {"recompute.offload": True}
    reports = measure_all({"kept": arguments(recompute), "moved": arguments(moved)})
    kept, moved_report = reports["kept"], reports["moved"]
    assert moved_report["syncs"] == kept["syncs"] == {}
    out, back = copies(moved_report)
    assert (out, back - copies(kept)[1]) == (24, 24)  # of 12 blocks in two micro batches
    assert kept["live"] - moved_report["live"] == pytest.approx(12 * 2 * 8192 * 1024 / GIB, rel=0.02)
    for peak in peaks(arguments(moved), 8):
        assert abs(peak.difference) <= WITHIN, peak
