"""Start and end of a training process: its rank, device, seeds, signals, and the run folder that all ranks share.

Every rank makes the same calls in the same order. What the ranks must agree on (stop now?) goes through a gloo group on
the host and is read one step late, so that no step waits for it.
"""

import atexit
import gc
import logging
import os
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from torchllm.config import Config, Run, Training
from torchllm.config.applied_keys import applied
from torchllm.config.environment import LAUNCHED, is_restart
from torchllm.config.errors import RefusedStart, UserError
from torchllm.runtime.error_report import report_errors
from torchllm.runtime.exchange import broadcast_record, gather_texts
from torchllm.runtime.heartbeat import Limits, beat, heartbeat
from torchllm.runtime.parent import end_with_parent
from torchllm.runtime.stop import STOP, STOPPED, StopRequests, write_marker
from torchllm.runtime.terminal import drop_unwritten_output
from torchllm.runtime.tolerance import Tolerance
from torchllm.tools.launch import rank_notes
from torchllm.tools.launch.compile_cache import choose_compile_cache
from torchllm.tools.launch.descriptors import describe_low_limit, raise_descriptor_limit
from torchllm.tools.launch.hang_watch import GRACE, HangWatch
from torchllm.tools.launch.head import HeadAddress, NodeMissing, NodeWait, reach_head
from torchllm.tools.launch.lease import DONE, Claim, check_owner, release_leases, take_or_inherit
from torchllm.tools.launch.network import interface_towards
from torchllm.tools.launch.numa import bind_near_gpu
from torchllm.tools.launch.on_event import call_at_end, call_on_event
from torchllm.tools.launch.same_start import refuse_different_starts
from torchllm.tools.launch.store import LOOPBACK, HashStore, Store, connect_store, serve_loopback_store, serve_store

log = logging.getLogger(__name__)

SAVE = "save"
"""file in the run folder that asks for a checkpoint now; anybody may create it, and the run deletes it"""
SECRET_BYTES = 32
"""of the secret with which ranks sign what they leave in the store"""
FILE_SYSTEM_PATIENCE = 5.0
"""seconds; a network file system shows a new file on other nodes a moment late"""


@dataclass
class Runtime:
    """This process, its device, and its connection to the other ranks of the job."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    folder: Path
    host_group: dist.ProcessGroup
    """gloo group of all ranks, for what they agree on without their devices"""
    collect_interval: int
    """steps between two garbage collections; 0 leaves them to Python"""
    stop_requests: StopRequests
    """what has asked this rank to stop"""
    hang_watch: HangWatch | None = None
    """None in a job of one rank, which waits for nobody: its launcher watches it"""
    claim: Claim | None = None
    """proves that this job owns the run folder; rank 0's"""
    _vote: "_Vote | None" = None
    should_save: bool = False
    """whether the file `SAVE` has asked for a checkpoint, by the last `should_stop`: the same on all ranks"""
    _is_frozen: bool = False
    """later collections skip the objects that have survived the first one"""

    @property
    def is_main(self) -> bool:
        """Return whether this is rank 0, the one that logs and writes files."""
        return self.rank == 0

    @property
    def first_rank_on_node(self) -> int:
        """Return the rank of the first process on this node: torchrun numbers the processes of a node in a row."""
        return self.rank - self.local_rank

    @property
    def ranks_on_node(self) -> int:
        """Return the number of ranks on this node; all of them if no launcher says otherwise."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size))

    def should_stop(self, failed: bool = False) -> bool:
        """Return whether any rank was asked to stop, or passed `failed`, by the previous call: the same on all ranks.

        Call it once per step. It reads the vote that the previous call started and starts the next one, which runs
        beside the step, so the answer comes one step late and no step waits for it.
        """
        beat("vote on stopping")
        stop = False
        if self._vote is None:
            self.stop_requests.begin_votes()
        else:
            stop, self.should_save = self._vote.wait()
            self.stop_requests.begin_training()
            heartbeat().begin_steps()
        flags = torch.tensor([failed or self.stop_requests.requested(), self._save_requested()], dtype=torch.uint8)
        work = dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.host_group, async_op=True)
        self._vote = _Vote(flags, work)
        return stop

    def end_votes(self) -> None:
        """Wait for the vote that is under way; none may be when its process group is destroyed."""
        if self._vote is not None:
            self._vote.wait()

    def _save_requested(self) -> bool:
        """Return whether the file `SAVE` has asked rank 0 for a checkpoint since the last call; it is deleted."""
        file = self.folder / SAVE
        if not self.is_main or not file.exists():
            return False
        file.unlink()
        log.info("%s: saving at the next step boundary", file)
        return True

    def gather_texts(self, text: str | None) -> list[str | None]:
        """Return the text of every rank, by rank; all ranks must call it. It is cheap if all pass the same text.

        Mostly error texts (None: no error): bad input on one rank must end all ranks instead of leaving them waiting.
        """
        return gather_texts(text, self.host_group)

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier(group=self.host_group)

    def collect_garbage(self, step: int, saved: bool = False) -> None:
        """Run Python's cycle collector, over all generations, every `collect_interval` steps and after a save.

        All ranks collect at the same step: at different steps each rank would stall all others in turn. What survives
        the first collection (the model, the modules of Python: some 300,000 objects, 0.2 s) stays as a rule, so later
        ones look only at what came since, some thousands of objects. A save leaves ten per tensor (`torch.save`).
        """
        if not self.collect_interval:
            return
        if not saved and step % self.collect_interval != 0:
            return
        gc.collect()
        if not self._is_frozen:
            gc.freeze()
            self._is_frozen = True

    def release_memory(self) -> None:
        """Free everything that nothing uses any more, cycles of references and the GPU's cached blocks among it.

        Call it on all ranks between one model and the next: the old one is a cycle of references. Steps have the time
        limit of the start-up again, until one is taken.
        """
        heartbeat().begin("start-up")
        gc.unfreeze()
        gc.collect()
        if self.collect_interval:
            gc.freeze()  # what survives is Python's modules; the next collection freezes the new model too
            self._is_frozen = False
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def check_owner(self) -> None:
        """Raise LeaseLost on rank 0 if another job has taken the run folder; call it there before a write.

        A run that was suspended for minutes may have been taken for dead.
        """
        if self.claim is not None:
            check_owner(self.folder, self.claim)

    def mark_stopped(self, step: int) -> None:
        """Write the marker that tells run_train.sh: this run ended early on purpose, with a checkpoint of `step`."""
        self.check_owner()
        if self.is_main:
            with Tolerance(str(self.folder / STOPPED)).attempt():  # the checkpoint is there, and says as much
                write_marker(self.folder, step)

    def close(self) -> None:
        """Leave the process group. Call it on success only: after an error peers may be stuck, and waiting hangs."""
        if self.is_main:
            (self.folder / STOP).unlink(missing_ok=True)
        self.end_votes()
        if self.hang_watch is not None:
            self.hang_watch.close()
        release_leases(DONE)
        rank_notes.leave(self.rank)
        dist.destroy_process_group()
        heartbeat().close()
        drop_unwritten_output()


class _Decision(NamedTuple):
    """What a vote has decided."""

    stop: bool
    save: bool


class _Vote(NamedTuple):
    """A vote of all ranks on stopping and on saving, which goes on in the background."""

    flags: Tensor
    """(2): 1 if this rank votes for stopping, and for saving; after the vote, if any rank does"""
    work: dist.Work | None
    """None when torch has finished the reduction at once"""

    def wait(self) -> _Decision:
        """Wait for the vote and return what any rank wants."""
        if self.work is not None:
            self.work.wait()
        stop, save = self.flags.tolist()
        return _Decision(bool(stop), bool(save))


def start_runtime(run: Run, configs: Sequence[Config] = (), *, reads_only: bool = False) -> Runtime:
    """Join the job that torchrun has started, or start a job of one rank, and set this process up as `run` says.

    configs: what the job may train with. RefusedStart is raised on all ranks if they, or the code, are not the same on
    all. reads_only: the job writes nothing into the run folder, which may belong to another job. Otherwise RefusedStart
    is raised on all ranks if another job owns it. Raises UserError on all ranks if a rank lacks its device or sees
    another run folder than rank 0.
    """
    end_with_parent()
    heart = heartbeat()
    heart.open()
    heart.limits = Limits(run.start_timeout, run.timeout, run.save_timeout)
    heart.begin("start-up")
    rank = int(os.environ.get("RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0)) if world_size > 1 else 0  # else it may be left over
    report_errors(rank, local_rank)
    rank_notes.join(rank)
    is_launched = LAUNCHED in os.environ and not reads_only
    is_owned = has_launcher() or not is_launched  # a launcher starts no rank before it owns the folder
    stop_requests = StopRequests(Path(run.folder), rank, world_size, is_launched, is_owned=is_owned)
    stop_requests.listen()
    too_low = describe_low_limit(raise_descriptor_limit(), world_size)
    if rank == 0 and too_low is not None:
        log.warning("%s", too_low)
    device = torch.device("cpu")
    device_error = None
    try:
        device = choose_device(run.device, local_rank)
    except UserError as error:
        device_error = str(error)  # raised below on all ranks: raised here, it would leave the others waiting
    ownership = _Ownership()
    if rank == 0 and not reads_only:
        ownership = _own_folder(Path(run.folder))
    timeout = timedelta(seconds=max(heart.limits) + GRACE)
    store = _open_store(run, rank, timeout)
    _join_job(run, rank, world_size, store, timeout)
    _set_torch_up(run, device)
    if device.type == "cuda" or any(config.compile.compiles_anything for config in configs):
        choose_compile_cache(Path(run.folder), world_size // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    runtime = Runtime(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        device=device,
        folder=Path(run.folder),
        host_group=dist.new_group(backend="gloo", timeout=timeout),
        collect_interval=run.collect_garbage_interval,
        claim=ownership.claim,
        stop_requests=stop_requests,
    )
    beat("all ranks have joined")
    refuse_different_starts(configs, runtime.host_group)
    raise_first_error(runtime.gather_texts, ownership.refusal, RefusedStart)
    stop_requests.folder_is_owned()
    raise_first_error(runtime.gather_texts, device_error)
    device_types = runtime.gather_texts(device.type)
    if len(set(device_types)) > 1:
        blind, sighted = device_types.index("cpu"), device_types.index("cuda")
        raise UserError(f"rank {blind} sees no GPU but rank {sighted} does: fix rank {blind}'s node")
    applied("run.deterministic", run.deterministic)
    bind_near_gpu(device)
    if world_size > 1:
        first = rank - local_rank
        ranks_of_node = range(first, min(first + runtime.ranks_on_node, world_size))
        runtime.hang_watch = HangWatch(
            rank,
            world_size,
            ranks_of_node,
            runtime.folder,
            _share_secret(runtime.host_group),
            run.on_event,
        )
    if not reads_only:
        _share_folder(runtime)
        if runtime.is_main:
            _call_on_restart_and_end(run, runtime.folder)
    return runtime


def _call_on_restart_and_end(run: Run, folder: Path) -> None:
    """Call `run.on_event` if the launchers have started the job again, and at the end of one without run_train.sh."""
    if is_restart():
        call_on_event(run.on_event, "restart", folder)
    if run.on_event and LAUNCHED not in os.environ:  # run_train.sh sees the end of every job that it starts
        atexit.register(call_at_end, run.on_event, folder)


class _Ownership(NamedTuple):
    """What came of an attempt to own the run folder."""

    claim: Claim | None = None
    refusal: str | None = None
    """why the job may not start"""


def _own_folder(folder: Path) -> _Ownership:
    """Take the lease of the run folder, if this job's launcher has not; for rank 0."""
    try:
        return _Ownership(take_or_inherit(folder))
    except RefusedStart as error:
        return _Ownership(refusal=str(error))


def has_launcher() -> bool:
    """Return whether a launcher has started this rank, and not run_train.sh itself, as with one task per GPU."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _join_job(run: Run, rank: int, world_size: int, store: Store, timeout: timedelta) -> None:
    """Create the default process group: through torchrun's rendezvous, or of this process alone."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "5000")  # operations that the flight recorder keeps
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else torch 2.13's profiler prints two lines per profile
    # A gloo group connects two ranks when they first send to each other; without this each rank opens a socket to every
    # other one, in every gloo group, and asks the store for every address: at 16,384 ranks for hours.
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    if int(os.environ.get("LOCAL_WORLD_SIZE", 1)) == world_size:  # one node: no rank listens to other hosts
        loopback = "lo" if sys.platform == "linux" else "lo0"
        # Also where a cluster's modules name another interface for all jobs: gloo asks for no password.
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = loopback
    elif interface := interface_towards(os.environ.get("MASTER_ADDR", "")):  # NCCL finds its own
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    # On GPUs no group of the mesh can send a tensor on the host: what ranks agree on goes through the host group, the
    # only gloo group of a run that saves in the foreground.
    backend = "nccl" if torch.cuda.is_available() and run.device != "cpu" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def _open_store(run: Run, rank: int, timeout: timedelta) -> Store:
    """Return the store of all ranks, which the launcher serves, or rank 0 if the ranks have no launcher.

    Raises UserError if rank 0 does not come, or if it is unknown where it is.
    """
    missing = {"RANK", "MASTER_ADDR", "MASTER_PORT"} - os.environ.keys()
    if missing and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise UserError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']}, but {' and '.join(sorted(missing))} not set: start the recipe "
            "with RECIPE=... ./run_train.sh, or unset WORLD_SIZE to train on this process alone"
        )
    if missing:
        return HashStore()
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if has_launcher():
        return connect_store(address, port, timeout)
    speaks = os.environ.get("LOCAL_RANK", "0") == "0"
    wait = NodeWait(run.start_timeout, speaks=speaks)
    try:
        if rank != 0:
            reach_head(HeadAddress(address, port), wait)
            store = connect_store(address, port, timeout)
            store.set(joined_key(rank), "")
            return store
        store = serve_loopback_store(port, timeout) if address == LOOPBACK else serve_store(address, port, timeout)
        await_ranks(store, int(os.environ["WORLD_SIZE"]), wait)
        return store
    except NodeMissing as error:
        raise UserError(str(error)) from error


def joined_key(rank: int) -> str:
    """Return the key that a rank without a launcher leaves in the store of rank 0."""
    return f"joined/{rank}"


def await_ranks(store: Store, world_size: int, wait: NodeWait) -> None:
    """Wait on rank 0 until all other ranks have joined. Raises NodeMissing that names the first that has not."""
    for rank in range(1, world_size):
        while not store.check([joined_key(rank)]):
            wait.go_on(
                f"rank {rank} of {world_size} to join",
                "Does it run, and may its node reach the ports of this one? Its own output says what it waits for",
            )


def _share_secret(group: dist.ProcessGroup) -> bytes:
    """Return random bytes that all ranks know, and nobody who only reaches the job's store."""
    secret = np.frombuffer(secrets.token_bytes(SECRET_BYTES), np.uint8)
    return broadcast_record(secret, group).tobytes()


def _set_torch_up(run: Run, device: torch.device) -> None:
    """Set the seed, deterministic algorithms, matmul precision and garbage collection that `run` asks for."""
    torch.manual_seed(run.seed)
    if run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is not deterministic without it
        torch.use_deterministic_algorithms(True)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    if run.collect_garbage_interval:
        gc.disable()  # Runtime.collect_garbage does it, at the same step on all ranks
        atexit.register(gc.unfreeze)  # what stays frozen is never freed, and torch 2.15's Triton prints it as leaked


def choose_device(requested: str, local_rank: int) -> torch.device:
    """Return the device of this rank: GPU number `local_rank`, or the CPU.

    `requested` is run.device: "auto", "cuda" or "cpu". Raises UserError if that GPU does not exist, or if this machine
    has GPUs that torch cannot use.
    """
    gpu_available = torch.cuda.is_available()
    if requested == "cuda" and not gpu_available:
        raise UserError('run.device = "cuda", but torch sees no GPU here; use "auto" or "cpu"')
    if requested == "auto" and not gpu_available and has_usable_gpu():
        raise UserError(
            f"this machine has a GPU, but torch {torch.__version__} cannot use it: it is a build without CUDA, or "
            'needs a newer driver. Install the build for your driver, or set run.device = "cpu" to train on the CPU'
        )
    if requested == "cpu" or not gpu_available:
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    if local_rank >= gpus:
        raise UserError(
            f"local rank {local_rank} has no GPU of its own: it sees {gpus}. Lower NPROC, or let each Slurm task see "
            "all GPUs of its node (--gpu-bind=none)"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def has_usable_gpu(devices: Path = Path("/dev")) -> bool:
    """Return whether this process may use an NVIDIA GPU: its device file opens, and CUDA_VISIBLE_DEVICES hides not all.

    Whether torch can use it too is another question. A container has the device files of its own GPUs only, and a
    scheduler forbids opening those of others.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and (not visible.strip() or visible.strip().startswith("-")):
        return False
    for file in devices.glob("nvidia[0-9]*"):
        with suppress(OSError):
            os.close(os.open(file, os.O_RDWR))
            return True
    return False


def compute_dtype(training: Training, device: torch.device) -> torch.dtype:
    """Return the dtype to compute in: training.dtype, where "auto" is bfloat16 on a GPU and float32 on a CPU.

    float32 is float64 where that is torch's default type, as it is in a proof that tells a mistake from rounding.
    """
    name = training.dtype
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" else "float32"
    return torch.bfloat16 if name == "bfloat16" else torch.promote_types(torch.get_default_dtype(), torch.float32)


def _share_folder(runtime: Runtime) -> None:
    """Create the run folder and check that all ranks see the same one: here, not at the first checkpoint.

    Raises UserError on all ranks if it cannot be written or a node has another file system at its path.
    """
    name = f"run.folder = {str(runtime.folder)!r}"
    probe = runtime.folder / ".shared"
    error = None
    if runtime.is_main:
        try:
            runtime.folder.mkdir(parents=True, exist_ok=True)
            probe.write_text(str(os.getpid()))
        except OSError as problem:
            error = f"{name} cannot be written: {problem}"
    raise_first_error(runtime.gather_texts, error)
    # The other ranks of a node see what its first one sees.
    if runtime.local_rank == 0 and not runtime.is_main and not _appears(probe.exists):
        error = f"{name} is not the folder of rank 0: it must be on one file system for all nodes (NFS, Lustre, …)"
    raise_first_error(runtime.gather_texts, error)
    if runtime.is_main:
        probe.unlink()


def _appears(exists: Callable[[], bool], patience: float = FILE_SYSTEM_PATIENCE) -> bool:
    """Wait up to `patience` seconds for `exists` to be true; return whether it was."""
    deadline = time.monotonic() + patience
    while not exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def raise_first_error(
    gather_texts: Callable[[str | None], list[str | None]], error: str | None, kind: type[UserError] = UserError
) -> None:
    """Raise an error of `kind` on every rank if any rank has an error, with the text of the first rank that has one."""
    for rank, text in enumerate(gather_texts(error)):
        if text is not None:
            raise kind(f"rank {rank}: {text}" if rank else text)
