"""Start fewer processes per node than asked for where their number does not fit the layout; try numbers of nodes.

Only --check and the dry run decide this, and only if a degree is -1.
"""

from typing import Any

from torchllm.tools.config.degrees import describe_batch, layout_problems, resolve_degrees
from torchllm.tools.config.draft import Draft
from torchllm.tools.config.environment import Ranks

MOST_LOWERED = 1024
"""run.lower_ranks tries at most this number of processes per node"""


def print_node_counts(draft: Draft[Any], fewest: int, most: int, per_node: int) -> bool:
    """Print for each number of nodes whether a job that loses nodes can go on; return whether one is allowed."""
    allowed = 0
    for nodes in range(most, fewest - 1, -1):
        draft.ranks = Ranks(world=nodes * per_node, nodes=nodes, per_node=per_node)
        world = ranks_to_start(draft) or 0
        unfit = layout_problems(draft.config, world)
        if unfit:
            verdict = "no: " + "; ".join(f"{problem.key}: {problem.message}" for problem in unfit)
        else:
            allowed += 1
            parallel, _ = resolve_degrees(draft.config.parallel, world)
            verdict = describe_batch(draft.config.training, parallel)
        print(f"{nodes} {'node' if nodes == 1 else 'nodes'} x {world // nodes} processes: {verdict}")
    return allowed > 0


def ranks_to_start(draft: Draft[Any]) -> int | None:
    """Return the number of ranks, None if it is unknown.

    With run.lower_ranks it is the largest number that fits the layout, from the given processes per node downwards.
    """
    ranks = draft.ranks
    if ranks is None:
        return None
    if ranks.per_node is None or not draft.may_start_fewer_ranks:
        return ranks.world
    per_node = _fitting_processes(draft, ranks.nodes)
    if per_node is None:
        return ranks.world
    if per_node < ranks.per_node:
        of_node = " per node" if ranks.nodes > 1 else ""
        unfit = f"{ranks.per_node} processes{of_node} {_unmet_need(draft, ranks)}"
        if draft.config.run.dry_run or draft.arguments.gpus:
            draft.notes.append(f"{unfit}: with run.lower_ranks a run starts {per_node}, and what follows is of these")
        else:
            draft.notes.append(f"{unfit}: starting {per_node}")
    return ranks.nodes * per_node


def _fitting_processes(draft: Draft[Any], nodes: int) -> int | None:
    """Return the processes per node that fit the layout on `nodes` nodes: all, or fewer with run.lower_ranks.

    None if no number fits.
    """
    per_node = draft.ranks.per_node if draft.ranks is not None else None
    if per_node is None:
        return None
    fewest = 1 if draft.config.run.lower_ranks else per_node
    for processes in (per_node, *range(min(per_node - 1, MOST_LOWERED), fewest - 1, -1)):
        if not layout_problems(draft.config, nodes * processes):
            return processes
    return None


def _unmet_need(draft: Draft[Any], ranks: Ranks) -> str:
    """Describe why the number of ranks does not fit, as the end of "3 processes ..."."""
    unfit = {problem.key for problem in layout_problems(draft.config, ranks.world)}
    if "training.global_batch_size" in unfit:
        return f"cannot share the batch of {draft.config.training.global_batch_size} sequences"
    if stages := sorted(key for key in unfit if key.startswith("data.stage")):
        return f"cannot share a step of {stages[0].rpartition('.')[0]}"
    return "do not divide into the degrees of [parallel]"
