"""Read the config of a run and plan its layout: what a recipe calls first, before it imports torch.

    CONFIGS = load_configs(sys.argv[1:])

`parallel.layout = "auto"` leaves the layout to the planner, for the machine that the run is started on; with "tune" the
run measures the planner's best few. A recipe that runs in one process needs neither: it calls `config.load_config`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar, overload

from torchllm.config import Config
from torchllm.config.errors import UserError
from torchllm.config.load import Draft, finish, read_draft

C = TypeVar("C", bound=Config)

TUNED = 4
"""layouts that parallel.layout = "tune" measures"""


@overload
def load_configs(arguments: Sequence[str]) -> list[Config]: ...
@overload
def load_configs(arguments: Sequence[str], schema: type[C]) -> list[C]: ...
def load_configs(arguments: Sequence[str], schema: type[Any] = Config) -> Any:
    """Return the checked config of a run, with its layout, its degrees and its run folder filled in.

    With parallel.layout = "tune" there are several, which differ in their layouts, the planner's best first. Arguments,
    output and exit status are those of `torchllm.config.load_config`; the cluster's file is checked too.
    """
    draft: Draft[Any] = read_draft(arguments, schema)
    check_cluster(draft)
    alternatives = plan_layout(draft)
    config = finish(draft)
    return [config, *(replace(alternative, run=config.run) for alternative in alternatives)]


def check_cluster(draft: Draft[Any]) -> None:
    """Report what is wrong with `cluster.name` and the file that it names."""
    name = draft.config.cluster.name
    if name:
        from torchllm.spec.cluster import read_cluster, unknown_cluster  # of no use to other runs

        if unknown := unknown_cluster(name):
            draft.report(("cluster", "name"), unknown)
        else:
            read_cluster(name, draft.errors)


def plan_layout(draft: Draft[C]) -> list[C]:
    """Give a draft whose layout is open the planner's best one; return the others that "tune" measures.

    Nothing is planned for a draft with errors.
    """
    kind = draft.config.parallel.layout
    if kind == "manual" or draft.errors or draft.ranks is None:
        return []
    path = ("parallel", "layout")
    if draft.ranks.world is None:
        draft.report(path, f"is {kind}, but the number of ranks is unknown: set NPROC (and NNODES)")
        return []

    from torchllm.planner.search.auto import choose_layouts  # of no use to other runs

    written = set()
    for section, table in draft.layer.table.items():
        written |= {f"{section}.{key}" for key in table}
    try:
        configs, line = choose_layouts(draft.config, draft.ranks.world, written, TUNED if kind == "tune" else 1)
    except UserError as error:
        draft.report(path, str(error))
        return []
    draft.notes.append(f"layout: {line}")
    draft.config, *alternatives = configs
    return alternatives
