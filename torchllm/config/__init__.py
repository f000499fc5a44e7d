"""The config of a run: `Config` and its sections, `write_config` to save one. No torch.

`torchllm.tools.config` reads and checks one.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from torchllm.config.applied_keys import applied, refuse_unapplied
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

if TYPE_CHECKING:
    from torchllm.config.changes import log_config_changes
    from torchllm.config.write import write_config

LATER = {"log_config_changes": "changes", "write_config": "write"}
"""name -> its module, which is imported when the name is used: ranks that read a checked config import no reader"""


def __getattr__(name: str) -> Any:
    """Return a name of `LATER`."""
    if name not in LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"torchllm.config.{LATER[name]}"), name)
