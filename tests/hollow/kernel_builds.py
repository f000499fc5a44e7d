"""Compiles inductor's Triton kernels for GPUs that are not here, of NVIDIA and of AMD, by what Triton's wheel brings.

    python -m tests.hollow.kernel_builds                         all cases of kernel_graphs.py
    python -m tests.hollow.kernel_builds "zero 3, compile"       some; --folder as in kernel_values.py

The sources are those of an H100, with the first of the sizes that inductor would try there. It shows that a kernel
builds, and what it takes of a GPU; not how fast it is, nor anything of RCCL or of kernels that are not Triton's.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import NamedTuple

from tests.hollow.bed import missing, run
from tests.hollow.kernel_graphs import Graph, graphs_of


class Target(NamedTuple):
    """A GPU to compile for."""

    backend: str
    architecture: int | str
    threads: int
    """of a warp"""
    shared: int
    """bytes of memory that the threads of a block can share"""


TARGETS = {
    "sm_80": Target("cuda", 80, 32, 166_912),
    "sm_90": Target("cuda", 90, 32, 232_448),
    "sm_100": Target("cuda", 100, 32, 232_448),
    "gfx942": Target("hip", "gfx942", 64, 65_536),
    "gfx950": Target("hip", "gfx950", 64, 163_840),
}


class Build(NamedTuple):
    """What a kernel takes of a GPU."""

    kernel: str
    target: str
    registers: int = 0
    """of a thread; AMD: vector registers"""
    spilled: int = 0
    """NVIDIA: bytes of a thread in local memory; AMD: registers that did not fit"""
    shared: int = 0
    """bytes"""
    error: str = ""
    """why it does not build; empty: it does"""

    @property
    def finding(self) -> str:
        """Return what is wrong with it; empty: nothing."""
        if self.error:
            return self.error
        if self.spilled:
            return f"spills {self.spilled}"
        limit = TARGETS[self.target].shared
        return f"shares {self.shared} bytes of {limit}" if self.shared > limit else ""


def build(file: Path, name: str, target: str) -> Build:
    """Compile the kernel of a file for a target. For a process on the hollow GPU, where inductor tells its sizes."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    backend, architecture, threads, _ = TARGETS[target]
    spec = spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    tuner = getattr(module, name)
    config, meta = tuner.configs[0], tuner.triton_meta
    constants = {**meta["constants"], **config.kwargs}
    try:
        source = ASTSource(tuner.fn, meta["signature"], constants, meta["configs"][0])
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        made = compile(source, GPUTarget(backend, architecture, threads), options)
    except Exception as error:  # whatever a compiler raises is why the kernel does not build
        return Build(name, target, error=f"{type(error).__name__}: {str(error).splitlines()[-1][:200]}")
    usage = _nvidia_usage(made.asm["cubin"]) if backend == "cuda" else _amd_usage(made.asm["amdgcn"])
    return Build(name, target, *usage, made.metadata.shared)


def _nvidia_usage(binary: bytes) -> tuple[int, int]:
    """Return registers and bytes of local memory of a thread, by cuobjdump, which comes with Triton."""
    spec = find_spec("triton")
    assert spec is not None
    assert spec.origin is not None
    tool = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return _number(r"REG:(\d+)", text), _number(r"LOCAL:(\d+)", text) + _number(r"STACK:(\d+)", text)


def _amd_usage(assembly: str) -> tuple[int, int]:
    return _number(r"\.vgpr_count:\s+(\d+)", assembly), _number(r"\.vgpr_spill_count:\s+(\d+)", assembly)


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found is not None, f"{pattern} is not in {text[:500]}"
    return int(found[1])


def build_all(kernels: Mapping[str, str], targets: Sequence[str] = tuple(TARGETS)) -> list[Build]:
    """Compile each kernel for each target. kernels: the sources by name."""
    with tempfile.TemporaryDirectory() as folder:
        for name, source in kernels.items():
            (Path(folder) / f"{name}.py").write_text(source)
        command = [sys.executable, "-m", "tests.hollow.kernel_builds", "--here", folder, *targets]
        done = run(command, seconds=3600)
    if done.returncode:
        raise RuntimeError(done.stdout)
    return [Build(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith('{"kernel"')]


def as_text(builds: Sequence[Build]) -> str:
    """Return a row per target, and a line per finding."""
    lines = ["| target | kernels | build | most registers | spill | most shared bytes |", "|---|--:|--:|--:|--:|--:|"]
    for target in TARGETS:
        of_target = [build for build in builds if build.target == target]
        built = [build for build in of_target if not build.error]
        if built:
            registers, shared = (max(getattr(b, column) for b in built) for column in ("registers", "shared"))
            spilling = sum(bool(build.spilled) for build in built)
            lines.append(f"| {target} | {len(of_target)} | {len(built)} | {registers} | {spilling} | {shared:,} |")
    lines += [f"{build.target}: {build.kernel}: {build.finding}" for build in builds if build.finding]
    return "\n".join(lines)


def kernels_of(graphs: Iterable[Graph]) -> dict[str, str]:
    """Return the distinct kernels of graphs: the sources by a name that no other has."""
    kernels = {kernel.key: kernel for graph in graphs for kernel in graph.kernels()}
    sources = {}
    for kernel in kernels.values():
        name = f"{kernel.name[:80]}_{kernel.key}"
        sources[name] = kernel.source.replace(kernel.name, name)
    return sources


def main(arguments: list[str]) -> int:
    """Print what was built; exit status 1 where a kernel does not build, spills, or shares too much."""
    if arguments[:1] == ["--here"]:
        folder, *targets = arguments[1:]
        for file in sorted(Path(folder).glob("*.py")):
            for target in targets:
                print(json.dumps(build(file, file.stem, target)._asdict()), flush=True)
        return 0
    if reason := missing():
        print(f"error: {reason}", file=sys.stderr)
        return 2
    with graphs_of(arguments) as graphs:
        builds = build_all(kernels_of(graphs))
    print(as_text(builds))
    return int(any(build.finding for build in builds))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
