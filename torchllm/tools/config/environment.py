"""The number of ranks and the job, as environment variables say; lines for the user."""

import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple, NoReturn

from torchllm.config.environment import LAUNCHED
from torchllm.config.system_errors import describe_place, describe_system_error
from torchllm.config.toml import shown

PER_RANK = "PER_RANK"
"""environment variable: a scheduler has started one run_train.sh per rank; LOCAL_RANK is its index"""
SCHEDULED_RESTARTS = 3
"""default of run.restarts under a scheduler: restarts without progress"""


class Ranks(NamedTuple):
    """Number of processes of a run; None where it is unknown."""

    world: int | None = None
    nodes: int = 1
    per_node: int | None = None
    are_started: bool = False
    """this process is one of them"""
    most_nodes: int | None = None
    """--check tries every number of nodes from `nodes` to this one; None: the number is fixed"""


def read_ranks(dry_run: bool, errors: list[str]) -> Ranks | None:
    """Return the number of ranks: WORLD_SIZE under torchrun, else NNODES x NPROC; NNODES may be a range, such as 2-4.

    A dry run is not a rank, and run_train.sh's default number of processes says nothing about its layout.
    None if a variable is invalid; `errors` gets a line for each.
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
            wanted = "a range from the smaller number to the larger" if span else "a whole number of at least 1"
            errors.append(f"environment: {name}: must be {wanted}, not {shown(text)}")
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
    """Return the id that a job's processes share, also after the job is requeued; "" if there is none."""
    for name in ("SLURM_JOB_ID", "PET_RDZV_ID", "TORCHELASTIC_RUN_ID"):
        value = os.environ.get(name, "")
        if value not in ("", "none"):
            return value
    return ""


def default_restarts() -> int:
    """Return the value of run.restarts = -1: 3 under Slurm or with the variables for Kubernetes, else 0."""
    is_scheduled = "SLURM_STEP_ID" in os.environ or "PET_NNODES" in os.environ
    return SCHEDULED_RESTARTS if is_scheduled else 0


def is_requeued() -> bool:
    """Return whether Slurm has started this job before."""
    return os.environ.get("SLURM_RESTART_COUNT", "0") != "0"


def same_words(words: Sequence[str]) -> list[str]:
    """Return the words that --check and the ranks share: run_train.sh gives ranks the folder that it has read."""
    return [word for word in words if word != "--check" and not word.startswith("--run.folder=")]


def print_error_lines(lines: Iterable[str]) -> None:
    """Print lines on stderr, without duplicates, from one process of each node."""
    is_one_of_several = "WORLD_SIZE" in os.environ or PER_RANK in os.environ  # else LOCAL_RANK is left over
    if not is_one_of_several or os.environ.get("LOCAL_RANK", "0") == "0":
        for line in dict.fromkeys(lines):
            with suppress(OSError):  # a full disk or a closed pipe must not stop the training
                print(line, file=sys.stderr)


def refuse(lines: Iterable[str]) -> NoReturn:
    """Print errors and exit with status 2; no file has been changed."""
    print_error_lines(lines)
    raise SystemExit(2)


@contextmanager
def system_errors_on_one_line() -> Iterator[None]:
    """Return a context, or a decorator, that turns an error of the system into one line and status 1."""
    try:
        yield
    except Exception as error:
        if not (text := describe_system_error(error)):
            raise
        print_error_lines([f"error: {text}{describe_place(error)}"])
        raise SystemExit(1) from error


def print_notes(lines: Iterable[str], *, is_check: bool) -> None:
    """Print notes about a valid config on stderr, once for the whole run.

    run_train.sh checks the config in one process, which prints the notes. The ranks that it starts afterwards see
    TORCHLLM_LAUNCHED and print nothing. Without run_train.sh, rank 0 prints.
    """
    another_process_prints = LAUNCHED in os.environ or os.environ.get("RANK", "0") != "0"
    if is_check or not another_process_prints:
        print_error_lines(lines)
