"""How much memory a rank needs to read published weights of the size of Llama 3.1 8B, and how many bytes it reads.

    python -m tests.hugging_face.rank_memory [--ranks=0,7] [--layers=32]

Each rank of each layout is a process of its own in a fake process group of eight. The files are sparse: 16 GB of zeros
that take no room on the disk. A rank may hold its own float32 shards and, besides, no more than one tensor.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from tests.hugging_face.published import write_sparse_model
from tests.parity import CPU
from torchllm.checkpoint.hf_reader import read_hub_weights
from torchllm.checkpoint.state import model_tensors, parts_of
from torchllm.config import Compile, Float8, Model, Parallel, Recompute
from torchllm.hugging_face.files import find_hub_files, read_hub_config
from torchllm.models.decoder import Decoder, build_model
from torchllm.parallel.initialize import materialize
from torchllm.parallel.mesh import build_mesh
from torchllm.parallel.parallelize import parallelize

LLAMA_8B = Model(
    layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256, max_sequence_length=131072, norm_epsilon=1e-5
)
RANKS = 8
LAYOUTS = {
    "fsdp 8": Parallel(dp_shard=8),
    "hsdp 2 x 4": Parallel(dp_replicate=2, dp_shard=4),
    "tp 8": Parallel(dp_shard=1, tp=8),
    "pp 8, tied": Parallel(dp_shard=1, pp=8),
}


def main() -> None:
    """Print a line per rank. SystemExit(1) if one held more than it may."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="0,7")
    parser.add_argument("--layers", type=int, default=LLAMA_8B.layers)
    parser.add_argument("--one", nargs=3, metavar=("LAYOUT", "RANK", "FOLDER"))
    options = parser.parse_args()
    if options.one:
        layout, rank, folder = options.one
        measure(LAYOUTS[layout], int(rank), Path(folder))
        return
    is_over = False
    with tempfile.TemporaryDirectory() as root:
        for layout in LAYOUTS:
            folder = Path(root) / layout.replace(" ", "-")
            model = replace(LLAMA_8B, layers=options.layers, tied_embeddings="tied" in layout)
            write_sparse_model(model, folder, bytes_per_file=5 * 10**9)
            for rank in options.ranks.split(","):
                command = [sys.executable, "-m", "tests.hugging_face.rank_memory", "--one", layout, rank, str(folder)]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                found = json.loads(done.stdout)
                is_over |= found["extra"] > found["largest_tensor"]
                print(f"{layout}, rank {rank}: " + ", ".join(f"{key} {value:,}" for key, value in found.items()))
    sys.exit(int(is_over))


def measure(parallel: Parallel, rank: int, folder: Path) -> None:
    """Read what one rank holds, and print its bytes and its memory as JSON."""
    config = read_hub_config(folder)
    files = find_hub_files(folder, config.family)
    stages = stages_of_rank(config.model, parallel, rank)
    base = anonymous_memory()
    with peak_memory() as peak:
        materialize(stages, CPU)
        shards = sum(part.local.nbytes for part in parts_of(model_tensors(stages)).values())
        began = time.monotonic()
        totals = read_hub_weights(files, config, stages)
        seconds = time.monotonic() - began
    result = {
        "shards": shards,
        "extra": max(peak) - base - shards,
        "largest_tensor": max(tensor.end - tensor.begin for tensor in files.tensors.values()),
        "bytes_read": totals.bytes_read,
        "file_bytes": sum(math.prod(tensor.shape) * 2 for tensor in files.tensors.values()),
        "largest_block": totals.largest_block,
        "seconds": round(seconds),
    }
    print(json.dumps(result))


def stages_of_rank(model: Model, parallel: Parallel, rank: int) -> list[Decoder]:
    """Return what one rank of a layout holds, without memory, in a fake process group."""
    dist.init_process_group("fake", rank=rank, world_size=RANKS)
    with torch.device("meta"):
        decoder = build_model(model)
    compile = Compile(block=False, loss=False)
    mesh = build_mesh(parallel, CPU)
    return parallelize(decoder, mesh, parallel, Recompute(), compile, Float8(), torch.float32, 64)


@contextmanager
def peak_memory() -> Iterator[list[int]]:
    """Yield a list that has, at the end of the context, what this process has held of memory every few ms, in bytes."""
    held: list[int] = []
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.005):
            held.append(anonymous_memory())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield held
    finally:
        ended.set()
        thread.join()
        held.append(anonymous_memory())


def anonymous_memory() -> int:
    """Return the bytes of this process that are no file's (RssAnon)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("Linux says no RssAnon")


if __name__ == "__main__":
    main()
