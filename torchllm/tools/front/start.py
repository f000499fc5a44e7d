"""The calls of a recipe that trains, before it imports torch.

    CONFIGS = load_configs(sys.argv[1:])

The config goes through three steps, once per job: read (`torchllm/tools/config/load.py`), resolve (`resolve.py`:
published model, planned layout, this machine), refuse (`torchllm/tools/config/refuse.py`). Ranks read the result.
"""

from collections.abc import Sequence
from typing import Any, TypeVar, overload

from torchllm.config.schema import Config
from torchllm.runtime.heartbeat import heartbeat
from torchllm.tools.config.environment import system_errors_on_one_line
from torchllm.tools.config.handed import handed_configs

C = TypeVar("C", bound=Config)


@overload
def load_configs(arguments: Sequence[str], *, uses_epochs: bool = False) -> list[Config]: ...
@overload
def load_configs(arguments: Sequence[str], schema: type[C], *, uses_epochs: bool = False) -> list[C]: ...
@system_errors_on_one_line()
def load_configs(arguments: Sequence[str], schema: type[Any] = Config, *, uses_epochs: bool = False) -> Any:
    """Return the checked config of a run, with its layout, its degrees and its run folder filled in.

    With parallel.layout = "tune" there are several, which differ in their layouts, the planner's best first. Arguments,
    output and exit status are as in `tools.config.load.load_config`. It also checks the cluster's file and, before
    the processes of the run are started, the files that it reads and the folders that it writes. uses_epochs: the
    recipe takes its steps from finetune.epochs; for another one it is printed that the key does nothing.
    """
    heartbeat().open()
    configs = handed_configs(arguments, schema)
    if configs is None:
        from torchllm.tools.front.resolve import read_configs  # of no use to ranks that run_train.sh has started

        configs = read_configs(arguments, schema, uses_epochs)
    from torchllm.tools.launch.start_lines import say_while_this_imports  # of no use to a check

    say_while_this_imports()
    return configs
