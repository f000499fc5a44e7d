"""What the environment says about this process: how many ranks there are, and which job they belong to."""

import os
import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple, NoReturn

from torchllm.config.toml import shown

LAUNCHED = "TORCHLLM_LAUNCHED"
"""environment variable: when run_train.sh, or a later attempt of its job, was started, in seconds since 1970"""
ATTEMPT = "TORCHLLM_ATTEMPT"
"""environment variable of the ranks that a launcher starts again: which attempt of the job this is, from 2"""
PER_RANK = "PER_RANK"
"""environment variable: a scheduler has started one run_train.sh per rank, LOCAL_RANK says which"""
SCHEDULED_RESTARTS = 3
"""restarts without progress that a job makes under a scheduler, unless run.restarts says otherwise"""


START_TIMEOUT = "TORCHLLM_START_TIMEOUT"
"""environment variable: run.start_timeout, for ranks that have not read their config yet"""


class Ranks(NamedTuple):
    """Number of processes of a run; None where it is unknown."""

    world: int | None = None
    nodes: int = 1
    per_node: int | None = None
    are_started: bool = False
    """this process is one of them"""
    most_nodes: int | None = None
    """--check tries every number of nodes from `nodes` to this one; None: the number is fixed"""
    spare: str = ""
    """why nodes of the job do not train: it has more than `nodes`, none of whose numbers fits the layout"""


def read_ranks(dry_run: bool, errors: list[str]) -> Ranks | None:
    """Return the number of ranks: WORLD_SIZE under torchrun, else NNODES x NPROC; NNODES may be a range, such as 2-4.

    A dry run is no rank, and the number of processes that run_train.sh starts by default says nothing about its layout.
    Return None, after a line in `errors` for each invalid variable, if there is one.
    """
    variables = ["WORLD_SIZE", "NNODES", "NPROC"]
    if dry_run:
        variables.remove("WORLD_SIZE")
        if os.environ.get("NPROC_IS_DEFAULT"):
            variables.remove("NPROC")
    numbers: dict[str, int] = {}
    most_nodes = None
    is_valid = True
    for name in variables:
        text = os.environ.get(name, "")
        span = re.fullmatch("([1-9][0-9]{0,4})-([1-9][0-9]{0,4})", text)
        if name == "NNODES" and span and int(span[1]) <= int(span[2]):
            text, most_nodes = span[1], int(span[2])
        if re.fullmatch("[1-9][0-9]{0,8}", text):
            numbers[name] = int(text)
        elif text:
            is_valid = False
            errors.append(f"environment: {name}: must be a whole number of at least 1, not {shown(text)}")
    if not is_valid:
        return None
    nodes = numbers.get("NNODES", 1)
    if "WORLD_SIZE" in numbers:
        return Ranks(world=numbers["WORLD_SIZE"], nodes=nodes, are_started=True)
    per_node = numbers.get("NPROC")
    if per_node is None or most_nodes is not None:
        return Ranks(nodes=nodes, per_node=per_node, most_nodes=most_nodes)
    return Ranks(world=nodes * per_node, nodes=nodes, per_node=per_node)


def job_id() -> str:
    """Return what all processes of a job, and the same job queued again, have in common; "" if there is nothing."""
    for name in ("SLURM_JOB_ID", "PET_RDZV_ID", "TORCHELASTIC_RUN_ID"):
        value = os.environ.get(name, "")
        if value not in ("", "none"):
            return value
    return ""


def default_restarts() -> int:
    """Return what run.restarts = -1 means here: under Slurm, or where the variables for Kubernetes are set, or not."""
    is_scheduled = "SLURM_STEP_ID" in os.environ or "PET_NNODES" in os.environ
    return SCHEDULED_RESTARTS if is_scheduled else 0


def is_restart() -> bool:
    """Return whether this process is a rank of a later attempt of the same job."""
    return ATTEMPT in os.environ


def is_requeued() -> bool:
    """Return whether Slurm has started this job before."""
    return os.environ.get("SLURM_RESTART_COUNT", "0") != "0"


def print_error_lines(lines: Iterable[str]) -> None:
    """Print lines on stderr, each once, from one process of each node."""
    is_one_of_several = "WORLD_SIZE" in os.environ or PER_RANK in os.environ  # else LOCAL_RANK is left over
    if not is_one_of_several or os.environ.get("LOCAL_RANK", "0") == "0":
        for line in dict.fromkeys(lines):
            with suppress(OSError):  # a full disk or a pipe without reader is no reason not to train
                print(line, file=sys.stderr)


def refuse(lines: Iterable[str]) -> NoReturn:
    """Print what is wrong and end with exit status 2: nothing has been touched."""
    print_error_lines(lines)
    raise SystemExit(2)


def print_notes(lines: Iterable[str], *, is_check: bool) -> None:
    """Print on stderr what the user should know about a valid config, once for the whole run.

    run_train.sh checks the config in one process and passes on what that process printed. The processes that it starts
    afterwards find TORCHLLM_LAUNCHED set and have nothing to add; where it is not set, rank 0 speaks.
    """
    is_told_by_others = LAUNCHED in os.environ or os.environ.get("RANK", "0") != "0"
    if is_check or not is_told_by_others:
        print_error_lines(lines)
