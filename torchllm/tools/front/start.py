"""The calls of a recipe that trains, before it imports torch.

    CONFIGS = load_configs(sys.argv[1:])

The config goes through three steps, once per job: read (`torchllm/tools/config/draft.py`), resolve (`resolve.py`:
published model, planned layout, this machine), refuse (`torchllm/tools/config/refuse.py`). Ranks read the result, and
neither plan nor check anything again.
"""

import json
import os
from collections.abc import Sequence
from typing import Any, TypeVar, overload

from torchllm.config.applied_keys import note_origins
from torchllm.config.environment import HANDED
from torchllm.config.schema import Config
from torchllm.runtime.heartbeat import heartbeat
from torchllm.tools.config.environment import same_words, system_errors_on_one_line
from torchllm.tools.config.read import ConfigError, read_table

C = TypeVar("C", bound=Config)


@overload
def load_configs(
    arguments: Sequence[str], *, uses_epochs: bool = False, reads_sources: bool = True
) -> list[Config]: ...
@overload
def load_configs(
    arguments: Sequence[str], schema: type[C], *, uses_epochs: bool = False, reads_sources: bool = True
) -> list[C]: ...
@system_errors_on_one_line()
def load_configs(
    arguments: Sequence[str], schema: type[Any] = Config, *, uses_epochs: bool = False, reads_sources: bool = True
) -> Any:
    """Return the checked config of a run, with its layout, its degrees and its run folder filled in.

    With parallel.layout = "tune" there are several, which differ in their layouts, the planner's best first. Arguments,
    output and exit status are as in `tools.config.load.load_config`. It also checks the cluster's file and, before
    the processes of the run are started, the files that it reads and the folders that it writes. uses_epochs: the
    recipe takes its steps from finetune.epochs; for another one it is printed that the key does nothing.
    reads_sources: False for a recipe with its own data, whose data.sources and data.tokenizer are not checked.
    """
    configs = handed_configs(arguments, schema)
    if configs is None:
        from torchllm.tools.front.resolve import read_configs  # of no use to ranks that run_train.sh has started

        configs = read_configs(arguments, schema, uses_epochs, reads_sources)
    from torchllm.tools.launch.start_lines import say_while_this_imports  # of no use to a check

    heartbeat().open()  # its launcher watches it from here on
    say_while_this_imports()
    return configs


def handed_configs(words: Sequence[str], schema: type[C]) -> list[C] | None:
    """Return the configs that `refuse.hand_over` wrote for this rank; None if there are none, e.g. in a cleaned folder.

    words: the command line. A process of another command, started inside of a run, must not train the run's config.
    """
    file = os.environ.get(HANDED)
    if not file or "WORLD_SIZE" not in os.environ or not os.path.isfile(file):
        return None
    with open(file) as opened:
        is_mine = os.fstat(opened.fileno()).st_uid == os.getuid()  # a cleaned /tmp may have another user's by then
        text = opened.read() if is_mine else ""
    if not text:  # the recipe checks its config in another way
        return None
    handed = json.loads(text)
    if handed["words"] != same_words(words):
        return None
    faults: list[ConfigError] = []
    configs = [read_table(schema, table, faults) for table in handed["configs"]]
    assert not faults, faults
    note_origins(configs[0], handed["origins"])
    return configs
