"""Compares inductor's Triton kernels for an H100 with the operations that they replace, in float32, without a GPU.

    python -m tests.hollow.kernel_values                         all cases of kernel_graphs.py
    python -m tests.hollow.kernel_values "zero 3, compile"       some
    python -m tests.hollow.kernel_values --folder=FOLDER         keeps the graphs there, or takes them from there

Triton's interpreter runs a kernel's source on CPU tensors. Its bfloat16 is not usable, so all 16-bit tensors are
float32 here, in the kernel and in the graph: what a kernel computes is compared, not how it rounds. Each result that a
kernel stores is compared with the result of its operation in the graph, and so are the results of the whole graph.
Attention and collectives are no Triton kernels: attention returns fixed numbers, the same for both sides, and all
ranks have the same numbers.
"""

import ast
import functools
import importlib.util
import os
import re
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.attention.varlen  # registers its operations
from torch import Tensor

from tests.hollow.bed import missing
from tests.hollow.kernel_graphs import Graph, Kernel, graphs_of
from torchllm.runtime.torch_compat import FakeTensorMode

TOLERANCE = 2e-5
"""of the largest number: float32 sums of 10,000 numbers in another order"""
BLOCKS = {"XBLOCK": 16, "YBLOCK": 16, "R0_BLOCK": 64}
"""elements of a kernel's program: few, so that most have several and the last is cut"""
POINTWISE = 1024
"""elements of a program of a kernel that reduces nothing"""

FUNCTIONS = {"rsqrt", "sqrt", "exp", "exp2", "log", "log2", "sin", "cos", "erf", "floor", "ceil", "abs", "fma"}
"""of CUDA's libdevice that Triton has by the same name"""
CPU = "device('cpu')"
REPLACED = (
    ("class <lambda>(", "class GraphModule("),
    ("torch.bfloat16", "torch.float32"),
    ("torch.float16", "torch.float32"),
    ("device(type='cuda', index=0)", CPU),
    ("device='cuda:0'", "device='cpu'"),
    ("_empty_strided_cuda", "_empty_strided_cpu"),
    ("with torch.cuda._DeviceGuard(0):", "if True:"),
    ("torch.cuda.set_device(0)", "pass"),
    ("from torch._C import _cuda_getCurrentRawStream as get_raw_stream", "get_raw_stream = int"),
    ("async_compile = AsyncCompile()", "async_compile = COMPILER"),
    ("torch.cuda.default_generators[0].graphsafe_get_state()", "None"),
    ("torch.ops.higher_order.graphsafe_run_with_rng_state", "STAND_IN.without_state"),
    ("torch.ops._c10d_functional.", "STAND_IN."),
    ("torch.ops.torch_attn.", "STAND_IN."),
    ("torch.ops.aten._scaled_dot_product", "STAND_IN._scaled_dot_product"),
    ("torch.ops.aten._flash_attention", "STAND_IN._flash_attention"),
)
"""text of a graph for a GPU, and its text here"""


class NotRunError(Exception):
    """Triton's interpreter cannot run a kernel; the text is the reason."""


class Result(NamedTuple):
    """What came of a kernel."""

    kernel: str
    case: str
    error: float
    """largest difference over the largest number of all that it stores"""
    compared: int
    """results that it stores and an operation of the graph has"""
    not_run: str = ""
    """why not; empty: it ran"""


def numbers(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, name: str) -> Tensor:
    """Return a tensor of fixed random numbers, the same for equal names and shapes."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {tuple(shape)}".encode()))
    made = torch.empty_strided(tuple(shape), tuple(strides), dtype=dtype)
    if dtype.is_floating_point:
        return made.copy_(torch.randn(tuple(shape), generator=generator))
    return made.copy_(torch.randint(0, 2 if dtype == torch.bool else 8, tuple(shape), generator=generator))


class StandIn:
    """Operations that are no Triton kernels: collectives of two or more ranks that have the same, or fixed numbers."""

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(default=functools.partial(self._call, name))

    def without_state(self, operation: Callable[..., Any], *args: Any, rng_state: None, **kwargs: Any) -> Any:
        """Call an operation that has no dropout."""
        return operation(*args, **kwargs)

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        first = args[0]
        match name.rstrip("_"):
            case "wait_tensor":
                return first
            case "all_reduce":
                values = first if args[1] == "max" else 2 * first
                return first.copy_(values) if name.endswith("_") else values.clone()
            case "all_gather_into_tensor":
                return torch.cat([first] * args[1])
            case "reduce_scatter_tensor":
                return args[2] * first.chunk(args[2])[0].contiguous()
            case "all_to_all_single":
                shape = [sum(args[1]), *first.shape[1:]]
                return numbers(shape, torch.empty(shape, device="meta").stride(), first.dtype, name)
            case _:
                return self._as_on_a_gpu(name, args, kwargs)

    def _as_on_a_gpu(self, name: str, args: Any, kwargs: Any) -> Any:
        """Return numbers with the shapes and strides of the results of an attention kernel for GPUs."""
        space = torch.ops.torch_attn if hasattr(torch.ops.torch_attn, name) else torch.ops.aten
        with FakeTensorMode():
            on_gpu = torch.utils._pytree.tree_map_only(Tensor, _fake_on_gpu, (args, kwargs))
            results = getattr(space, name).default(*on_gpu[0], **on_gpu[1])

        def filled(result: Any) -> Any:
            if not isinstance(result, Tensor):
                return result
            dtype = torch.float32 if result.dtype in (torch.bfloat16, torch.float16) else result.dtype
            return numbers(result.shape, result.stride(), dtype, name)

        return tuple(map(filled, results))


def _fake_on_gpu(tensor: Tensor) -> Tensor:
    dtype = torch.bfloat16 if tensor.dim() >= 3 and tensor.dtype == torch.float32 else tensor.dtype
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="cuda")


def source_here(text: str) -> str:
    """Return Python that inductor wrote for a GPU, for a CPU in float32."""
    for old, new in REPLACED:
        text = text.replace(old, new)
    return text


# -- the operations of the graph


class _Recorded(ast.NodeTransformer):
    """Keeps the value of each name that a function assigns."""

    def visit_Assign(self, node: ast.Assign) -> Any:
        target = node.targets[0]
        if len(node.targets) > 1 or not isinstance(target, ast.Name) or isinstance(node.value, ast.Constant):
            return node
        return [node, *ast.parse(f"VALUES[{target.id!r}] = {target.id}").body]

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        assert isinstance(node.target, ast.Name)
        return [node, *ast.parse(f"VALUES[{node.target.id!r}] = {node.target.id}").body]


def run_operations(graph: Graph, inputs: Sequence[Any]) -> tuple[list[Any], dict[str, Tensor]]:
    """Return the results of a graph's operations, and those of each by name."""
    values: dict[str, Any] = {}
    tree = ast.fix_missing_locations(_Recorded().visit(ast.parse(source_here(graph.operations))))
    scope = {"torch": torch, "device": torch.device, "STAND_IN": StandIn(), "VALUES": values, **_CONSTANTS}
    exec(compile(tree, "operations", "exec"), scope)
    results = scope["GraphModule"]().forward(*inputs)
    return list(results), {name: value for name, value in values.items() if isinstance(value, Tensor)}


_CONSTANTS = {"inf": float("inf"), "nan": float("nan")}


# -- the kernels


class Interpreted:
    """A kernel in Triton's interpreter, in place of the compiled one."""

    def __init__(self, kernel: Kernel, folder: Path, check: Callable[[Kernel, list[Tensor]], None]) -> None:
        self.kernel, self.check = kernel, check
        file = folder / f"{kernel.key}.py"
        file.write_text(self._source())
        spec = importlib.util.spec_from_file_location(kernel.key, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        self.function = getattr(module, kernel.name)
        self.meta = self._settings()

    def _source(self) -> str:
        """Return the kernel's function alone, with functions that the interpreter has. NotRunError: it lacks one."""
        _, _, function = self.kernel.source.partition("@triton.jit\n")
        function = function.replace("tl.bfloat16", "tl.float32")
        lacking = set(re.findall(r"libdevice\.(\w+)", function)) - FUNCTIONS - {"tanh", "isnan", "log1p"}
        if lacking:
            raise NotRunError(f"the interpreter has no {', '.join(sorted(lacking))}")
        function = re.sub(r"libdevice\.(tanh|isnan|log1p)\(", r"_\1(", function)
        # Inductor's differ for nan alone, and the interpreter would combine numbers one by one.
        function = re.sub(r"triton_helpers\.(max|min)2\(", r"tl.\1(", function)
        function = re.sub(r"(?:libdevice|tl_math)\.(\w+)", r"tl.\1", function)
        return (
            "import triton\nimport triton.language as tl\n"
            "from torch._inductor.runtime import triton_helpers\n\n"
            "@triton.jit\ndef _tanh(x):\n    return 2 * tl.sigmoid(2 * x) - 1\n\n"
            "@triton.jit\ndef _isnan(x):\n    return x != x\n\n"
            "@triton.jit\ndef _log1p(x):\n    return tl.log(1 + x)\n\n"
            f"@triton.jit\n{function}"
        )

    def _settings(self) -> dict[str, Any]:
        """Return inductor's `inductor_meta` and the types of the arguments."""
        found = {}
        for name in ("inductor_meta", "triton_meta"):
            text = re.search(rf"{name}=(\{{.*\}}),?\n", self.kernel.source)
            assert text is not None
            found[name] = eval(text[1], {}, _Names())
        return found

    def run(self, *args: Any, stream: int) -> None:
        """Do what the launch of the compiled kernel does."""
        from torch._inductor.runtime.triton_heuristics import GridExpr

        types = self.meta["triton_meta"]["signature"]
        names = [name for name in types if not name.isupper()]
        given = dict(zip(names, args, strict=True))
        reduces = any(name.startswith("r0_") for name in names)
        blocks = {name: BLOCKS.get(name, 1) for name in types if name.isupper()}
        if not reduces and "YBLOCK" not in blocks:
            blocks["XBLOCK"] = POINTWISE
        if given["xnumel"] == 1:
            blocks["XBLOCK"] = 1  # as inductor does, which then has no mask
        grid = GridExpr.from_meta(self.meta["inductor_meta"], blocks).eval_slow({**given, **blocks})
        self.function[grid](*args, **blocks)
        mutated = self.meta["inductor_meta"].get("mutated_arg_names", [])
        written = [value for name, value in given.items() if "out_ptr" in name or name in mutated]
        self.check(self.kernel, written)


class _Names(dict[str, Any]):
    """Inductor's classes in its settings, which are not read."""

    def __missing__(self, name: str) -> Any:
        return _Ignored()


class _Ignored:
    def __getattr__(self, name: str) -> "_Ignored":
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> "_Ignored":
        return self


def run_code(graph: Graph, inputs: Sequence[Any], check: Callable[[Kernel, list[Tensor]], None]) -> list[Any]:
    """Return the results of the code that inductor made of a graph. NotRunError: a kernel cannot be run here."""
    kernels = {kernel.name: kernel for kernel in graph.kernels()}
    with tempfile.TemporaryDirectory() as folder:

        def load(name: str, source: str, device_str: str) -> Interpreted:
            return Interpreted(kernels[name], Path(folder), check)

        compiler = SimpleNamespace(triton=load, wait=lambda scope: None)
        scope: dict[str, Any] = {"__name__": "code", "COMPILER": compiler, "STAND_IN": StandIn()}
        exec(source_here(graph.code), scope)
        return list(scope["call"](list(inputs)))


def inputs_of(graph: Graph) -> list[Any]:
    """Return fixed random inputs of a graph, by the shapes in inductor's `get_args`."""
    body = graph.code[graph.code.index("\ndef get_args():") :].partition("\n\n\n")[0]
    body = re.sub(r"(\w+) = rand_strided\(", r"\1 = NUMBERS('\1', ", source_here(body))
    scope: dict[str, Any] = {"torch": torch, "NUMBERS": _input}
    exec(body, scope)
    return scope["get_args"]()


def _input(name: str, shape: Sequence[int], strides: Sequence[int], *, device: str, dtype: torch.dtype) -> Tensor:
    return numbers(shape, strides, dtype, name)


# -- the comparison


def difference(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference over the largest number; tensors of other sizes differ by infinity."""
    if found.numel() != expected.numel():
        return float("inf")
    found, expected = found.double().flatten(), expected.double().flatten()
    if torch.equal(found, expected) or not found.numel():
        return 0.0
    largest = max(float(expected.nan_to_num(0, 0, 0).abs().max()), 1e-30)
    same = (found == expected) | (found.isnan() & expected.isnan())
    worst = (found - expected).abs().masked_fill_(same, 0).max()
    return float("inf") if worst.isnan() else float(worst) / largest


class _Stored(NamedTuple):
    """What a kernel has stored in one of its arguments."""

    place: Tensor
    candidates: list[Tensor]
    """results of its operations with that number of elements"""
    error: float
    """smallest difference to one of them, right after the launch"""


def _nearest(place: Tensor, candidates: Sequence[Tensor]) -> float:
    return min(difference(place, value) for value in candidates)


def compare(graph: Graph) -> list[Result]:
    """Return what came of each kernel of a graph."""
    expected, values = run_operations(graph, inputs_of(graph))
    kernels = graph.kernels()
    stored: dict[str, list[_Stored]] = {kernel.name: [] for kernel in kernels}

    def check(kernel: Kernel, written: list[Tensor]) -> None:
        """Compare at the first launch, whose operations are known."""
        if stored[kernel.name]:
            return
        known = [values[name] for name in kernel.outputs if name in values]
        for place in written:
            candidates = [value for value in known if value.numel() == place.numel()]
            if candidates:
                stored[kernel.name].append(_Stored(place, candidates, _nearest(place, candidates)))

    try:
        results = run_code(graph, inputs_of(graph), check)
    except NotRunError as reason:
        return [Result(kernel.name, graph.case, 0.0, 0, str(reason)) for kernel in kernels]
    errors = {}
    for kernel in kernels:
        # Some results are whole only after a later kernel or collective has worked on them in place.
        found = sorted(min(one.error, _nearest(one.place, one.candidates)) for one in stored[kernel.name])
        parts = sum(name not in values for name in kernel.outputs)  # of sums: the next kernel's result shows them
        errors[kernel.name] = found[: max(len(found) - parts, 0)]
    whole = 0.0
    for found, value in zip(results, expected, strict=True):
        if isinstance(found, Tensor):
            whole = max(whole, difference(found, value))
    worst = {name: max(found, default=whole) for name, found in errors.items()}
    if whole > TOLERANCE >= max(worst.values()):
        worst = dict.fromkeys(worst, whole)
    return [Result(name, graph.case, worst[name], len(found)) for name, found in errors.items()]


def compare_all(graphs: Iterator[Graph]) -> list[Result]:
    """Return what came of each distinct kernel."""
    results: dict[str, Result] = {}
    for graph in graphs:
        keys = {kernel.name: kernel.key for kernel in graph.kernels()}
        for result in compare(graph):
            results.setdefault(keys[result.kernel], result)
    return list(results.values())


def as_text(results: Sequence[Result]) -> str:
    """Return the summary of all kernels, and a line for each that is wrong or was not run."""
    run = [result for result in results if not result.not_run]
    lines = [
        f"{len(results)} kernels, {len(run)} run, {sum(result.compared for result in run)} results compared: "
        f"worst error {max((result.error for result in run), default=0.0):.1e} of the largest number"
    ]
    lines += [f"not run: {result.kernel} ({result.case}): {result.not_run}" for result in results if result.not_run]
    lines += [f"WRONG: {r.kernel} ({r.case}): {r.error:.1e}" for r in run if not r.error <= TOLERANCE]
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Print what came of the kernels; exit status 1 if one is wrong."""
    if reason := missing():
        print(f"error: {reason}", file=sys.stderr)
        return 2
    with graphs_of(arguments) as graphs:
        results = compare_all(graphs)
    print(as_text(results))
    return int(any(not result.error <= TOLERANCE for result in results))


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET") != "1":  # Triton reads it when it is imported
        os.execvpe(
            sys.executable,
            [sys.executable, "-m", __spec__.name, *sys.argv[1:]],
            {**os.environ, "TRITON_INTERPRET": "1"},
        )
    sys.exit(main(sys.argv[1:]))
