"""Compares `model.attention = "flash"` with the eager core, forward and backward, by the real flash-attn package.

    python -m tests.hollow.flash_attn_values

The package's kernels for AMD's GPUs are Triton kernels, which Triton's interpreter runs on CPU tensors in float32. Its
kernels for NVIDIA's are not run: what is shared is the package's interface, and what the library asks it for.

    FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE FLASH_ATTENTION_TRITON_AMD_ENABLE=TRUE \\
        pip install --no-build-isolation --no-deps flash-attn
"""

import json
import os
import sys
from importlib.metadata import version
from importlib.util import find_spec
from itertools import accumulate
from typing import Any

import torch

ENVIRONMENT = {"TRITON_INTERPRET": "1", "FLASH_ATTENTION_TRITON_AMD_ENABLE": "TRUE"}
OPERATIONS = (
    "_flash_attn_forward",
    "_flash_attn_backward",
    "_flash_attn_varlen_forward",
    "_flash_attn_varlen_backward",  # within documents, which the library leaves to torch's flash attention
)
CASES: dict[str, dict[str, Any]] = {
    "as many heads": {"heads": 4, "kv_heads": 4},
    "grouped heads": {"heads": 4, "kv_heads": 2},
    "another scale": {"heads": 4, "kv_heads": 1, "softmax_scale": 0.3},
}
IGNORED: dict[str, dict[str, Any]] = {"window": {"window": 17}, "score_softcap": {"score_softcap": 0.5}}
"""keys of [model] that these kernels take and ignore, so that the library refuses them"""
DOCUMENTS = (13, 1, 40, 16)
"""tokens of documents that follow each other"""
LENGTH, WIDTH = 70, 32
"""tokens, of which no block of a kernel is a divisor, and width of a head"""


def run_on_cpu() -> None:
    """Give the package's operations, which are registered for CUDA alone, their own functions on a CPU too."""
    from flash_attn import flash_attn_interface

    for name in OPERATIONS:
        operation = getattr(flash_attn_interface, name)
        operation.register_kernel("cpu")(operation._init_fn)


def errors(settings: dict[str, Any]) -> list[float]:
    """Return the largest differences of result and gradients of q, k, v, over the largest number of each."""
    from torchllm.config import Model
    from torchllm.models.attention import CORES

    model = Model(hidden=settings["heads"] * WIDTH, **settings)
    torch.manual_seed(0)
    shapes = [(2, LENGTH, heads, WIDTH) for heads in (model.heads, model.kv_heads, model.kv_heads)]
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    gradient = torch.randn(shapes[0])
    results = []
    for name, dtype in (("flash", torch.float32), ("eager", torch.float64)):
        core = CORES[name](model)
        typed = [x.detach().to(dtype).requires_grad_() for x in inputs]
        out = core(*typed, core.mask(None))
        results.append([out, *torch.autograd.grad(out, typed, gradient.to(dtype))])
    detached = [[x.detach() for x in found] for found in results]
    return [float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(*detached, strict=True)]


def errors_of_documents(heads: int, kv_heads: int) -> list[float]:
    """Return the same of the package's attention within documents, which no core of the library calls."""
    from flash_attn import flash_attn_varlen_func

    from torchllm.config import Model
    from torchllm.models.attention import CORES

    model = Model(hidden=heads * WIDTH, heads=heads, kv_heads=kv_heads)
    torch.manual_seed(0)
    inputs = [torch.randn(1, sum(DOCUMENTS), count, WIDTH, requires_grad=True) for count in (heads, kv_heads, kv_heads)]
    gradient = torch.randn(inputs[0].shape)
    begins = torch.tensor([0, *accumulate(DOCUMENTS)], dtype=torch.int32)
    longest = max(DOCUMENTS)
    out = flash_attn_varlen_func(*(x[0] for x in inputs), begins, begins, longest, longest, causal=True)[None]
    found = [out, *torch.autograd.grad(out, inputs, gradient)]
    core = CORES["eager"](model)
    documents = torch.arange(len(DOCUMENTS)).repeat_interleave(torch.tensor(DOCUMENTS))[None]
    typed = [x.detach().double().requires_grad_() for x in inputs]
    expected = core(*typed, core.mask(documents))
    expected = [expected, *torch.autograd.grad(expected, typed, gradient.double())]
    with torch.no_grad():
        return [float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True)]


def refused() -> list[str]:
    """Return which of `IGNORED` the library refuses."""
    from torchllm.config import Model
    from torchllm.config.errors import UserError
    from torchllm.models.attention import CORES

    found = []
    for name, settings in IGNORED.items():
        try:
            CORES["flash"](Model(**settings))
        except UserError:
            found.append(name)
    return found


def main() -> None:
    """Print as JSON the errors of each case, and what is refused."""
    from torchllm.models import attention_cores

    attention_cores._flash_attention_4 = lambda view: None  # it may be installed, too, and is called first
    run_on_cpu()
    found = {name: errors(CASES[name]) for name in CASES}
    found |= {f"documents, {kv_heads} key-value heads": errors_of_documents(4, kv_heads) for kv_heads in (4, 2)}
    print(json.dumps({"flash_attn": version("flash_attn"), "errors": found, "refused": refused()}))


def missing() -> str:
    """Return which package is not installed; empty: none."""
    return next((f"{name} is not installed" for name in ("flash_attn", "triton") if find_spec(name) is None), "")


if __name__ == "__main__":
    if any(os.environ.get(name) != value for name, value in ENVIRONMENT.items()):  # read when Triton is imported
        os.environ.update(ENVIRONMENT)
        os.execv(sys.executable, [sys.executable, "-m", "tests.hollow.flash_attn_values"])
    main()
