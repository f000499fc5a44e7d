"""A job whose corpus and checkpoints are in a bucket: any number of ranks, and a lost run folder."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import patience
from tests.s3 import s3_bucket
from tests.tiny_run import DEBUG, QUIET, ROOT, SMALL, changed, curve
from tests.tools.prepare.test_build import write_documents

pytestmark = pytest.mark.exhaustive
WORDS = changed(
    *(SMALL, *QUIET, "--data.workers=1", "--training.global_batch_size=16", "--training.micro_batch_size=4"),
    "--schedule.name=constant",  # a run of 4 steps is the first half of one of 8
)


def run_in(folder: Path, ranks: int, *words: str) -> Path:
    """Train; return the run folder."""
    environment = os.environ | {"NPROC": str(ranks)}
    of_run = changed(WORDS, *words, f"--run.folder={folder}/run", f"--data.cache={folder}/cache")
    command = ["./run_train.sh", DEBUG, *of_run]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=patience(300))
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "run"


def test_several_ranks_read_a_corpus_in_a_bucket_and_resume_from_it(tmp_path: Path) -> None:
    write_documents(tmp_path, 300)
    with s3_bucket() as bucket:
        source = ["--data.sources.0.kind=jsonl", f"--data.sources.0.path={tmp_path}/a.jsonl", "--data.tokenizer=bytes"]
        folders = [f"--prepare.folder={tmp_path}/tokens", f"--prepare.remote={bucket}/tokens"]
        prepare = [sys.executable, "recipes/prepare.py", *source, *folders, "--prepare.shard_mib=0.005"]
        done = subprocess.run(prepare, cwd=ROOT, capture_output=True, text=True, timeout=patience(300))
        assert done.returncode == 0, done.stderr

        tokens = "--data.sources.0.kind=tokens", "--data.tokenizer=bytes"
        here = run_in(tmp_path / "here", 1, *tokens, f"--data.sources.0.path={tmp_path}/tokens/0-jsonl-a")
        shutil.rmtree(tmp_path / "tokens")
        there = (*tokens, f"--data.sources.0.path={bucket}/tokens/0-jsonl-a", f"--checkpoint.remote={bucket}/run")
        first = run_in(tmp_path / "two", 2, *there, "--training.steps=4", "--parallel.tp=2")
        losses = [record[1] for record in curve(first)]
        last = run_in(tmp_path / "four", 4, *there, "--parallel.pp=2")
        losses += [record[1] for record in curve(last)]
        assert losses == pytest.approx([record[1] for record in curve(here)], rel=1e-5)
        assert [record[0] for record in curve(last)] == [5, 6, 7, 8]
