"""One layout of a sweep: whether it can be, its job, and what came out, as a row of measurements."""

import contextlib
import io
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
from pathlib import Path

from torchllm.config import Config
from torchllm.config.errors import UserError
from torchllm.config.inert import idle_keys
from torchllm.planner.evidence.rows import measurement_of
from torchllm.planner.search.auto import cluster_with_gpu, device, planned
from torchllm.resources import resource
from torchllm.start import load_configs

Layout = tuple[str, ...]
"""overrides of the command line"""

COLUMNS = tuple(
    word
    for words in (
        "dataset stack group model n_params layers hidden heads kv_heads ffn vocab tied_emb seq_len cluster gpu gpus",
        "dp dp_replicate dp_shard tp pp cp cp_method schedule interleave_v micro_batch grad_accum global_batch_seqs",
        "zero_stage seq_parallel act_ckpt attn_impl rmsnorm_kernel compile precision status step_time_s",
        "tokens_per_s_per_gpu peak_memory_gib mfu_pct hfu_pct note source spread_pct layout",
    )
    for word in words.split()
)
"""of a measurement (DESIGN, section 6), then two of the sweep's own: the spread of the steps, and the overrides"""

MEMORY = re.compile(
    r"OutOfMemoryError|out of memory|can't allocate memory|Cannot allocate memory|MemoryError", re.IGNORECASE
)
KILLED = re.compile(r"exitcode\s*:\s*-9|Signal 9|SIGKILL")


def resolve_layout(config: str, layout: Layout, processes: int) -> tuple[Config | None, str]:
    """The resolved config of a layout on so many ranks, or None and why it cannot be."""
    said = io.StringIO()
    before = os.environ.get("NPROC")
    os.environ["NPROC"] = str(processes)
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            # As a dry run, which speaks of ranks without being one.
            [resolved, *_] = load_configs([config, *layout, "--run.dry_run=true", "--run.folder=unused"])
    except SystemExit:
        return None, "; ".join(said.getvalue().strip().splitlines())
    finally:
        os.environ.pop("NPROC") if before is None else os.environ.update(NPROC=before)
    swept = {override.partition("=")[0] for override in layout}
    idle = [f"--{inert.key}: {inert.message}" for inert in idle_keys(resolved) if f"--{inert.key}" in swept]
    if idle:  # the same layout as without them
        return None, "; ".join(idle)
    ranks = resolved.parallel.ranks
    if ranks != processes:
        return None, f"needs {ranks} ranks, not {processes}"
    return resolved, ""


def cells_of(resolved: Config, processes: int) -> dict[str, str]:
    """The columns of a layout on this machine."""
    gpu = device()
    row = measurement_of(resolved, processes) | {"gpu": gpu or "CPU"}
    with contextlib.suppress(UserError):  # a GPU that no cluster file has
        row["cluster"] = row["cluster"] or cluster_with_gpu(gpu)
    return row


def measure_layout(
    config: str, layout: Layout, processes: int, steps: int, timeout: float, folder: Path
) -> dict[str, str]:
    """Run a layout's job in `folder`, which is deleted before and after, and say what came out."""
    row = dict.fromkeys(COLUMNS, "") | {"layout": " ".join(layout), "source": "recipes/sweep"}
    resolved, problem = resolve_layout(config, layout, processes)
    if resolved is None:
        return row | {"status": "invalid", "note": problem}
    row |= cells_of(resolved, processes)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    fixed = [f"--training.steps={steps}", "--metrics.log_interval=1", "--metrics.tensorboard=false"]
    fixed += ["--metrics.breakdown_interval=0"]
    fixed += ["--evaluate.interval=0", "--checkpoint.interval=0", "--generate.after_training=false"]
    fixed += ["--schedule.warmup_steps=0", "--schedule.decay_steps=0", f"--run.folder={folder / 'run'}"]
    command = ["bash", str(resource("run_train.sh")), config, *layout, *fixed]
    environment = {**os.environ, "NPROC": str(processes), "PYTHON": sys.executable}
    with open(folder / "log", "w") as log:
        job = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        try:
            code = job.wait(timeout)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if job.poll() is None:  # or interrupted
                _end(job)
    outcome = read_outcome(
        code, (folder / "log").read_text(errors="replace"), folder / "run" / "metrics.jsonl", timeout
    )
    shutil.rmtree(folder, ignore_errors=True)
    row |= outcome
    if row["status"] == "ok":
        seconds, training = float(row["step_time_s"]), resolved.training
        tokens = training.global_batch_size * training.sequence_length
        row["tokens_per_s_per_gpu"] = f"{tokens / seconds / processes:.6g}"
        row |= of_a_cpu(resolved, seconds) if row["gpu"] == "CPU" else {}
    return row


def of_a_cpu(resolved: Config, seconds: float) -> dict[str, str]:
    """The cells that a CPU's job cannot know as a GPU's does.

    MFU and HFU: every job measures a peak of its own, which layouts cannot be compared with; here it is that of the
    planner's cluster file. Empty where that is of another number of ranks. Memory: what a process has resident is
    Python's and torch's more than its tensors'.
    """
    of = planned(resolved)
    return {
        "mfu_pct": f"{100 * of.mfu * of.step / seconds:.2f}" if of else "",
        "hfu_pct": f"{100 * of.hfu * of.step / seconds:.2f}" if of else "",
        "peak_memory_gib": "",
    }


def _end(job: "subprocess.Popen[bytes]") -> None:
    """A job and all that it has started, as a user would: run_train.sh takes a second signal, 5 s later, for "at once".

    FOOTGUN: torchrun's ranks are in sessions of their own; if it is killed rather than asked they live on, and share
    the machine with the layouts that are measured next.
    """
    for ask, patience in ((signal.SIGTERM, 7.0), (signal.SIGTERM, 40.0), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, ask)
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(patience)
            return


def read_outcome(code: int | None, log: str, metrics: Path, timeout: float) -> dict[str, str]:
    """Status, times and peak of a job that ended with `code` (None: it did not), as cells of its row."""
    if code is None:
        return {"status": "timeout", "note": f"not done after {timeout:g} s"}
    if code != 0:
        lines = [line.strip() for line in log.splitlines() if line.strip()]
        errors = [line for line in lines if re.match(r"(\[rank\d+\]: )?[\w.]*(Error|Exception)\b", line)]
        last = (errors or lines or ["it said nothing"])[-1][:200]
        if found := MEMORY.search(log):
            return {"status": "oom", "note": next(line for line in lines if found[0] in line)[:200]}
        if KILLED.search(log) or code in (-9, 137):
            return {"status": "oom", "note": "killed by signal 9: the kernel, for want of memory, unless somebody else"}
        return {"status": "crash", "note": f"exit {code}: {last}"}
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    counted = [record for record in records if "step_seconds" in record][1:]
    if not counted:
        return {"status": "crash", "note": "no step but the first"}
    seconds = [record["step_seconds"] for record in counted]
    middle = statistics.mean(seconds)
    peak = max(record["memory_gib"] for record in counted)

    def mean(key: str) -> str:
        values = [record[key] for record in counted if record.get(key) is not None]
        return f"{100 * statistics.mean(values):.2f}" if values else ""

    return {
        "status": "ok",
        "step_time_s": f"{middle:.6g}",
        "spread_pct": f"{100 * statistics.pstdev(seconds) / middle:.1f}",
        "peak_memory_gib": f"{peak:.3f}",
        "mfu_pct": mean("mfu"),
        "hfu_pct": mean("hfu"),
    }
