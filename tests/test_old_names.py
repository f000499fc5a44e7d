"""Old names of modules, and of what has left them, work with a warning (tests/recipes/test_old_forks.py trains)."""

import re
import subprocess
import sys
import warnings
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.tiny_run import ROOT
from torchllm import old_names

pytestmark = pytest.mark.quick


def test_every_module_that_has_moved_is_where_the_table_says() -> None:
    """A module that goes, goes from the table, too: then its old name is an ImportError as its new one."""
    table = old_names.new_names(old_names.MODULES) | old_names.RENAMED_MODULES | old_names.FOLDERS
    assert len(table) > 60
    assert [new for new in table.values() if find_spec(f"torchllm.{new}") is None] == []
    assert [old for old in table if (ROOT / "torchllm" / f"{old.replace('.', '/')}.py").exists()] == []


def test_every_name_that_has_left_its_module_is_the_one_of_today() -> None:
    warned = 0
    for old, new in (old_names.new_names(old_names.NAMES) | old_names.RENAMED).items():
        (module, name), (home, new_name) = (f"torchllm.{dotted}".rsplit(".", 1) for dotted in (old, new))
        with warnings.catch_warnings(record=True) as caught:
            assert getattr(import_module(module), name) is getattr(import_module(home), new_name)
        texts = [str(warning.message) for warning in caught if warning.category is FutureWarning]
        if name in vars(import_module(module)):  # which imports it itself
            assert texts == []
        else:
            (text,) = texts
            assert text.startswith(f"torchllm.{old} is torchllm.{new} now; the old name goes with 0.3")
            warned += 1
    assert warned > 10
    with pytest.raises(AttributeError, match=r"module 'torchllm.runtime.process' has no attribute 'Runtme'"):
        import_module("torchllm.runtime.process").Runtme  # noqa: B018  # reading it is the test


PROGRAM = """
import sys
import torchllm
assert [name for name in sys.modules if name.startswith("torchllm.")] == ["torchllm.old_names"]
from torchllm.start import load_configs
from torchllm.start import load_configs as again
from torchllm.spec import flops
import torchllm.planner.search.layouts
from torchllm.facts import flops as same
assert flops is same and torchllm.planner.search.layouts.__name__ == "torchllm.tools.planner.search.layouts"
try:
    import torchllm.spec.nothing
except ImportError as error:
    print(error)
"""


def test_an_old_module_is_the_new_one_and_warns_once_where_it_is_imported(tmp_path: Path) -> None:
    program = tmp_path / "old.py"
    program.write_text(PROGRAM)
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    run = [sys.executable, str(program)]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "No module named 'torchllm.spec.nothing'\n"
    warned = re.findall(r"old.py:(\d+): FutureWarning: torchllm.(\S+) is torchllm.(\S+) now;", done.stderr)
    assert warned == [
        ("5", "start", "tools.front.start"),
        ("7", "spec.flops", "facts.flops"),
        ("8", "planner.search.layouts", "tools.planner.search.layouts"),
    ]
    assert done.stderr.count("Warning") == 3
    other = subprocess.run(run, env=environment | {"RANK": "1"}, capture_output=True, text=True, check=True)
    assert other.stderr == ""


def test_an_old_module_can_be_started(tmp_path: Path) -> None:
    """As copies of run_train.sh do."""
    command = [sys.executable, "-P", "-m", "torchllm.runtime.on_event", f"touch {tmp_path}/called", str(tmp_path)]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert "torchllm.runtime.on_event is torchllm.tools.launch.on_event now" in done.stderr
    assert (tmp_path / "called").exists()
