"""Layouts measured in one launch: the fastest trains, and is remembered."""

import gc
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from tests.parallel.test_mesh import groups_now
from tests.parity import Settings, tiny
from tests.recipes.warm import pretrain
from tests.tiny_run import curve
from tests.workers import run
from torchllm.config import Config
from torchllm.config.errors import UserError
from torchllm.runtime.stop import STOP, StopSource
from torchllm.tools.adapt import tune
from torchllm.tools.adapt.tune import fastest, is_settled
from torchllm.tools.launch import stop_requests
from torchllm.tools.launch.stop_requests import StopRequests
from torchllm.tools.planner.search.layouts import layout_of


def _runtime() -> Any:
    group = dist.new_group(backend="gloo")
    return SimpleNamespace(
        device=torch.device("cpu"),
        world_size=dist.get_world_size(),
        ranks_on_node=dist.get_world_size(),
        is_main=dist.get_rank() == 0,
        host_group=group,
        barrier=lambda: dist.barrier(group=group),
        release_memory=gc.collect,
        stop_requests=StopSource(),
    )


SETTINGS: list[dict[str, Any]] = [
    {"parallel.tp": 2, "parallel.sequence_parallel": True},
    {"parallel.dp_shard": 2, "parallel.zero_stage": 1},
    {"parallel.pp": 2, "data.document_mask": True},
]


def text_of(config: Config) -> str:
    return layout_of(config).text()


def _configs() -> list[Config]:
    return [tiny(settings) for settings in SETTINGS]


class Tuned(NamedTuple):
    """What measuring has come to on a rank."""

    layout: str
    new_groups: set[str]
    """process groups that are there since; on a GPU each has buffers there"""


def _fastest(cache: Path) -> Tuned:
    runtime = _runtime()
    groups = groups_now()
    layout = text_of(fastest(_configs(), runtime, cache))
    return Tuned(layout, groups_now() - groups)


@pytest.mark.exhaustive
def test_real_layouts_are_measured_alike_on_all_ranks_and_leave_no_process_group(tmp_path: Path) -> None:
    tuned = run(_fastest, 2, tmp_path)
    [times] = json.loads((tmp_path / "tuned.json").read_text()).values()
    assert times.keys() == {text_of(config) for config in _configs()}
    assert all(seconds > 0 for seconds in times.values())
    assert tuned == [Tuned(min(times, key=times.get), set())] * 2


class Outcome(NamedTuple):
    """What `fastest` did with pretended measurements."""

    answer: str
    """the layout, or the error"""
    measured: list[str]
    """layouts, in order"""


def _pretended(cache: Path, seconds: list[float], crashes: int | None = None) -> Outcome:
    """With measurements that take no time; `crashes`: index of the layout whose measurement ends the job."""
    layouts = [text_of(config) for config in _configs()]
    measured: list[str] = []

    def pretend(config: Config, runtime: Any) -> float:
        measured.append(text_of(config))
        index = layouts.index(measured[-1])
        if index == crashes:
            raise RuntimeError("out of memory")
        return seconds[index]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tune, "measure", pretend)
        try:
            return Outcome(text_of(fastest(_configs(), _runtime(), cache)), measured)
        except (RuntimeError, UserError) as error:
            return Outcome(str(error), measured)


def test_steps_are_taken_until_the_two_fastest_agree() -> None:
    """Other programs have slowed down half of them."""
    assert not is_settled([1.0, 1.0])  # too few
    assert not is_settled([3.0, 1.0, 2.0, 2.0])
    assert is_settled([3.0, 1.0, 2.0, 1.04])


def test_times_are_kept_by_all_that_they_depend_on() -> None:
    runtime: Any = SimpleNamespace(device=torch.device("cpu"), world_size=2, ranks_on_node=2)
    apart: Any = SimpleNamespace(device=torch.device("cpu"), world_size=2, ranks_on_node=1)
    others: list[Settings] = [
        {"optimizer.offload": True},
        {"optimizer.name": "muon"},
        {"recompute.offload": True},
        {"parallel.keep_last_block": False},
        {"lora.rank": 2},
        {"data.document_mask": True},
        {"float8.recipe": "rowwise"},
    ]
    keys = [tune.job_key(tiny(settings), runtime) for settings in [{}, *others]]
    keys.append(tune.job_key(tiny({}), apart))
    assert len(set(keys)) == len(keys)
    same: list[Settings] = [{"parallel.tp": 2}, {"recompute.mode": "full"}, {"training.steps": 7}]
    assert {tune.job_key(tiny(settings), runtime) for settings in same} == {keys[0]}


def test_a_layout_is_measured_once_per_number_of_ranks(tmp_path: Path) -> None:
    tp, dp, pp = map(text_of, _configs())
    assert run(_pretended, 2, tmp_path, [3.0, 2.0, 1.0]) == [(pp, [tp, dp, pp])] * 2
    assert run(_pretended, 2, tmp_path, [1.0, 1.0, 9.0]) == [(pp, [])] * 2
    assert run(_pretended, 1, tmp_path, [1.0, 2.0, 9.0]) == [(tp, [tp, dp, pp])]  # another number of ranks


def test_a_layout_that_ended_a_job_is_not_tried_again(tmp_path: Path) -> None:
    tp, dp, pp = map(text_of, _configs())
    assert run(_pretended, 2, tmp_path, [1.0, 2.0, 3.0], 0) == [("out of memory", [tp])] * 2
    assert run(_pretended, 2, tmp_path, [1.0, 2.0, 3.0], 0) == [(dp, [dp, pp])] * 2
    file = tmp_path / "tuned.json"
    file.write_text("{")  # damaged: as none
    run(_pretended, 1, tmp_path, [float("inf")] * 3)
    error = (
        f"parallel.layout: every proposed layout crashed earlier (recorded in {file}); delete that file to try again"
    )
    assert run(_pretended, 1, tmp_path, [1.0] * 3) == [(error, [])]
    for text in ("[]", ""):
        file.write_text(text)
        assert run(_pretended, 1, tmp_path, [1.0, 2.0, 3.0]) == [(tp, [tp, dp, pp])]
    one = _configs()[0]
    assert fastest([one], None, Path("/nowhere")) is one  # not measured


class _Ended(BaseException):
    """In place of the end of the process."""


def _asked_to_stop(cache: Path) -> dict[str, float]:
    """The times on disk after a request to stop in the second measurement."""
    runtime = _runtime()
    requests = runtime.stop_requests = StopRequests(cache, 0, 1, is_launched=True)

    def measure(config: Config, runtime: Any) -> float:
        if text_of(config) != text_of(_configs()[1]):
            return 1.0
        (cache / STOP).touch()
        requests._end_if_asked()
        raise AssertionError

    def end(status: int) -> None:
        raise _Ended

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tune, "measure", measure)
        patch.setattr(stop_requests, "end_process", end)
        with pytest.raises(_Ended):
            fastest(_configs(), runtime, cache)
    [times] = json.loads((cache / "tuned.json").read_text()).values()
    return dict(times)


def test_a_layout_that_is_measured_when_the_job_is_asked_to_stop_is_measured_again(tmp_path: Path) -> None:
    tp, *_ = map(text_of, _configs())
    assert run(_asked_to_stop, 1, tmp_path) == [{tp: 1.0}]


def test_a_run_of_two_ranks_tunes_itself_and_trains(tmp_path: Path) -> None:
    tuned = ["--parallel.layout=tune", f"--data.cache={tmp_path / 'cache'}", "--training.steps=4", "--model.layers=2"]
    assert pretrain(2, tmp_path / "run", *tuned) == ["", ""]
    assert 'layout = "manual"' in (tmp_path / "run/config.toml").read_text()
    [times] = json.loads((tmp_path / "cache/tuned.json").read_text()).values()
    assert len(times) == 4
    assert len(curve(tmp_path / "run")) == 4
