"""benchmark matmul: the rate of matrix products."""

from collections.abc import Iterator
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import torch

from torchllm.metrics.meter import peak_flops
from torchllm.runtime.process import Runtime

from .tools import TableRow, Tables, seconds_of

if TYPE_CHECKING:
    from .settings import BenchmarkConfig

SQUARES = [2**power for power in range(8, 15)]


class Product(NamedTuple):
    """A linear layer as a training step runs it: x (m, k) times weight (n, k) transposed, and both gradients."""

    name: str
    m: int
    n: int
    k: int

    @property
    def flops(self) -> int:
        """Floating-point operations of the product and its two gradients."""
        return 6 * self.m * self.n * self.k


def matmul(config: "BenchmarkConfig", runtime: Runtime) -> Tables:
    """Measure squares of growing size, then this config's own matrices."""
    dtypes = [torch.float32]
    if runtime.device.type == "cuda":
        dtypes.append(torch.bfloat16)
    rows = []
    for dtype in dtypes:
        rows += list(product_rows(config, runtime.device, dtype))
    return {"matrix products": rows}


def product_rows(config: "BenchmarkConfig", device: torch.device, dtype: torch.dtype) -> Iterator[TableRow]:
    """Yield a row per product. Squares that would take longer than `benchmark.seconds` are skipped."""
    peak = peak_flops(config.metrics, device, dtype)
    budget = config.benchmark.seconds
    rate = float("inf")  # of the last product: an estimate for the next
    for size in SQUARES:
        square = Product("square", size, size, size)
        if square.flops < rate * budget:
            rate = square.flops / product_seconds(square, dtype, device, budget)
            yield product_row(square, dtype, rate, peak)
    for product in model_products(config):
        rate = product.flops / product_seconds(product, dtype, device, budget)
        yield product_row(product, dtype, rate, peak)


def model_products(config: "BenchmarkConfig") -> list[Product]:
    """Return the products of the first block and of the head, for one micro batch."""
    model = config.model.of_block(0)
    tokens = config.training.micro_batch_size * config.training.sequence_length
    loss_tokens = min(tokens, config.training.loss_chunk or tokens)
    query_width = model.heads * model.head_width
    key_width = model.kv * model.head_width
    return [
        Product("q_proj", tokens, query_width, model.hidden),
        Product("k_proj, v_proj", tokens, key_width, model.hidden),
        Product("o_proj", tokens, model.hidden, query_width),
        Product("up_proj", tokens, model.ffn, model.hidden),
        Product("down_proj", tokens, model.hidden, model.ffn),
        Product("lm_head", loss_tokens, model.vocab, model.hidden),
    ]


def product_row(product: Product, dtype: torch.dtype, rate: float, peak: float | None) -> TableRow:
    """Return the table's row of one product; `rate` and `peak` in FLOP/s."""
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "matrix": product.name,
        "m": product.m,
        "n": product.n,
        "k": product.k,
        "tflops": rate / 1e12,
        "share_of_peak": None if peak is None else rate / peak,
    }


def product_seconds(product: Product, dtype: torch.dtype, device: torch.device, budget: float) -> float:
    """Return the median seconds of a product and its two gradients, repeated for about `budget` seconds."""
    # FOOTGUN: neither zeros nor ones: a GPU draws less power on them, and clocks higher than on real numbers.
    x = torch.randn(product.m, product.k, device=device).to(dtype)
    weight = torch.randn(product.n, product.k, device=device).to(dtype)
    gradient = torch.randn(product.m, product.n, device=device).to(dtype)

    def work() -> None:
        torch.mm(x, weight.T)
        torch.mm(gradient, weight)
        torch.mm(gradient.T, x)

    once = seconds_of(work, 2, device)[-1]
    times = max(3, min(100, int(budget / once)))
    return median(seconds_of(work, times, device))
