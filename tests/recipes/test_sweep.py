"""Sweeps: which layouts, what every way to end becomes, that nothing is measured twice, and a real one on two ranks."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

from evidence.figures import FIGURES, best_by_setting, compare_predictions, draw_figures
from recipes.sweep.job import (
    COLUMNS,
    MEASURING,
    cpu_cells,
    layout_cells,
    measure_layout,
    read_outcome,
    resolve_layout,
)
from recipes.sweep.sweep import (
    append,
    combinations,
    expected,
    main,
    promising,
    read_results,
    read_sweep,
    results_table,
)
from tests.patience import patience
from tests.tiny_run import ROOT, SMALL
from torchllm.config.errors import UserError
from torchllm.tools.planner.calibration.rows import read_row
from torchllm.tools.planner.search.auto import planned

DEBUG = str(ROOT / "train_configs" / "debug.toml")


def written(tmp_path: Path, text: str) -> str:
    (tmp_path / "run.toml").write_text(f'base = "{DEBUG}"\n')
    (tmp_path / "sweep.toml").write_text(text)
    return str(tmp_path / "sweep.toml")


def test_a_sweep_combines_all_values(tmp_path: Path) -> None:
    axes = '[[sweep.axes]]\nkey = "parallel.tp"\nvalues = ["1", "2"]\n'
    axes += '[[sweep.axes]]\nkey = "recompute.mode"\nvalues = ["none", "full"]\n'
    sweep = read_sweep(written(tmp_path, f'[sweep]\nconfig = "run.toml"\nprocesses = 4\n{axes}'))
    assert (sweep.processes, sweep.steps) == (4, 10)
    assert combinations(sweep) == [
        ("--parallel.tp=1", "--recompute.mode=none"),
        ("--parallel.tp=1", "--recompute.mode=full"),
        ("--parallel.tp=2", "--recompute.mode=none"),
        ("--parallel.tp=2", "--recompute.mode=full"),
    ]


def test_what_is_wrong_with_a_sweep_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text, message in [
        ("[sweep]\n", "sweep.config: required key is missing"),
        ('[sweep]\nconfig = "other.toml"\n', "sweep.config: other.toml: no such file in "),
        ('[sweep]\nconfig = "run.toml"\nstep = 3\n', "sweep.toml:3: sweep.step: unknown"),
        ('[sweep]\nconfig = "run.toml"\n[[sweep.axes]]\nkey = "parallel.tp"\n', "parallel.tp has no values"),
    ]:
        with pytest.raises(SystemExit) as stopped:
            read_sweep(written(tmp_path, text))
        assert stopped.value.code == 2, text
        assert message in capsys.readouterr().err, text


def test_what_cannot_be_is_not_started(tmp_path: Path) -> None:
    for layout, message in (
        (("--parallel.tp=3",), "3 does not divide model.heads = 8"),
        (("--parallel.dp_shard=2",), "2"),
        (("--parallel.pt=2",), "parallel.pt: unknown"),
        (("--parallel.tp=1", "--parallel.sequence_parallel=true"), "it needs parallel.tp over 1"),
    ):
        row = measure_layout(DEBUG, layout, 8, 3, 60.0, tmp_path / "job")
        assert row["status"] == "invalid"
        assert message in row["note"]
        assert not (tmp_path / "job").exists()


def test_how_a_job_can_end(tmp_path: Path) -> None:
    memory = "torch.OutOfMemoryError: CUDA out of memory."
    for code, log, status, note in (
        (None, "", "timeout", "not done after 9 s"),
        (1, f"x\n{memory} Tried\ny", "oom", "torch.OutOfMemoryError: CUDA out of"),
        (1, "  exitcode  : -9 (pid: 7)\nSignal 9 (SIGKILL)", "oom", "killed by signal 9"),
        (-9, "", "oom", "killed by signal 9"),
        (1, "step 1\nValueError: bad thing\nsome more", "crash", "exit status 1: ValueError: bad thing"),
        (3, "", "crash", "exit status 3: no output"),
    ):
        outcome = read_outcome(code, log, tmp_path / "metrics.jsonl", 9.0)
        assert outcome["status"] == status
        assert outcome["note"].startswith(note)
    outcome = read_outcome(0, "", tmp_path / "metrics.jsonl", 9.0)
    assert outcome == {"status": "crash", "note": "the job wrote no metrics.jsonl"}
    records = [{"step_seconds": s, "memory_gib": s, "mfu": 0.5, "hfu": None} for s in (9.0, 1.0, 2.0, 3.0)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    outcome = read_outcome(0, "", tmp_path / "metrics.jsonl", 9.0)  # the first step is dropped
    assert (outcome["status"], outcome["step_time_s"], outcome["peak_memory_gib"]) == ("ok", "2", "3.000")
    assert (outcome["spread_pct"], outcome["mfu_pct"], outcome["hfu_pct"]) == ("40.8", "50.00", "")


def test_a_gpus_peak_is_what_its_allocator_has_reserved(tmp_path: Path) -> None:
    """To these bytes `calibrate` fits the allocator's gaps; by the bytes of tensors it would find none."""
    file = tmp_path / "metrics.jsonl"
    record = {"step_seconds": 1.0, "memory_gib": 40.0, "memory_reserved_gib": 52.0, "mfu": None, "hfu": None}
    file.write_text(2 * f"{json.dumps(record)}\n")
    outcome = read_outcome(0, "", file, 9.0)
    assert (outcome["peak_memory_gib"], outcome["live_memory_gib"]) == ("52.000", "40.000")
    file.write_text(2 * f"{json.dumps(record | {'memory_gib': None, 'memory_reserved_gib': None})}\n")
    assert read_outcome(0, "", file, 9.0)["peak_memory_gib"] == ""


def test_a_cpus_layouts_are_compared_with_one_peak_and_not_by_memory() -> None:
    fast, _ = resolve_layout(DEBUG, (), 8)
    recomputing, _ = resolve_layout(DEBUG, ("--recompute.mode=full",), 8)
    two_ranks, _ = resolve_layout(DEBUG, (), 2)
    assert fast is not None
    assert recomputing is not None
    assert two_ranks is not None
    whole = cpu_cells(fast, 1.0)
    half = cpu_cells(fast, 2.0)
    assert float(half["mfu_pct"]) == pytest.approx(float(whole["mfu_pct"]) / 2, abs=0.01)
    recomputed = cpu_cells(recomputing, 1.0)
    assert recomputed["mfu_pct"] == whole["mfu_pct"]
    assert float(recomputed["hfu_pct"]) > float(whole["hfu_pct"])
    empty = {"mfu_pct": "", "hfu_pct": "", "peak_memory_gib": "", "live_memory_gib": ""}
    assert cpu_cells(two_ranks, 1.0) == empty  # the cluster file is of eight ranks


def row(layout: str, seconds: str = "", status: str = "ok", **cells: str) -> dict[str, str]:
    return {**dict.fromkeys(COLUMNS, ""), "layout": layout, "status": status, "step_time_s": seconds, **cells}


def test_a_row_that_a_kill_cut_off_is_measured_again(tmp_path: Path) -> None:
    file = tmp_path / "results.csv"
    append(file, row("one", "1.0"))
    append(file, row("two", "2.0"))
    file.write_text(file.read_text() + "sweep,torchllm,half a l")
    assert [result["layout"] for result in read_results(file)] == ["one", "two"]
    append(file, row("three", "3.0"))
    assert [result["layout"] for result in read_results(file)] == ["one", "two", "three"]


def test_the_planners_best_and_some_others() -> None:
    sweep = read_sweep(str(ROOT / "train_configs" / "sweeps" / "debug.toml"))
    every = combinations(sweep)
    chosen = promising(DEBUG, every, 8, 8)
    assert len(chosen) == len(set(chosen)) == 10
    times = []
    for layout in every:
        config, _ = resolve_layout(DEBUG, layout, 8)
        if config is not None:
            prediction = planned(config)
            assert prediction is not None
            times.append((prediction.step, layout))
    fastest = [layout for _, layout in sorted(times)]
    assert chosen[:8] == fastest[:8]
    places = [fastest.index(layout) for layout in chosen[8:]]
    assert places == sorted(places)
    assert places[0] < len(fastest) / 2 < places[1]
    assert expected(DEBUG, every[0], 8).startswith("predicted 0.")
    assert "3 does not divide model.heads" in expected(DEBUG, ("--parallel.tp=3",), 8)


def test_a_plan_of_what_cannot_be_predicted_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text(f'base = "{ROOT / DEBUG}"\n[cluster]\nname = ""\n')
    with pytest.raises(UserError, match="no layout can be predicted: no cluster file describes this machine"):
        promising(str(file), [("--parallel.tp=2",)], 2, 1)


def test_a_layout_neither_copies_its_checkpoint_nor_goes_on_from_another(tmp_path: Path) -> None:
    """Or the run itself would go on from a layout of its sweep."""
    file = tmp_path / "x.toml"
    text = 'remote = "memory://run"\nresume = "runs/old/checkpoints/step-00000005"\n'
    file.write_text(f'base = "{ROOT / DEBUG}"\n[checkpoint]\n{text}')
    resolved = resolve_layout(str(file), MEASURING, 1)
    assert resolved.config is not None, resolved.problem
    assert (resolved.config.checkpoint.remote, resolved.config.checkpoint.resume) == ("", "auto")


def test_a_section_of_a_fork_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fork = tmp_path / "mine.py"
    fork.write_text(
        "from dataclasses import dataclass, field\nfrom torchllm.config import Config\n\n\n"
        "@dataclass(frozen=True)\nclass Distill:\n    weight: float = 1.0\n\n\n"
        "@dataclass(frozen=True)\nclass Mine(Config):\n    distill: Distill = field(default_factory=Distill)\n"
    )
    file = tmp_path / "x.toml"
    file.write_text(f'base = "{ROOT / DEBUG}"\n[distill]\nweight = 0.5\n')
    assert "distill" in resolve_layout(str(file), MEASURING, 1).problem
    monkeypatch.setenv("RECIPE", str(fork))
    resolved = resolve_layout(str(file), MEASURING, 1)
    assert resolved.config is not None, resolved.problem
    assert vars(resolved.config)["distill"].weight == 0.5


def test_predicted_against_measured(tmp_path: Path) -> None:
    config, _ = resolve_layout(DEBUG, ("--parallel.tp=2",), 8)
    assert config is not None
    prediction = planned(config)
    assert prediction is not None
    measured = row("a", "3.2", **layout_cells(config, 8))
    unread = row("b", "1.0", global_batch_seqs="2")
    [(seconds, expected, kind)] = compare_predictions([measured, row("c", status="oom")])
    assert (seconds, expected) == (0.2, pytest.approx(prediction.step / 16))
    assert kind == "tp 2, recompute none"
    assert compare_predictions([unread]) == []
    changes = {"tp": "4", "step_time_s": "2", "attn_impl": "eager", "act_ckpt": "full", "micro_batch": "1"}
    changed = {**measured, **changes}
    files = {file.name for file in draw_figures([measured, changed], tmp_path)}
    assert files == {"predicted.png", *(f"{name}.png" for name in FIGURES)}


def test_the_best_by_setting() -> None:
    rows = [
        row("a", "4.0", tp="1", pp="1", global_batch_seqs="2"),
        row("b", "3.0", tp="1", pp="2", global_batch_seqs="2"),
        row("c", "8.0", tp="2", pp="1", global_batch_seqs="4"),
        row("d", "", "oom", tp="4", pp="1", note="too large"),
    ]
    best = best_by_setting(rows, ["tp"])
    assert best.keys() == {"tp 1", "tp 2"}
    assert best["tp 1"]["layout"] == "b"
    assert best["tp 2"]["layout"] == "c"
    table = results_table(rows)
    assert table.index("`b`") < table.index("`a`") < table.index("`c`")
    assert "| oom | 1 | `d`: too large |" in table


def test_a_sweep_measures_what_is_not_measured_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    resolved, _ = resolve_layout(DEBUG, (), 8)
    assert resolved is not None
    cells = layout_cells(resolved, 8)
    started = []

    def measure(config: str, layout: tuple[str, ...], *rest: object) -> dict[str, str]:
        started.append(layout)
        if len(started) == 2:
            raise KeyboardInterrupt
        return row(" ".join(layout), "1.0", **cells)

    monkeypatch.setattr("recipes.sweep.sweep.measure_layout", measure)
    axis = '[[sweep.axes]]\nkey = "parallel.tp"\nvalues = ["1", "2"]\n'
    command = [written(tmp_path, f'[sweep]\nconfig = "run.toml"\n{axis}'), f"--output={tmp_path / 'out'}"]
    with pytest.raises(SystemExit) as stopped:
        main(command)
    assert stopped.value.code == 130
    assert "the same command continues with the remaining 1" in capsys.readouterr().err
    main(command)
    assert started == [("--parallel.tp=1",), ("--parallel.tp=2",), ("--parallel.tp=2",)]
    main(command)
    assert "0 layouts to measure, 2 in " in capsys.readouterr().out
    assert len(started) == 3

    run = tmp_path / "run.toml"
    run.write_text(run.read_text() + "[run]\nseed = 5\n")
    main(command)  # which no step time depends on
    run.write_text(run.read_text() + "[model]\nlayers = 3\n")
    with pytest.raises(SystemExit) as refused:
        main(command)
    assert refused.value.code == 2
    assert "sweep.json: the rows there are of another run" in capsys.readouterr().err
    (tmp_path / "out" / "results.csv").unlink()
    main(command)
    assert len(started) == 5


@pytest.mark.exhaustive
def test_a_real_sweep(tmp_path: Path) -> None:
    """Two layouts that run and one that cannot; then the same command has nothing to do."""
    settings = [word.removeprefix("--").split("=") for word in SMALL[1:3]]
    small = "\n".join(f'[[sweep.axes]]\nkey = "{key}"\nvalues = ["{value}"]' for key, value in settings)
    text = f'[sweep]\nconfig = "run.toml"\nprocesses = 2\nsteps = 3\n{small}\n'
    file = written(tmp_path, text + '[[sweep.axes]]\nkey = "parallel.tp"\nvalues = ["1", "2", "3"]\n')
    command = [sys.executable, "recipes/sweep", file, f"--output={tmp_path / 'out'}"]
    first = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=patience(600))
    assert first.returncode == 0, first.stderr
    with open(tmp_path / "out" / "results.csv", newline="") as opened:
        rows = list(csv.DictReader(opened))
    assert [result["status"] for result in rows] == ["ok", "ok", "invalid"], first.stdout
    assert all(float(result["step_time_s"]) > 0 for result in rows[:2])
    case = read_row(rows[1]).case  # the planner reads it
    assert case is not None
    assert (case.parallel.tp, case.parallel.dp_shard, case.model.hidden) == (2, 1, 32)
    assert (tmp_path / "out" / "results.md").is_file()
    assert not (tmp_path / "out" / "job").exists()
    repeated = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=patience(120))
    assert repeated.stdout.startswith("0 layouts to measure, 3 in ")
