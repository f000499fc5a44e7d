"""The number of ranks, as environment variables say."""

import os
import re

from torchllm.config.toml import shown
from torchllm.tools.config.environment import Ranks


def read_ranks(dry_run: bool, errors: list[str]) -> Ranks | None:
    """Return the number of ranks: WORLD_SIZE under torchrun, else NNODES x NPROC; NNODES may be a range, such as 2-4.

    A dry run is no rank, and run_train.sh's default number of processes says nothing about its layout.
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
