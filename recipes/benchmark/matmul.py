"""benchmark.py matmul: the rate of matrix products."""

from statistics import median
from typing import TYPE_CHECKING

import torch

from torchllm.metrics.meter import peak_flops
from torchllm.runtime.process import Runtime

from .tools import TableRow, Tables, seconds_of

if TYPE_CHECKING:
    from .settings import BenchmarkConfig


def matmul(config: "BenchmarkConfig", runtime: Runtime) -> Tables:
    """Every shape as a training step runs it: x (m, k) times weight (n, k) transposed and both gradients, 6 m n k."""
    model, device, rows = config.model, runtime.device, list[TableRow]()
    tokens = config.training.micro_batch_size * config.training.sequence_length
    wide, narrow = model.heads * model.head_width, model.kv * model.head_width
    shapes = [("square", *(2**power,) * 3) for power in range(8, 15)] + [
        ("q_proj", tokens, wide, model.hidden),
        ("k_proj, v_proj", tokens, narrow, model.hidden),
        ("o_proj", tokens, model.hidden, wide),
        ("up_proj", tokens, model.ffn, model.hidden),
        ("down_proj", tokens, model.hidden, model.ffn),
        ("lm_head", min(tokens, config.training.loss_chunk or tokens), model.vocab, model.hidden),
    ]
    for dtype in (torch.float32, torch.bfloat16) if device.type == "cuda" else (torch.float32,):
        peak, rate = peak_flops(device, dtype), 1e30
        for name, m, n, k in shapes:
            if name != "square" or 6 * m * n * k < rate * config.benchmark.seconds:
                rate = 6 * m * n * k / product_seconds(m, n, k, dtype, device, config.benchmark.seconds)
                row: TableRow = {"dtype": str(dtype).removeprefix("torch."), "matrix": name, "m": m, "n": n, "k": k}
                rows.append({**row, "tflops": rate / 1e12, "share_of_peak": None if peak is None else rate / peak})
    return {"matrix products": rows}


def product_seconds(m: int, n: int, k: int, dtype: torch.dtype, device: torch.device, budget: float) -> float:
    """Median seconds of a product and its two gradients."""
    # FOOTGUN: not zeros or ones: a GPU draws less power on them, and clocks higher than on anything real.
    x, weight, out = (torch.randn(shape, device=device).to(dtype) for shape in ((m, k), (n, k), (m, n)))

    def work() -> None:
        torch.mm(x, weight.T)
        torch.mm(out, weight)
        torch.mm(out.T, x)

    once = seconds_of(work, 2, device)[-1]
    return median(seconds_of(work, max(3, min(100, int(budget / once))), device))
