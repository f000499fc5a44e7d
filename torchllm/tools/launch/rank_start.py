"""Start of a training process: its rank, device, seeds, signals, and the run folder that all ranks share."""

import atexit
import gc
import logging
import os
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from torchllm.config import Config, Run
from torchllm.config.applied_keys import applied
from torchllm.config.environment import LAUNCHED, is_restart
from torchllm.config.errors import RefusedStart, UserError
from torchllm.runtime.device import choose_device
from torchllm.runtime.error_report import report_errors
from torchllm.runtime.heartbeat import GROUP_GRACE, Timeouts, beat, heartbeat
from torchllm.runtime.process import Hooks, Runtime
from torchllm.runtime.torch_compat import one_thread_of_gloo
from torchllm.tools.launch import launcher_notes
from torchllm.tools.launch.descriptors import describe_low_limit, raise_descriptor_limit
from torchllm.tools.launch.lease import DONE, check_owner, inherited_claim, release_leases
from torchllm.tools.launch.process_tree import end_with_parent
from torchllm.tools.launch.stop_requests import StopRequests
from torchllm.tools.launch.store import HashStore, Store, has_launcher, join_store

if TYPE_CHECKING:
    from torchllm.tools.launch.hang_watch import HangWatch
    from torchllm.tools.launch.head import NodeWait

log = logging.getLogger(__name__)

SECRET_BYTES = 32
"""length of the secret for signing entries in the store"""
FILE_SYSTEM_PATIENCE = 5.0
"""seconds; a network file system shows a new file on other nodes a moment late"""


@dataclass(kw_only=True)
class LaunchHooks(Hooks):
    """Watches over the run folder's owner and over hangs; leaves the job at its end."""

    rank: int
    hang_watch: "HangWatch | None" = None
    """None in a job of one rank, which waits for no other one: its launcher watches it"""

    def end(self) -> None:
        if self.hang_watch is not None:
            self.hang_watch.close()
        release_leases(DONE)
        launcher_notes.leave(self.rank)


def start_runtime(run: Run, configs: Sequence[Config] = (), *, reads_only: bool = False) -> Runtime:
    """Join the job that a launcher has started, or start a job of one rank, and set this process up as `run` says.

    configs: the configs that the job may train with. RefusedStart is raised on all ranks if they, or the code, differ
    between ranks. reads_only: the job writes nothing into the run folder, which may belong to another job. Otherwise
    RefusedStart is raised on all ranks if another job owns it. Raises UserError on all ranks if a rank lacks its device
    or sees another run folder than rank 0.
    """
    end_with_parent()
    heart = heartbeat()
    heart.open()
    heart.timeouts = Timeouts(run.start_timeout, run.timeout, run.save_timeout)
    heart.begin("start-up")
    rank = int(os.environ.get("RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0)) if world_size > 1 else 0  # else it may be left over
    report_errors(rank, local_rank)
    launcher_notes.join(rank)
    is_launched = LAUNCHED in os.environ and not reads_only
    is_owned = has_launcher() or not is_launched  # a launcher starts no rank before it owns the folder
    leave = partial(launcher_notes.leave, rank)
    stop_requests = StopRequests(Path(run.folder), rank, world_size, is_launched, is_owned=is_owned, leave=leave)
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
    claim = refusal = None
    if rank == 0 and not reads_only:
        try:
            claim = inherited_claim(Path(run.folder))
            if claim is None:
                from torchllm.tools.launch.take_lease import take_lease  # most launchers have taken it

                claim = take_lease(Path(run.folder)).claim
        except RefusedStart as error:
            refusal = str(error)  # raised below, as above
    timeout = timedelta(seconds=max(heart.timeouts) + GROUP_GRACE)
    store = _open_store(run, rank, timeout)
    _join_job(run, rank, world_size, store, timeout)
    _set_torch_up(run, device)
    if device.type == "cuda" or any(config.compile.compiles_anything for config in configs):
        from torchllm.tools.launch.compile_cache import choose_compile_cache

        choose_compile_cache(Path(run.folder), world_size // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    hooks = LaunchHooks(rank=rank)
    if claim is not None:  # of rank 0: a run that was suspended for minutes may have been taken for dead
        hooks.check_owner = partial(check_owner, Path(run.folder), claim)
    runtime = Runtime(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        device=device,
        folder=Path(run.folder),
        host_group=dist.new_group(backend="gloo", timeout=timeout),
        collect_interval=run.collect_garbage_interval,
        stop_requests=stop_requests,
        hooks=hooks,
    )
    beat("all ranks have joined")
    if world_size > 1:
        from torchllm.tools.launch.same_start import refuse_different_starts

        refuse_different_starts(configs, runtime.host_group)
    raise_first_error(runtime.gather_texts, refusal, RefusedStart)
    stop_requests.folder_is_owned()
    raise_first_error(runtime.gather_texts, device_error)
    device_types = runtime.gather_texts(device.type)
    if len(set(device_types)) > 1:
        blind, sighted = device_types.index("cpu"), device_types.index("cuda")
        raise UserError(f"rank {blind} sees no GPU but rank {sighted} does: fix rank {blind}'s node")
    applied("run.deterministic", run.deterministic)
    if device.type == "cuda":
        from torchllm.tools.launch.numa import bind_near_gpu

        bind_near_gpu(device)
    if world_size > 1:
        from torchllm.tools.launch.hang_watch import HangWatch

        first = rank - local_rank
        ranks_of_node = range(first, min(first + runtime.ranks_on_node, world_size))
        hooks.hang_watch = HangWatch(
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
    if not run.on_event:
        return
    from torchllm.tools.launch.on_event import call_at_end, call_on_event

    if is_restart():
        call_on_event(run.on_event, "restart", folder)
    if LAUNCHED not in os.environ:  # run_train.sh sees the end of every job that it starts
        atexit.register(call_at_end, run.on_event, folder)


def _join_job(run: Run, rank: int, world_size: int, store: Store, timeout: timedelta) -> None:
    """Create the default process group: of all ranks, or of this process alone."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "5000")  # operations that the flight recorder keeps
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else torch 2.13's profiler prints two lines per profile
    # A gloo group connects two ranks when they first send to each other; without this each rank opens a socket to every
    # other one, in every gloo group, and asks the store for every address: at 16,384 ranks for hours.
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    if int(os.environ.get("LOCAL_WORLD_SIZE", 1)) == world_size:  # one node: no rank listens to other hosts
        loopback = "lo" if sys.platform == "linux" else "lo0"
        # Also where a cluster's modules name another interface for all jobs: gloo asks for no password.
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = loopback
    else:
        from torchllm.tools.launch.network import interface_towards

        if interface := interface_towards(os.environ.get("MASTER_ADDR", "")):  # NCCL finds its own
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    # On GPUs no group of the mesh can send a tensor on the host: ranks exchange metadata through the host group, the
    # only gloo group of a run that saves in the foreground.
    backend = "nccl" if torch.cuda.is_available() and run.device != "cpu" else one_thread_of_gloo()
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
    if has_launcher():
        return join_store(timeout)
    from torchllm.tools.launch.head import HeadAddress, NodeMissing, NodeWait, reach_head  # launchers wait otherwise
    from torchllm.tools.launch.job import read_port
    from torchllm.tools.launch.store import LOOPBACK, connect_store, serve_loopback_store, serve_store

    address, port = os.environ["MASTER_ADDR"], read_port(os.environ, "MASTER_PORT", 0)
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


def await_ranks(store: Store, world_size: int, wait: "NodeWait") -> None:
    """Wait on rank 0 until all other ranks have joined. Raises NodeMissing that names the first that has not."""
    for rank in range(1, world_size):
        while not store.check([joined_key(rank)]):
            wait.go_on(
                f"rank {rank} of {world_size} to join",
                "Does it run, and may its node reach the ports of this one? Its output names the reason",
            )


def _share_secret(group: dist.ProcessGroup) -> bytes:
    """Return random bytes that all ranks know, but not a stranger who reaches the job's store."""
    secret = torch.frombuffer(bytearray(secrets.token_bytes(SECRET_BYTES)), dtype=torch.uint8)
    dist.broadcast(secret, group=group, group_src=0)
    return secret.numpy().tobytes()


def _set_torch_up(run: Run, device: torch.device) -> None:
    """Set the seed, deterministic algorithms, matmul precision and garbage collection that `run` asks for."""
    torch.manual_seed(run.seed)
    if run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is not deterministic without it
        torch.use_deterministic_algorithms(True)
        torch.backends.cuda.enable_cudnn_sdp(False)  # torch 2.15's varlen attention would take it all the same
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    if run.collect_garbage_interval:
        gc.disable()  # Runtime.collect_garbage does it, at the same step on all ranks
        atexit.register(gc.unfreeze)  # frozen objects are never freed, and torch 2.15's Triton prints them as leaked


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
    # One check per node is enough: its ranks share a file system.
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
