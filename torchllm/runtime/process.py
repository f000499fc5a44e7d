"""What a process needs before it can train: its ranks, device, seeds, signals; and how it ends.

Every rank runs the same calls in the same order. What ranks must agree on (stop now?) goes through a gloo group on the
host and is read one step late, so that no step waits for it.
"""

import gc
import json
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType, TracebackType

import torch
import torch.distributed as dist
from torch import Tensor

from torchllm.config import Run, Training
from torchllm.config.errors import UserError
from torchllm.runtime.hang_watch import GRACE, HangWatch

log = logging.getLogger(__name__)

STOPPED = "stopped.json"
"""marker in the run folder: the run was told to stop, saved, and can go on from there"""
STOP = "stop"
"""file in the run folder by which anybody, run_train.sh above all, tells the run to stop"""


@dataclass
class Runtime:
    """This process among the others."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    folder: Path
    host_group: dist.ProcessGroup
    """gloo, for agreements on the host"""
    collect_interval: int
    hang_watch: HangWatch | None = None
    """where there are other ranks to wait for"""
    _told_to_stop: float | None = None
    _vote: tuple[Tensor, dist.Work | None] | None = None

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that speaks and writes."""
        return self.rank == 0

    @property
    def ranks_on_node(self) -> int:
        """Ranks that share this node; without a launcher to say so: all."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size))

    def should_stop(self, failed: bool = False) -> bool:
        """Whether any rank had been told to stop, or had `failed`, by the previous call: the same answer on all ranks.

        Call it once a step.

        One step late: the vote of the last call is read, the next one set off to run beside the step.
        """
        stop = False
        if self._vote is not None:
            flag, work = self._vote
            if work is not None:
                work.wait()
            stop = bool(flag.item())
        flag = torch.tensor(int(failed or self._is_told_to_stop()))
        self._vote = flag, dist.all_reduce(flag, dist.ReduceOp.MAX, group=self.host_group, async_op=True)
        return stop

    def _is_told_to_stop(self) -> bool:
        if self._told_to_stop is None and self.is_main and (self.folder / STOP).exists():
            self._told_to_stop = time.monotonic()
            log.warning("%s: saving at the next step boundary", self.folder / STOP)
        return self._told_to_stop is not None

    def gather_texts(self, error: str | None) -> list[str | None]:
        """Every rank's error text (None: fine) on every rank: one rank's bad input must end all of them, not hang."""
        errors: list[str | None] = [None] * self.world_size
        dist.all_gather_object(errors, error, group=self.host_group)
        return errors

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier(group=self.host_group)

    def collect_garbage(self, step: int) -> None:
        """Python's cycle collection, on every rank at the same step: at different ones each would stall all others."""
        if self.collect_interval and step % self.collect_interval == 0:
            gc.collect(1)

    def mark_stopped(self, step: int) -> None:
        """Tell run_train.sh that this run ended early on purpose, with a checkpoint of `step`."""
        if self.is_main:
            (self.folder / STOPPED).write_text(json.dumps({"step": step}) + "\n")

    def close(self) -> None:
        """Leave the process group. Call it on success only: after an error peers may be stuck, and waiting hangs."""
        if self.is_main:
            (self.folder / STOP).unlink(missing_ok=True)
        if self._vote is not None and self._vote[1] is not None:
            self._vote[1].wait()
        if self.hang_watch is not None:
            self.hang_watch.close()
        dist.destroy_process_group()


def start_runtime(run: Run) -> Runtime:
    """Join the job that torchrun (or nothing: one rank) started, and set this process up for it.

    UserError, on all ranks, if one has not the device it should have, or the run folder is not one on all nodes.
    """
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    report_errors(rank, local_rank)
    device, error = torch.device("cpu"), None
    try:
        device = choose_device(run.device, local_rank)
    except UserError as problem:
        error = str(problem)  # raised below, together: alone it would leave the others waiting
    timeout = timedelta(seconds=run.timeout + GRACE)
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "5000")  # the flight recorder's: what the ranks sent last
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch 2.13's profiler prints two lines a profile otherwise
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and run.device != "cpu" else "gloo"
    if {"RANK", "MASTER_ADDR"} <= os.environ.keys():
        dist.init_process_group(backend, timeout=timeout)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]  # public, but not re-exported for type checkers
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    torch.manual_seed(run.seed)
    if run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    if run.collect_garbage_interval:
        gc.disable()
    runtime = Runtime(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        device=device,
        folder=Path(run.folder),
        host_group=dist.new_group(backend="gloo", timeout=timeout),
        collect_interval=run.collect_garbage_interval,
    )
    raise_first_error(runtime.gather_texts, error)
    kinds = runtime.gather_texts(device.type)
    if len(set(kinds)) > 1:
        raise UserError(f"rank {kinds.index('cpu')} sees no GPU, rank {kinds.index('cuda')} does: mend that node")
    _handle_signals(runtime)
    _share_folder(runtime)
    if world_size > 1:
        peers = runtime.gather_texts(f"{os.uname().nodename} {os.getppid()} {os.getpid()}")
        runtime.hang_watch = HangWatch(rank, runtime.folder, run.timeout, [str(peer) for peer in peers])
    return runtime


def choose_device(wanted: str, local_rank: int) -> torch.device:
    """The device of this rank: GPU number `local_rank`, or the CPU. UserError if that GPU is not there."""
    there = torch.cuda.is_available()
    if wanted == "cuda" and not there:
        raise UserError('run.device = "cuda", but torch sees no GPU here; use "auto" or "cpu"')
    if wanted == "cpu" or not there:
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise UserError(
            f"local rank {local_rank} has no GPU of its own, it sees {torch.cuda.device_count()}: lower NPROC, or let "
            "each Slurm task see all GPUs of its node (--gpu-bind=none)"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def compute_dtype(training: Training, device: torch.device) -> torch.dtype:
    """The type of the computation that training.dtype asks for on this device."""
    name = training.dtype
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" else "float32"
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def report_errors(rank: int = 0, local_rank: int = 0) -> None:
    """Rank 0 speaks, others only of errors, with their rank; what the user can mend is said once, in plain words."""
    main = rank == 0
    logging.basicConfig(
        level=logging.INFO if main else logging.ERROR,
        format="%(message)s" if main else f"rank {rank}: %(message)s",
        stream=sys.stderr,
        force=True,
    )

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, UserError):
            who = "rank 0 " if main else ""  # the others' lines begin with it
            log.error("%s", f"{who}failed:\n{''.join(traceback.format_exception(kind, error, trace))}")
            return
        if not main:  # rank 0 has it too, and ends the job when it has said so; unless only this node has it
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(3.0 if local_rank == 0 else 6.0)
        log.error("error: %s", error)

    sys.excepthook = show


def _handle_signals(runtime: Runtime) -> None:
    """SIGTERM and SIGINT: save and stop at the next step boundary; another one later ends the process at once.

    Not one at the same moment: Slurm signals every process, and torchrun, signalled too, forwards it once more.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        if runtime._told_to_stop is not None:
            if time.monotonic() - runtime._told_to_stop > 5.0:
                os._exit(128 + number)
            return
        runtime._told_to_stop = time.monotonic()
        if runtime.is_main:
            log.warning("%s: saving at the next step boundary", signal.Signals(number).name)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)


def _share_folder(runtime: Runtime) -> None:
    """Make the run folder, and find out now, not at the first checkpoint, if a node has another file system there."""
    probe = runtime.folder / ".shared"
    error = None
    if runtime.is_main:
        try:
            runtime.folder.mkdir(parents=True, exist_ok=True)
            (runtime.folder / STOPPED).unlink(missing_ok=True)
            probe.write_text(str(os.getpid()))
        except OSError as problem:
            error = f"run.folder = {str(runtime.folder)!r} cannot be written: {problem}"
    raise_first_error(runtime.gather_texts, error)
    seen = runtime.is_main or _appears(probe.exists)
    error = None if seen else f"run.folder = {str(runtime.folder)!r} is not the folder of rank 0: it must be one file "
    error = error and error + "system on all nodes (NFS, Lustre, …)"
    raise_first_error(runtime.gather_texts, error)
    if runtime.is_main:
        probe.unlink()


def _appears(exists: Callable[[], bool], patience: float = 5.0) -> bool:
    """Whether a file is seen within `patience` seconds: network file systems show it late."""
    deadline = time.monotonic() + patience
    while not exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def raise_first_error(gather_texts: Callable[[str | None], list[str | None]], error: str | None) -> None:
    """UserError on every rank if any has an error, naming the first that has."""
    for rank, text in enumerate(gather_texts(error)):
        if text is not None:
            raise UserError(f"rank {rank}: {text}" if rank else text)
