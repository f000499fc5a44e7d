"""The config of a run: `Config` and its sections, `write_config` to save one. No torch.

`torchllm.tools.config` reads and checks one.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchllm.config.applied_keys import applied, refuse_unapplied
    from torchllm.config.changes import log_config_changes
    from torchllm.config.schema import (
        FAMILIES,
        SCHEDULES,
        Bound,
        Checkpoint,
        Cluster,
        Compile,
        Config,
        Count,
        Data,
        Degree,
        Evaluate,
        Features,
        FilePath,
        Finetune,
        Float8,
        Fraction,
        Generate,
        Metrics,
        MixtureStage,
        Model,
        Natural,
        NonNegative,
        Optimizer,
        Parallel,
        PipelineSchedule,
        Positive,
        Recompute,
        Run,
        Schedule,
        Source,
        TrainedParameters,
        Training,
        gradient_accumulation,
    )
    from torchllm.config.write import write_config

__all__ = [
    "FAMILIES",
    "SCHEDULES",
    "Bound",
    "Checkpoint",
    "Cluster",
    "Compile",
    "Config",
    "Count",
    "Data",
    "Degree",
    "Evaluate",
    "Features",
    "FilePath",
    "Finetune",
    "Float8",
    "Fraction",
    "Generate",
    "Metrics",
    "MixtureStage",
    "Model",
    "Natural",
    "NonNegative",
    "Optimizer",
    "Parallel",
    "PipelineSchedule",
    "Positive",
    "Recompute",
    "Run",
    "Schedule",
    "Source",
    "TrainedParameters",
    "Training",
    "applied",
    "gradient_accumulation",
    "log_config_changes",
    "refuse_unapplied",
    "write_config",
]

ELSEWHERE = {
    "applied": "applied_keys",
    "log_config_changes": "changes",
    "refuse_unapplied": "applied_keys",
    "write_config": "write",
}
"""name -> its module, if that is not `schema`"""


def __getattr__(name: str) -> Any:
    """Return a name of `__all__`, whose module is imported now: a launcher needs the errors alone."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"torchllm.config.{ELSEWHERE.get(name, 'schema')}"), name)
