"""How long the ranks of a node need to read published weights that no memory caches, beside `cat` of the same files.

    OMP_NUM_THREADS=1 python -m tests.hugging_face.cold_reading [--rounds=3] [--layers=5] [--folder=/tmp]

Files of the shapes of Llama 3.1 8B but for fewer blocks and a vocabulary of 32,000, random bytes in bfloat16: 2.7 GB.
Before each reading their pages are dropped from the cache of the system; what a process then reads from the disk is
counted. Eight processes, one per rank, are started and made ready before the clock runs. They read into float32.
"""

import argparse
import multiprocessing
import os
import statistics
import subprocess
import tempfile
import time
from dataclasses import replace
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, NamedTuple

from tests.hugging_face.published import write_sparse_model
from tests.hugging_face.rank_memory import LAYOUTS, LLAMA_8B, RANKS, stages_of_rank
from tests.parity import CPU
from torchllm.checkpoint.hf_reader import read_hub_weights
from torchllm.hugging_face.files import find_hub_files, read_hub_config
from torchllm.parallel.initialize import materialize

FORK = multiprocessing.get_context("fork")  # a rank that imports all by itself takes seconds
RANDOM = 1 << 26
"""random bytes that are written again and again"""


class Reading(NamedTuple):
    """What one process, or all, needed for the files."""

    seconds: float
    from_disk: int
    """bytes"""
    computed: float
    """seconds of CPU time"""


def main() -> None:
    """Print the seconds of each reading, and the ratios to `cat` in the same round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--folder", default=None, help="on the disk that is measured")
    options = parser.parse_args()
    if os.environ.get("OMP_NUM_THREADS") != "1":  # a forked process hangs that inherits threads of OpenMP
        parser.error("OMP_NUM_THREADS must be 1, as torchrun sets it for ranks: OMP_NUM_THREADS=1 python -m ...")
    with tempfile.TemporaryDirectory(dir=options.folder) as root:
        folder = Path(root) / "model"
        write_sparse_model(replace(LLAMA_8B, layers=options.layers, vocab=32000), folder, bytes_per_file=10**9)
        paths = sorted(folder.glob("*.safetensors"))
        for path in paths:
            fill_with_random_bytes(path)
        for layout in ("fsdp 8", "tp 8"):
            compare_with_cat(layout, folder, paths, options.rounds)


def compare_with_cat(layout: str, folder: Path, paths: list[Path], rounds: int) -> None:
    """Read files with `cat` and on all ranks of a layout in turns."""
    size = sum(path.stat().st_size for path in paths)
    ranks = Ranks(folder, layout, rounds)
    ratios = []
    for number in range(1, rounds + 1):
        ranks.barrier.wait()  # all are ready, and idle while cat reads
        plain = read_with_cat(paths)
        reading = ranks.read(paths)
        ratios.append(reading.seconds / plain.seconds)
        print(f"{layout}, round {number}: {describe(reading, size)}; cat: {describe(plain, size)}", flush=True)
    ranks.join()
    print(f"{layout} over cat: median {statistics.median(ratios):.2f}, spread {min(ratios):.2f} to {max(ratios):.2f}")


def describe(reading: Reading, size: int) -> str:
    """Return the seconds, the CPU time, and what came from the disk."""
    share = f"from disk {reading.from_disk / size:.3f} of {size / 1e9:.2f} GB"
    return f"{reading.seconds:.2f} s, {reading.computed:.2f} s of CPU time, {share}"


def fill_with_random_bytes(path: Path) -> None:
    """Overwrite all behind the header, and force it to disk."""
    content = os.urandom(RANDOM)
    with path.open("r+b") as file:
        header = int.from_bytes(file.read(8), "little")
        left = path.stat().st_size - 8 - header
        file.seek(8 + header)
        while left:
            file.write(content[: min(left, RANDOM)])
            left -= min(left, RANDOM)
        file.flush()
        os.fsync(file.fileno())


def drop_from_cache(paths: list[Path]) -> None:
    """Make the system forget the pages of files."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def bytes_from_disk(process: int | str = "self") -> int:
    """Return what a process has had read from a disk, in bytes."""
    lines = Path(f"/proc/{process}/io").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("read_bytes:"))
    return int(line.split()[1])


def read_with_cat(paths: list[Path]) -> Reading:
    """Read files with `cat`, one after the other."""
    drop_from_cache(paths)
    script = 'cat "$@" > /dev/null; grep ^read_bytes: /proc/$$/io'  # of the shell and of children that have ended
    before = os.times()
    began = time.monotonic()
    done = subprocess.run(["sh", "-c", script, "sh", *map(str, paths)], capture_output=True, text=True, check=True)
    seconds = time.monotonic() - began
    after = os.times()
    computed = after.children_user + after.children_system - before.children_user - before.children_system
    return Reading(seconds, int(done.stdout.split()[1]), computed)


class Ranks:
    """The processes of a layout, one per rank."""

    def __init__(self, folder: Path, layout: str, rounds: int) -> None:
        self.barrier = FORK.Barrier(RANKS + 1, timeout=300)
        self.results: Any = FORK.SimpleQueue()
        self.processes = []
        for rank in range(RANKS):
            arguments = (folder, layout, rank, rounds, self.barrier, self.results)
            self.processes.append(FORK.Process(target=read_on_rank, args=arguments, daemon=True))
            self.processes[-1].start()

    def read(self, paths: list[Path]) -> Reading:
        """Read the files once, each rank what it holds."""
        drop_from_cache(paths)
        began = time.monotonic()
        self.barrier.wait()
        ended = [self.results.get() for _ in self.processes]
        seconds = max(one.seconds for one in ended) - began
        return Reading(seconds, sum(one.from_disk for one in ended), sum(one.computed for one in ended))

    def join(self) -> None:
        """Wait until all have ended."""
        for process in self.processes:
            process.join()


def read_on_rank(folder: Path, layout: str, rank: int, rounds: int, barrier: Barrier, results: Any) -> None:
    """Put, of each round, the time at which this rank has read what it holds."""
    config = read_hub_config(folder)
    files = find_hub_files(folder, config.family)
    stages = stages_of_rank(config.model, LAYOUTS[layout], rank)
    for _ in range(rounds):
        materialize(stages, CPU)  # new memory, as at a start
        barrier.wait()
        before, computed = bytes_from_disk(), time.process_time()
        barrier.wait()
        read_hub_weights(files, config, stages)
        results.put(Reading(time.monotonic(), bytes_from_disk() - before, time.process_time() - computed))


if __name__ == "__main__":
    main()
