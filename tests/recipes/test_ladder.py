"""Ladders: the law and its interval, which sizes are trained when, and a real one of four sizes."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from ladder import ladder as ladders
from ladder.fit import Point, PowerLaw
from ladder.ladder import Ladder

from tests.tiny_run import ROOT
from torchllm.config import Config, Optimizer, Run

DEBUG = ROOT / "train_configs" / "debug.toml"
COMPUTE = np.array([2.7e11, 8.9e11, 3.1e12, 1.7e13, 6.4e13])
NEXT = 2.6e14


def loss_of(compute: float) -> float:
    return 1.2 + 1.1 * (compute / COMPUTE[0]) ** -0.25


def fitted(losses: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> PowerLaw:
    return PowerLaw([Point(*point) for point in zip(COMPUTE.tolist(), losses.tolist(), strict=True)])


def test_the_law_of_losses_without_noise_is_found() -> None:
    law = fitted(loss_of(COMPUTE))
    assert (law.floor, law.scale, law.exponent) == pytest.approx((1.2, 1.1, 0.25), rel=2e-3)  # of a grid
    assert law.predict(NEXT).loss == pytest.approx(loss_of(NEXT), abs=5e-4)


@pytest.mark.exhaustive
def test_an_interval_has_the_measured_loss_in_nine_of_ten_cases() -> None:
    noise = np.random.default_rng(0)
    inside = 0
    for _ in range(100):
        predicted = fitted(loss_of(COMPUTE) + noise.normal(0, 0.01, len(COMPUTE))).predict(NEXT)
        inside += abs(loss_of(NEXT) + noise.normal(0, 0.01) - predicted.loss) <= predicted.half_width
    assert 84 <= inside <= 96  # two standard deviations of a binomial of 100 and 0.9


def test_a_law_needs_four_runs() -> None:
    with pytest.raises(ValueError, match="a fit takes 4 to 8 runs, not 3"):
        PowerLaw([Point(1e9, 2.0), Point(1e10, 1.9), Point(1e11, 1.8)])


def written(folder: Path, **keys: object) -> str:
    """Write a ladder whose sizes take a few steps each, and return its path."""
    values = {
        "config": str(DEBUG),
        "sizes": ["40K", "50K", "60K", "70K"],
        "next": "80K",
        "tokens_per_parameter": 0.2,
        "global_batch_size": 16,
        "processes": 2,
        "overrides": ["--optimizer.learning_rate=3e-3"],
    }
    lines = [f"{key} = {json.dumps(value)}" for key, value in (values | keys).items()]
    (folder / "small.toml").write_text("\n".join(["[ladder]", *lines]))
    return str(folder / "small.toml")


def test_what_is_wrong_with_a_ladder_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for keys, message in [
        ({"config": "none.toml"}, "ladder.config: 'none.toml': no such file in"),
        ({"sizes": ["1M"]}, "ladder.sizes: a law takes 4 to 8 sizes, not 1"),
        ({"next": "big"}, "ladder.sizes and ladder.next: not a number such as 350M or 1.5B: big"),
        ({"next": "50K"}, "a size is there twice"),
        ({"step": 3}, "small.toml:9: ladder.step: unknown"),
        ({"overrides": ["--model.heads=7"]}, "heads"),
    ]:
        with pytest.raises(SystemExit) as end:
            ladders.main([written(tmp_path, **keys), f"--output={tmp_path / 'out'}"])
        assert end.value.code == 2, keys
        assert message in capsys.readouterr().err, keys


def test_the_prediction_is_written_before_the_last_size_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[str] = []
    out = tmp_path / "out"

    def run_job(arguments: list[str], processes: int, timeout: None, log: Path, launcher: str) -> int:
        folder = Path(arguments[-1].removeprefix("--run.folder="))
        started.append(folder.name)
        if folder.name == "70K" and len(started) == 5:
            return 1
        assert (out / "prediction.json").exists() == (folder.name == "80K")
        folder.mkdir(exist_ok=True)
        losses = {"40K": 2.0, "50K": 1.9, "60K": 1.83, "70K": 1.78, "80K": 1.7}
        steps = int(next(word for word in arguments if word.startswith("--evaluate.interval=")).partition("=")[2])
        records = [{"step": 1, "validation_loss": 9.0}, {"step": steps, "validation_loss": losses[folder.name]}]
        if folder.name == "60K" and len(started) == 3:  # asked to stop: its exit status is 0, too
            records.pop()
        lines = [json.dumps(record) for record in [*records, {"step": steps}]]
        (folder / "metrics.jsonl").write_text("\n".join(lines))
        return 0

    monkeypatch.setattr(ladders, "run_job", run_job)
    command = [written(tmp_path), f"--output={out}"]
    for message in ("60K: no validation loss of step 6, its last", "70K: its run ended with status 1"):
        with pytest.raises(SystemExit) as end:
            ladders.main(command)
        assert end.value.code == 1
        assert message in capsys.readouterr().err
    ladders.main(command)
    assert started == ["40K", "50K", "60K", "60K", "70K", "70K", "80K"]  # what is measured is not trained again
    ladders.main(command)
    assert len(started) == 7
    table = (out / "results.md").read_text()
    assert "| 80K |" in table
    assert "measured: 1.7000." in table
    predicted = json.loads((out / "prediction.json").read_text())
    assert f"Off by {1.7 - predicted['loss']:+.4f} nats" in table

    with pytest.raises(SystemExit) as end:
        ladders.main([written(tmp_path, tokens_per_parameter=0.4), f"--output={out}"])
    assert end.value.code == 2
    assert "of another ladder, or run: choose another --output" in capsys.readouterr().err


def test_sizes_of_another_run_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file that `ladder.config` names was edited between two sizes."""
    ladder, run = Ladder(config="debug.toml"), Config()
    ladders.refuse_other_ladder(ladder, run, tmp_path)
    ladders.refuse_other_ladder(ladder, replace(run, run=Run(folder="runs/later")), tmp_path)
    with pytest.raises(SystemExit):
        ladders.refuse_other_ladder(ladder, replace(run, optimizer=Optimizer(beta2=0.5)), tmp_path)
    assert "of another ladder, or run" in capsys.readouterr().err


def test_a_size_has_the_tokens_that_are_asked_for(tmp_path: Path) -> None:
    rung = ladders.rung_of("50K", ladders.read_ladder(written(tmp_path)), str(DEBUG))
    longer = ladders.rung_of("50K", ladders.read_ladder(written(tmp_path, tokens_per_parameter=2.0)), str(DEBUG))
    assert rung.tokens == pytest.approx(0.2 * 50e3, rel=0.11)  # whole steps of 2,048 tokens
    short = written(tmp_path, overrides=["--training.sequence_length=64"])
    assert ladders.rung_of("50K", ladders.read_ladder(short), str(DEBUG)).tokens == pytest.approx(0.2 * 50e3, rel=0.06)
    assert longer.tokens == pytest.approx(2.0 * 50e3, rel=0.011)
    assert longer.compute / rung.compute == pytest.approx(longer.tokens / rung.tokens)
    assert longer.parameters == rung.parameters


def test_stages_of_other_sizes_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Their steps have other tokens than the batch of the ladder: the law would be of a compute that was not spent."""
    run = tmp_path / "run.toml"
    stages = "[[data.stage]]\nuntil_tokens = 4096\nglobal_batch_size = 4\n[[data.stage]]\nglobal_batch_size = 8\n"
    run.write_text(f'base = "{DEBUG}"\n{stages}')
    with pytest.raises(SystemExit) as end:
        ladders.main([written(tmp_path, config="run.toml"), f"--output={tmp_path / 'out'}"])
    assert end.value.code == 2
    assert "data.stage: the sizes of a ladder have one batch" in capsys.readouterr().err
    without = ladders.read_ladder(written(tmp_path, config="run.toml", overrides=["--data.stage=[]"]))
    assert ladders.rung_of("50K", without, str(run)).steps > 0


def test_a_size_goes_on_from_no_other(tmp_path: Path) -> None:
    rung = ladders.rung_of("50K", ladders.read_ladder(written(tmp_path)), str(DEBUG))
    assert {"--checkpoint.remote=", "--checkpoint.resume=auto"} <= {*rung.overrides}


def test_rows_that_are_no_numbers_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out" / "results.csv"
    file.parent.mkdir()
    file.write_text("size,parameters,tokens,compute,loss\n50K,1,1,1,1\n\n")
    assert [row.size for row in ladders.read_sizes(file)] == ["50K"]
    file.write_text("size,parameters,tokens,compute,loss\n50K,many,1,1,1\n")
    with pytest.raises(SystemExit) as end:
        ladders.main([written(tmp_path), f"--output={file.parent}"])
    assert end.value.code == 2
    line = capsys.readouterr().err
    assert re.fullmatch(r".*results.csv: invalid literal .*'many': remove the row, .*\n", line)


@pytest.mark.exhaustive
def test_a_real_ladder(tmp_path: Path) -> None:
    out = tmp_path / "out"
    ladders.main([written(tmp_path), f"--output={out}"])
    rows = ladders.read_sizes(out / "results.csv")
    assert [row.size for row in rows] == ["40K", "50K", "60K", "70K", "80K"]
    assert all(1.0 < row.loss < 6.0 for row in rows)
