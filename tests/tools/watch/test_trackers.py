"""Experiment trackers: what they are sent, on libraries that write their calls down, and on the real ones."""

import importlib
import importlib.util
import json
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.launched import ends
from tests.patience import patience, text_with, until
from tests.tiny_run import DEBUG, ROOT, SMALL, changed, metrics
from torchllm.config import Config, Metrics, Run, write_config
from torchllm.metrics.sinks import JsonLines, Record
from torchllm.tools.config.by_key import values_by_key
from torchllm.tools.front.preflight import inspect_training
from torchllm.tools.watch import trackers
from torchllm.tools.watch.send_records import Sender, main
from torchllm.tools.watch.trackers import TrackerHelper, count_unsent

TRACKERS = ["wandb", "mlflow", "trackio"]
FAKES = Path(__file__).parent / "fake_trackers"
MODULES = ("wandb", "mlflow", "mlflow.entities", "mlflow.tracking", "trackio", "calls")
Calls = list[list[Any]]


def record(step: int, loss: float | None = None) -> Record:
    return {"step": step, "loss": step / 2 if loss is None else loss, "mfu": None}


def run_folder(folder: Path, tracker: str) -> Path:
    """A run folder whose config names a project for a tracker."""
    folder.mkdir()
    write_config(replace(Config(), metrics=replace(Metrics(), **{tracker: "bees"})), folder / "config.toml")
    return folder


def write_steps(folder: Path, steps: range, start: int = 0, shift: float = 0.0) -> None:
    lines = JsonLines(folder / "metrics.jsonl", start)
    for step in steps:
        lines.write(step, record(step, step / 2 + shift))
    lines.close()


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Libraries that write their calls to this file, here and in helper processes."""
    file = tmp_path / "calls"
    monkeypatch.setenv("FAKE_CALLS", str(file))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FAKES), str(ROOT)]))
    monkeypatch.syspath_prepend(str(FAKES))
    mine = [*MODULES, *(f"torchllm.metrics.{tracker}_tracker" for tracker in TRACKERS)]
    for name in mine:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield file
    for name in mine:
        sys.modules.pop(name, None)


def read_calls(file: Path) -> Calls:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def logged(calls: Calls) -> list[int]:
    return [call[1] for call in calls if call[0] == "log"]


def run_ids(calls: Calls) -> list[str]:
    return [call[2] for call in calls if call[0] == "open"]


def config_at_the_tracker(calls: Calls) -> dict[str, str]:
    parameters = [call[1] for call in calls if call[0] == "parameters"]
    if parameters:
        return {key: value for batch in parameters for key, value in batch.items()}
    return {key: str(value) for key, value in values_by_key(calls[0][3]).items()}


def send(folder: Path, tracker: str) -> None:
    """Send what a run folder has, as the command does."""
    ended = threading.Event()
    ended.set()
    Sender(folder, tracker, {"host": "node-3"}).send(ended)


@pytest.mark.parametrize("tracker", TRACKERS)
def test_a_tracker_gets_each_record_once_and_a_resumed_run_continues_its_run(
    tmp_path: Path, calls: Path, tracker: str
) -> None:
    folder = run_folder(tmp_path / "run", tracker)
    write_steps(folder, range(1, 6))
    send(folder, tracker)
    first = read_calls(calls)
    assert logged(first) == [1, 2, 3, 4, 5]
    assert [call[2] for call in first if call[0] == "log"] == [{"loss": step / 2} for step in range(1, 6)]
    assert [call[0] for call in first if call[0] != "parameters"] == ["open", *["log"] * 5, "close"]
    assert first[0][1] == "bees"
    config = config_at_the_tracker(first)
    assert config["environment.host"] == "node-3"
    assert config["training.sequence_length"] == str(Config().training.sequence_length)

    write_steps(folder, range(4, 9), start=3)  # killed after step 5, resumed from 3: 4 and 5 come out the same
    send(folder, tracker)
    resumed = read_calls(calls)
    assert logged(resumed) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert len(set(run_ids(resumed))) == 1

    write_steps(folder, range(7, 10), start=6, shift=1.0)  # with another learning rate, say
    send(folder, tracker)
    again = read_calls(calls)[len(resumed) :]
    assert logged(again) == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert len(set(run_ids(again)) - set(run_ids(resumed))) == 1
    assert count_unsent(folder, tracker) == 0


def test_a_steps_loss_profile_and_tasks_are_three_records(tmp_path: Path, calls: Path) -> None:
    folder = run_folder(tmp_path / "run", "trackio")
    lines = JsonLines(folder / "metrics.jsonl")
    lines.write(1, record(1))
    others = [{"breakdown/forward": 0.5}, {"tasks/easy/acc": 0.25}]
    for other in others:
        lines.write(1, {"step": 1} | other)
    send(folder, "trackio")
    assert [call[2] for call in read_calls(calls) if call[0] == "log"] == [{"loss": 0.5}, *others]


@pytest.fixture
def server() -> Iterator[str]:
    """The address of a server that answers every request with an error."""
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as answering:
        threading.Thread(target=answering.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{answering.server_port}"
        answering.shutdown()


def test_without_a_server_or_a_key_wandb_writes_offline(
    tmp_path: Path, calls: Path, server: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run_folder(tmp_path / "a run", "wandb")
    monkeypatch.setenv("FAKE_KEY", "1")
    write_steps(folder, range(1, 3))
    send(folder, "wandb")
    assert read_calls(calls)[0][4] == "offline"
    told = f"`wandb sync '{folder}/trackers/wandb'/offline-run-*`"
    output = capsys.readouterr().out
    assert "http://127.0.0.1:9 is out of reach ([Errno 111] Connection refused)" in output
    assert told in output

    monkeypatch.setenv("FAKE_SERVER", server)
    monkeypatch.delenv("FAKE_KEY")
    write_steps(folder, range(3, 5), start=2)
    send(folder, "wandb")
    assert read_calls(calls)[-4][4] == "offline"
    output = capsys.readouterr().out
    assert "wandb: no API key; offline: " in output
    assert told in output

    monkeypatch.setenv("FAKE_KEY", "1")
    write_steps(folder, range(5, 7), start=4)
    send(folder, "wandb")
    assert read_calls(calls)[-4][4] == "online"


def start_run(folder: Path, patience: float = 60.0) -> tuple[JsonLines, TrackerHelper]:
    """The metrics of a run, and what keeps its helper."""
    return JsonLines(folder / "metrics.jsonl"), TrackerHelper(folder, "trackio", patience)


def test_a_tracker_that_raises_loses_no_record(
    tmp_path: Path, calls: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FAKE_FAILS", "2")
    monkeypatch.setattr(trackers, "RESTART_SECONDS", 0.0)
    folder = run_folder(tmp_path / "run", "trackio")
    lines, helper = start_run(folder)
    for step in (1, 2):
        lines.write(step, record(step))
        helper.logged(step, record(step))
    text_with(folder / "trackers/trackio.log", "the tracker has failed", 60)
    assert helper.helper is not None
    helper.helper.wait(patience(60))
    monkeypatch.delenv("FAKE_FAILS")
    lines.write(3, record(3))
    helper.logged(3, record(3))
    helper.end()
    assert logged(read_calls(calls)) == [1, 2, 3]
    log_file = folder / "trackers/trackio.log"
    assert caplog.messages == [
        f"metrics.trackio: its process has ended; see {log_file}; training goes on, and it is tried again"
    ]


@pytest.mark.exhaustive
def test_a_damaged_record_at_the_end_is_a_warning(
    tmp_path: Path, calls: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = run_folder(tmp_path / "run", "trackio")
    lines, helper = start_run(folder)
    lines.write(1, record(1))
    helper.logged(1, record(1))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("3\n")
    helper.end()
    assert "metrics.trackio" in caplog.messages[-1]
    assert helper.helper is None


@pytest.mark.exhaustive
def test_a_tracker_that_blocks_stops_neither_the_steps_nor_the_end_and_is_sent_the_rest_by_command(
    tmp_path: Path, calls: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FAKE_BLOCKS", "3")
    folder = run_folder(tmp_path / "run", "trackio")
    lines, helper = start_run(folder, patience=1.0)
    for step in range(1, 4):
        lines.write(step, record(step))
        helper.logged(step, record(step))
    until(lambda: logged(read_calls(calls)) == [1, 2], 60)
    process = helper.helper
    helper.end()
    assert process is not None
    assert process.returncode == -9
    command = f"python -P -m torchllm.tools.watch.send_records {folder} trackio"
    log_file = folder / "trackers/trackio.log"
    assert caplog.messages == [
        f"metrics.trackio: its process has not ended 1 s after the steps, and is killed; see {log_file}",
        f"metrics.trackio: 1 records are not sent; the run sends them when it resumes, or: {command}",
    ]
    monkeypatch.delenv("FAKE_BLOCKS")
    subprocess.run([sys.executable, *command.split()[1:]], check=True, cwd=ROOT)
    assert logged(read_calls(calls)) == [1, 2, 3]


def test_the_command_says_why_it_can_send_nothing(
    tmp_path: Path, calls: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run_folder(tmp_path / "run", "wandb")
    reasons = []
    for _ in range(2):
        with pytest.raises(SystemExit) as refused:
            main([str(folder), "trackio"])
        assert refused.value.code == 2
        reasons.append(capsys.readouterr().err.splitlines()[-1].partition("error: ")[2])
        write_steps(folder, range(1, 3))
    monkeypatch.setattr("torchllm.tools.watch.send_records.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        main([str(folder), "wandb"])
    reasons.append(capsys.readouterr().err.splitlines()[-1].partition("error: ")[2])
    assert reasons == [
        f"{folder}/metrics.jsonl: no such file; name a run folder",
        f"{folder}/config.toml: metrics.trackio names no project: write one there",
        "the package wandb is missing: pip install 'torchllm[wandb]'",
    ]


@pytest.mark.exhaustive
def test_a_helper_ends_with_a_run_that_is_killed(tmp_path: Path, calls: Path) -> None:
    folder = run_folder(tmp_path / "run", "trackio")
    write_steps(folder, range(1, 3))
    program = f"""
import time
from pathlib import Path
from torchllm.tools.watch.trackers import TrackerHelper
helper = TrackerHelper(Path({str(folder)!r}), "trackio")
helper.logged(1, {{}})
print(helper.helper.pid, flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        pid = int(run.stdout.readline())
        run.kill()
        assert ends(pid, patience(60))


def test_a_missing_package_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchllm.tools.front.preflight.find_spec", lambda name: None)
    config = replace(Config(), run=Run(folder=str(tmp_path / "run")), metrics=Metrics(wandb="bees", mlflow="bees"))
    found = {problem.key: problem.message for problem in inspect_training(config).problems}
    assert found["metrics.wandb"] == "the package wandb is missing: pip install 'torchllm[wandb]'"
    assert "pip install 'torchllm[mlflow]'" in found["metrics.mlflow"]


def leveldb_records(log: bytes) -> Iterator[bytes]:
    """Yield the records of a log in LevelDB's format, as wandb writes it: after 7 bytes, in blocks of 32 KiB."""
    block, header = 2**15, 7
    position = header
    record = b""
    while position + header <= len(log):
        if block - position % block < header:  # the end of a block is empty
            position += block - position % block
            continue
        length = int.from_bytes(log[position + 4 : position + 6], "little")
        ends_a_record = log[position + 6] in (1, 4)  # a whole one, or the last part of one
        record += log[position + header : position + header + length]
        position += header + length
        if ends_a_record:
            yield record
            record = b""


def steps_at_the_tracker(folder: Path, tracker: str) -> list[int]:
    """Return the steps that have a loss in what a library has stored without a network."""
    if tracker == "mlflow":
        with sqlite3.connect(folder / "trackers/mlflow.db") as database:
            rows = database.execute("select step from metrics where key = 'loss' order by step").fetchall()
        return [step for (step,) in rows]
    if tracker == "trackio":
        [file] = (folder / "trackio").glob("*.db")
        with sqlite3.connect(file) as database:
            rows = database.execute("select step, metrics from metrics order by step").fetchall()
        return [step for step, values in rows if "loss" in json.loads(values)]
    from wandb.proto import wandb_internal_pb2

    steps = []
    for file in sorted(folder.glob("trackers/wandb/offline-run-*/*.wandb")):
        for data in leveldb_records(file.read_bytes()):
            message = wandb_internal_pb2.Record()
            message.ParseFromString(data)
            values = {item.key or ".".join(item.nested_key): item.value_json for item in message.history.item}
            if "loss" in values:
                steps.append(int(values["step"]))
    return steps


@pytest.mark.exhaustive
@pytest.mark.parametrize("tracker", TRACKERS)
def test_a_run_and_its_resumption_with_the_real_library_and_no_network(tmp_path: Path, tracker: str) -> None:
    if importlib.util.find_spec(tracker) is None:
        pytest.skip(f"the package {tracker} is not installed (extra {tracker})")
    folder = tmp_path / "run"
    closed = "http://127.0.0.1:9"  # a port that nobody listens to
    environment = {
        **os.environ,
        "TRACKIO_DIR": str(folder / "trackio"),
        "WANDB_BASE_URL": closed,
        "WANDB_API_KEY": "0" * 40,
        "HTTPS_PROXY": closed,
        "HTTP_PROXY": closed,
    }
    own = [f"--run.folder={folder}", f"--metrics.{tracker}=bees", "--parallel.dp_shard=1"]
    for steps in (4, 8):
        command = [sys.executable, "recipes/pretrain.py", DEBUG, *changed(SMALL, f"--training.steps={steps}", *own)]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "not sent" not in done.stderr, (folder / f"trackers/{tracker}.log").read_text()
    assert [line["step"] for line in metrics(folder) if "loss" in line] == list(range(1, 9))
    assert steps_at_the_tracker(folder, tracker) == list(range(1, 9))
    lines = (folder / f"trackers/{tracker}.jsonl").read_text().splitlines()
    assert len([line for line in lines if '"run"' in line]) == 1
