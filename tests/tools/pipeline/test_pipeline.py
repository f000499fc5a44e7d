"""torchllm pipeline: stages run once, go on, and run anew after a change; what it prints."""

import fcntl
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_run import ROOT
from torchllm.config.errors import UserError
from torchllm.tools.pipeline import pipeline as module
from torchllm.tools.pipeline.pipeline import clock, command_line, main
from torchllm.tools.pipeline.stages import Record, read_pipeline, read_stage_records, write_record

SHIPPED = [ROOT / "train_configs/pipeline/laptop.toml", ROOT / "train_configs/pipeline/8gpu.toml"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three stages; each appends a line to its file in the pipeline's folder, `middle` as often as middle.toml says."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.toml").write_text("times = 1\n")
    (tmp_path / "middle.toml").write_text('base = "base.toml"\n')
    (tmp_path / "stage.py").write_text(
        "import os, pathlib, sys\n"
        "name = sys.argv[1]\n"
        "folder = pathlib.Path('out', name)\n"
        "folder.mkdir(exist_ok=True)\n"
        "print('ran', file=(folder / 'log').open('a'))\n"
        "sys.exit(pathlib.Path(f'fail-{name}').exists())\n"
    )
    tables = [
        f'[[stages]]\nname = "{name}"\nrun = "python stage.py {name} {words}"\nseconds = 2\nresumes = {resumes}\n'
        for name, words, resumes in (("first", "", "false"), ("middle", "middle.toml", "true"), ("last", "", "false"))
    ]
    (tmp_path / "p.toml").write_text('folder = "out"\nmachine = "mine"\n' + "".join(tables))
    return tmp_path


def runs() -> dict[str, int]:
    return {file.parent.name: len(file.read_text().split()) for file in Path("out").glob("*/log")}


def fails() -> int:
    with pytest.raises(SystemExit) as ended:
        main(["p.toml"])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_a_finished_stage_is_not_run_again(capfd: pytest.CaptureFixture[str]) -> None:
    main(["p.toml"])
    assert runs() == {"first": 1, "middle": 1, "last": 1}
    assert "stage 1 of 3, first: to do\n  $ " in capfd.readouterr().out
    main(["p.toml"])
    assert runs() == {"first": 1, "middle": 1, "last": 1}
    printed = capfd.readouterr().out
    assert printed.count("done earlier") == 3
    assert "in all" in printed


def test_it_goes_on_where_it_failed(capfd: pytest.CaptureFixture[str]) -> None:
    Path("fail-middle").touch()
    assert fails() == 1
    assert "middle: failed with exit status 1" in capfd.readouterr().out
    Path("fail-middle").unlink()
    main(["p.toml"])
    assert runs() == {"first": 1, "middle": 2, "last": 1}
    assert "stage 2 of 3, middle: goes on\n" in capfd.readouterr().out


def test_an_interrupted_stage_that_cannot_go_on_begins_anew() -> None:
    Path("fail-last").touch()
    assert fails() == 1
    Path("fail-last").unlink()
    main(["p.toml"])
    assert runs() == {"first": 1, "middle": 1, "last": 1, "last.old-1": 1}


@pytest.mark.parametrize("change", ["base of a config", "command"])
def test_a_changed_stage_and_the_later_ones_run_anew(change: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Also if that is interrupted before the later ones: they are not taken for done."""
    main(["p.toml"])
    if change == "command":
        file, name = Path("p.toml"), "its command"
        file.write_text(file.read_text().replace("middle.toml", "middle.toml more"))
    else:
        name = "middle.toml"
        Path("base.toml").write_text("times = 2\n")
    capfd.readouterr()
    main(["p.toml", "--check"])
    checked = capfd.readouterr().out
    assert "1 first: done; " in checked
    assert f"2 middle: to do anew, changed: {name}; 0:02 on mine" in checked
    assert "3 last: to do anew, changed: an earlier stage" in checked
    Path("fail-middle").touch()
    assert fails() == 1
    assert runs() == {"first": 1, "middle": 1, "middle.old-1": 1, "last": 1}
    Path("fail-middle").unlink()
    main(["p.toml"])
    assert runs() == {"first": 1, "middle": 2, "middle.old-1": 1, "last": 1, "last.old-1": 1}


def test_a_folder_of_unknown_origin_is_set_aside() -> None:
    Path("out/middle").mkdir(parents=True)
    main(["p.toml"])
    assert Path("out/middle.old-1").is_dir()


def test_a_stop_reaches_the_stage_and_says_how_to_go_on(folder: Path) -> None:
    """The stage ends with status 0 after the signal, as a command that saves does: it is done, the next not begun."""
    waits = "import signal, sys\nsignal.signal(15, lambda *_: sys.exit(0))\n"
    (folder / "waits.py").write_text(waits + "print('waits', flush=True)\nsignal.pause()\n")
    text = (folder / "p.toml").read_text().replace("python stage.py middle", "python waits.py")
    (folder / "p.toml").write_text(text)
    command = [sys.executable, "-P", "-m", "torchllm", "pipeline", "p.toml"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line == "waits\n":
                process.send_signal(signal.SIGTERM)
                rest = process.stdout.read()
    assert process.returncode == 128 + signal.SIGTERM
    assert rest.startswith("stopped after stage 2 of 3, middle, 0:0")
    assert rest.endswith("; to go on: torchllm pipeline p.toml\n")
    assert [(name, record.is_done) for name, record in read_stage_records(Path("out")).items()] == [
        ("first", True),
        ("middle", True),
    ]


def test_wrong_files_are_refused_before_anything_runs(capsys: pytest.CaptureFixture[str]) -> None:
    good = Path("p.toml").read_text()
    for text, error in (
        (
            good.replace("seconds = 2", "second = 2", 1),
            "p.toml:6: stages.0.second: unknown key; did you mean",
        ),
        (good.replace('"last"', '"first"'), "stages.2.name: first is the name of an earlier stage"),
        (good.replace('"last"', '"a/b"'), "stages.2: needs a name, without /"),
        (good.replace("middle.toml", "centre.toml"), "stage middle: centre.toml: no such file"),
        ('folder = "out"\n', "needs a folder, and [[stages]]"),
    ):
        Path("p.toml").write_text(text)
        assert fails() == 2
        assert error in capsys.readouterr().err
    assert not runs()


def test_a_damaged_record_and_a_second_pipeline_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    Path("out").mkdir()
    with Path("out/lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert fails() == 2
    assert "another pipeline works in this folder" in capsys.readouterr().err
    Path("out/stages.json").write_text('{"first": {}}')
    assert fails() == 2
    assert "out/stages.json: cannot be read" in capsys.readouterr().err


def test_the_stage_that_talks_is_started_by_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    text = Path("p.toml").read_text() + '[[stages]]\nname = "chat"\nrun = "A=1 python x.py"\nneeds_terminal = true\n'
    Path("p.toml").write_text(text)
    started: list[tuple[list[str], str]] = []
    monkeypatch.setattr(os, "execvpe", lambda _, words, environment: started.append((words, environment["A"])))
    main(["p.toml"])
    assert capfd.readouterr().out.endswith("chat: A=1 python x.py\n")
    assert not started
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    main(["p.toml"])
    assert started == [([sys.executable, "-P", "x.py"], "1")]


def test_settings_change_the_commands_and_the_folder(capfd: pytest.CaptureFixture[str]) -> None:
    text = (
        Path("p.toml").read_text().replace("python stage.py middle", "torchllm train --run.device=cpu {folder}/a.toml")
    )
    Path("p.toml").write_text(text)
    pipeline = read_pipeline("p.toml", ["folder=new one", "middle.training.steps=20", "middle.run.device=a b"])
    assert pipeline.folder == "new one"
    assert [stage.seconds for stage in pipeline.stages] == [2.0, 0.0, 2.0]  # the changed one takes another time
    assert command_line(pipeline.stages[1].run)[0][4:] == [
        *("train", "new one/a.toml", "middle.toml", "--training.steps=20", "--run.device=a b")
    ]
    for setting, error in (
        ("midle.training.steps=20", "there is no stage 'midle'; did you mean middle?"),
        ("none.training.steps=20", "there is no stage 'none'; the stages are first, middle, last"),
        ("middle.steps=20", "write middle.section.key=value"),
        ("middle.training.steps", "write middle.section.key=value"),
        ("first.training.steps=20", "the command of first takes no settings: python stage.py first"),
    ):
        with pytest.raises(UserError) as refused:
            read_pipeline("p.toml", [setting])
        assert str(refused.value).startswith(f"--set {setting}: {error}")
    assert not Path("new one").exists()


def test_a_wrong_setting_is_refused_before_anything_runs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(SHIPPED[0]), "--set", "folder=out", "--set", "pretrain.training.step=20"])
    assert ended.value.code == 2
    assert "stage pretrain: --training.step: unknown key; did you mean training.steps?" in capsys.readouterr().err
    assert not Path("out").exists()


def test_a_stop_with_settings_says_how_to_go_on_with_them(capfd: pytest.CaptureFixture[str]) -> None:
    Path("fail-last").touch()
    with pytest.raises(SystemExit):
        main(["p.toml", "--set", "folder=out"])
    assert "after a correction: torchllm pipeline p.toml --set folder=out\n" in capfd.readouterr().out


def test_a_command_of_no_program_is_an_error() -> None:
    with pytest.raises(UserError, match="no-such-program: No such file"):
        module.run_stage_command("no-such-program")
    with pytest.raises(UserError, match="no command"):
        command_line("A=1")


def test_recipes_come_with_torchllm() -> None:
    words, environment = command_line("RECIPE=recipes/finetune.py torchllm train a.toml")
    assert environment["RECIPE"] == str(ROOT / "recipes/finetune.py")
    assert words == [sys.executable, "-P", "-m", "torchllm", "train", "a.toml"]


def test_durations() -> None:
    assert " ".join(map(clock, (0.4, 59.6, 3599, 3600, 18013))) == "0:00 1:00 59:59 1:00:00 5:00:13"


def test_the_8_gpu_pipeline_has_planned_hours_without_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    main([str(SHIPPED[1]), "--check"])
    printed = capsys.readouterr().out
    assert printed.count("planned, not measured") == 3  # two runs that train, and the sum
    hours = float(printed.rpartition("in all ")[2].split()[0])
    assert hours == pytest.approx(5.5, rel=0.1)  # the planner gets better; the files say 5.0 and 0.5
    assert "at $24 per hour of 8 GPUs" in printed
    assert not Path("runs").exists()


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_commands_of_shipped_pipelines_are_valid(file: Path) -> None:
    """Checked, not run: what one stage writes is where the next one reads."""
    pipeline = read_pipeline(str(file))
    checked = 0
    for stage in pipeline.stages:
        words, environment = command_line(stage.run)
        if {"tokenizer", "prepare", "train"} & set(words):
            checked += 1
            done = subprocess.run(
                [*words, "--check", "--run.dry_run=true"],
                env=environment | {"NPROC": str(pipeline.gpus or 2)},
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, done.stderr
            assert "nothing in this" not in done.stderr  # no key of a shipped file is without effect
        if stage.resumes or not stage.needs_terminal:
            assert f"{pipeline.folder}/{stage.name}" in stage.run or stage.name in ("validate", "tasks")
    assert checked >= 4
    trains = [shlex.split(stage.run) for stage in pipeline.stages if "torchllm train" in stage.run]
    for words in trains:
        config = next(word for word in words if word.endswith(".toml"))
        assert "stopped_exit_status = 75" in (ROOT / Path(config).parent / "pretrain.toml").read_text()


def test_records_are_written_whole(tmp_path: Path) -> None:
    record = Record("key", {"its command": "a"}, True, 1.0, 2.0)
    write_record(tmp_path, "one", record)
    os.link(tmp_path / "stages.json", tmp_path / "as before")
    write_record(tmp_path, "two", record)
    assert list(json.loads((tmp_path / "as before").read_text())) == ["one"]  # whoever reads it meanwhile
    assert read_stage_records(tmp_path) == {"one": record, "two": record}
    assert sorted(json.loads((tmp_path / "stages.json").read_text())) == ["one", "two"]
    assert [file.name for file in tmp_path.glob("stages.*")] == ["stages.json"]
