import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import workers
from tests.data.test_build import write_documents
from torchllm.config import Data, Model, Source, Training
from torchllm.data.batch import Batch
from torchllm.data.corpus import Begins, Ids, Split, fingerprint_of
from torchllm.data.error import DataError
from torchllm.data.loader import DataRanks, TrainLoader, build_loader
from torchllm.data.order import DataOrder

LENGTH = 3


class Numbered:
    """Sequences whose tokens say which one they are: (source, split, number)."""

    def __init__(self, source: int, train: int, validation: int = 0) -> None:
        self.source, self.sizes = source, {"train": train, "validation": validation}
        self.fingerprint = f"numbered-{source}-{train}"

    def count(self, split: Split, length: int) -> int:
        return self.sizes[split]

    def window(self, split: Split, number: int, length: int) -> tuple[Ids, Begins]:
        return np.array([self.source, split == "validation", number, 0], dtype=np.uint32), np.zeros(1, dtype=np.int64)


def alone(rank: int = 0, size: int = 1) -> DataRanks:
    return DataRanks(rank, size, rank == 0)


def loader(sizes: list[int], rank: int, size: int, micro: int, accumulation: int, **more: Any) -> TrainLoader:
    weights = more.pop("weights", [1.0] * len(sizes))
    training = Training(micro_batch_size=micro, global_batch_size=micro * accumulation * size, sequence_length=LENGTH)
    sources = tuple(Source(kind="synthetic", weight=weight) for weight in weights)
    data = Data(sources=sources, workers=more.pop("workers", 0))
    numbered = [Numbered(source, count, more.get("validation", 0)) for source, count in enumerate(sizes)]
    return TrainLoader(list(numbered), data, training, more.get("seed", 0), alone(rank, size))


def seen(batch: Batch) -> list[tuple[int, ...]]:
    return [tuple(row) for row in batch.tokens.tolist()]


layouts = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2))


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(layouts, st.integers(0, 3)), min_size=1, max_size=3),
    st.lists(st.integers(1, 30), min_size=1, max_size=3),
    st.integers(0, 2**63 - 1),
)
def test_whatever_the_layouts_and_stops_the_stream_is_the_uninterrupted_one(
    stages: list[tuple[tuple[int, int, int, int], int]], sizes: list[int], seed: int
) -> None:
    weights = [1.0 + source for source in range(len(sizes))]
    state: dict[str, Any] | None = None
    stream: list[tuple[int, ...]] = []
    for (ranks, micro, accumulation, processes), steps in stages:
        loaders = [
            loader(sizes, rank, ranks, micro, accumulation, workers=processes, seed=seed, weights=weights)
            for rank in range(ranks)
        ]
        for each in loaders:
            if state is not None:
                each.load_state(json.loads(json.dumps(state)))
        for _ in range(steps):
            of_ranks = [each.next_step() for each in loaders]
            assert all(len(batches) == accumulation for batches in of_ranks)
            for micro_batches in zip(*of_ranks, strict=True):
                stream += [row for batch in micro_batches for row in seen(batch)]
        states = [each.state() for each in loaders]
        for each in loaders:
            each.close()
        assert all(other == states[0] for other in states)
        state = states[0]
    order = DataOrder(seed, sizes, weights)
    assert state is not None
    assert state["sequences"] == len(stream)
    located = [order.locate(n) for n in range(len(stream))]
    assert stream == [(source, 0, number) for source, _, number in located]


def test_resuming_is_as_quick_far_out() -> None:
    each = loader([10**9], 0, 1, 2, 2, workers=1)
    state = each.state() | {"sequences": 4 * 10**12}
    start = time.perf_counter()
    each.load_state(state)
    (first, _) = each.next_step()
    assert time.perf_counter() - start < 1.0
    order = DataOrder(0, [10**9], [1.0])
    assert seen(first)[0][2] == order.locate(4 * 10**12)[2]
    each.close()


def test_a_state_of_other_data_is_refused_with_both_fingerprints() -> None:
    state = loader([10], 0, 1, 1, 1, seed=1).state()
    with pytest.raises(ValueError, match=r"seed: saved 1, now 2$"):
        loader([10], 0, 1, 1, 1, seed=2).load_state(state)
    with pytest.raises(ValueError, match=r"saved \[\['numbered-0-10', 1\.0\]\], now \[\['numbered-0-11', 1\.0\]\]"):
        loader([11], 0, 1, 1, 1, seed=1).load_state(state)
    with pytest.raises(ValueError, match="sources"):
        loader([10], 0, 1, 1, 1, seed=1, weights=[2.0]).load_state(state)
    changed = state | {"fingerprint": state["fingerprint"] | {"sequence_length": 7}}
    with pytest.raises(ValueError, match="sequence_length: saved 7, now 3"):
        loader([10], 0, 1, 1, 1, seed=1).load_state(changed)


@pytest.mark.parametrize("processes", [0, 1])
def test_the_runs_random_state_is_not_touched(processes: int) -> None:
    torch.manual_seed(0)
    expected = torch.get_rng_state()
    each = loader([10], 0, 1, 1, 1, workers=processes)
    each.next_step()
    each.close()
    assert torch.equal(torch.get_rng_state(), expected)


@pytest.mark.filterwarnings("error")
def test_nothing_warns() -> None:
    each = loader([10], 0, 1, 1, 1, workers=1)
    each.next_step()
    each.close()


@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 20), st.integers(0, 9), st.integers(1, 9))
def test_validation_is_the_same_for_every_layout(ranks: int, micro: int, wanted: int, first: int, second: int) -> None:
    def stream(ranks: int, micro: int, seed: int) -> list[tuple[int, ...]]:
        of_ranks = []
        for rank in range(ranks):
            each = loader([5, 5], rank, ranks, micro, 1, seed=seed)
            each._held_out = {s: count for s, count in enumerate((first, second)) if count}
            of_ranks.append(list(each.validation_batches(wanted)))
        assert len({len(batches) for batches in of_ranks}) == 1
        rows = [
            (row, bool((labels != -100).any()))
            for batches in zip(*of_ranks, strict=True)
            for batch in batches
            for row, labels in zip(seen(batch), batch.labels, strict=True)
        ]
        kept = [row for row, counted in rows if counted]
        assert [row for row, _ in rows[: len(kept)]] == kept  # what is ignored is at the end
        return kept

    found = stream(ranks, micro, seed=ranks)
    assert found == stream(1, 1, seed=0)
    assert len(found) == len(set(found)) == min(wanted, first + second)
    assert all(held_out for _, held_out, _ in found)


def real(tmp_path: Path, source: Source, length: int = 32, **changes: Any) -> TrainLoader:
    settings: dict[str, Any] = {"sources": (source,), "cache": str(tmp_path / "cache"), "workers": 0} | changes
    training = Training(micro_batch_size=2, global_batch_size=4, sequence_length=length)
    return build_loader(Data(**settings), training, Model(), 0, alone())


def text_of(batch: Batch) -> list[str]:
    return ["".join(map(chr, row)) for row in batch.tokens.tolist()]


def test_held_out_documents_are_never_trained_on(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"[{index:04d}]" * 3}) for index in range(300)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    source = Source(kind="jsonl", path=str(tmp_path / "a.jsonl"))
    each = real(tmp_path, source, validation_fraction=0.2)

    def names(batches: list[Batch]) -> set[str]:
        text = [part for batch in batches for row in text_of(batch) for part in row.split("[")]
        return {part[:4] for part in text if len(part) >= 5 and part[4] == "]"}

    validation = names(list(each.validation_batches(1000)))
    steps = 2 * each._order._sizes[0] // 4  # two epochs
    trained = names([batch for _ in range(steps) for batch in each.next_step()])
    assert len(validation) > 30
    assert len(trained) > 200
    assert not validation & trained


def test_labels_are_the_next_tokens_also_across_sequences(tmp_path: Path) -> None:
    each = real(tmp_path, write_documents(tmp_path, 50), document_mask=True)
    for batch in each.next_step():
        assert batch.document_ids is not None
        for tokens, labels, positions, ids in zip(*(part.tolist() for part in batch if part is not None), strict=True):
            for place in range(len(tokens) - 1):
                ends = tokens[place] == 257
                assert labels[place] == (-100 if ends else tokens[place + 1])
                assert ids[place + 1] == ids[place] + ends
                assert positions[place + 1] == (0 if ends else positions[place] + 1)


def test_the_standard_library_in_bytes_is_quick_and_cached(tmp_path: Path) -> None:
    start = time.process_time()
    first = real(tmp_path, Source(), length=256)
    assert time.process_time() - start < 10.0
    start = time.process_time()
    second = real(tmp_path, Source(), length=256)
    assert time.process_time() - start < 1.0
    assert first.state() == second.state()
    assert first._order._sizes[0] * 256 > 5e6
    assert first.validation_sequences(64) == 64
    assert not first.skipped


def test_default_cache_follows_the_platform(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    real(tmp_path, write_documents(tmp_path, 50), cache="")
    assert list((tmp_path / "xdg" / "torchllm").glob("jsonl-*/corpus.json"))


def test_skipped_records_are_reported(tmp_path: Path) -> None:
    source = write_documents(tmp_path, 50)
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write("\nnonsense\n{}\n")
    assert real(tmp_path, source, on_bad_record="skip").skipped == {"broken JSON": 1, "wrong key": 1}
    with pytest.raises(DataError, match=r"a\.jsonl:51: broken JSON"):
        real(tmp_path, source)  # the corpus with skips must not serve a run that wants none


def test_what_is_too_small_or_too_big(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_documents(tmp_path, 50)
    with pytest.raises(DataError, match=r"shorter than one sequence of training\.sequence_length = 100000"):
        real(tmp_path, source, length=100_000)
    monkeypatch.setattr(sys, "argv", ["recipes/pretrain.py", "my run.toml", "--run.seed=1"])
    command = r"python recipes/prepare\.py 'my run\.toml' --run\.seed=1 --prepare\.folder=tokens"
    with pytest.raises(DataError, match=command):
        real(tmp_path, replace(source, text_key="t"), max_raw_mib=0.001)
    (tmp_path / "hub").mkdir()
    write_documents(tmp_path / "hub", 5)
    with pytest.raises(DataError, match=r"is of unknown size; only 256 MiB .*\n.*recipes/prepare\.py"):
        real(tmp_path, Source(kind="hub", path=str(tmp_path / "hub")))
    each = real(tmp_path, source, validation_fraction=0.0)
    with pytest.raises(DataError, match=r"nothing is held out .* data\.validation_fraction"):
        each.validation_batches(1)


def test_tokens_must_be_of_the_runs_tokenizer_and_fit_the_model(tmp_path: Path) -> None:
    real(tmp_path, write_documents(tmp_path, 50))
    (folder,) = (tmp_path / "cache").iterdir()
    source = Source(kind="tokens", path=str(folder))
    assert real(tmp_path, source).next_step()
    header = json.loads((folder / "corpus.json").read_text())
    for key, value, message in (
        ("tokenizer", "other", "holds tokens of 'other', but data.tokenizer is 'bytes'"),
        ("max_token", 264, r"token id 264 >= model\.vocab = 264"),
    ):
        changed = header | {key: value}
        (folder / "corpus.json").write_text(json.dumps(changed | {"fingerprint": fingerprint_of(changed)}))
        with pytest.raises(DataError, match=message):
            real(tmp_path, source)


def test_runs_that_prepare_the_same_corpus_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    source = write_documents(tmp_path, 2000, size=500)
    script = (
        "import sys, pathlib; from tests.data.test_loader import *\n"
        f"print(real(pathlib.Path({str(tmp_path)!r}), Source(kind='jsonl', path={source.path!r})).state())"
    )
    command = [sys.executable, "-c", script]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = {run.communicate(timeout=60)[0] for run in runs}
    assert [run.returncode for run in runs] == [0, 0, 0]
    assert len(said) == 1
    assert not list((tmp_path / "cache").glob("*/raw*")) + list((tmp_path / "cache").glob("*/*.tmp"))


def test_synthetic_needs_no_file_and_no_tokenizer(tmp_path: Path) -> None:
    each = real(tmp_path, Source(kind="synthetic"), tokenizer="no such file")
    batch = each.next_step()[0]
    assert int(batch.tokens.max()) < Model().vocab
    assert torch.equal(batch.tokens[:, 1:], batch.labels[:, :-1])
    assert not (tmp_path / "cache").exists()


SCRIPT = """
import os, signal, sys, time
from tests.data.test_loader import loader, seen
each = loader([100], 0, 1, 1, 1, workers=2)
first = [seen(each.next_step()[0]) for _ in range(3)]
{body}
"""


def run_script(body: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", SCRIPT.format(body=body)]
    return subprocess.run(command, timeout=60, capture_output=True, text=True, start_new_session=True)


def test_an_uncaught_error_ends_the_process_and_its_workers() -> None:
    start = time.monotonic()
    done = run_script("raise RuntimeError('boom')")
    assert (done.returncode, "boom" in done.stderr) == (1, True)
    assert time.monotonic() - start < 30


def test_a_signal_to_the_whole_group_leaves_the_workers_to_the_trainer() -> None:
    """Slurm, torchrun and Ctrl-C signal every process; the trainer still needs batches until it has saved."""
    done = run_script(
        "signal.signal(signal.SIGTERM, lambda *_: print('told'))\n"
        "os.killpg(0, signal.SIGTERM); time.sleep(0.3)\n"
        "rest = [seen(each.next_step()[0]) for _ in range(20)]\n"
        "whole = loader([100], 0, 1, 1, 1)\n"
        "assert first + rest == [seen(whole.next_step()[0]) for _ in range(23)]\n"
        "print('went on')"
    )
    assert (done.returncode, done.stdout) == (0, "told\nwent on\n"), done.stderr


def test_workers_end_with_a_killed_trainer() -> None:
    body = (
        "import multiprocessing; print(*(w.pid for w in multiprocessing.active_children()), flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", SCRIPT.format(body=body)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert len(pids) == 2
    deadline = time.monotonic() + 30  # the workers look for their parent every 5 s
    while any(_lives(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _on_a_rank(folder: str, changes: dict[str, Any], of_rank_1: dict[str, Any]) -> tuple[str, list[Any]]:
    """Build a loader on this live rank: its error, or else a step."""
    rank = dist.get_rank()

    def gather_texts(text: str | None) -> list[str | None]:
        gathered: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, text)
        return gathered

    ranks = DataRanks(rank, dist.get_world_size(), rank == 0, gather_texts)
    settings = {"cache": f"{folder}/cache", **changes, **(of_rank_1 if rank else {})}
    training = Training(micro_batch_size=1, global_batch_size=2, sequence_length=32)
    try:
        each = build_loader(Data(**settings), training, Model(), 0, ranks)
    except DataError as error:
        return str(error), []
    rows = seen(each.next_step()[0])
    each.close()
    return "", rows


def test_ranks_agree(tmp_path: Path) -> None:
    source = write_documents(tmp_path, 50)
    (first, rows), (second, others) = workers.POOL.run(_on_a_rank, 2, str(tmp_path), {"sources": (source,)}, {})
    assert (first, second) == ("", "")
    assert rows != others


def _cases(tmp_path: Path) -> dict[str, tuple[dict[str, Any], dict[str, Any], str]]:
    (tmp_path / "bad.jsonl").write_text('{"text": "good"}\nnonsense')
    good = write_documents(tmp_path, 50)
    (tmp_path / "other").mkdir()
    other = write_documents(tmp_path / "other", 60)
    bad = Source(kind="jsonl", path=str(tmp_path / "bad.jsonl"))
    real(tmp_path, other)  # so that its tokens are in the cache for rank 1, which does not prepare
    return {
        "bad line": ({"sources": (bad,)}, {}, "bad.jsonl:2: broken JSON"),
        "missing file": ({"sources": (replace(bad, path="gone"),)}, {}, "no file matches 'gone'"),
        "one rank cannot open": ({"sources": (good,)}, {"cache": str(tmp_path / "else")}, "holds no token shards"),
        "one rank has other data": ({"sources": (good,)}, {"sources": (other,)}, "not all ranks read the same data"),
    }


@pytest.mark.parametrize("case", ["bad line", "missing file", "one rank cannot open", "one rank has other data"])
def test_what_is_wrong_on_one_rank_stops_all(tmp_path: Path, case: str) -> None:
    changes, of_rank_1, message = _cases(tmp_path)[case]
    start = time.monotonic()
    errors = [error for error, _ in workers.POOL.run(_on_a_rank, 2, str(tmp_path), changes, of_rank_1)]
    assert time.monotonic() - start < 60
    assert errors[0] == errors[1]
    assert message in errors[0]
