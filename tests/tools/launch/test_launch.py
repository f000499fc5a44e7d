"""The launcher of one node imports no torch, and says what it starts."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.launched import clean
from tests.patience import patience
from tests.tiny_run import ROOT
from torchllm.tools.launch.launch import launch
from torchllm.tools.launch.restarts import PartEnding

LAUNCH = [sys.executable, "-P", "-m", "torchllm.tools.launch.launch"]
PLAIN = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
ones = torch.ones(1)
dist.all_reduce(ones)
assert ones == 2
dist.destroy_process_group()  # without it gloo's threads may abort a process at its end
"""
"""a script that takes all from the environment, as of torchrun"""


def test_it_imports_no_torch() -> None:
    code = "import sys, torchllm.tools.launch.launch, torchllm.tools.launch.job\n"
    code += "sys.exit(bool({'torch', 'numpy', 'torchllm.config.schema'} & sys.modules.keys()))"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_the_first_line_is_there_before_a_rank_is(tmp_path: Path) -> None:
    """On node 0, whose launcher takes the lease of the run folder; the others say nothing."""
    recipe = tmp_path / "recipe.py"
    recipe.write_text("import sys; print('a rank', file=sys.stderr)")
    environment = clean({"PYTHONPATH": str(ROOT), "TORCHLLM_TAKE_LEASE": str(tmp_path / "run")})
    done = subprocess.run([*LAUNCH, str(recipe)], env=environment, capture_output=True, text=True, timeout=patience(60))
    first, *others = done.stderr.splitlines()
    assert first.startswith(f"starting {recipe} on 1 process, this node is ")
    assert first.endswith(": importing torch")
    assert others == ["a rank"]


LEAVES = """
import os, sys, time
from pathlib import Path
from torchllm.runtime import error_report
rank, folder = int(os.environ["RANK"]), Path(sys.argv[1])
if rank == 1:
    (folder / "new").write_text(str(os.getpid()))
    (folder / "new").rename(folder / "pid")
    sys.exit()
def runs():
    try:
        pid = (folder / "pid").read_text() if (folder / "pid").exists() else ""
        return not pid or " Z " not in Path("/proc", pid, "stat").read_text()
    except FileNotFoundError:  # the launcher has seen its end
        return False
while runs():
    time.sleep(0.01)
error_report.OTHERS_WAIT = 0
error_report.report_errors(rank)
raise RuntimeError(sys.argv[2])
"""
"""rank 1 ends, without an error, before rank 0 fails"""


@pytest.mark.parametrize(
    ("error", "last_line"),
    [
        ("Connection closed by peer", PartEnding("left", 1).describe()),
        ("of rank 0 alone", "RuntimeError: of rank 0 alone"),
    ],
)
def test_a_rank_that_ended_while_others_trained_is_named(tmp_path: Path, error: str, last_line: str) -> None:
    recipe = tmp_path / "leaves.py"
    recipe.write_text(LEAVES)
    command = [*LAUNCH, "--nproc-per-node=2", str(recipe), str(tmp_path), error]
    environment = clean({"PYTHONPATH": str(ROOT)})
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=patience(60))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == last_line


def test_wrong_arguments_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in [
        (["--nproc-per-node=0"], "at least one rank per node"),
        (["--nnodes=2", "--node-rank=2", "--rdzv-endpoint=node0:29500"], "counts from 0 to --nnodes - 1"),
        (["--nnodes=2"], "HOST:PORT of node 0, not ''"),
        (["--nnodes=2", "--rdzv-endpoint=node0"], "HOST:PORT of node 0, not 'node0'"),
    ]:
        with pytest.raises(SystemExit) as end:
            launch([*arguments, "recipe.py"])
        assert end.value.code == 2, arguments
        assert message in capsys.readouterr().err, arguments


@pytest.mark.exhaustive
def test_a_plain_script_meets_at_the_port_that_is_kept_for_it(tmp_path: Path) -> None:
    recipe = tmp_path / "plain.py"
    recipe.write_text(PLAIN)
    environment = clean({"PYTHONPATH": str(ROOT)})
    subprocess.run([*LAUNCH, "--nproc-per-node=2", str(recipe)], env=environment, check=True, timeout=patience(100))
