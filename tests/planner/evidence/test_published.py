"""Small tables of published figures, typed in with their source: what the planner is held to wherever the tests run.

BENCHMARKS.md has the errors on whole sweeps.
"""

import itertools
from statistics import mean
from typing import Any

import pytest

from torchllm.planner.evidence.layer import layer_seconds
from torchllm.planner.evidence.measurements import MeasuredRow, read_row
from torchllm.planner.memory import counted
from torchllm.planner.predict import predict

A100: dict[str, Any] = {"gpu": "A100-80GB", "cluster": "dgx_a100", "status": "ok", "precision": "bf16"}

# Narayanan et al. 2021 (arXiv 2104.04473), table 1 and the micro batches and interleaving of its published scripts:
# billions of parameters, layers, hidden, heads, tp, pp, GPUs, sequences, micro batch, virtual stages, seconds (from
# tokens per second).
TABLE_1 = (
    ("1.7B", 24, 2304, 24, 1, 1, 32, 512, 16, 1, 3.528),
    ("3.6B", 30, 3072, 32, 2, 1, 64, 512, 16, 1, 3.697),
    ("7.5B", 36, 4096, 32, 4, 1, 128, 512, 16, 1, 3.696),
    ("18B", 40, 6144, 48, 8, 1, 256, 1024, 8, 1, 9.399),
    ("39B", 48, 8192, 64, 8, 2, 512, 1536, 4, 1, 14.453),
    ("76B", 60, 10240, 80, 8, 4, 1024, 1792, 2, 3, 16.058),
    ("145B", 80, 12288, 96, 8, 8, 1536, 2304, 2, 2, 24.817),
    ("310B", 96, 16384, 128, 8, 16, 1920, 2160, 1, 2, 37.614),
    ("530B", 105, 20480, 128, 8, 35, 2520, 2520, 1, 3, 54.085),
    ("1T", 128, 25600, 160, 8, 64, 3072, 3072, 1, 1, 102.63),
)

# Korthikanti et al. 2022 (arXiv 2205.05198), table 4: one layer of the 22B model, tp 8, micro batch 4: sequence
# parallelism, recomputation, milliseconds forward and backward.
TABLE_4 = ((0, "none", 7.7, 11.9), (1, "none", 7.2, 11.8), (0, "full", 7.7, 19.5), (0, "selective", 7.7, 13.2))
TABLE_4 += ((1, "selective", 7.2, 13.1),)

# Qi et al. 2023 (arXiv 2401.10241), tables 3 to 5: schedule, virtual stages, seconds of 24, 32 and 64 micro batches
# (from its samples per second), GB at the peak.
ZERO_BUBBLE = {
    ("1.5B", 22, 2304, 24, 6): (
        ("1F1B", 1, (1.525, 1.92, 3.529), 30),
        ("Interleaved1F1B", 3, (1.374, 1.791, 3.453), 40),
        ("ZB-1p", 1, (1.395, 1.791, 3.38), 32),
        ("ZB-2p", 1, (1.241, 1.622, 3.221), 59),
    ),
    ("6.2B", 30, 4096, 32, 3): (
        ("1F1B", 1, (2.571, 3.243, 5.955), 39),
        ("Interleaved1F1B", 4, (2.244, 2.941, 5.728), 48),
        ("ZB-1p", 1, (2.32, 3.0, 5.714), 42),
        ("ZB-2p", 1, (2.083, 2.759, 5.467), 70),
    ),
}

# MosaicML's llm-foundry (github.com/mosaicml/llm-foundry, scripts/train/benchmarking/README.md): GPU, layers, hidden,
# heads, length, micro batch, accumulated, recomputation, tokens per second per GPU. FSDP on eight GPUs.
FOUNDRY = (
    ("A100-80GB", 40, 5120, 40, 1024, 40, 3, "full", 2330),
    ("A100-80GB", 32, 4096, 32, 2048, 6, 2, "none", 4641),
    ("A100-80GB", 32, 2560, 20, 4096, 5, 6, "none", 9457),
    ("A100-80GB", 24, 2048, 16, 16384, 2, 4, "none", 9956),
    ("A100-80GB", 24, 1024, 16, 4096, 16, 2, "none", 49555),
    ("H100-80GB", 40, 5120, 40, 4096, 10, 3, "full", 4717),
    ("H100-80GB", 32, 4096, 32, 4096, 16, 2, "full", 8611),
    ("H100-80GB", 32, 2560, 20, 8192, 3, 6, "none", 16578),
    ("H100-80GB", 24, 2048, 16, 16384, 2, 4, "none", 19649),
    ("A100-40GB", 32, 4096, 32, 16384, 1, 4, "full", 2249),
    ("A100-40GB", 32, 2560, 20, 512, 20, 8, "none", 11324),
    ("A100-40GB", 24, 2048, 16, 1024, 16, 8, "none", 20959),
)


def read(**cells: Any) -> MeasuredRow:
    row = read_row({key: str(value) for key, value in {**A100, **cells}.items()})
    assert row.case is not None, row.problem
    return row


def error(row: MeasuredRow) -> float:
    assert row.case is not None
    assert row.seconds is not None
    return abs(predict(row.case).step / row.seconds - 1)


def test_megatron_from_a_billion_to_a_trillion_parameters() -> None:
    rows = [
        read(
            **{"stack": "megatron-2021", "model": name, "layers": layers, "hidden": hidden, "heads": heads, "tp": tp},
            **{"pp": pp, "gpus": gpus, "dp": gpus // tp // pp, "global_batch_seqs": sequences, "micro_batch": micro},
            **{"interleave_v": virtual, "step_time_s": seconds, "seq_len": 2048, "vocab": 51200, "zero_stage": 0},
            **{"act_ckpt": "full", "schedule": "1F1B" if virtual == 1 else "Interleaved1F1B"},
        )
        for name, layers, hidden, heads, tp, pp, gpus, sequences, micro, virtual, seconds in TABLE_1
    ]
    assert mean(map(error, rows)) <= 0.045


def test_one_layer_forward_and_backward() -> None:
    errors = []
    for sequence_parallel, mode, forward, backward in TABLE_4:
        row = read(
            **{"stack": "megatron-2022", "model": "22B", "layers": 1, "hidden": 6144, "heads": 64, "ffn": 24576},
            **{
                "seq_len": 2048,
                "gpus": 8,
                "tp": 8,
                "micro_batch": 4,
                "seq_parallel": sequence_parallel,
                "act_ckpt": mode,
            },
        )
        assert row.case is not None
        for predicted, measured in zip(layer_seconds(row.case), (forward, backward), strict=True):
            errors.append(abs(1e3 * predicted / measured - 1))
    assert mean(errors) <= 0.045


def test_schedules_in_their_order_and_their_peaks() -> None:
    """The order: of every pair of schedules whose measured times differ by over 8 %, the faster is predicted faster."""
    errors, peaks = [], []
    for (name, layers, hidden, heads, micro), schedules in ZERO_BUBBLE.items():
        for at, count in enumerate((24, 32, 64)):
            times = {}
            for schedule, virtual, seconds, peak in schedules:
                row = read(
                    **{"stack": "megatron-zero-bubble-2023", "model": name, "layers": layers, "hidden": hidden},
                    **{"heads": heads, "ffn": 4 * hidden, "seq_len": 1024, "gpus": 8, "pp": 8, "micro_batch": micro},
                    **{"grad_accum": count, "schedule": schedule, "interleave_v": virtual, "zero_stage": 0},
                    **{"step_time_s": seconds[at], "attn_impl": "fused_softmax", "act_ckpt": "none"},
                )
                assert row.case is not None
                prediction = predict(row.case)
                errors.append(error(row))
                peaks.append(abs(counted(prediction.memory, row.case.software) / 2**30 / peak - 1))
                times[schedule] = (seconds[at], prediction.step)
            for one, other in itertools.permutations(times.values(), 2):
                if one[0] < 0.92 * other[0]:
                    assert one[1] < other[1], (name, count, times)
    assert mean(errors) <= 0.07
    assert mean(peaks) <= 0.08


@pytest.mark.parametrize("gpu", ["A100-80GB", "H100-80GB", "A100-40GB"])
def test_fsdp_on_eight_gpus(gpu: str) -> None:
    errors = []
    for kind, layers, hidden, heads, length, micro, accumulated, mode, tokens in FOUNDRY:
        if kind != gpu:
            continue
        cluster = {"A100-80GB": "mosaic_a100_80gb", "H100-80GB": "mosaic_h100", "A100-40GB": "mosaic_a100_40gb"}[gpu]
        sequences = 8 * micro * accumulated
        row = read(
            **{"stack": "llm-foundry-2023", "gpu": gpu, "cluster": cluster, "layers": layers, "hidden": hidden},
            **{"heads": heads, "ffn": 4 * hidden, "vocab": 50368, "tied_emb": 1, "seq_len": length, "gpus": 8},
            **{"dp_shard": 8, "micro_batch": micro, "global_batch_seqs": sequences, "zero_stage": 3, "act_ckpt": mode},
            step_time_s=sequences * length / (8 * tokens),
        )
        errors.append(error(row))
    assert mean(errors) <= 0.08
