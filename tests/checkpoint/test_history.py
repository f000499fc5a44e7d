import hashlib
import os
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests import workers
from tests.checkpoint.test_checkpointer import saved, steps
from torchllm import config
from torchllm.checkpoint import history, piece_table, verify
from torchllm.checkpoint import manifest as manifests
from torchllm.checkpoint.checkpointer import Checkpointer
from torchllm.checkpoint.history import Proof, delete_folder, folders_to_delete, share_of


def test_the_newest_whole_ones_stay() -> None:
    folders = [Path(name) for name in "edcba"]
    judged = []

    def is_whole(folder: Path) -> bool:
        judged.append(folder.name)
        return folder.name != "d"

    assert folders_to_delete(folders, 2, is_whole) == [Path("b"), Path("a")]
    assert judged == ["e", "d", "c"]  # of those that go, none is looked at
    assert folders_to_delete(folders[:3], 2, is_whole) == []


def test_deletions_are_shared_out() -> None:
    for count, ranks in ((997, 64), (997, 1), (3, 64), (0, 4)):
        folders = [Path(f".step-{number:08d}.{number:032x}.tmp") for number in range(count)]
        shares = [share_of(folders, rank, ranks) for rank in range(ranks)]
        assert sorted(folder for share in shares for folder in share) == folders
        assert max(map(len, shares)) == -(-count // ranks)


def test_a_single_folder_is_not_always_the_same_ranks() -> None:
    ranks = set()
    for number in range(100):
        hidden = Path(f".step-00000001.{hashlib.md5(bytes([number])).hexdigest()}.tmp")
        ranks.update(rank for rank in range(4) if share_of([hidden], rank, 4))
    assert ranks == {0, 1, 2, 3}


def test_a_leftover_that_cannot_be_deleted_is_named_and_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    leftovers = [tmp_path / "another users", tmp_path / "mine"]
    for leftover in leftovers:
        leftover.mkdir()
    rmtree = history.shutil.rmtree

    def refuse(path: Path, ignore_errors: bool = False) -> None:
        if path != leftovers[0]:
            rmtree(path, ignore_errors)
        elif not ignore_errors:
            raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(history.shutil, "rmtree", refuse)
    for leftover in leftovers:
        delete_folder(leftover)
    assert [leftover.exists() for leftover in leftovers] == [True, False]
    [message] = caplog.messages
    assert message.startswith(f"warning: cannot delete {leftovers[0]}, which is no checkpoint any more")


def test_an_old_checkpoint_that_cannot_be_renamed_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rename = os.rename

    def refuse(source: Path, target: Path) -> None:
        if source.name == "step-00000001":
            raise PermissionError(1, "Operation not permitted", str(source))
        rename(source, target)

    saving = saved(tmp_path, 1, keep=1)
    monkeypatch.setattr(os, "rename", refuse)
    saving.save(2, {})
    saving.save(3, {})
    saving.close()
    assert steps(tmp_path) == [3, 1]
    assert "cannot delete the old checkpoint" in caplog.text
    assert "step-00000001" in caplog.text


def lower_keep(folder: str) -> dict[str, int]:
    """Save once more with keep = 3; return how often this rank has deleted a folder, and hashed or read a file."""
    counts = {}
    with ExitStack() as patches:
        for module, name in (
            (history.shutil, "rmtree"),
            (verify, "read_content"),
            (piece_table, "read_piece_table"),
            (piece_table, "read_range"),
        ):
            counts[name] = patches.enter_context(mock.patch.object(module, name, wraps=getattr(module, name)))
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters())
        settings = config.Checkpoint(keep=3)
        checkpoints = Checkpointer(settings, Path(folder), [model], optimizer, host_group=dist.group.WORLD)
        checkpoints.save(5000, {})
        checkpoints.close()
    return {name: count.call_count for name, count in counts.items()}


def test_a_thousand_checkpoints_go_without_being_read(tmp_path: Path) -> None:
    """`keep` is lowered: the folders are judged by size, and deleted by all ranks."""
    model = nn.Linear(2, 2)
    saving = Checkpointer(config.Checkpoint(keep=0), tmp_path, [model], torch.optim.SGD(model.parameters()))
    saving.save(1, {})
    root = tmp_path / "checkpoints"
    for step in range(2, 1001):
        (manifests.step_folder(root, step)).mkdir()  # a thousand real ones take a minute: those that go are not read
    for step in (1001, 1002):
        saving.save(step, {})
    counted = workers.run(lower_keep, 4, str(tmp_path))
    assert [manifests.step_of(folder) for folder in manifests.step_folders(root)] == [5000, 1002, 1001]
    assert len(list(root.iterdir())) == 3
    assert counted == [{"rmtree": 250, "read_content": 0, "read_piece_table": 0, "read_range": 0}] * 4


def proof_after(steps: dict[int, tuple[int, float | None]], evaluates: bool = False, start: int = 0) -> Proof:
    """The proof after these logged steps: (steps skipped so far, validation loss)."""
    proof = Proof(start, evaluates=evaluates)
    for step, (skipped, validation_loss) in steps.items():
        proof.note(step, skipped, validation_loss)
    return proof


@pytest.mark.quick
def test_steps_that_were_not_applied_prove_nothing() -> None:
    every_second_is_skipped = {step: (step // 2, None) for step in range(1, 25)}
    # Of the steps after 4 ten were applied: 5, 7, ..., 23.
    assert proof_after(every_second_is_skipped).proven_until == 4
    none_is_applied = {step: (step - 20, None) for step in range(21, 1000)}
    assert proof_after({20: (0, None)} | none_is_applied).proven_until == 0
    assert len(proof_after({20: (0, None)} | none_is_applied)._samples) <= 10  # however long that goes on


@pytest.mark.quick
def test_of_logged_steps_only_it_knows_what_came_after_each() -> None:
    assert proof_after({1: (0, None), 20: (0, None), 25: (0, None)}).proven_until == 1
    assert proof_after({1: (0, None), 20: (0, None), 30: (0, None)}).proven_until == 20


@pytest.mark.quick
def test_what_is_suspect_begins_after_what_is_good() -> None:
    logged: dict[int, tuple[int, float | None]] = dict.fromkeys(range(1, 31), (0, None))
    proof = proof_after(logged | {4: (0, 1.5)}, evaluates=True)
    assert proof.suspect_since(evaluation=True) == 5
    assert proof.suspect_since(evaluation=False) == 21  # ten finite steps have followed step 20
    assert proof_after({505: (5, None)}, start=500).suspect_since(evaluation=False) == 500  # none that is older
