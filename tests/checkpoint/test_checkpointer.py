"""Decisions of the Checkpointer, in one process; `test_tensors.py` has the layouts and the ranks."""

import itertools
import logging
import math
import os
import random
import re
import shutil
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from tests.patience import patience, until
from torchllm import __version__, config
from torchllm.checkpoint import checkpointer as checkpointers
from torchllm.checkpoint import history
from torchllm.checkpoint import manifest as manifests
from torchllm.checkpoint import tensors as checkpoint_tensors
from torchllm.checkpoint.checkpointer import Checkpointer
from torchllm.checkpoint.manifest import (
    PROVEN,
    SUSPECT,
    CheckpointError,
    DamagedCheckpoint,
    Manifest,
    mark,
    read_suspects,
)
from torchllm.checkpoint.piece_table import read_piece_table
from torchllm.checkpoint.state import Snapshot, nonfinite_keys, parts_of
from torchllm.checkpoint.tensors import verify_in_parallel
from torchllm.config.environment import ATTEMPT
from torchllm.tools.hub.weights import load_newest_weights, load_weights
from torchllm.tools.launch.lease import LeaseLost
from torchllm.train.step import Health


def checkpointer(
    folder: Path,
    model: nn.Linear | None = None,
    *,
    evaluates: bool = False,
    check_owner: Callable[[], None] = lambda: None,
    **settings: Any,
) -> Checkpointer:
    model = model or nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(model.in_features)).sum().backward()
    optimizer.step()
    options: dict[str, Any] = {"record": {"run": "test"}, "evaluates": evaluates, "check_owner": check_owner}
    return Checkpointer(config.Checkpoint(**settings), folder, [model], optimizer, **options)


def saved(folder: Path, *steps: int, **options: Any) -> Checkpointer:
    """Return checkpoints of which these steps have been saved."""
    saving = checkpointer(folder, **options)
    for step in steps:
        saving.save(step, {})
    return saving


def step_folder(folder: Path, step: int) -> Path:
    return manifests.step_folder(folder / "checkpoints", step)


def steps(folder: Path) -> list[int]:
    return [manifests.step_of(path) for path in manifests.step_folders(folder / "checkpoints")]


def suspects(folder: Path) -> list[int]:
    return [manifests.step_of(path) for path in read_suspects(manifests.step_folders(folder / "checkpoints"))]


def resumed_step(checkpoints: Checkpointer) -> int | None:
    manifest = checkpoints.resume()
    return manifest.step if manifest else None


def damage(folder: Path, step: int) -> None:
    path = step_folder(folder, step) / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-1] + b"?")


def full(*_: Any, **__: Any) -> None:
    """Stand for a call into a file system without room."""
    raise OSError(28, "No space left on device")


class Owner:
    """This job, until `looks` are used up: then another one has taken the folder."""

    looks = math.inf

    def check(self) -> None:
        self.looks -= 1
        if self.looks < 0:
            raise LeaseLost("the folder belongs to another job")


def test_step_data_record_and_tensors_come_back(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    saving = checkpointer(tmp_path, model)
    saving.save(7, {"sequences": 56, "epochs": [0, 1]})
    loaded = nn.Linear(3, 2)
    resuming = checkpointer(tmp_path, loaded)
    manifest = resuming.resume()
    assert manifest is not None
    assert (manifest.step, manifest.data, manifest.record) == (7, {"sequences": 56, "epochs": [0, 1]}, {"run": "test"})
    saved, resumed = saving._model_parts(), resuming._model_parts()
    assert saved.keys() == resumed.keys()
    assert len(saved) == 2 + 2 * 3  # two parameters, and three entries of AdamW for each
    for key, part in saved.items():
        assert torch.equal(part.local, resumed[key].local), key
    assert torch.equal(loaded.weight, model.weight)


def test_a_resume_under_another_version_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    saved(tmp_path, 7)
    checkpointer(tmp_path).resume()
    assert "other versions" not in caplog.text
    monkeypatch.setattr("torchllm.checkpoint.checkpointer.__version__", "9.9")
    checkpointer(tmp_path).resume()
    assert f"written by other versions: torchllm {__version__}, now 9.9" in caplog.text


def test_a_save_that_is_longer_than_schedulers_wait_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saving = checkpointer(tmp_path)
    for seconds in (29.0, 31.0, 60.0, 63.0):
        saving._report_long_save(seconds)
    first, second = caplog.messages
    assert first.startswith("writing a checkpoint takes 31 s: ")
    assert "--signal=USR1@SECONDS" in first
    assert second.startswith("writing a checkpoint takes 63 s: ")
    monkeypatch.setattr(checkpointers, "DEFAULT_GRACE", -1.0)
    caplog.clear()
    saved(tmp_path, 1)
    assert "writing a checkpoint takes 0 s" in caplog.text


def test_every_one_of_200_flipped_bits_is_found(tmp_path: Path) -> None:
    checkpointer(tmp_path).save(1, {"sequences": 3})
    folder = step_folder(tmp_path, 1)
    verify_in_parallel(None, folder)
    resuming = checkpointer(tmp_path)
    resuming._load(folder)
    paths = sorted(folder.iterdir())
    assert [path.name for path in paths] == ["__0_0.distcp", "index.json", manifests.MANIFEST]
    generator = random.Random(0)
    for flip in range(200):
        path = paths[flip % len(paths)]
        content = path.read_bytes()
        changed = bytearray(content)
        changed[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
        path.write_bytes(changed)
        with pytest.raises(DamagedCheckpoint):
            verify_in_parallel(None, folder)
        with pytest.raises(DamagedCheckpoint):
            resuming._load(folder)
        path.write_bytes(content)
    verify_in_parallel(None, folder)
    resuming._load(folder)


def test_auto_starts_fresh_only_without_any_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    (tmp_path / "checkpoints" / (".step-00000009." + "0" * 32 + ".tmp")).mkdir(parents=True)
    starting = checkpointer(tmp_path)
    assert starting.resume() is None
    starting.close()
    assert "starting fresh" in caplog.text
    assert list((tmp_path / "checkpoints").iterdir()) == []  # what a killed save left is swept


def test_auto_takes_the_newest_that_verifies_and_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path, 1, 2, 3)
    damage(tmp_path, 3)
    (step_folder(tmp_path, 2) / manifests.MANIFEST).unlink()
    resuming = checkpointer(tmp_path)
    assert resumed_step(resuming) == 1
    first, second = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    assert "step-00000003" in first
    assert "step-00000002" in second
    resuming.save(3, {"again": True})  # the damaged one makes way and is kept
    assert verify_in_parallel(None, step_folder(tmp_path, 3)).data == {"again": True}
    assert len(list((tmp_path / "checkpoints").glob("damaged-step-00000003.*"))) == 1


def test_checkpoints_that_have_each_others_names_are_told_their_own(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    first, second = (step_folder(tmp_path, step) for step in (1, 2))
    first.rename(tmp_path / "aside")
    second.rename(first)
    (tmp_path / "aside").rename(second)
    with pytest.raises(CheckpointError, match="repair one as said below") as error:
        checkpointer(tmp_path).resume()
    (wrong, right), *_ = re.findall(r"(step-\d+): holds step \d: rename it to (step-\d+)", str(error.value))
    (first.parent / right).rename(tmp_path / "aside")
    (first.parent / wrong).rename(first.parent / right)
    assert resumed_step(checkpointer(tmp_path)) == manifests.step_of(Path(right))


def test_damage_found_while_loading_leaves_nothing_of_that_checkpoint(tmp_path: Path) -> None:
    """The last tensor of the newest is damaged: all before it are in the model when that is found."""
    saving = checkpointer(tmp_path)
    for step in (1, 2):
        for part in saving._model_parts().values():
            part.local.fill_(step)
        saving.save(step, {})
    path = step_folder(tmp_path, 2) / "__0_0.distcp"
    *_, last = read_piece_table(path, manifests.read_manifest(path.parent).files[path.name])
    content = bytearray(path.read_bytes())
    content[last.offset + last.length // 2] ^= 1
    path.write_bytes(content)
    resuming = checkpointer(tmp_path)
    assert resumed_step(resuming) == 1
    for key, part in resuming._model_parts().items():
        assert bool((part.local == 1).all()), key


def test_another_model_is_an_error_though_an_older_checkpoint_would_fit(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    checkpointer(tmp_path, nn.Linear(3, 4)).save(2, {})
    with pytest.raises(CheckpointError, match="another model") as caught:
        checkpointer(tmp_path).resume()
    assert not isinstance(caught.value, DamagedCheckpoint)


def test_only_weights_are_read_for_weights_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(64, 64)
    saved(tmp_path, 1, model=model)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    file_bytes = sum(path.stat().st_size for path in step_folder(tmp_path, 1).iterdir())
    monkeypatch.setattr(checkpoint_tensors, "check_files", None)  # nothing is read as a whole
    with mock.patch.object(os, "pread", wraps=os.pread) as reads:
        load_newest_weights(tmp_path, partial(load_weights, stages=[nn.Linear(64, 64)]))
    containers_and_tables = 2 * 2048 + 2 * 1024
    assert weights < sum(call.args[1] for call in reads.call_args_list) < weights + containers_and_tables
    with mock.patch.object(os, "pread", wraps=os.pread) as reads:
        checkpointer(tmp_path, nn.Linear(64, 64)).resume()
    bytes_read = sum(call.args[1] for call in reads.call_args_list)
    assert 3 * weights < bytes_read < file_bytes + 8 * 1024  # AdamW's two moments too; at most 8 tables


def test_none_refuses_a_folder_with_checkpoints(tmp_path: Path) -> None:
    assert checkpointer(tmp_path, resume="none").resume() is None
    saved(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r'checkpoint\.resume = "none", but .*step-00000001 exists'):
        checkpointer(tmp_path, resume="none").resume()


def test_named_checkpoint_must_exist_and_verify(tmp_path: Path) -> None:
    named = manifests.step_folder(tmp_path / "old" / "checkpoints", 5)
    with pytest.raises(CheckpointError, match="there is no such checkpoint folder"):
        checkpointer(tmp_path / "new", resume=str(named)).resume()
    saved(tmp_path / "old", 5)
    assert resumed_step(checkpointer(tmp_path / "new", resume=str(named))) == 5
    saved(tmp_path / "new", 6)
    with pytest.raises(CheckpointError, match="step-00000006 is newer"):
        checkpointer(tmp_path / "new", resume=str(named)).resume()
    damage(tmp_path / "old", 5)
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp: damaged"):
        checkpointer(tmp_path / "fresh", resume=str(named)).resume()


@pytest.mark.parametrize(("variable", "number"), [(ATTEMPT, "2"), ("SLURM_RESTART_COUNT", "1")])
def test_a_later_start_of_a_job_resumes_from_its_own_checkpoints(
    variable: str, number: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the config of the first, which may name another run's checkpoint, or none."""
    saved(tmp_path / "old", 5)
    named = str(manifests.step_folder(tmp_path / "old/checkpoints", 5))
    monkeypatch.setenv(variable, number)
    assert checkpointer(tmp_path / "new", resume="none").resume() is None
    assert resumed_step(checkpointer(tmp_path / "new", resume=named)) == 5
    saved(tmp_path / "new", 6)
    for resume in ("none", named):
        assert resumed_step(checkpointer(tmp_path / "new", resume=resume)) == 6


def newest_weights(folder: Path | str) -> Manifest:
    return load_newest_weights(folder, partial(load_weights, stages=[nn.Linear(3, 2)]))


def test_weights_come_from_the_newest_that_verifies(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        newest_weights(tmp_path)
    saved(tmp_path, 1, 2)
    assert newest_weights(tmp_path).step == 2
    damage(tmp_path, 2)
    assert newest_weights(str(tmp_path)).step == 1
    assert "the older step-00000001 is used instead" in caplog.text
    first = step_folder(tmp_path, 1)
    assert load_weights(first, [nn.Linear(3, 2)]).step == 1
    with pytest.raises(CheckpointError, match="there is no such checkpoint folder"):
        load_weights(Path("else/where"), [nn.Linear(3, 2)])


def test_a_checkpoint_is_never_rewritten(tmp_path: Path) -> None:
    saving = saved(tmp_path, 1)
    with pytest.raises(CheckpointError, match="exists already"):
        saving.save(1, {})
    with pytest.raises(CheckpointError, match="exists already"):
        saved(tmp_path, 1)
    assert steps(tmp_path) == [1]


def test_keep_counts_and_deletes_only_whole_ones(tmp_path: Path) -> None:
    saving = checkpointer(tmp_path, keep=0)
    for step in range(1, 6):
        saving.save(step, {})
    assert steps(tmp_path) == [5, 4, 3, 2, 1]
    damage(tmp_path, 5)
    (step_folder(tmp_path, 3) / "__0_0.distcp").unlink()
    later = checkpointer(tmp_path, keep=2)
    later.resume()
    later.save(6, {})
    assert steps(tmp_path) == [6, 5, 4]  # 5 was found damaged: it neither counts nor goes
    later.save(7, {})
    assert steps(tmp_path) == [7, 6, 5]
    later.close()
    assert len(list((tmp_path / "checkpoints").iterdir())) == 3
    assert checkpointer(tmp_path).resume() is not None


def test_the_checkpoint_just_written_stays_whatever_lies_beside_it(tmp_path: Path) -> None:
    saved(tmp_path, 9)
    damage(tmp_path, 9)  # which its size does not show
    later = checkpointer(tmp_path, keep=1)
    later.save(1, {})
    assert steps(tmp_path) == [9, 1]
    verify_in_parallel(None, step_folder(tmp_path, 1))


def test_a_deletion_does_not_hold_up_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = threading.Event()
    rmtree = shutil.rmtree

    def rmtree_when_allowed(path: Path, **options: Any) -> None:
        assert allowed.wait(patience(20))
        rmtree(path, **options)

    monkeypatch.setattr(history.shutil, "rmtree", rmtree_when_allowed)
    saving = saved(tmp_path, 1, 2, 3, keep=1)
    assert steps(tmp_path) == [3]
    assert len(manifests.hidden_folders(tmp_path / "checkpoints")) == 2
    allowed.set()
    saving.close()
    assert manifests.hidden_folders(tmp_path / "checkpoints") == []


def test_another_model_or_optimizer_is_refused_by_name(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    folder = step_folder(tmp_path, 1)
    models: list[tuple[nn.Module, str]] = [
        (nn.Linear(3, 4), r"model\.weight: \(2, 3\) in the checkpoint, \(4, 3\) here"),
        (nn.Linear(3, 2).double(), r"model\.weight: torch\.float32 in the checkpoint, torch\.float64 here"),
        (nn.Linear(3, 2, bias=False), r"model\.bias: in the checkpoint only"),
        (nn.Sequential(nn.Linear(3, 2)), r"model\.0\.weight: missing in the checkpoint"),
    ]
    for model, message in models:
        weights = [parameter.clone() for parameter in model.parameters()]
        with pytest.raises(CheckpointError, match=message):
            load_weights(folder, [model])
        for weight, parameter in zip(weights, model.parameters(), strict=True):
            assert torch.equal(weight, parameter)
    model = nn.Linear(3, 2)
    resuming = Checkpointer(config.Checkpoint(), tmp_path, [model], torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(CheckpointError, match=r"optimizer\.bias\.exp_avg: in the checkpoint only"):
        resuming.resume()


def test_a_number_that_an_optimizer_counts_in_its_groups_comes_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Unless its groups differ in it; a number that is constant follows the config."""
    found = []
    for momentum in (0.5, 0.9):
        model = nn.Linear(3, 2)
        groups = [
            {"params": [model.weight], "steps": 0, "rate": 1.0},
            {"params": [model.bias], "steps": 0, "rate": 1.0},
        ]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=momentum)
        checkpoints = Checkpointer(config.Checkpoint(), tmp_path, [model], optimizer)
        if checkpoints.resume() is None:
            model(torch.ones(3)).sum().backward()
            optimizer.step()
            for factor, group in enumerate(optimizer.param_groups, 2):
                group.update(steps=7, rate=1.0 * factor, lr=0.3)
            checkpoints.save(1, {})
        found.append([(group["steps"], group["rate"], group["momentum"]) for group in optimizer.param_groups])
    assert found == [[(7, 2.0, 0.5), (7, 3.0, 0.5)], [(7, 1.0, 0.9)] * 2]
    assert "'rate' differs between the optimizer's groups" in caplog.text


def test_wrappers_do_not_change_the_keys(tmp_path: Path) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    wrapped = nn.Sequential(checkpoint_wrapper(torch.compile(nn.Linear(3, 2))))
    optimizer = torch.optim.SGD(wrapped.parameters())
    Checkpointer(config.Checkpoint(), tmp_path, [wrapped], optimizer).save(1, {})
    plain = nn.Sequential(nn.Linear(3, 2))
    load_weights(step_folder(tmp_path, 1), [plain])
    assert torch.equal(plain[0].weight, next(wrapped.parameters()))


@pytest.mark.parametrize("view", [lambda whole: whole[:2], lambda whole: whole.t()[:2]])
def test_of_a_view_only_its_own_elements_are_stored(tmp_path: Path, view: Callable[[Tensor], Tensor]) -> None:
    """Torch would write all of the memory that a view looks at; a shard is such a view."""
    model = nn.Module()
    model.weight = nn.Parameter(view(torch.arange(8000.0).view(1000, 8)))
    Checkpointer(config.Checkpoint(), tmp_path, [model], torch.optim.SGD(model.parameters())).save(1, {})
    folder = step_folder(tmp_path, 1)
    random_state_and_containers = 5056 + 2 * 2048
    assert (folder / "__0_0.distcp").stat().st_size < model.weight.nbytes + random_state_and_containers
    loaded = nn.Module()
    loaded.weight = nn.Parameter(torch.zeros(model.weight.shape))
    load_weights(folder, [loaded])
    assert torch.equal(loaded.weight, model.weight)


def test_background_save_holds_the_values_of_its_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(3, 2)
    saving = checkpointer(tmp_path, model, asynchronous=True)
    allowed = threading.Event()
    save_tensors = checkpointers.save_tensors

    def save_when_allowed(*arguments: Any) -> Any:
        assert allowed.wait(patience(20))
        return save_tensors(*arguments)

    monkeypatch.setattr(checkpointers, "save_tensors", save_when_allowed)
    expected = {key: part.local.clone() for key, part in saving._model_parts().items()}
    saving.save(1, {})
    for part in saving._model_parts().values():
        part.local.zero_()
    assert steps(tmp_path) == []
    allowed.set()
    saving.close()
    resuming = checkpointer(tmp_path)
    resuming.resume()
    for key, part in resuming._model_parts().items():
        assert torch.equal(part.local, expected[key]), key


def test_background_saves_never_overlap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saving = checkpointer(tmp_path, asynchronous=True)
    published: list[list[int]] = []
    take = Snapshot.take

    def note_and_take(*arguments: Any) -> Any:  # it changes the tensors of an earlier save
        published.append(steps(tmp_path))
        return take(*arguments)

    monkeypatch.setattr(Snapshot, "take", note_and_take)
    for step in (1, 2, 3):
        saving.save(step, {})
    saving.close()
    assert published == [[], [1], [2, 1]]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_failed_write_is_raised_and_leaves_the_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    saving = saved(tmp_path, 1, asynchronous=asynchronous)
    saving._finish()

    monkeypatch.setattr(torch, "save", full)
    if asynchronous:
        saving.save(2, {})
        until(lambda: saving.failed)
    with pytest.raises(
        CheckpointError,
        match=r"cannot write .*step-00000002.*No space left.*make room.*earlier checkpoints are untouched",
    ):
        saving.save(3 if asynchronous else 2, {})
    monkeypatch.undo()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]
    assert resumed_step(checkpointer(tmp_path)) == 1


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_whose_folder_is_removed_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    saving = saved(tmp_path, 1, asynchronous=asynchronous)
    saving._finish()
    save = torch.save

    def remove_and_save(*arguments: Any, **options: Any) -> None:
        shutil.rmtree(tmp_path / "checkpoints", ignore_errors=True)
        save(*arguments, **options)

    monkeypatch.setattr(torch, "save", remove_and_save)
    gone = r"cannot write .*step-00000002: .*No such file.*\(earlier checkpoints cannot be reached either\)"
    if asynchronous:
        saving.save(2, {})
    fail = saving.close if asynchronous else partial(saving.save, 2, {})
    with pytest.raises(CheckpointError, match=gone):
        fail()


def test_a_folder_that_cannot_be_made_for_a_save_names_the_earlier_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving = saved(tmp_path, 1)

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(
        CheckpointError, match=r"step-00000002: .*make room there \(earlier checkpoints are untouched\)"
    ):
        saving.save(2, {})


def test_a_checkpoint_that_does_not_fit_is_refused_before_it_is_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving = checkpointer(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=100))
    with pytest.raises(CheckpointError, match=r"a checkpoint needs \d+ bytes, 100 are free"):
        saving.save(1, {})
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_run_that_lost_its_folder_changes_nothing_in_it(tmp_path: Path) -> None:
    """Another job has taken the folder while this one was suspended; the hidden folder may be that job's save."""
    owner = Owner()
    saving = saved(tmp_path, 1, keep=1, check_owner=owner.check)
    root = tmp_path / "checkpoints"
    hidden = manifests.make_temporary(root, 2, 0)
    owner.looks = 0
    damage(tmp_path, 1)
    actions = (partial(saving.save, 3, {}), saving.resume, partial(saving._history.make_way, step_folder(tmp_path, 1)))
    for action in actions:
        with pytest.raises(CheckpointError, match="the folder belongs to another job"):
            action()
    saving.close()
    assert steps(tmp_path) == [1]
    assert manifests.hidden_folders(root) == [hidden]


def test_a_run_that_loses_its_folder_after_a_save_deletes_nothing(tmp_path: Path) -> None:
    owner = Owner()
    saving = saved(tmp_path, 1, keep=1, check_owner=owner.check)
    owner.looks = 1
    with pytest.raises(CheckpointError, match="the folder belongs to another job"):
        saving.save(2, {})
    saving.close()
    assert steps(tmp_path) == [2, 1]


NAN = float("nan")


@pytest.mark.parametrize(
    ("key", "value", "asynchronous"),
    [
        ("model.weight", NAN, False),
        ("optimizer.bias.exp_avg_sq", float("inf"), False),
        ("model.weight", -float("inf"), True),
    ],
)
def test_a_value_that_is_not_finite_is_not_saved_and_nothing_is_deleted(
    tmp_path: Path, key: str, value: float, asynchronous: bool
) -> None:
    saving = saved(tmp_path, 1, keep=1, asynchronous=asynchronous)
    saving._model_parts()[key].local.view(-1)[-1] = value
    with pytest.raises(CheckpointError, match=rf"step 2 is not saved: values are not finite in {key}\. They would"):
        saving.save(2, {})
    for part in saving._model_parts().values():
        part.local.view(-1)[0] = value
    names = r"model\.bias, model\.weight, optimizer\.bias\.exp_avg and 5 other tensors\."
    with pytest.raises(CheckpointError, match=names):
        saving.save(2, {})
    saving.close()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]
    assert resumed_step(checkpointer(tmp_path)) == 1


def test_a_nan_is_found_wherever_it_is() -> None:
    for dtype, size in itertools.product((torch.float32, torch.bfloat16, torch.float64), (1, 7, 64, 1000)):
        for position in {0, size // 2, size - 1}:
            tensor = torch.full((size,), torch.finfo(dtype).max, dtype=dtype)
            parts = parts_of({"large": tensor, "empty": tensor[:0], "whole number": torch.zeros(3, dtype=torch.int64)})
            assert nonfinite_keys(parts) == []
            tensor[position] = NAN
            assert nonfinite_keys(parts) == ["large"]


def well(step: int, validation_loss: float | None = None) -> Health:
    return Health(step, 0, validation_loss, is_lost=False, problem="")


def ill(step: int, since: int) -> Health:
    """The health of a run of which no step after `since` was applied."""
    return Health(step, step - since, None, is_lost=True, problem="too many in a row")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_newest_checkpoint_that_ten_finite_steps_have_followed_stays(tmp_path: Path, asynchronous: bool) -> None:
    saving = checkpointer(tmp_path, keep=2, asynchronous=asynchronous)
    for step in range(1, 31):
        if step <= 21:  # after that, none is applied
            saving.judge(well(step))
        else:
            saving.judge(ill(step, 21)._replace(is_lost=False))
        if step % 4 == 0:
            saving.save(step, {})
    saving.close()
    assert steps(tmp_path) == [28, 24, 12, 8]  # ten steps were applied after step 11; 12 waits for its tenth
    assert (step_folder(tmp_path, 8) / "proven.json").exists()
    verify_in_parallel(None, step_folder(tmp_path, 8))  # a mark is no damage
    resuming = checkpointer(tmp_path, keep=1)
    assert resumed_step(resuming) == 28
    resuming.judge(ill(29, 28))
    assert suspects(tmp_path) == [28]  # from which it has started; it has seen no other
    resuming.save(32, {})
    resuming.save(36, {})
    resuming.close()
    assert steps(tmp_path) == [36, 8]  # although this process has not seen what followed step 8


def test_a_run_with_evaluations_keeps_the_newest_that_one_has_followed(tmp_path: Path) -> None:
    saving = checkpointer(tmp_path, keep=1, evaluates=True)
    for step in range(1, 41):
        saving.judge(well(step, validation_loss=1.5 if step == 8 else None))
        if step % 4 == 0:
            saving.save(step, {})
    assert steps(tmp_path) == [40, 8]
    saving.judge(well(41, validation_loss=1.5))
    saving.save(44, {})
    assert steps(tmp_path) == [44, 40]


def test_a_run_that_is_lost_starts_again_from_before_that(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saving = checkpointer(tmp_path, keep=0)
    for step in range(1, 41):
        saving.judge(well(step) if step <= 31 else ill(step, 31)._replace(is_lost=False))
        if step % 4 == 0:
            saving.save(step, {})
    saving.judge(ill(41, 31))
    marked = read_suspects(manifests.step_folders(tmp_path / "checkpoints"))
    assert [manifests.step_of(folder) for folder in marked] == [40, 36, 32, 28, 24]  # ten steps followed step 21
    assert set(marked.values()) == {"too many steps in a row were not finite up to step 41"}
    assert caplog.text.count("is marked as suspect") == 5
    assert caplog.messages[-1] == "a run that starts again goes on from step-00000020"
    caplog.clear()

    resuming = checkpointer(tmp_path, keep=0)
    assert resumed_step(resuming) == 20
    assert caplog.text.count("SUSPECT CHECKPOINT") == 5
    assert "step-00000040 is skipped, an older one is used instead: too many steps in a row" in caplog.text
    assert newest_weights(tmp_path).step == 20
    resuming.save(24, {"again": True})  # the suspect one makes way
    assert verify_in_parallel(None, step_folder(tmp_path, 24)).data == {"again": True}
    assert 24 not in suspects(tmp_path)
    resuming.close()
    assert manifests.hidden_folders(tmp_path / "checkpoints") == []


def test_a_run_that_is_lost_before_any_good_checkpoint_is_told_what_trains(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saving = checkpointer(tmp_path)
    with torch.no_grad():
        next(saving._stages[0].parameters()).fill_(NAN)
    with pytest.raises(CheckpointError, match="there is no checkpoint: a run that starts again begins at step 1"):
        saving.save(1, {})
    saving = saved(tmp_path, 1)
    saving.judge(ill(2, 0))
    assert caplog.messages[-1] == "no checkpoint is left that a run could go on from: start anew in another run.folder"
    with pytest.raises(CheckpointError, match="is marked as suspect"):
        checkpointer(tmp_path).resume()
    assert resumed_step(checkpointer(tmp_path / "another")) is None


def test_a_proven_checkpoint_is_no_suspect_though_the_run_is_lost_after_it(tmp_path: Path) -> None:
    saved(tmp_path, 4)
    mark(step_folder(tmp_path, 4), PROVEN, "it went on well")
    resuming = checkpointer(tmp_path)
    resuming.resume()
    resuming.save(8, {})
    resuming.judge(ill(14, 4))
    assert suspects(tmp_path) == [8]


def test_an_evaluation_that_is_not_finite_makes_suspects(tmp_path: Path) -> None:
    saving = checkpointer(tmp_path, keep=2, evaluates=True)
    saving.judge(well(4, validation_loss=1.5))
    for step in (4, 5, 6):
        saving.save(step, {})
    for step in range(7, 14):
        saving.judge(well(step, validation_loss=NAN))
        saving.save(step, {})
    assert suspects(tmp_path) == [13, 12]  # they do not fill the disk,
    assert steps(tmp_path) == [13, 12, 4]  # nor do they drive the good one out
    saving.judge(well(14, validation_loss=1.5))
    saving.save(14, {})
    assert steps(tmp_path) == [14, 13, 4]
    assert suspects(tmp_path) == [13]


def test_a_suspect_is_loaded_only_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path, 1, 2)
    first, second = (step_folder(tmp_path, step) for step in (1, 2))
    mark(second, SUSPECT, "NaN")
    assert resumed_step(checkpointer(tmp_path, resume=str(first))) == 1  # the newer one is not in the way
    assert not caplog.records
    assert resumed_step(checkpointer(tmp_path, resume=str(second))) == 2
    assert "step-00000002 is loaded because checkpoint.resume names it, but is marked as suspect: NaN" in caplog.text
    mark(first, SUSPECT, "NaN")
    for load in (checkpointer(tmp_path).resume, lambda: newest_weights(tmp_path)):
        with pytest.raises(CheckpointError, match=r"every checkpoint in .* is marked as suspect"):
            load()


def test_every_nth_checkpoint_is_kept_for_good(tmp_path: Path) -> None:
    saving = checkpointer(tmp_path, keep=1, keep_every=6)
    for step in range(2, 21, 2):
        saving.save(step, {})
    assert steps(tmp_path) == [20, 18, 12, 6]
    later = checkpointer(tmp_path, keep=1, keep_every=12)
    later.resume()
    later.save(22, {})
    assert steps(tmp_path) == [22, 12]
