"""Runs that version 0.1 wrote, before its files and names were moved, go on bit for bit.

`tests/fixtures/version_0_1` holds two runs of 8 steps on 2 ranks (torch 2.13.0, AVX512): a Llama under FSDP with ZeRO
stage 1, and a GPT cut into two pipeline stages. Of each it keeps the resolved config, the metrics of all 8 steps, the
checkpoint of step 4, and of step 8 the sha256 of every tensor. `corpus` is the corpus that version 0.1 made of
`corpus.jsonl`: a later version would make another one, so a run is resumed on this folder.
"""

import json
import shutil
from pathlib import Path

import pytest

from tests.recipes.warm import pretrain
from tests.tiny_run import ROOT, curve, tensor_digests
from torchllm.config import load_config

FIXTURE = ROOT / "tests" / "fixtures" / "version_0_1"
RUNS = ["llama", "gpt"]


@pytest.mark.parametrize("name", RUNS)
def test_its_resolved_config_loads_without_a_line(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    load_config([str(FIXTURE / name / "config.toml")])
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("name", RUNS)
def test_its_run_goes_on_as_if_nothing_had_changed(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    shutil.copytree(FIXTURE / name, folder)
    written = curve(folder)
    assert [step for step, *_ in written] == list(range(1, 9))
    (folder / "metrics.jsonl").unlink()

    tokens = ("--data.sources.0.kind=tokens", f"--data.sources.0.path={FIXTURE / 'corpus'}")
    errors = pretrain(2, folder, *tokens, config=folder / "config.toml", settings=())

    assert errors == ["", ""]
    resumed = curve(folder)
    assert [step for step, *_ in resumed] == [5, 6, 7, 8]
    for expected, step in zip(written[4:], resumed, strict=True):
        assert step == pytest.approx(expected, rel=1e-5)  # another CPU: float32 sums in another order, over four steps
    # Another torch or another CPU model sums in another order: the first step's gradient norm shows it.
    if resumed[0] == written[4]:
        assert resumed == written[4:]
        written_tensors = json.loads((FIXTURE / name / "step-00000008.json").read_text())["tensors"]
        assert tensor_digests(folder, 8) == written_tensors
