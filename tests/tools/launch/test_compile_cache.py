"""Compiled code is read only from folders that nobody else can write."""

import os
from pathlib import Path

import pytest

from torchllm.tools.launch import compile_cache
from torchllm.tools.launch.compile_cache import VARIABLE, choose_compile_cache, is_private

pytestmark = pytest.mark.quick


@pytest.fixture
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(VARIABLE, "")  # restored afterwards
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(compile_cache.tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(compile_cache.atexit, "register", lambda *arguments, **options: None)
    (tmp_path / "tmp").mkdir()
    (tmp_path / "runs").mkdir(mode=0o755)
    return tmp_path / "runs" / "run"


def test_a_cache_beside_the_run_folder(run_folder: Path) -> None:
    choose_compile_cache(run_folder, nodes=8)
    cache = run_folder.parent / ".compiled"
    assert os.environ[VARIABLE] == str(cache)
    assert cache.stat().st_mode & 0o777 == 0o700


def test_the_users_own_choice_stands(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "/elsewhere")
    choose_compile_cache(run_folder, nodes=1)
    assert os.environ[VARIABLE] == "/elsewhere"


def test_of_many_nodes_each_has_its_own(run_folder: Path, tmp_path: Path) -> None:
    choose_compile_cache(run_folder, nodes=9)
    assert os.environ[VARIABLE] == str(tmp_path / "tmp" / f"torchllm-compiled-{os.getuid()}")


@pytest.mark.parametrize("kind", ["shared folder", "sticky shared folder of another", "writable cache", "of another"])
def test_a_cache_that_others_could_write_is_not_used(
    run_folder: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = run_folder.parent / ".compiled"
    cache.mkdir(mode=0o700)
    if kind == "shared folder":
        run_folder.parent.chmod(0o777)
    elif kind == "writable cache":
        cache.chmod(0o770)
    elif os.getuid() == 0:
        os.chown(cache if kind == "of another" else run_folder.parent, 65534, 65534)
    else:
        pytest.skip("only root can give a folder to another user")
    choose_compile_cache(run_folder, nodes=1)
    assert os.environ[VARIABLE] == str(tmp_path / "home" / "torchllm" / "compiled")
    (tmp_path / "home").chmod(0o777)
    monkeypatch.delenv(VARIABLE)
    choose_compile_cache(run_folder, nodes=1)
    assert os.environ[VARIABLE].startswith(str(tmp_path / "tmp" / "torchllm-compiled-"))


def test_a_sticky_folder_above_is_as_good_as_ones_own(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o1777)
    (tmp_path / "shared" / "mine").mkdir(mode=0o755)
    assert is_private(tmp_path / "shared" / "mine")
    assert (tmp_path / "shared" / "mine").stat().st_mode & 0o777 == 0o700


def test_a_link_is_judged_by_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "open" / "target").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "open" / "target")
    assert not is_private(tmp_path / "link")
