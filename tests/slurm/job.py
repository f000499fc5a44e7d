"""A training job on the cluster, and what is seen of it."""

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.slurm.cluster import SlurmCluster
from tests.tiny_run import DEBUG, ROOT, SMALL, changed

STEPS = 100
QUICK_STEPS = 7
"""they take milliseconds; each further one takes a second for as long as the file `SLOW` is there"""
SLOW = "slow"
RECIPE = "slow_pretrain.py"
CHANGED = [
    f"--training.steps={STEPS}",
    "--training.global_batch_size=12",  # for 2, 3 and 4 ranks
    "--checkpoint.interval=5",
    "--evaluate.interval=50",
    "--metrics.tensorboard=false",
    "--generate.after_training=false",
]
SETTINGS = changed(SMALL, *CHANGED)
KINDS = {
    "run_train.sh": r"^bash \S*run_train\.sh ",
    "launcher": r" -m torchllm\.tools\.launch\.launch ",
    "rank": rf"python\S* (-u )?\S*{RECIPE} ",
}
"""patterns of command lines; workers of a rank's data loader have its own"""
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")


def write_recipe(folder: Path) -> None:
    """Write recipes/pretrain.py with slow steps, so that a job can be met in training."""
    source = (ROOT / "recipes/pretrain.py").read_text()
    pause = f"            if n > {QUICK_STEPS} and Path({str(folder / SLOW)!r}).exists():\n"
    pause += "                time.sleep(1.0)\n"
    for anchor, addition in (("            with monitor.data_wait():\n", pause), ("import sys\n", "import time\n")):
        assert anchor in source
        source = source.replace(anchor, addition + anchor, 1)
    source = source.replace("import sys\n", "import sys\nfrom pathlib import Path\n", 1)
    (folder / RECIPE).write_text(source)


class Job:
    """A job that trains in a run folder of its own. It can be submitted again, and goes on."""

    def __init__(self, cluster: SlurmCluster, name: str) -> None:
        self.cluster = cluster
        self.folder = cluster.folder / "runs" / name
        self.output = cluster.folder / f"{name}.txt"
        """what all its starts have printed"""
        self.number = 0
        """Slurm's"""

    def command(self, *settings: str) -> list[str]:
        return ["./run_train.sh", DEBUG, *changed(SETTINGS, *settings), f"--run.folder={self.folder}"]

    def submit(
        self, *options: str, srun: str = "srun", settings: Sequence[str] = (), ending: str = "", **environment: str
    ) -> None:
        """Submit it: sbatch OPTIONS --wrap "SRUN ./run_train.sh ... SETTINGS ENDING". Its steps are slow then."""
        (self.cluster.folder / SLOW).touch()
        words = [*options, "--wrap", f"{srun} {shlex.join(self.command(*settings))}{ending}"]
        variables = {"NPROC": "1", "OMP_NUM_THREADS": "1", "PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
        variables |= {"RECIPE": str(self.cluster.folder / RECIPE)} | environment
        files = [f"--output={self.output}", "--open-mode=append"]
        self.number = int(self.cluster.run("sbatch", "--parsable", *files, *words, **variables))

    def begin(self, *options: str, **rest: Any) -> None:
        """Submit it, and wait for its first slow steps."""
        self.submit(*options, **rest)
        self.until_training()

    def until_training(self) -> None:
        self.cluster.until(lambda: self.step > QUICK_STEPS + 1 or self.state in ENDED)
        assert self.step > QUICK_STEPS + 1, self.text

    @property
    def text(self) -> str:
        return self.output.read_text() if self.output.exists() else ""

    @property
    def step(self) -> int:
        logged = re.findall(rf"^step +(\d+)/{STEPS} ", self.text, re.M)
        return int(logged[-1]) if logged else 0

    @property
    def checkpoint(self) -> int:
        return max((int(file.parent.name[5:]) for file in self.folder.glob("checkpoints/*/manifest.json")), default=0)

    @property
    def resumed(self) -> list[int]:
        return [int(step) for step in re.findall(r"resuming from .*: step (\d+),", self.text)]

    @property
    def state(self) -> str:
        return self.cluster.state(self.number).name

    def find(self, node: str, kind: str) -> int:
        """Return the id of its first process of a kind, a key of `KINDS`, on a node."""
        processes = self.cluster.network.hosts[node].processes()
        return min(pid for pid, command in processes.items() if re.search(KINDS[kind], command))

    def trains_on(self, node: str) -> bool:
        commands = self.cluster.network.hosts[node].processes().values()
        return any(re.search(KINDS["rank"], command) for command in commands)

    def until_ended(self) -> float:
        """Wait until Slurm says that it has ended and none of its processes is left on any node; return the seconds."""
        return self.cluster.until(lambda: self.state in ENDED and not self.cluster.processes())

    def until_resumed(self, times: int = 1) -> float:
        """Wait until it has gone on from a checkpoint so many times; return the seconds."""
        return self.cluster.until(lambda: len(self.resumed) >= times)

    def finish(self) -> None:
        (self.cluster.folder / SLOW).unlink()
        self.until_ended()
        assert self.state == "COMPLETED", self.cluster.describe()
