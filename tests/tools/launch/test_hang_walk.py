"""The files that a hang passes through: what a reader opens to follow it from a stuck rank to its message."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launched import clean
from tests.patience import patience
from tests.tiny_run import ROOT
from tests.walks import walk_of_the_map

pytestmark = pytest.mark.exhaustive

TRACE = """
import json, logging, os, sys, threading, time
from pathlib import Path
from torchllm.runtime.heartbeat import phase

folder, is_traced, files = Path(sys.argv[1]), threading.Event(), set()

def note(frame, event, argument):
    file = Path(frame.f_code.co_filename)
    if is_traced.is_set() and file.is_relative_to(Path(ROOT) / "torchllm"):
        files.add(str(file.relative_to(ROOT)))

def begin():
    sys.setprofile(note)
    is_traced.set()

def log(text, *arguments):
    "The message itself: what comes after it is no way to it."
    is_traced.clear()
    (folder / f"files-{os.getpid()}").write_text(json.dumps([text % arguments, sorted(files)]))

threading.setprofile(note)
"""
RANK = """
import torch, torch.distributed as dist
from torchllm.config import Run
from torchllm.tools.launch import hang_watch
from torchllm.tools.launch.rank_start import start_runtime

hang_watch.log.error = log
runtime = start_runtime(Run(folder=str(folder), device="cpu", start_timeout=1.0))
runtime.barrier()
begin()
with phase("forward"):
    if runtime.rank == 0:
        time.sleep(60)
    dist.all_reduce(torch.ones(1))
"""
STUCK = """
import time
from torchllm.runtime import heartbeat

heart = heartbeat.heartbeat()
heart.open()
heart.timeouts = heartbeat.Timeouts(0.1, 0.1, 0.1)
heart.begin("start-up")
time.sleep(60)
"""
LAUNCHER = """
import subprocess
from torchllm.tools.launch import rank_watch

rank_watch.log.error = log
watch = rank_watch.RankWatch(run_folder=folder)
with watch.attempt(folder / "heartbeats"):
    rank = subprocess.Popen([sys.executable, "-c", STUCK], start_new_session=True)
    begin()
    watch.start()
    rank.wait()
"""


OTHER_THREAD = {"tools/launch/lease.py", "tools/launch/take_lease.py"}
"""rank 0 counts in its lease meanwhile; under run_train.sh the launcher does"""


def test_a_hang_passes_through_seven_files_on_its_way_to_the_message(tmp_path: Path) -> None:
    trace = f"ROOT, STUCK = {str(ROOT)!r}, {STUCK!r}\n{TRACE}"
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "TORCHLLM_STORE": f"{tmp_path}/store"}
    ends = [(RANK, place | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(2)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", trace + end, str(tmp_path)], env=clean({"PYTHONPATH": str(ROOT)} | more)
        )
        for end, more in [*ends, (LAUNCHER, {})]
    ]
    for process in processes:
        process.wait(patience(60))
    walks = dict(json.loads(file.read_text()) for file in tmp_path.glob("files-*"))
    assert [text.partition(" over ")[0] for text in sorted(walks)] == ["hang: no progress for", "hang: ranks waited"]
    entered = {file.removeprefix("torchllm/") for files in walks.values() for file in files} - OTHER_THREAD
    assert sorted(entered) == sorted(walk_of_the_map("a hang"))
    assert len(entered) == 7
