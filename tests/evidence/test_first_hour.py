"""the first hour: each judgment sees a planted fault, and the command goes on where it was ended."""

import copy
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sweep.job import resolve_layout

from evidence.first_hour.first_hour import (
    ERROR,
    FAILED,
    PASSED,
    SKIPPED,
    chosen_stages,
    due_stages,
    format_page,
    latest_records,
    read_records,
    run_stage,
    write_records,
)
from evidence.first_hour.jobs import Figures, Jobs, Machine, StageFailed
from evidence.first_hour.stages import (
    MEMORY_MODES,
    STAGES,
    FirstHourStage,
    memory_layout,
)
from tests.tiny_run import DEBUG
from torchllm.config.errors import UserError

H100 = Machine(("NVIDIA H100 80GB HBM3",) * 8, "2.13.0", "13.0", "580.65")
CPU = Machine((), "2.13.0+cpu", "", "")
STAGE = {stage.name: stage for stage in STAGES}

HEALTHY: dict[str, Figures] = {
    "losses": {
        "bfloat16": [5.77, 5.1, 4.4],
        "float32": [5.7702, 5.1001, 4.41],
        "float32 on a CPU": [5.7701, 5.1, 4.41],
    },
    "resume": {"ranks": 8, "at once": [5.7, 5.1, 4.6], "resumed": [5.7, 5.1, 4.6]},
    "step": {"step time, ranks 8": [{"what": "torchllm / bare FSDP2", "ratio": 1.01, "least": 1.0, "largest": 1.02}]},
    "matmul": {
        "matrix products": [
            {"dtype": "float32", "matrix": "square", "share_of_peak": 0.5},
            {"dtype": "bfloat16", "matrix": "square", "share_of_peak": 0.6},
            {"dtype": "bfloat16", "matrix": "up_proj", "share_of_peak": 0.79},
        ]
    },
    "memory": {
        "memory": [
            {
                "recompute": "full",
                "status": "ok",
                "peak_gib": 26.5,
                "hollow_gib": 26.6,
                "note": "",
            }
        ]
    },
    "torchtitan": {"step time": [{"what": "torchllm / torchtitan", "ratio": 0.98, "least": 0.97, "largest": 1.0}]},
    "saves": {
        "saves": [],
        "time taken from training": [{"what": "asynchronous / synchronous", "ratio": 0.02, "least": 0, "largest": 1}],
    },
}
"""what a machine without a fault shows"""


def set_at(*path: str | int, to: Any) -> Callable[[Figures], None]:
    """Return what plants a fault: another value at this place of the figures."""

    def plant(figures: Figures) -> None:
        place: Any = figures
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = to

    return plant


FAULTS = [
    ("losses", set_at("float32", 1, to=5.12), "float32: the loss of step 2 is 5.1200, on a CPU 5.1000"),
    ("losses", set_at("bfloat16", 2, to=4.6), "bfloat16: the loss of step 3"),
    ("losses", set_at("bfloat16", 2, to=math.nan), "bfloat16: the loss of step 3 is nan"),
    ("resume", set_at("resumed", 2, to=4.6 + 1e-15), "the loss of step 3"),
    ("resume", set_at("resumed", to=[5.7, 5.1]), "logged 2 steps, the other 3"),
    ("resume", set_at("at once", to=[0.0, 0.0, 0.0]), "nothing was trained"),
    ("step", set_at("step time, ranks 8", 0, "ratio", to=1.05), "0.952 of the bare loop's speed"),
    ("matmul", set_at("matrix products", 2, "share_of_peak", to=0.3), "60% of the data sheet's"),
    ("memory", set_at("memory", 0, "peak_gib", to=28.0), "the peak is 28.0 GiB, on the hollow GPU it is 26.6: over 5%"),
    ("memory", set_at("memory", 0, "peak_gib", to=None), "recompute full: ok"),
    ("torchtitan", set_at("step time", 0, "ratio", to=1.06), "takes 1.060 times as long as torchtitan's"),
    ("torchtitan", set_at("step time", 0, "ratio", to=math.nan), "takes nan times"),
    ("saves", set_at("time taken from training", 0, "ratio", to=0.2), "takes 0.200 of a synchronous"),
]


def test_a_healthy_machine_has_no_problem() -> None:
    assert {name: stage.problems(HEALTHY[name]) for name, stage in STAGE.items()} == {name: [] for name in STAGE}


def test_planted_faults_are_seen() -> None:
    for name, plant, said in FAULTS:
        figures = copy.deepcopy(HEALTHY[name])
        plant(figures)
        (problem,) = STAGE[name].problems(figures)
        assert said in problem
    assert {name for name, _, _ in FAULTS} == STAGE.keys()


def test_every_layout_that_a_machine_measures_is_valid(tmp_path: Path) -> None:
    for gpus in (1, 2, 8):
        jobs = Jobs(H100._replace(gpus=H100.gpus[:gpus]), DEBUG, tmp_path / "jobs", deadline=0)
        for mode in MEMORY_MODES:
            config, *overrides = memory_layout(jobs, mode)
            assert resolve_layout(config, tuple(overrides), gpus).problem == ""


def stage_that(measure: Callable[[Jobs], Figures], problems: list[str] | None = None, gpus: int = 0) -> FirstHourStage:
    return FirstHourStage("losses", "Does it?", measure, lambda figures: problems or [], gpus)


def test_the_outcomes_of_a_stage(tmp_path: Path) -> None:
    titan = STAGE["torchtitan"]
    assert titan._replace(package="pytest==1.0").obstacle(H100) == ""
    assert titan._replace(package="missing==1.0").obstacle(H100) == "needs another package: pip install missing==1.0"
    assert titan.obstacle(CPU) == "needs 1 GPUs, and there are 0"

    def answers(jobs: Jobs) -> Figures:
        (jobs.folder / "file").touch()
        return {"answer": 1}

    def fails(jobs: Jobs) -> Figures:
        raise StageFailed("run float32 ended with exit status 1: out of memory")

    cases = [
        (stage_that(answers), PASSED, [], {"answer": 1}),
        (stage_that(answers, ["too slow"]), FAILED, ["too slow"], {"answer": 1}),
        (stage_that(fails), ERROR, ["run float32 ended with exit status 1: out of memory"], {}),
        (stage_that(answers, gpus=9), SKIPPED, ["needs 9 GPUs, and there are 8"], {}),
    ]
    for stage, outcome, problems, figures in cases:
        record = run_stage(stage, H100, DEBUG, tmp_path)
        assert (record["outcome"], record["problems"], record["figures"]) == (outcome, problems, figures)
        assert not (tmp_path / "scratch").exists()


def record_of(stage: str, outcome: str, machine: Machine = H100) -> dict[str, Any]:
    facts = {"stage": stage, "outcome": outcome, "problems": [], "figures": HEALTHY[stage], "seconds": 1.0}
    return facts | {"date": "2026-11-22", "machine": machine._asdict()}


def test_it_goes_on_with_what_has_no_answer_of_this_machine(tmp_path: Path) -> None:
    results = tmp_path / "first_hour.jsonl"
    assert read_records(results) == []
    records = [record_of("losses", PASSED), record_of("matmul", ERROR), record_of("memory", SKIPPED)]
    records += [record_of("resume", FAILED), record_of("step", PASSED, CPU)]
    write_records(results, records)
    assert json.loads(results.read_text().splitlines()[0])["stage"] == "losses"
    due = [stage.name for stage in due_stages(STAGES, read_records(results), H100)]
    assert due == [stage.name for stage in STAGES if stage.name not in ("losses", "resume")]
    first, *_ = latest_records([*read_records(results), record_of("losses", FAILED)])
    assert (first["stage"], first["outcome"]) == ("losses", FAILED)
    assert [stage.name for stage in chosen_stages("resume, losses")] == ["losses", "resume"]
    with pytest.raises(UserError, match=r"there is no stage 'loss'; the stages are losses, resume, "):
        chosen_stages("loss")


def test_the_page_has_every_figure() -> None:
    page = format_page([record_of(name, PASSED) for name in STAGE])
    assert "8 x NVIDIA H100 80GB HBM3, driver 580.65, torch 2.13.0, CUDA 13.0, 2026-11-22" in page
    assert "| losses | Does this device train the model that a CPU trains? | pass |" in page
    assert "bfloat16: 5.77, 5.1, 4.4" in page
    assert "| recompute | status | peak_gib | hollow_gib |" in page
    assert "| full | ok | 26.5 | 26.6 |" in page


def first_hour(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "evidence.first_hour", f"--run.folder={folder}", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=1800)


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)  # 7 stages, of which `step` alone takes minutes on two cores
def test_the_rehearsal(tmp_path: Path) -> None:
    """All stages on a CPU. What is slower here than on a GPU may be wrong, no job may fail."""
    done = first_hour(tmp_path)
    records = {record["stage"]: record for record in read_records(tmp_path / "first_hour.jsonl")}
    assert list(records) == [stage.name for stage in STAGES], done.stderr
    slow_here = {"step", "saves"}
    for name, record in records.items():
        allowed = {PASSED, SKIPPED, FAILED} if name in slow_here else {PASSED, SKIPPED}
        assert record["outcome"] in allowed, record
    assert [name for name, record in records.items() if record["outcome"] == SKIPPED] == ["memory", "torchtitan"]
    assert first_hour(tmp_path).stdout.splitlines()[1].startswith("2 stages to go")
