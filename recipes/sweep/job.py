"""Measure one layout of a sweep: check it, run its job, and return the outcome as a row of measurements."""

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from torchllm.config import Config
from torchllm.config.errors import UserError
from torchllm.tools.config.idle import contradictions, idle_keys
from torchllm.tools.front.start import load_configs
from torchllm.tools.launch.compiler import first_gpu
from torchllm.tools.planner.calibration.rows import COLUMNS as MEASURED_COLUMNS
from torchllm.tools.planner.calibration.rows import measurement_of
from torchllm.tools.planner.search.auto import cluster_with_gpu, planned
from torchllm.tools.proof.recipe import schema_of_fork
from torchllm.tools.resources import resource

Overrides = tuple[str, ...]
"""overrides of the command line for a layout of the sweep's run, e.g. --parallel.tp=2"""

COLUMNS = (*MEASURED_COLUMNS, "live_memory_gib", "spread_pct", "layout")
"""columns of a measurement, as recipes/plan.py reads them; then live tensors, the spread of the steps, the overrides"""

MEASURING = (
    "--metrics.log_interval=1",
    "--metrics.tensorboard=false",
    "--metrics.breakdown_interval=0",
    "--evaluate.interval=0",
    "--data.stage=[]",
    "--evaluate.tasks_interval=0",
    "--checkpoint.interval=0",
    "--checkpoint.remote=",  # or a layout would go on from the one before, and the run itself from the last
    "--checkpoint.resume=auto",
    "--generate.after_training=false",
    "--schedule.warmup_steps=0",
    "--schedule.decay_steps=0",
)
"""overrides of every job: it logs each step and only trains"""

OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|out of memory|can't allocate memory|Cannot allocate memory|MemoryError", re.IGNORECASE
)
KILLED = re.compile(r"exitcode\s*:\s*-9|Signal 9|SIGKILL")
ERROR = re.compile(r"(\[rank\d+\]: )?[\w.]*(Error|Exception)\b")
NOTE_LENGTH = 200


class Resolved(NamedTuple):
    """The config of a layout with all degrees filled in, or why there is none."""

    config: Config | None
    problem: str
    """why the layout is invalid; empty if there is a config"""


@contextlib.contextmanager
def processes_on_node(processes: int) -> Iterator[None]:
    """Set NPROC, the source of the config's degrees, for the length of a `with` block."""
    original = os.environ.get("NPROC")
    os.environ["NPROC"] = str(processes)
    try:
        yield
    finally:
        if original is None:
            del os.environ["NPROC"]
        else:
            os.environ["NPROC"] = original


def resolve_layout(config: str, overrides: Overrides, processes: int) -> Resolved:
    """Return the config of a layout on this number of ranks, or why it is invalid."""
    arguments = [config, *overrides, "--run.dry_run=true", "--run.folder=unused"]  # a dry run needs not be a rank
    errors = io.StringIO()
    try:
        with (
            processes_on_node(processes),
            contextlib.redirect_stderr(errors),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            resolved = load_configs(arguments, schema_of_fork(Config), uses_epochs=True)[0]
    except SystemExit:
        return Resolved(None, "; ".join(errors.getvalue().strip().splitlines()))
    without_effect = []
    for idle in [*contradictions(resolved), *idle_keys(resolved)]:
        if any(override.startswith(f"--{idle.key}=") for override in overrides):
            without_effect.append(f"--{idle.key}: {idle.message}")
    if without_effect:  # the layout without these overrides is the same
        return Resolved(None, "; ".join(without_effect))
    ranks = resolved.parallel.ranks
    if ranks != processes:
        return Resolved(None, f"needs {ranks} ranks, not {processes}")
    return Resolved(resolved, "")


def layout_cells(config: Config, processes: int) -> dict[str, str]:
    """Return the cells that describe a layout on this machine."""
    gpu = first_gpu()
    cells = measurement_of(config, processes)
    cells["gpu"] = gpu or "CPU"
    if gpu:
        cells["rmsnorm_kernel"] = "1"  # compiled or not
    if not cells["cluster"]:
        with contextlib.suppress(UserError):  # no cluster file has this GPU
            cells["cluster"] = cluster_with_gpu(gpu)
    return cells


def measure_layout(
    config: str, overrides: Overrides, processes: int, steps: int, timeout: float, folder: Path, launcher: str = ""
) -> dict[str, str]:
    """Run a layout's job in `folder`, which is deleted before and after. Return its row, whatever the job comes to."""
    row = dict.fromkeys(COLUMNS, "")
    row["layout"] = " ".join(overrides)
    row["source"] = "recipes/sweep"
    resolved = resolve_layout(config, overrides, processes)
    if resolved.config is None:
        return row | {"status": "invalid", "note": resolved.problem}
    row |= layout_cells(resolved.config, processes)

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    run_folder = folder / "run"
    arguments = [config, *overrides, *MEASURING, f"--training.steps={steps}", f"--run.folder={run_folder}"]
    exit_status = run_job(arguments, processes, timeout, folder / "log", launcher)
    log = (folder / "log").read_text(errors="replace")
    ran = resolve_layout(str(run_folder / "config.toml"), (), processes)
    if ran.config is not None:  # it holds the job's values for keys that were "auto"
        row |= layout_cells(ran.config, processes)
    row |= read_outcome(exit_status, log, run_folder / "metrics.jsonl", timeout)
    shutil.rmtree(folder, ignore_errors=True)

    if row["status"] == "ok":
        seconds = float(row["step_time_s"])
        training = resolved.config.training
        tokens = training.global_batch_size * training.sequence_length
        row["tokens_per_s_per_gpu"] = f"{tokens / seconds / processes:.6g}"
        if row["gpu"] == "CPU":
            row |= cpu_cells(resolved.config, seconds)
    return row


def run_job(arguments: list[str], processes: int, timeout: float | None, log: Path, launcher: str = "") -> int | None:
    """Start run_train.sh and wait for it. Return its exit status, or None if it ran longer than `timeout` seconds.

    Without a timeout it may run as long as it takes. launcher: starts it on each node, with a process per GPU.
    """
    command = [*shlex.split(launcher), "bash", str(resource("run_train.sh")), *arguments]
    number = {} if launcher else {"NPROC": str(processes)}
    return run_command(command, {"PYTHON": sys.executable, **number}, timeout, log)


def run_command(command: list[str], environment: Mapping[str, str], timeout: float | None, log: Path) -> int | None:
    """Run a command with more `environment` and its output in `log`. Return its exit status, or None as `run_job`."""
    variables = {**os.environ, **environment}
    with open(log, "w") as output:
        job = subprocess.Popen(command, stdout=output, stderr=output, env=variables, start_new_session=True)
        try:
            return job.wait(timeout)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if job.poll() is None:  # after the timeout, or when this process itself is interrupted
                end_job(job)


def end_job(job: "subprocess.Popen[bytes]") -> None:
    """End a job and all that it started, as a user would: SIGQUIT tells run_train.sh "at once".

    FOOTGUN: torchrun's ranks are in other sessions. If torchrun is killed rather than asked, they live on and
    share the machine with the layouts that are measured next.
    """
    for number, patience in ((signal.SIGTERM, 7.0), (signal.SIGQUIT, 40.0), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(patience)
            return


def cpu_cells(config: Config, seconds: float) -> dict[str, str]:
    """Return the cells of a CPU's job that differ from a GPU's. `seconds`: measured step time.

    MFU and HFU: a job on a CPU has none; the peak is taken from the planner's cluster file; empty if that file
    describes another number of ranks. Memory: empty, because most of a
    process's resident memory is Python and torch, not tensors.
    """
    cells = dict.fromkeys(("mfu_pct", "hfu_pct", "peak_memory_gib", "live_memory_gib"), "")
    prediction = planned(config)
    if prediction is not None:
        scale = prediction.step / seconds  # predicted MFU times predicted step time is MFU of a step of one second
        cells["mfu_pct"] = f"{100 * prediction.mfu * scale:.2f}"
        cells["hfu_pct"] = f"{100 * prediction.hfu * scale:.2f}"
    return cells


def read_outcome(exit_status: int | None, log: str, metrics: Path, timeout: float) -> dict[str, str]:
    """Return status, step time and peak of a job as cells of its row. `exit_status`: None if the job was given up."""
    if exit_status is None:
        return {"status": "timeout", "note": f"not done after {timeout:g} s"}
    if exit_status != 0:
        return explain_failure(exit_status, log)
    if not metrics.is_file():
        return {"status": "crash", "note": "the job wrote no metrics.jsonl"}
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [record for record in records if "step_seconds" in record]
    counted = steps[1:]  # the first one allocates and compiles
    if not counted:
        return {"status": "crash", "note": "the job logged fewer than two steps"}
    seconds = [record["step_seconds"] for record in counted]
    average = statistics.mean(seconds)
    live, reserved = largest_of_records(counted, "memory_gib"), largest_of_records(counted, "memory_reserved_gib")
    return {
        "status": "ok",
        "step_time_s": f"{average:.6g}",
        "spread_pct": f"{100 * statistics.pstdev(seconds) / average:.1f}",
        "peak_memory_gib": reserved or live,  # of torchllm the planner knows reserved bytes
        "live_memory_gib": live,
        "mfu_pct": average_percent(counted, "mfu"),
        "hfu_pct": average_percent(counted, "hfu"),
    }


def largest_of_records(records: list[dict[str, float | None]], key: str) -> str:
    """Return the largest value of the records; empty if none has one."""
    values = [value for record in records if (value := record.get(key)) is not None]
    return f"{max(values):.3f}" if values else ""


def average_percent(records: list[dict[str, float | None]], key: str) -> str:
    """Return the average of a share in percent; empty if no record has it."""
    values = [value for record in records if (value := record.get(key)) is not None]
    return f"{100 * statistics.mean(values):.2f}" if values else ""


def explain_failure(exit_status: int, log: str) -> dict[str, str]:
    """Return status "oom" or "crash" of a job that failed, and the line of its log that says most."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    for line in lines:
        if OUT_OF_MEMORY.search(line):
            return {"status": "oom", "note": line[:NOTE_LENGTH]}
    if KILLED.search(log) or exit_status in (-9, 137):
        note = "killed by signal 9, most likely by the kernel's out-of-memory killer"
        return {"status": "oom", "note": note}
    errors = [line for line in lines if ERROR.match(line)]
    last = (errors or lines or ["no output"])[-1]
    return {"status": "crash", "note": f"exit status {exit_status}: {last[:NOTE_LENGTH]}"}
