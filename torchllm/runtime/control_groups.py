"""Find the control groups that limit this process: Slurm, Kubernetes and containers limit memory and cores by them."""

from pathlib import Path

FOLDER = "sys/fs/cgroup"
"""mount point on Linux"""


def control_groups(controller: str, root: Path = Path("/")) -> list[Path]:
    """Return the folders of this process's control groups that `controller` ("memory", "cpu") can limit, up to the top.

    In a container Linux may return the host's path, which is not visible there; the root is visible, and is the
    container's group. root: the root of the file system, another one in tests.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    groups: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            top = root / FOLDER
        elif controller in controllers.split(","):  # version 1: a folder per set of controllers, or a link to it
            top = root / FOLDER / controller
        else:
            continue
        own = top / path.lstrip("/")
        groups += [folder for folder in (own, *own.parents) if folder == top or top in folder.parents]
    return groups
