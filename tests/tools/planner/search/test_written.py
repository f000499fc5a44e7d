"""The header of a written run."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from recipes.plan import main
from tests.tools.planner.search.test_numbers import JOB
from torchllm.config import Training
from torchllm.tools.planner.predict import predict
from torchllm.tools.planner.search.layouts import Layout
from torchllm.tools.planner.search.search import Ranked
from torchllm.tools.planner.search.written import header


def test_a_written_run_names_both_figures_of_its_memory() -> None:
    planned = replace(JOB, gpus=8, training=Training(sequence_length=2048, global_batch_size=64))
    layout = Layout(1, 1, planned.gpus, 1, 1)
    prediction = predict(planned.case(layout))
    memory = prediction.memory
    lines = header(Path("run.toml"), planned, Ranked(layout, prediction), traced=3 * 2**30)
    assert all(line.startswith("#") for line in lines)
    assert f", {memory.total / 2**30:.1f} GiB per GPU," in lines[-3]
    assert lines[-2].startswith(f"# of which {memory.live / 2**30:.1f} are tensors: ")
    assert lines[-2].endswith(" with uncompiled blocks, by a dry run 3.0.")
    assert memory.live < memory.total
    *_, without, _ = header(Path("run.toml"), planned, Ranked(layout, prediction), traced=None)
    assert without.endswith(", not counted by a dry run, which is refused.")


def test_the_dry_run_of_a_written_run_counts_what_is_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "NNODES", "NPROC"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "run.toml"
    words = ["--model=llama3_1b", "--model.layers=2", "--cluster=dgx_a100", "--gpus=8", "--parallel.tp=4"]
    main(["rank", *words, "--sequence-length=32768", "--global-batch-size=8", "--write", str(file)])
    found = re.search(r": ([\d.]+) with uncompiled blocks, by a dry run ([\d.]+)\.$", file.read_text(), re.M)
    assert found is not None
    planned, traced = float(found[1]), float(found[2])
    assert traced == pytest.approx(planned, rel=0.03)
