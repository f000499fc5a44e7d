"""Runs that commit 8ca45ed wrote, in format 2, go on bit for bit; files of format 1 are refused by that name.

`tests/fixtures/commit_8ca45ed` has two runs of 4 steps on 2 ranks (torch 2.13.0, AVX512): a Llama under FSDP with ZeRO
stage 1, and a GPT cut into two pipeline stages. Of each it has the resolved config, the metrics of all steps, the
checkpoint of step 2, and the sha256 of every tensor of step 4. Both were trained on `corpus`.
"""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest

from tests.data.test_corpus import flip_bit
from tests.recipes.warm import pretrain
from tests.tiny_run import ROOT, curve, tensor_digests
from torchllm.checkpoint.manifest import CheckpointError
from torchllm.checkpoint.tensors import verify_in_parallel
from torchllm.checkpoint.verify import newest_verified
from torchllm.config.errors import DataError
from torchllm.data.corpus import Corpus
from torchllm.tools.config.load import load_config

FIXTURE = ROOT / "tests" / "fixtures" / "commit_8ca45ed"
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
    assert [step for step, *_ in written] == [1, 2, 3, 4]
    (folder / "metrics.jsonl").unlink()

    corpus = f"--data.sources.0.path={FIXTURE / 'corpus'}"
    errors = pretrain(2, folder, corpus, config=folder / "config.toml", settings=())

    assert errors == ["", ""]
    resumed = curve(folder)
    assert [step for step, *_ in resumed] == [3, 4]
    for expected, step in zip(written[2:], resumed, strict=True):
        assert step == pytest.approx(expected, rel=1e-5)  # another CPU: float32 sums in another order, over two steps
    # Another torch or another CPU model sums in another order: the first step's gradient norm shows it.
    if resumed[0] == written[2]:
        assert resumed == written[2:]
        assert tensor_digests(folder, 4) == json.loads((FIXTURE / name / "step-00000004.json").read_text())


def test_its_corpus_keeps_its_fingerprint() -> None:
    corpus = Corpus(FIXTURE / "corpus")
    for shard in corpus.check():
        corpus.verify(*shard)
    assert corpus.fingerprint == "5aba634cbe8c3bf6"


def test_damage_is_found_by_the_sums_of_format_2(tmp_path: Path) -> None:
    corpus, step = tmp_path / "corpus", tmp_path / "step-00000002"
    shutil.copytree(FIXTURE / "corpus", corpus)
    shutil.copytree(FIXTURE / "gpt" / "checkpoints" / step.name, step)
    verify_in_parallel(None, step)
    flip_bit(step / "__0_0.distcp", 100)
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp: damaged: the sum of bytes 0 to "):
        verify_in_parallel(None, step)
    flip_bit(corpus / "00000.train.bin", 100)
    with pytest.raises(DataError, match=r"00000\.train\.bin is damaged: its bytes 0 to "):
        Corpus(corpus).verify("train", 0)


def test_format_1_is_refused_by_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "step-00000002"
    folder.mkdir()
    (folder / "manifest.json").write_text('{"format": 1, "step": 2, "files": {".metadata": [1, ""]}}')
    message = r"no checkpoint in .*manifest\.json: a checkpoint of format 1; this torchllm reads 2 and 3$"
    with pytest.raises(CheckpointError, match=f"(?s){message}"):
        newest_verified([folder], partial(verify_in_parallel, None), print)
    (tmp_path / "corpus.json").write_text('{"format": 1, "key": "", "shards": [{"files": {}}]}')
    message = r"corpus\.json: a corpus of format 1; this version of torchllm reads 2 and 3: prepare the corpus again"
    with pytest.raises(DataError, match=message):
        Corpus(tmp_path)
