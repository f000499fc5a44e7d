"""The package as a user installs it: from the wheel, the sdist and a checkout, used in an empty folder.

Each way is installed into a virtual environment of its own, without dependencies: it borrows those of the running
environment, so nothing is downloaded.
"""

import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

import torchllm
from tests.patience import patience
from tests.tiny_run import ROOT, metrics

SHIPPED = ("train_configs", "recipes", "run_train.sh")
"""what a wheel holds inside the package; in git it lies at the top level"""
BENCHMARKS = {"matmul", "step"}
"""that a wheel holds; the others are in a checkout only"""
STEPS = 3
TRAIN = [
    "--run.device=cpu",
    "--run.folder=run",
    "--model.hidden=32",
    "--model.ffn=64",
    "--model.layers=1",
    f"--training.steps={STEPS}",
    "--training.sequence_length=32",
    "--training.global_batch_size=2",
    "--schedule.warmup_steps=2",
    "--data.workers=0",
    "--evaluate.interval=0",
    "--metrics.log_interval=1",
    "--metrics.breakdown_interval=0",
    "--metrics.tensorboard=false",
    "--generate.after_training=false",
]
PLAN = ["plan", "rank", "--model=llama3_1b", "--cluster=dgx_h100", "--gpus=8"]
PLAN += ["--sequence-length=4096", "--global-batch-size=64", "--model.layers=2", "--parallel.pp=1", "--parallel.cp=1"]


class Distributions(NamedTuple):
    wheel: Path
    sdist: Path


class Installation(NamedTuple):
    environment: Path
    folder: Path
    """an empty working directory"""

    @property
    def package(self) -> Path:
        """The folder of the installed package; it does not exist for an editable installation."""
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        return self.environment / "lib" / version / "site-packages" / "torchllm"

    def run(self, *command: str, status: int = 0, **variables: str) -> str:
        """Return what a command prints. Nothing but PATH tells it where torchllm is."""
        path = f"{self.environment / 'bin'}:/usr/bin:/bin"
        variables = {"PATH": path, "HOME": str(self.folder), "NPROC": "1", **variables}
        done = subprocess.run(
            command, cwd=self.folder, env=variables, capture_output=True, text=True, timeout=patience(120)
        )
        assert done.returncode == status, done.stderr
        return done.stdout + done.stderr


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    """The sdist of this checkout, and the wheel built from that sdist."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    (sdist,) = folder.glob("*.tar.gz")
    return Distributions(wheel, sdist)


@pytest.fixture(
    scope="module",
    params=["wheel", *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in ("editable", "sdist"))],
)
def installation(
    request: pytest.FixtureRequest, distributions: Distributions, tmp_path_factory: pytest.TempPathFactory
) -> Installation:
    source = {
        "wheel": [str(distributions.wheel)],
        "sdist": [str(distributions.sdist)],
        "editable": ["--editable", str(ROOT)],
    }[request.param]
    environment = tmp_path_factory.mktemp(request.param) / "environment"
    venv.create(environment, symlinks=True)
    python = environment / "bin" / "python"
    installed = Installation(environment, tmp_path_factory.mktemp("empty"))
    borrowed = [path for path in sys.path if path.endswith("site-packages")]
    (installed.package.parent / "borrowed.pth").write_text("\n".join(borrowed) + "\n")
    options = ["--no-deps", "--no-index", "--no-build-isolation", "--ignore-installed", "--quiet"]
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", *options, *source]
    subprocess.run(pip, check=True, capture_output=True, env={**os.environ, "PYTHONPATH": ""})
    return installed


def tree(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of the last change of every file."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    return {str(file): (file.stat().st_size, file.stat().st_mtime_ns) for file in files}


def files_in_git(name: str) -> set[str]:
    """The files of this checkout that are in git, or would be."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", name]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {file for file in listed.splitlines() if (ROOT / file).exists()}


def test_the_wheel_holds_the_package_and_what_it_needs(distributions: Distributions) -> None:
    names = set(zipfile.ZipFile(distributions.wheel).namelist())
    held = {name for name in names if ".dist-info/" not in name}
    expected = files_in_git("torchllm")
    for name in SHIPPED:
        expected |= {f"torchllm/{file}" for file in files_in_git(name)}
    assert held == expected
    assert "torchllm/py.typed" in held
    for file in files_in_git("evidence/data/licenses"):  # of measurements that others published
        assert any(name.endswith(f".dist-info/licenses/{file}") for name in names), file


def test_the_sdist_holds_what_git_holds(distributions: Distributions) -> None:
    with tarfile.open(distributions.sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert held - {"PKG-INFO"} == files_in_git(".")


def test_it_trains_and_plans_from_an_empty_folder_and_writes_nothing_else(installation: Installation) -> None:
    installed = tree(installation.package)
    assert "3/3" in installation.run("torchllm", "train", *TRAIN)
    assert [record["step"] for record in metrics(installation.folder / "run")] == list(range(1, STEPS + 1))
    assert "8 x H100" in installation.run("torchllm", *PLAN, "--write", "planned.toml")
    checked = installation.run("torchllm", "train", "planned.toml", "--check", NPROC="8")
    assert "NPROC=8" in checked
    assert tree(installation.package) == installed


def test_its_resources_are_where_importlib_looks(installation: Installation) -> None:
    program = "import torchllm.tools.resources as r; print(r.resource('train_configs/models/llama3_8b.toml').is_file())"
    assert installation.run("python", "-c", program) == "True\n"
    if installation.package.exists():  # not the editable installation
        file = "r.files('torchllm') / 'train_configs/debug.toml'"
        printed = installation.run("python", "-c", f"import importlib.resources as r; print(({file}).read_text())")
        assert "models/debug.toml" in printed


def test_a_recipe_and_a_config_are_copied_and_started(installation: Installation) -> None:
    installation.run("torchllm", "copy", "pretrain", "mine.py")
    installation.run("torchllm", "copy", "train_configs/debug.toml", "mine.toml")
    installation.run("torchllm", "copy", "run_train.sh")
    assert "NPROC=1" in installation.run("torchllm", "train", "mine.toml", "--check", RECIPE="mine.py")
    assert "NPROC=1" in installation.run("./run_train.sh", "--check")


@pytest.mark.exhaustive  # that the wheel holds their files is tested above
def test_an_installed_package_has_the_benchmarks(installation: Installation) -> None:
    imports = ", ".join(f"benchmark.{name}" for name in sorted(BENCHMARKS))
    recipes = "from torchllm.tools.resources import resource; import sys; sys.path.insert(0, str(resource('recipes')))"
    installation.run("python", "-P", "-c", f"{recipes}; import {imports}")


def test_the_version_is_in_the_changelog_and_the_citation() -> None:
    """A released version is in both; a development version is the changelog's Unreleased."""
    (cited,) = re.findall(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.M)
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    released = [heading for heading in headings if heading != "Unreleased"]
    assert cited == released[0]
    if torchllm.__version__ != cited:
        assert ".dev" in torchllm.__version__
        assert headings[0] == "Unreleased"
