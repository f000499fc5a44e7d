"""The public API for recipes. Each name is imported from its module on first use, so that most need no torch.

These names keep their meaning from one version to the next. New parameters are keyword-only and have a default; a
renamed function works for one more version, with a FutureWarning. A section that a recipe adds to the config takes its
types from `torchllm.config`.
"""

from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

with suppress(ModuleNotFoundError):  # the core trains without tools, on prepared tokens
    import torchllm.tools  # noqa: F401  # registers what they can read: text, token files of others, tokenizers

HOMES = {
    "Checkpointer": "torchllm.checkpoint.checkpointer",
    "applied": "torchllm.config.applied_keys",
    "refuse_unapplied": "torchllm.config.applied_keys",
    "log_config_changes": "torchllm.tools.config.changes",
    "UserError": "torchllm.config.errors",
    "load_config": "torchllm.tools.config.load",
    "Config": "torchllm.config.schema",
    "write_config": "torchllm.config.write",
    "IterableLoader": "torchllm.tools.iterable",
    "DataRanks": "torchllm.data.packing",
    "TrainLoader": "torchllm.data.loader",
    "build_loader": "torchllm.data.loader",
    "AddedParameter": "torchllm.facts.block_kinds",
    "BlockKind": "torchllm.facts.block_kinds",
    "register_block": "torchllm.facts.block_kinds",
    "BlockPart": "torchllm.facts.parts.part",
    "MixerCosts": "torchllm.facts.parts.costs",
    "PartParameter": "torchllm.facts.parts.part",
    "linear": "torchllm.facts.parts.part",
    "KEYS_OF_ATTENTION": "torchllm.facts.parts.part",
    "register_mixer": "torchllm.facts.parts.added",
    "Mixer": "torchllm.models.mixer",
    "ShortReach": "torchllm.models.short_reach",
    "CachedReach": "torchllm.models.short_reach",
    "build_model": "torchllm.models.decoder",
    "cast_parameters": "torchllm.models.decoder",
    "add_low_rank_updates": "torchllm.models.decoder",
    "IGNORED": "torchllm.models.head",
    "WeightAverage": "torchllm.optim.average",
    "ExpertBalance": "torchllm.optim.expert_balance",
    "clip_grad_norm": "torchllm.optim.grad_norm",
    "apply_if_finite": "torchllm.optim.optimizer",
    "build_optimizer": "torchllm.optim.optimizer",
    "parameter_groups": "torchllm.optim.optimizer",
    "LearningRate": "torchllm.optim.schedule",
    "log_attention_kernel": "torchllm.tools.watch.chosen_kernel",
    "sequence_pieces": "torchllm.parallel.mesh",
    "initialize": "torchllm.parallel.initialize",
    "materialize": "torchllm.parallel.initialize",
    "build_mesh": "torchllm.parallel.mesh",
    "parallelize": "torchllm.parallel.parallelize",
    "OneStage": "torchllm.parallel.forward_backward",
    "build_forward_backward": "torchllm.parallel.parallelize",
    "choose_device": "torchllm.runtime.device",
    "compute_dtype": "torchllm.runtime.device",
    "report_errors": "torchllm.runtime.error_report",
    "Runtime": "torchllm.runtime.process",
    "supervise": "torchllm.tools.adapt.supervise",
    "dry_run": "torchllm.tools.dry_run.run",
    "load_configs": "torchllm.tools.front.start",
    "load_run": "torchllm.tools.front.resolve",
    "export_adapter": "torchllm.tools.hub.export",
    "export_model": "torchllm.tools.hub.export",
    "initial_weights": "torchllm.tools.hub.initial",
    "load_weights_of_run": "torchllm.tools.hub.weights_of_run",
    "start_runtime": "torchllm.tools.launch.rank_start",
    "Monitor": "torchllm.metrics.monitor",
    "Observer": "torchllm.metrics.observer",
    "evaluate": "torchllm.train.evaluate",
    "due": "torchllm.train.interval",
    "TrainStep": "torchllm.train.step",
    "read_health": "torchllm.train.step",
}
"""name -> the module that defines it"""
__all__ = sorted(HOMES)

if TYPE_CHECKING:  # the same names, for type checkers and editors
    from torchllm.checkpoint.checkpointer import Checkpointer as Checkpointer
    from torchllm.config.applied_keys import applied as applied
    from torchllm.config.applied_keys import refuse_unapplied as refuse_unapplied
    from torchllm.config.errors import UserError as UserError
    from torchllm.config.schema import Config as Config
    from torchllm.config.write import write_config as write_config
    from torchllm.data.loader import TrainLoader as TrainLoader
    from torchllm.data.loader import build_loader as build_loader
    from torchllm.data.packing import DataRanks as DataRanks
    from torchllm.facts.block_kinds import AddedParameter as AddedParameter
    from torchllm.facts.block_kinds import BlockKind as BlockKind
    from torchllm.facts.block_kinds import register_block as register_block
    from torchllm.facts.parts.added import register_mixer as register_mixer
    from torchllm.facts.parts.costs import MixerCosts as MixerCosts
    from torchllm.facts.parts.part import KEYS_OF_ATTENTION as KEYS_OF_ATTENTION
    from torchllm.facts.parts.part import BlockPart as BlockPart
    from torchllm.facts.parts.part import PartParameter as PartParameter
    from torchllm.facts.parts.part import linear as linear
    from torchllm.metrics.monitor import Monitor as Monitor
    from torchllm.metrics.observer import Observer as Observer
    from torchllm.models.decoder import add_low_rank_updates as add_low_rank_updates
    from torchllm.models.decoder import build_model as build_model
    from torchllm.models.decoder import cast_parameters as cast_parameters
    from torchllm.models.head import IGNORED as IGNORED
    from torchllm.models.mixer import Mixer as Mixer
    from torchllm.models.short_reach import CachedReach as CachedReach
    from torchllm.models.short_reach import ShortReach as ShortReach
    from torchllm.optim.average import WeightAverage as WeightAverage
    from torchllm.optim.expert_balance import ExpertBalance as ExpertBalance
    from torchllm.optim.grad_norm import clip_grad_norm as clip_grad_norm
    from torchllm.optim.optimizer import apply_if_finite as apply_if_finite
    from torchllm.optim.optimizer import build_optimizer as build_optimizer
    from torchllm.optim.optimizer import parameter_groups as parameter_groups
    from torchllm.optim.schedule import LearningRate as LearningRate
    from torchllm.parallel.forward_backward import OneStage as OneStage
    from torchllm.parallel.initialize import initialize as initialize
    from torchllm.parallel.initialize import materialize as materialize
    from torchllm.parallel.mesh import build_mesh as build_mesh
    from torchllm.parallel.mesh import sequence_pieces as sequence_pieces
    from torchllm.parallel.parallelize import build_forward_backward as build_forward_backward
    from torchllm.parallel.parallelize import parallelize as parallelize
    from torchllm.runtime.device import choose_device as choose_device
    from torchllm.runtime.device import compute_dtype as compute_dtype
    from torchllm.runtime.error_report import report_errors as report_errors
    from torchllm.runtime.process import Runtime as Runtime
    from torchllm.tools.adapt.supervise import supervise as supervise
    from torchllm.tools.config.changes import log_config_changes as log_config_changes
    from torchllm.tools.config.load import load_config as load_config
    from torchllm.tools.dry_run.run import dry_run as dry_run
    from torchllm.tools.front.resolve import load_run as load_run
    from torchllm.tools.front.start import load_configs as load_configs
    from torchllm.tools.hub.export import export_adapter as export_adapter
    from torchllm.tools.hub.export import export_model as export_model
    from torchllm.tools.hub.initial import initial_weights as initial_weights
    from torchllm.tools.hub.weights_of_run import load_weights_of_run as load_weights_of_run
    from torchllm.tools.iterable import IterableLoader as IterableLoader
    from torchllm.tools.launch.rank_start import start_runtime as start_runtime
    from torchllm.tools.watch.chosen_kernel import log_attention_kernel as log_attention_kernel
    from torchllm.train.evaluate import evaluate as evaluate
    from torchllm.train.interval import due as due
    from torchllm.train.step import TrainStep as TrainStep
    from torchllm.train.step import read_health as read_health


def __getattr__(name: str) -> Any:
    """Import the module of a name in the table, and return the name from it."""
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(HOMES[name]), name)
