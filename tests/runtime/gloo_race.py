"""Crash torch's gloo backend without torchllm: two of its threads assign to one string.

    python tests/runtime/gloo_race.py --seconds=60
    python tests/runtime/gloo_race.py --seconds=60 --in-flight=1         waits for each operation, as training does
    python tests/runtime/gloo_race.py --seconds=60 --only-short-names    the first control: no crash
    python tests/runtime/gloo_race.py --seconds=60 --threads=1           the second control: no crash

Each gloo group has two worker threads. In `ProcessGroupGloo::runLoop` they note the name of the operation that they
have finished in `pgStatus_->lastCompletedWorkName`, without a lock, and after the operation's caller may go on. A
`std::string` keeps up to 15 characters within itself. "ALLGATHER_COALESCED", the name of DTensor's all-gathers, takes
20 bytes of the heap: one thread frees them while the other writes "ALLREDUCE" there. The next small allocation of the
first thread then ends the process: "malloc(): unaligned tcache chunk detected" or SIGSEGV. What was measured is in
docs/reliability.md.

A process of one rank repeats both operations until it dies or the time is over; then it is started again.
"""

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

PAIRS_PER_REPORT = 64 * 10
"""pairs of operations between two lines of a rank: a multiple of those in flight"""
TENSORS = 8
"""that are gathered in one operation, which then lasts as long as it takes to start the next ones"""


class Outcome(NamedTuple):
    pairs: int
    """operations of each kind that it had done, in steps of `PAIRS_PER_REPORT`"""
    death: str
    """the signal that ended it, and what it had printed before; empty if it was stopped in time"""


def gloo_of_one_thread(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
    """Return a gloo backend with one worker thread; torch has no public way to ask for it."""
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._threads = 1
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, world_size, options)


def repeat_operations(threads: int, in_flight: int, only_short_names: bool) -> None:
    """Gather and reduce over one rank for ever. in_flight: pairs of operations that are under way at once."""
    torch.set_num_threads(1)
    dist.Backend.register_backend("one_thread", gloo_of_one_thread, devices=["cpu"])
    backend = "gloo" if threads == 2 else "one_thread"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    tensors = [torch.ones(8) for _ in range(TENSORS)]
    pairs = 0
    while True:
        works = []
        for _ in range(in_flight):
            outputs = [torch.empty_like(x) for x in tensors]
            if only_short_names:
                works.append(dist.all_gather(outputs[:1], tensors[0], async_op=True))
            else:
                works.append(dist.all_gather_coalesced([outputs], tensors, async_op=True))
            if in_flight == 1:
                works.pop().wait()
            works.append(dist.all_reduce(torch.ones(8), async_op=True))
        for work in works:
            work.wait()
        pairs += in_flight
        if pairs % PAIRS_PER_REPORT == 0:
            print(pairs, flush=True)


def watch_one_process(arguments: Sequence[str], seconds: float) -> Outcome:
    """Run `repeat_operations` in a process of its own until it dies, or for `seconds`."""
    command = [sys.executable, "-W", "ignore", __file__, "--rank", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        return Outcome(_last_count(output), "")
    if process.returncode >= 0:
        raise SystemExit(f"the rank ended with status {process.returncode}:\n{errors}")
    name = signal.Signals(-process.returncode).name
    return Outcome(_last_count(output), f"{name} {errors.strip()}".strip())


def _last_count(output: str) -> int:
    counts = output.split()
    return int(counts[-1]) if counts else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long, over all processes")
    parser.add_argument("--threads", type=int, choices=[1, 2], default=2, help="worker threads of the group")
    parser.add_argument("--in-flight", type=int, default=64, help="pairs of operations under way at once")
    parser.add_argument("--only-short-names", action="store_true", help="no operation of more than 15 characters")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        repeat_operations(options.threads, options.in_flight, options.only_short_names)
    arguments = [f"--threads={options.threads}", f"--in-flight={options.in_flight}"]
    if options.only_short_names:
        arguments.append("--only-short-names")
    end = time.monotonic() + options.seconds
    outcomes = []
    while (remaining := end - time.monotonic()) > 0:
        outcomes.append(watch_one_process(arguments, remaining))
        if outcomes[-1].death:
            print(f"after {outcomes[-1].pairs:,} pairs: {outcomes[-1].death}", flush=True)
    crashes = sum(bool(outcome.death) for outcome in outcomes)
    pairs = sum(outcome.pairs for outcome in outcomes)
    print(f"torch {torch.__version__}: {crashes} crashes in {pairs:,} pairs of operations, {options.seconds:g} s")


if __name__ == "__main__":
    main()
