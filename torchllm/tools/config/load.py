"""Load the config of a run: a TOML file with its bases, overrides from the command line, and the number of ranks.

All errors are found at once, before torch is imported, and printed on one line each:

    train_configs/x.toml:12: parallel.tp: 3 does not divide model.heads = 8

The process then exits with status 2. No value is coerced, and an unknown key is an error.

`load_config` does it all. `torchllm.tools.front.resolve` plans the layout between its two halves: `draft.read_draft`
reads the files, the overrides and the environment; `refuse.finish` checks the values against each other.
"""

from collections.abc import Sequence
from typing import Any, TypeVar, overload

from torchllm.config.schema import Config
from torchllm.config.toml import shown
from torchllm.tools.config.draft import Draft, read_draft
from torchllm.tools.config.environment import system_errors_on_one_line
from torchllm.tools.config.refuse import finish

C = TypeVar("C", bound=Config)


@overload
def load_config(arguments: Sequence[str], *, one_device: bool = False) -> Config: ...
@overload
def load_config(arguments: Sequence[str], schema: type[C], *, one_device: bool = False) -> C: ...
@system_errors_on_one_line()
def load_config(arguments: Sequence[str], schema: type[Any] = Config, *, one_device: bool = False) -> Any:
    """Return the checked config, with its degrees and its run folder filled in.

    `arguments` are `[CONFIG.toml] [--section.key=value ...] [--check] [--gpus=N] [--json] [--help]`. `schema` may add
    sections to `Config`. `one_device`: the recipe runs in one process; degrees of files become 1, and the command line
    may set none. A recipe whose layout the planner may choose calls `torchllm.tools.front.start.load_configs`: here
    parallel.layout is "manual".

    --check prints the settings of run_train.sh, as lines NPROC=, RUN_FOLDER=, SAMPLE=, START_TIMEOUT= and optionally
    RESTARTS=, STOPPED_EXIT_STATUS=, ON_EVENT= and DRY_RUN=. It ends with SystemExit(0), as --help does. Without --check
    the process must be a rank, except for a dry run: more than one rank needs WORLD_SIZE in the environment.
    SystemExit(2) after the lines on stderr if there are errors. TypeError if `schema` has a field no TOML can fill.
    """
    draft: Draft[Any] = read_draft(arguments, schema, one_device=one_device)
    layout = draft.config.parallel.layout
    if layout != "manual":
        draft.report(("parallel", "layout"), f"is {shown(layout)}, but this recipe does not plan: set the degrees")
    for path in (("model", "from_hf"), ("checkpoint", "initial")):
        if getattr(getattr(draft.config, path[0]), path[1]) and not draft.is_resolved:
            draft.report(path, "this recipe reads no weights to start from: remove the key, or use recipes/pretrain.py")
    return finish(draft)
