"""The config of a run: the names of `schema.py`, and functions of other modules. No torch.

`torchllm.tools.config` reads and checks one. A module is imported when one of its names is asked for: a launcher needs
the errors alone.
Imports: no other folder.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchllm.config.applied_keys import applied as applied
    from torchllm.config.applied_keys import refuse_unapplied as refuse_unapplied
    from torchllm.config.keys import *  # noqa: F403 - as below
    from torchllm.config.schema import *  # noqa: F403 - all of its names are names of this package, for type checkers
    from torchllm.config.write import write_config as write_config

ELSEWHERE = {"applied": "applied_keys", "refuse_unapplied": "applied_keys", "write_config": "write"}
"""name -> its module, if that is not `schema`"""


def __getattr__(name: str) -> Any:
    """Return a name, whose module is imported now. AttributeError if there is none."""
    if name.startswith("_"):  # e.g. __path__: the import system must not load the schema
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{ELSEWHERE.get(name, 'schema')}"), name)
