"""Collects the graphs that inductor compiles for an H100 in steps on the hollow GPU, and their Triton kernels.

A graph is two files of torch's own debugging output: its operations as Python, and the code that inductor made of them.
"""

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.hollow.bed import H100, ROOT, environment
from tests.hollow.layouts import MODEL, Arguments, Settings, as_arguments, layouts
from tests.hollow.test_experts import CONFIG as EXPERTS
from tests.hollow.test_experts import EP, FSDP, PENALTIES, TP

COMPILED: Settings = {"compile.block": True, "compile.loss": True}
ODD: Settings = {
    "model.hidden": 264,
    "model.head_dim": 24,
    "model.ffn": 410,
    "model.vocab": 259,
    "training.sequence_length": 250,
}
"""sizes that no block of a kernel divides, in place of powers of two"""
MODELS: dict[str, Settings] = {
    "GPT": {"model.family": "gpt"},
    "norms of heads": {"model.qk_norm": "head", "model.norm_position": "both"},
    "Gemma 3": {
        "model.norm_offset": True,
        "model.activation": "gelu_tanh",
        "model.embedding_multiplier": 8.0,
        "model.logit_softcap": 30.0,
    },
    "gate": {"model.attention_gate": "element", "model.residual_multiplier": 0.4},
    "documents": {"data.document_mask": True},
    "z loss": {"training.z_loss": 0.001},
    "norm alone": {"compile.block": False, "compile.norm": True},
}
"""models whose blocks have other elementwise parts"""

KERNEL = re.compile(
    r"^(triton_\w+) = async_compile\.triton\('\w+', '''\n(.*?)^''', device_str", re.MULTILINE | re.DOTALL
)
RETURNED = re.compile(r"^#   return (%\S+)\n(triton_\w+) = async_compile", re.MULTILINE)


def cases() -> dict[str, Arguments]:
    """Return the command lines whose kernels count: all compiled layouts, models with other parts, and odd sizes."""
    found = {name: arguments for name, arguments in layouts().items() if "compile" in name}
    for name, settings in MODELS.items():
        found[name] = as_arguments("train_configs/debug.toml", MODEL, COMPILED, settings)
        found[f"{name}, odd sizes"] = as_arguments("train_configs/debug.toml", MODEL, COMPILED, ODD, settings)
    for name, settings in {"fsdp": FSDP, "penalties": {**FSDP, **PENALTIES}, "ep": EP, "tp": TP}.items():
        found[f"experts, {name}"] = as_arguments(EXPERTS, MODEL, settings, COMPILED)
    return found


class Kernel(NamedTuple):
    """A Triton kernel of a graph."""

    name: str
    source: str
    outputs: tuple[str, ...]
    """names of the graph's operations whose results it stores; those of parts of a sum are not in the graph"""

    @property
    def key(self) -> str:
        """Return the digest of the source without its name: kernels of several graphs may be one."""
        body = re.sub(r"filename=__file__.*", "", self.source.replace(self.name, "kernel"))
        return hashlib.sha256(body.encode()).hexdigest()[:12]


class Graph(NamedTuple):
    """A compiled graph, forward or backward."""

    case: str
    operations: str
    """Python: class GraphModule, whose forward calls one operation per line"""
    code: str
    """Python: the function `call`, which launches the kernels"""

    def kernels(self) -> list[Kernel]:
        """Return the graph's Triton kernels."""
        outputs = {
            name: tuple(part.lstrip("%") for part in text.split(",")) for text, name in RETURNED.findall(self.code)
        }
        return [Kernel(name, source, outputs.get(name, ())) for name, source in KERNEL.findall(self.code)]


def collect(some: Mapping[str, Arguments], folder: Path) -> Iterator[Graph]:
    """Take steps of each case on a hollow H100; yield the graphs with a kernel that no graph before has.

    folder: gets a folder per case; a case that has one is not run again.
    """
    seen: set[str] = set()
    for case, arguments in some.items():
        debug = folder / re.sub(r"\W+", "_", case)
        if not debug.exists():
            _run(arguments, debug)
        for code in sorted(debug.rglob("output_code.py")):
            graph = Graph(case, (code.parent / "fx_graph_transformed.py").read_text(), code.read_text())
            keys = {kernel.key for kernel in graph.kernels()}
            if keys - seen:
                seen |= keys
                yield graph


def _run(arguments: Arguments, debug: Path) -> None:
    """Take the steps of one case; torch writes what it compiles below `debug`. RuntimeError if they fail."""
    with tempfile.TemporaryDirectory() as messages:
        variables = {
            **environment(H100, Path(messages)),
            "TORCH_COMPILE_DEBUG": "1",
            "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",  # a graph that it has is not written
            "TORCH_COMPILE_DEBUG_DIR": str(debug),
            "TRITON_INTERPRET": "0",
        }
        done = subprocess.run(
            [sys.executable, "-m", "tests.hollow.one_rank", "--cases"],
            input=json.dumps([arguments]),
            env=variables,
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
    report = json.loads(done.stdout.splitlines()[-1])
    if "error" in report:
        shutil.rmtree(debug, ignore_errors=True)
        raise RuntimeError(f"{arguments}: {report['error']}")


@contextmanager
def graphs_of(arguments: Sequence[str]) -> Iterator[Iterator[Graph]]:
    """Give the graphs of the cases that a command line names, all if it names none."""
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"one of {', '.join(map(repr, cases()))}")
    parser.add_argument("--folder", type=Path, help="where graphs are kept, and taken from")
    options = parser.parse_args(arguments)
    wanted = {name: case for name, case in cases().items() if not options.cases or name in options.cases}
    with tempfile.TemporaryDirectory() as temporary:
        yield collect(wanted, options.folder or Path(temporary))
