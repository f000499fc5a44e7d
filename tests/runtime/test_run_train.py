"""run_train.sh: what it starts (with a stand-in for Python that only takes notes), and real runs from end to end."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.launched import SCRIPT, Started, children, clean, is_pause, without_signs_of_life
from tests.patience import until
from tests.tiny_run import DEBUG, QUIET, ROOT, SMALL, STEPS, curve, metrics
from tests.tools.launch.test_job import SLURM
from torchllm.runtime.host_limits import usable_cores
from torchllm.tools.config.load import load_config
from torchllm.tools.launch.lease import DONE

STAND_IN = """#!/usr/bin/env bash
# Answers --check, and which job this is, as Python does. Anything else it notes, and does $PRETEND.
for word; do case $word in --check | torchllm.tools.launch.job) exec {python} "$@" ;; esac; done
notes=$(mktemp -d {notes}/XXXXXX)
printf '%s\\0' "$@" >"$notes/words"
env -0 >"$notes/environment"
eval "${{PRETEND:-}}"
"""


class Call(NamedTuple):
    words: list[str]
    environment: dict[str, str]


class Notes:
    """What run_train.sh started, according to the stand-in for Python."""

    def __init__(self, done: subprocess.CompletedProcess[str], folder: Path) -> None:
        self.status = done.returncode
        self.out = done.stdout
        self.err = without_signs_of_life(done.stderr)
        self.calls: list[Call] = []
        for note in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns):
            words = (note / "words").read_text().split("\0")[:-1]
            variables = (note / "environment").read_text().split("\0")[:-1]
            environment = dict(variable.split("=", 1) for variable in variables)
            self.calls.append(Call(words, environment))
            shutil.rmtree(note)

    @property
    def torchrun(self) -> list[str]:
        """The arguments of the only torchrun, but for --stop-file, after which at most a sample was made."""
        torchrun, *samples = self.calls
        assert all(sample.words[0].endswith("/generate.py") for sample in samples)
        assert torchrun.words[:3] == ["-P", "-m", "torchllm.tools.launch.launch"]
        return [word for word in torchrun.words[3:] if not word.startswith("--stop-file=")]


@pytest.fixture
def noted(tmp_path: Path) -> Callable[..., Notes]:
    notes, tools = tmp_path / "notes", tmp_path / "tools"
    notes.mkdir()
    tools.mkdir()

    def tool(name: str, text: str) -> str:
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
        return str(tools / name)

    python = tool("python-stand-in", STAND_IN.format(python=sys.executable, notes=notes))

    def run(*arguments: str, **environment: str) -> Notes:
        everything = clean({"PYTHON": python, **environment})
        done = subprocess.run([SCRIPT, *arguments], cwd=ROOT, env=everything, capture_output=True, text=True)
        return Notes(done, notes)

    return run


# ---- what it starts


def test_the_script_is_clean() -> None:
    if not shutil.which("shellcheck"):
        pytest.skip("shellcheck is not installed")
    done = subprocess.run(["shellcheck", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


SAMPLE = "a sample of the last checkpoint:\n"


def test_without_an_argument_it_starts_the_debug_run_on_two_processes(noted: Callable[..., Notes]) -> None:
    notes = noted()
    *launch, config, folder = notes.torchrun
    assert launch[:2] == ["--nproc-per-node=2", "--restarts=0"]
    assert launch[3:] == ["--start-timeout=1800", f"{ROOT}/recipes/pretrain.py"]
    assert config == f"{ROOT}/{DEBUG}"
    assert re.fullmatch(r"--run\.folder=runs/debug-[\w-]+", folder)
    assert notes.status == 0
    assert notes.err == f"global batch 16 sequences = 2 data ranks x 2 micro batch x 4 accumulated\n{SAMPLE}"
    assert notes.out == ""


def test_threads_and_the_allocator_of_gpus(noted: Callable[..., Notes]) -> None:
    four = noted(NPROC="4", PYTORCH_ALLOC_CONF="")
    assert four.torchrun[0] == "--nproc-per-node=4"
    environment = four.calls[0].environment
    assert environment["OMP_NUM_THREADS"] == str(max(1, usable_cores() // 4))
    assert environment["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):  # the second is the name of older versions
        environment = noted(DEBUG, **{name: "max_split_size_mb:128"}).calls[0].environment
        assert environment[name] == "max_split_size_mb:128"
        assert "expandable_segments" not in environment.get("PYTORCH_ALLOC_CONF", "")


def test_more_processes_than_divide_the_batch_are_lowered_and_it_is_said(noted: Callable[..., Notes]) -> None:
    notes = noted("--training.steps=99", NPROC="3")
    assert notes.torchrun[0] == "--nproc-per-node=2"
    assert notes.torchrun[5:7] == [f"{ROOT}/{DEBUG}", "--training.steps=99"]  # which is of the debug run, too
    assert "3 processes cannot share the batch of 16 sequences: starting 2" in notes.err.splitlines()


def test_what_is_wrong_is_said_before_anything_is_started(noted: Callable[..., Notes]) -> None:
    """The variables of jobs that are refused are in tests/tools/launch/test_job.py."""
    for arguments, environment, line in (
        (["--training.stps=5"], {"LOCAL_RANK": "1"}, "--training.stps: unknown key; did you mean training.steps?"),
        ([], {"RECIPE": "recipes/none.py"}, "run_train.sh: RECIPE=recipes/none.py: no such file"),
        ([], {"NNODES": "2"}, "PET_MASTER_ADDR and PET_MASTER_PORT, torchrun's own variables, on every node"),
        ([], {"PYTHON": "/no/python"}, "/no/python: no such program; set PYTHON to the interpreter that has torchllm"),
        ([], {"SLURM_STEP_ID": "0"}, "the scheduler's variable SLURM_JOB_ID is not set, others of it are"),
    ):
        notes = noted(*arguments, **environment)
        assert (notes.status, notes.calls, notes.out) == (2, [], "")
        assert any(found.endswith(line) for found in notes.err.splitlines())
        assert "Traceback" not in notes.err


def test_a_start_from_elsewhere(noted: Callable[..., Notes], tmp_path: Path) -> None:
    folder = "--run.folder=Zürich"
    notes = noted(DEBUG, folder, TMPDIR="/nowhere/tmp", CDPATH=str(tmp_path), PYTHONIOENCODING="ascii")
    assert notes.status == 0
    assert folder in notes.torchrun
    assert notes.err.startswith("TMPDIR=/nowhere/tmp is no folder that can be written: using /tmp\n")
    assert notes.torchrun[4] == f"{ROOT}/recipes/pretrain.py"
    environment = clean({"PYTHON": str(tmp_path / "tools/python-stand-in")})
    script = 'cd "$1" && exec "$0" "$2" <&- >&- 2>&-'
    (tmp_path / "link").symlink_to(SCRIPT)
    closed = subprocess.run(["bash", "-c", script, str(tmp_path / "link"), str(ROOT), DEBUG], env=environment)
    assert closed.returncode == 0
    last = max((tmp_path / "notes").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    assert f"{ROOT}/recipes/generate.py" in (last / "words").read_text()


def test_help_and_check_start_nothing(noted: Callable[..., Notes]) -> None:
    notes = noted(DEBUG, "--check", "--run.folder=runs/a=b=")
    assert (notes.status, notes.calls) == (0, [])
    assert notes.out == "NPROC=2\nRUN_FOLDER=runs/a=b=\nSAMPLE=1\nSTART_TIMEOUT=1800\n"
    # The stand-in only knows --check: that --help reached the recipe is enough here.
    assert [call.words[-2:] for call in noted(DEBUG, "--help").calls] == [[DEBUG, "--help"]]


def test_a_dry_run_is_one_process_of_any_layout(noted: Callable[..., Notes]) -> None:
    dry_run = [DEBUG, "--run.dry_run=true", "--training.micro_batch_size=1"]
    for arguments, environment, processes in (
        (["--parallel.dp_shard=16"], {}, "16"),  # not the default of the script, which is said to be one
        ([], {"NPROC": "8", "NNODES": "2"}, "8"),
    ):
        notes = noted(*dry_run, *arguments, **environment)
        assert notes.status == 0
        assert notes.err == "global batch 16 sequences = 16 data ranks x 1 micro batch x 1 accumulated\n"
        (recipe,) = notes.calls  # no torchrun
        assert recipe.words == [f"{ROOT}/recipes/pretrain.py", *dry_run, *arguments]
        assert recipe.environment["NPROC"] == processes
        assert ("NPROC_IS_DEFAULT" in recipe.environment) == (not environment)
        assert not {"WORLD_SIZE", "RANK"} & recipe.environment.keys()
    assert noted(*dry_run, "--parallel.dp_shard=16", **SLURM).calls == []  # of the second node
    assert not (ROOT / "runs" / "debug").exists()


FIRST_TASK = SLURM | {"SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_NNODES": "4"}
"""of a step that runs on two nodes of a job of four"""


def test_slurm_with_one_task_a_node(noted: Callable[..., Notes]) -> None:
    """Another node says nothing, as under Kubernetes."""
    notes = noted(DEBUG, NPROC="4", **FIRST_TASK)
    assert notes.status == 0
    assert notes.torchrun == [
        "--nproc-per-node=4",
        "--nnodes=2",
        "--rdzv-endpoint=node1:0",
        "--node-rank=0",
        "--rdzv-id=70123.0.0",
        "--restarts=3",
        "--run-folder=runs/debug-70123",
        "--start-timeout=1800",
        f"{ROOT}/recipes/pretrain.py",
        DEBUG,
        "--run.folder=runs/debug-70123",
    ]
    assert notes.err == f"global batch 16 sequences = 8 data ranks x 2 micro batch x 1 accumulated\n{SAMPLE}"


def test_slurm_with_one_task_a_gpu(noted: Callable[..., Notes]) -> None:
    tasks = FIRST_TASK | {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}
    notes = noted(DEBUG, NPROC="2", **tasks)
    words, environment = notes.calls[0]
    assert words == [f"{ROOT}/recipes/pretrain.py", DEBUG, "--run.folder=runs/debug-70123"]
    expected = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "MASTER_ADDR": "node1", "MASTER_PORT": "30123"}
    assert expected.items() <= environment.items()
    line = "one task per GPU: no rank is started again in the job; after a failure let Slurm start it again "
    line += "(--requeue, srun --kill-on-bad-exit=1)\n"
    host = os.uname().nodename
    starting = f"starting {ROOT}/recipes/pretrain.py on 4 processes, this node is {host}: importing torch\n"
    first = f"global batch 16 sequences = 4 data ranks x 2 micro batch x 2 accumulated\n{starting}{line}{SAMPLE}"
    assert notes.err == first


def test_how_often_a_job_is_started_again(noted: Callable[..., Notes]) -> None:
    folder = "--run.folder=runs/a"
    notes = noted(DEBUG, folder, "--run.restarts=5", "--run.on_event=true")
    assert {"--restarts=5", "--run-folder=runs/a", "--on-event=true"} <= {*notes.calls[0].words}
    assert "--restarts=3" not in noted(DEBUG, folder, "--run.restarts=0", **POD).torchrun


def test_slurm_with_more_tasks_than_share_the_batch(noted: Callable[..., Notes]) -> None:
    """Of three tasks on a node, two train (run.lower_ranks)."""
    tasks = SLURM | {"SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_TASKS_PER_NODE": "3(x2)"}
    for local, number, is_rank in (("1", "4", True), ("2", "5", False)):
        notes = noted(DEBUG, **tasks | {"SLURM_PROCID": number, "SLURM_LOCALID": local})
        assert (notes.status, notes.err, len(notes.calls)) == (0, "", is_rank)
        if is_rank:
            expected = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
            assert expected.items() <= notes.calls[0].environment.items()


POD = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "4",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "run-master-0",
    "PET_MASTER_PORT": "23456",
    "RANK": "1",
    "WORLD_SIZE": "2",
}


def test_kubernetes(noted: Callable[..., Notes]) -> None:
    notes = noted(DEBUG, "--run.folder=/shared/run", **POD)
    expected = [
        "--nproc-per-node=4",
        "--nnodes=2",
        "--rdzv-endpoint=run-master-0:23456",
        "--node-rank=1",
        "--restarts=3",
        "--run-folder=/shared/run",
        "--start-timeout=1800",
    ]
    assert notes.torchrun == [*expected, f"{ROOT}/recipes/pretrain.py", DEBUG, "--run.folder=/shared/run"]
    assert not {"RANK", "WORLD_SIZE"} & notes.calls[0].environment.keys()  # the pod's numbers are no rank's
    assert (notes.status, notes.err) == (0, "")
    one_node = POD | {"PET_NNODES": "1", "PET_NODE_RANK": "0"}
    assert noted(DEBUG, **one_node).torchrun[:2] == ["--nproc-per-node=4", "--restarts=3"]


OWN_FOLDER = (
    'mkdir -p "$TORCHLLM_TAKE_LEASE/lease"; '
    """echo "{\\"launched\\": \\"$TORCHLLM_LAUNCHED\\"}" >"$TORCHLLM_TAKE_LEASE/lease/000001" """
)
"""what the launcher of node 0 does first, as far as run_train.sh sees it"""


def test_how_it_ends(noted: Callable[..., Notes], tmp_path: Path) -> None:
    folder = tmp_path / "a run $(of sorts)"  # each printed command can be pasted
    arguments = [DEBUG, f"--run.folder={folder}"]
    quoted = shlex.quote(str(folder))
    sampler = [f"{ROOT}/recipes/generate.py", f"{folder}/config.toml", "--checkpoint.resume=auto"]
    folder.mkdir()
    (folder / "stopped.json").touch()  # another job's: must not turn this one's failure into success
    (folder / "stop").touch()
    failed = noted(*arguments, PRETEND="exit 7")
    assert (failed.status, len(failed.calls)) == (7, 1)
    assert (folder / "stop").exists()
    refused = noted(*arguments, PRETEND="exit 2", **POD)
    assert refused.status == 2
    done = noted(*arguments)
    assert done.status == 0
    assert [call.words for call in done.calls[1:]] == [sampler]
    assert len(noted(*arguments, "--generate.after_training=false").calls) == 1
    failed = noted(*arguments, PRETEND=f'[ "$1" != {sampler[0]} ] || exit 5')
    assert failed.status == 5
    stopped = noted(*arguments, PRETEND=f"{OWN_FOLDER}; touch {quoted}/stopped.json; exit 1")
    assert (stopped.status, len(stopped.calls)) == (0, 1)
    told, _, command = stopped.out.partition("--")
    assert told == "stopped early, with a checkpoint; to continue, run the same command with "
    pasted = subprocess.run(["bash", "-c", f"printf %s {command.strip()}"], capture_output=True, text=True)
    assert pasted.stdout == f"run.folder={folder}"
    starting = f"""{OWN_FOLDER}; echo '{{"step": null}}' >{quoted}/stopped.json"""
    stopped = noted(*arguments, "--run.stopped_exit_status=75", PRETEND=starting)
    assert (stopped.status, len(stopped.calls)) == (75, 1)
    assert stopped.out.startswith("stopped early, with no checkpoint: the next start begins at step 1; to continue")
    (folder / "checkpoints/step-00000002").mkdir(parents=True)
    (folder / "checkpoints/step-00000002/manifest.json").touch()
    stopped = noted(*arguments, PRETEND=starting)
    assert stopped.out.startswith("stopped early, in the start-up, with an earlier checkpoint; to continue")


def test_a_slow_start_says_what_starts(tmp_path: Path, start: Callable[..., Started]) -> None:
    """Python, and then torch, are read from a disk that answers when the line has been printed."""
    pipe = tmp_path / "disk"
    os.mkfifo(pipe)
    slow_python = tmp_path / "python"
    slow_python.write_text(
        f'#!/bin/sh\ncase "$*" in *launch.job*) read line <{pipe} ;; esac\nexec {sys.executable} "$@"\n'
    )
    slow_python.chmod(0o755)
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text(f"open({str(pipe)!r}).read()\nraise ImportError('it has been read')\n")
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', ROOT)}"
    run = start(DEBUG, *QUIET, f"--run.folder={tmp_path}/run", PYTHON=str(slow_python), PYTHONPATH=path, NPROC="1")
    run.until(
        lambda: re.search(rf"starting {ROOT}/recipes/pretrain.py, reading its config: \d+ s", run.err.read_text())
    )
    pipe.write_text("go on\n")
    run.until(lambda: "pretrain.py on 1 process, this node is" in run.err.read_text())
    pipe.write_text("")
    assert run.wait() == 1
    assert "it has been read" in run.err.read_text()


def until_heard(run: Started) -> None:
    """Wait until run_train.sh waits for what it has started, and has done what earlier signals ask for."""

    def pauses() -> set[int]:
        return {child for child in children(run.process.pid) if is_pause(child)}

    for _ in range(2):  # it does so after a pause; the first new one may have begun as the signal came
        earlier = pauses()
        run.until(lambda earlier=earlier: pauses() - earlier)


@pytest.fixture
def pretended(noted: Callable[..., Notes], start: Callable[..., Started], tmp_path: Path) -> Callable[..., Started]:
    """Starts run_train.sh in the background, and waits until it waits for a stand-in that does `pretend`."""

    def begin(pretend: str, **environment: str) -> Started:
        stand_in = str(tmp_path / "tools/python-stand-in")
        run = start(DEBUG, f"--run.folder={tmp_path}/run", PYTHON=stand_in, PRETEND=pretend, **environment)
        run.until(lambda: any((tmp_path / "notes").glob("*/environment")))
        until_heard(run)
        return run

    return begin


def test_a_node_that_waits_for_node_0_is_asked_by_a_file_of_its_own(
    pretended: Callable[..., Started], tmp_path: Path
) -> None:
    """The run folder may hold a request to an earlier job until node 0 owns it."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/stop").touch()
    find = 'for word; do case $word in --stop-file=*) file=${word#*=} ;; esac; done; [ ! -e "$file" ] || exit 1'
    begun = tmp_path / "begun"
    run = pretended(f'{find}; touch {begun}; while [ ! -e "$file" ]; do sleep 0.05; done; exit 3', **POD)
    until(begun.exists)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 0


def test_a_signal_to_a_job_that_waits_for_the_folder_does_not_stop_its_owner(
    pretended: Callable[..., Started], tmp_path: Path
) -> None:
    (tmp_path / "run/lease").mkdir(parents=True)
    (tmp_path / "run/lease/000001").write_text('{"launched": "1.0"}')
    run = pretended("exec tail -f /dev/null")
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 128 + signal.SIGINT
    assert not (tmp_path / "run/stop").exists()


@pytest.mark.exhaustive
def test_only_a_second_interrupt_ends_everything_at_once(pretended: Callable[..., Started], tmp_path: Path) -> None:
    # As torchrun does: a shell makes its background processes ignore SIGQUIT, which the process then undoes.
    pretend = f'exec {sys.executable} -c "import signal as s; s.signal(s.SIGQUIT, s.SIG_DFL); s.pause()"'
    run = pretended(f"{OWN_FOLDER}; {pretend}")
    asking = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP]
    for number in [*asking, signal.SIGINT]:
        run.process.send_signal(number)
        until_heard(run)
    assert (tmp_path / "run/stop").exists()
    time.sleep(6.0)  # for so long an interrupt is the first one again
    for number in asking[1:]:
        run.process.send_signal(number)
        until_heard(run)
    assert run.process.poll() is None
    assert run.err.read_text().count("stopping: the ranks save at the next step boundary") == 1
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 128 + signal.SIGQUIT


def test_signals_to_all_processes_at_once_are_one_request(
    noted: Callable[..., Notes], start: Callable[..., Started], tmp_path: Path
) -> None:
    """As Slurm sends them: programs that run_train.sh starts get them too, and the last ones come as the job ends.

    A run_train.sh that calls bash's `wait` while signals arrive fails one attempt in six.
    """
    stand_in, folder = str(tmp_path / "tools/python-stand-in"), tmp_path / "run"
    pretend = f"until [ -e {folder}/end ]; do sleep 0.1; done; exit 3"
    run = start(DEBUG, f"--run.folder={folder}", PYTHON=stand_in, PRETEND=f"{OWN_FOLDER}; {pretend}")
    lease = folder / "lease/000001"
    run.until(lambda: lease.exists() and lease.read_text())
    for number in range(20000):
        if run.process.poll() is not None:
            break
        if number == 2000:
            run.until((folder / "stop").exists)
            (folder / "end").touch()
        os.killpg(run.process.pid, signal.SIGTERM)
        time.sleep(0.0003)
    assert "before anything was started" not in run.err.read_text()
    assert run.wait() == 3, run.err.read_text()


# ---- real runs


def test_the_main_job(start: Callable[..., Started], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Smaller and shorter."""
    folder = tmp_path / "run"
    whole = start(DEBUG, *SMALL, f"--run.folder={folder}")
    assert whole.wait() == 0, whole.err.read_text()
    lines = whole.out.read_text().splitlines()
    for number, line in enumerate(lines[:STEPS], start=1):
        evaluated = r"validation [\d.]+  [\d.]+ bits/byte  " if number in (4, 8) else ""
        record = rf"step {number}/{STEPS}  loss [\d.]+  {evaluated}gradient .* left \d+:\d\d:\d\d"
        assert re.fullmatch(record, line), line
    assert lines[STEPS] == f"--- step {STEPS}, up to 20 tokens at temperature 0.8 ---"
    assert lines[STEPS + 1].startswith("def ")

    errors = without_signs_of_life(whole.err.read_text()).splitlines()
    assert errors[0] == "global batch 16 sequences = 2 data ranks x 2 micro batch x 4 accumulated"
    assert f"no checkpoint in {folder}/checkpoints: starting fresh" in errors
    assert f"saved {folder}/checkpoints/step-00000008" in errors
    assert errors[-4:] == [
        "a sample of the last checkpoint:",
        f"the run is in {folder}; next, for example:",
        f"  tensorboard --logdir {folder}/tensorboard",
        f"  torchllm generate {folder}",
    ]
    assert (folder / "sample.txt").read_text().splitlines() == lines[STEPS:]
    assert len(errors) == len(set(errors))  # one rank speaks
    assert not [line for line in errors if re.search(r"rank 1:|Warning|Traceback|W\d{4}", line)]

    records = metrics(folder)
    keys = "step loss grad_norm learning_rate tokens tokens_per_second step_seconds data_seconds mfu hfu memory_gib"
    assert all(set(keys.split()) <= record.keys() for record in records)
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert [record["tokens"] for record in records] == [16 * 32 * n for n in range(1, STEPS + 1)]
    assert [record["step"] for record in records if "validation_loss" in record] == [4, 8]
    assert 5.4 < records[0]["loss"] < 5.75  # ln(264) = 5.58
    assert records[-1]["loss"] < records[0]["loss"] - 0.3
    assert records[-1]["validation_loss"] < records[3]["validation_loss"] < 5.4
    assert {record["mfu"] for record in records} == {None}  # of a CPU

    assert [path.name for path in sorted(folder.glob("checkpoints/*"))] == ["step-00000004", "step-00000008"]
    assert list(folder.glob("tensorboard/events.*"))
    files = {"config.toml", "metrics.jsonl", "goodput.json", "sample.txt"}
    assert {path.name for path in folder.iterdir()} == files | {"tensorboard", "checkpoints", "lease"}
    assert [DONE in file.read_text() for file in folder.glob("lease/*")] == [True]  # for nodes that wait
    monkeypatch.setenv("WORLD_SIZE", "2")
    decided = ["--compile.block=false", "--compile.loss=false"]  # what "auto" is on a CPU
    expected = load_config([DEBUG, *SMALL, *decided, f"--run.folder={folder}"])
    assert load_config([str(folder / "config.toml")]) == expected


FORK = """
import os, sys
from dataclasses import dataclass, field
from torchllm.config import Config
from torchllm.tools.front.start import load_configs

@dataclass(frozen=True)
class Probe:
    crash_rank: int = -1

@dataclass(frozen=True)
class ForkConfig(Config):
    probe: Probe = field(default_factory=Probe)

if __name__ == "__main__":
    CONFIGS = load_configs(sys.argv[1:], ForkConfig)
    import torchllm.runtime.error_report
    from recipes import pretrain

    class Step(pretrain.TrainStep):
        def __call__(self, step, batches):
            if step == 2 and int(os.environ["RANK"]) == CONFIGS[0].probe.crash_rank:
                raise RuntimeError("the probe")
            return super().__call__(step, batches)

    pretrain.TrainStep = Step
    # Peers wait for the launcher to end them; a loaded machine may need longer than the usual seconds.
    torchllm.runtime.error_report.OTHERS_WAIT = 50.0
    pretrain.main(*CONFIGS)
"""


@pytest.fixture
def fork(tmp_path: Path) -> Path:
    """A recipe with a section of its own, that can crash on a rank."""
    (tmp_path / "mine.py").write_text(FORK)
    return tmp_path / "mine.py"


def test_a_forked_recipe_has_a_section_of_its_own(noted: Callable[..., Notes], fork: Path) -> None:
    wrong = noted(DEBUG, "--probe.crash_rnk=1", RECIPE=str(fork))
    assert (wrong.status, wrong.calls) == (2, [])
    assert wrong.err == "--probe.crash_rnk: unknown key; did you mean probe.crash_rank?\n"
    right = noted(DEBUG, "--probe.crash_rank=1", RECIPE=str(fork))
    assert right.torchrun[4:7] == [str(fork), DEBUG, "--probe.crash_rank=1"]


@pytest.mark.exhaustive
def test_a_forked_recipe_that_crashes_on_one_rank_says_so_once(
    start: Callable[..., Started], fork: Path, tmp_path: Path
) -> None:
    run = start(DEBUG, *SMALL, *QUIET, "--probe.crash_rank=1", f"--run.folder={tmp_path / 'run'}", RECIPE=str(fork))
    assert run.wait() == 1  # in less than `PATIENCE`: no waiting for collectives that never come
    errors = run.err.read_text()
    assert "rank 1: failed:\nTraceback" in errors
    assert "RuntimeError: the probe" in errors
    lines = [line for line in errors.splitlines() if not line.startswith("SIGTERM: ")]  # to a peer that is slow to end
    assert lines[-1] == "RuntimeError: the probe"  # what it does to its peers is folded away
    assert errors.count("Traceback") == 1
    assert "terminate called" not in errors
    assert "crash_rank = 1" in (tmp_path / "run/config.toml").read_text()
    assert [step[0] for step in curve(tmp_path / "run")] == [1]
