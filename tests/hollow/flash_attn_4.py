"""Calls the real package flash-attn-4 by `model.attention = "flash"`, forward and backward, on the hollow GPU.

    python -m tests.hollow.flash_attn_4 window

It compiles the kernels that the call asks for, to machine code, and launches none, since the tensors are fake. What is
shown is that it takes the call, and that result and gradients have the shapes of attention's.
"""

import json
import sys
import types
from importlib.metadata import PackageNotFoundError, distribution, version
from typing import Any

import torch

from torchllm.config import Model
from torchllm.models.attention import CORES
from torchllm.runtime.torch_compat import FakeTensorMode

CASES: dict[str, dict[str, Any]] = {
    "grouped heads": {"heads": 4, "kv_heads": 2},
    "window": {"heads": 4, "kv_heads": 4, "window": 100},
    "soft cap, another scale": {"heads": 4, "kv_heads": 1, "score_softcap": 30.0, "softmax_scale": 0.3},
}
LENGTH, WIDTH = 256, 64
"""tokens, and width of a head"""


def missing() -> str:
    """Return that the package is not installed; empty: it is."""
    try:
        version("flash-attn-4")
    except PackageNotFoundError as error:
        return str(error)
    return ""


def architecture(gpu: str) -> dict[str, str]:
    """Return the variables of the environment that choose its kernels, and the target of their compiler."""
    return {"FLASH_ATTENTION_ARCH": gpu, "CUTE_DSL_ARCH": f"{gpu}a"}


def hide_flash_attn() -> None:
    """Have `flash_attn.cute` be imported without the package flash-attn, which may be here without its kernels."""
    namespace = types.ModuleType("flash_attn")
    namespace.__path__ = [str(distribution("flash-attn-4").locate_file("flash_attn"))]
    sys.modules["flash_attn"] = namespace


def call(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the module of the kernel, and the shapes of the result and of the gradients of q, k, v."""
    model = Model(hidden=settings["heads"] * WIDTH, **settings)
    core = CORES["flash"](model)
    shapes = [(2, LENGTH, heads, WIDTH) for heads in (model.heads, model.kv_heads, model.kv_heads)]
    with FakeTensorMode():
        inputs = [torch.empty(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
        out = core(*inputs, core.mask(None))
        gradients = torch.autograd.grad(out, inputs, torch.empty_like(out))
    return {"kernel": core.kernel.__module__, "shapes": [list(x.shape) for x in (out, *gradients)]}


if __name__ == "__main__":
    hide_flash_attn()
    print(json.dumps({"flash-attn-4": version("flash-attn-4"), **call(CASES[sys.argv[1]])}))
