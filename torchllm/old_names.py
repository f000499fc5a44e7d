"""Names that have moved since commit 8ca45ed: they work until version 0.3, with a FutureWarning that says the new.

An old module is the new one under another name, so what a fork exchanges in it is exchanged. Imported by the package
itself, before any other module.
"""

import os
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import find_spec
from types import CodeType, ModuleType

PREFIX = "torchllm."

FOLDERS = {
    "adapt": "tools.adapt",
    "data.chat": "tools.prepare.chat",
    "data.formats": "tools.prepare.formats",
    "dry_run": "tools.dry_run",
    "hugging_face": "tools.hub",
    "planner": "tools.planner",
    "proof": "tools.proof",
    "spec": "facts",
}
"""folder of torchllm -> folder in which its modules are now, but for those of MODULES"""

MODULES = {
    ("", "tools"): "bug_report resources",
    ("", "tools.front"): "preflight start",
    ("checkpoint", "checkpoint.keeping"): "history",
    ("checkpoint", "tools.hub"): "dcp_metadata adapter by_key export exported hf_reader hf_writer upcycle weights",
    ("config", "tools.config"): "foreign load read refuse checks draft help handed changes",
    ("config", "tools.front"): "json_schema",
    ("data", "tools"): "iterable",
    ("data", "tools.prepare"): "pieces build cache in_place plan records sources tokenize_shard tokenizer_json",
    ("parallel", "tools.watch"): "chosen_kernel",
    ("metrics", "tools.watch"): """bottlenecks breakdown goodput mlflow_tracker send_records slow_rank step_profiler
        task_processes tasks trace trackers trackio_tracker wandb_tracker""",
    (
        "runtime",
        "tools.launch",
    ): """compiler descriptors hang_report hang_watch head launch lease network node_watch numa
        launcher_notes on_event process_identity rank_watch rendezvous restarts same_start spare_node store""",
    ("spec", "tools.planner"): "cluster schedules software",
}
"""(old folder, new folder): modules that have kept their names"""
RENAMED_MODULES = {
    "checkpoint.marks": "checkpoint.manifest",
    "checkpoint.proof": "checkpoint.keeping.history",
    "checkpoint.retention": "checkpoint.keeping.history",
    "config.arguments": "tools.config.draft",
    "config.inert": "tools.config.checks",
    "git_lfs": "regular_file",
    "runtime.exchange": "tools.launch.records",
    "runtime.rank_notes": "tools.launch.launcher_notes",
}

NAMES = {
    ("checkpoint.initial", "tools.hub.initial"): """FrozenSource RunWeights initial_weights
        load_frozen_weights load_weights_of_run""",
    ("checkpoint.initial", "tools.hub.published_weights"): "HubWeights",
    ("checkpoint.initial", "tools.hub.upcycle"): "UpcycledWeights",
    ("checkpoint.manifest", "regular_file"): "check_regular",
    ("checkpoint.state", "tools.hub.weights"): "PartsToFill initial_model_tensors initial_parts saved_parts",
    ("config", "tools.config.load"): "load_config",
    ("config", "tools.config.changes"): "log_config_changes",
    ("config.environment", "tools.config.environment"): """PER_RANK Ranks default_restarts is_requeued job_id
        print_error_lines print_notes read_ranks refuse""",
    ("config.toml", "tools.config.toml_files"): "Layer key_lines merge_layers parse_value read_files",
    ("tools.config.load", "tools.config.draft"): "Draft",
    ("tools.config.load", "tools.config.refuse"): "finish",
    ("data.shard", "tools.prepare.corpus_writer"): "replacing",
    ("data.tokenizer", "tools.prepare.hugging_face_tokenizer"): "HuggingFaceTokenizer",
    ("data.tokenizer", "tools.prepare.tiktoken_tokenizer"): "TiktokenTokenizer",
    ("data.tokenizer", "data.tokenizer_protocol"): "Tokenizer",
    ("data.tokenizer", "tools.generate.language_model"): "begin_of_text",
    ("metrics.monitor", "metrics.observer"): "Change",
    ("metrics.monitor", "tools.adapt.adaptation"): "TIMED_STEPS",
    ("metrics.monitor", "tools.watch.bottlenecks"): "Bottlenecks",
    ("metrics.monitor", "tools.watch.profiled_steps"): "SLOW_NODES",
    ("models.attention", "tools.generate.cached_attention"): "CachedAttention",
    ("parallel.context", "parallel.mesh"): "sequence_pieces",
    ("parallel.pipeline", "parallel.forward_backward"): "ForwardBackward OneStage",
    ("parallel.pipeline", "parallel.parallelize"): "build_forward_backward",
    ("parallel.expert", "tools.dry_run.trace"): "even_splits split_evenly",
    ("parallel.mesh", "tools.mesh_axes"): "AXIS_NAMES MeshAxis",
    ("recipe", "config.applied_keys"): "CHANGE_NO_WEIGHT",
    ("recipe", "optim.grad_norm"): "clip grad_norm",
    ("runtime.heartbeat", "tools.launch.rank_watch"): "Beat read_beat",
    ("runtime.parent", "tools.launch.process_tree"): "PARENT PARENT_PIPE end_with_parent is_running tie_children",
    ("runtime.parent", "tools.launch.rank_watch"): "find_children find_ranks",
    ("runtime.process", "runtime.device"): "choose_device compute_dtype has_usable_gpu",
    ("runtime.process", "tools.launch.rank_start"): """await_ranks has_launcher joined_key raise_first_error
        start_runtime""",
    ("runtime.stop", "tools.launch.stop_requests"): """FILE_PATIENCE IGNORE_REPEATED_SIGNALS_FOR LOOKS_PER_SECOND
        STOP_SIGNALS StopRequests""",
    ("runtime.torch_compat", "tools.torch_names"): "dump_memory group_with_name skip_pipeline_vote storage_info",
    ("facts.shapes", "tools.hub.family"): "stored_shapes",
    ("tools.adapt.supervise", "tools.adapt.adaptation"): "Adaptation",
    ("tools.front.start", "tools.front.resolve"): """can_compile check_cluster check_export is_rank_of_launcher load_run
        load_sizes plan_layout resolve_compile resolve_published_model""",
    ("tools.launch.hang_watch", "checkpoint.background"): "SAVES_IN_BACKGROUND",
    ("tools.launch.records", "runtime.process"): "gather_texts same_on_all_ranks",
    ("tools.prepare.cache", "data.data_changes"): "cached_corpora",
    ("tools.prepare.chat.write", "tools.prepare.counts"): """CONVERSATIONS EXAMPLES LENGTH PADDING RULE TARGETS TOKENS
        TRUNCATED UNTRAINED WORDS describe_counts""",
    ("tools.prepare.sources", "tools.prepare.source_files"): "SourceFile source_files stat_file",
}
"""(module that is still there, module of today): names that have moved"""
RENAMED = {
    "models.decoder.hold_in": "models.decoder.cast_parameters",
    "recipe.apply_lora": "models.lora.apply_lora",
    "tools.prepare.chat.plan.chat_format_of_run": "tools.prepare.chat.old_format.old_chat_format",
}


def new_names(table: dict[tuple[str, str], str]) -> dict[str, str]:
    """Return old -> new dotted name of all entries, without "torchllm."."""
    return {
        f"{old}.{name}".lstrip("."): f"{new}.{name}" for (old, new), names in table.items() for name in names.split()
    }


_MODULES = new_names(MODULES) | RENAMED_MODULES
_NAMES = new_names(NAMES) | RENAMED
_MODULES_WITHOUT_NAMES = {old.rpartition(".")[0] for old in _NAMES}


def new_module(old: str) -> str | None:
    """Return where a module of torchllm has moved to; None if it has not."""
    if old in _MODULES:
        return _MODULES[old]
    for folder, new in FOLDERS.items():
        if old == folder or old.startswith(f"{folder}."):
            return new + old.removeprefix(folder)
    return None


def _warn(old: str, new: str) -> None:
    """Warn of an old name, on one rank, at the line that uses it."""
    if os.environ.get("RANK", "0") == "0":
        message = f"torchllm.{old} is torchllm.{new} now; the old name goes with 0.3 (recipes import torchllm.recipe)"
        warnings.warn(message, FutureWarning, stacklevel=3)


class _OldModule:
    """Loads a module by its old name."""

    def __init__(self, old: str, new: ModuleSpec) -> None:
        self.old, self.new = old, new

    def create_module(self, spec: ModuleSpec) -> None:
        """Leave it to Python: `exec_module` replaces it."""

    def exec_module(self, module: ModuleType) -> None:
        """Put the new module in its place. A folder stays empty: its modules are found one by one."""
        if self.new.submodule_search_locations is not None:
            module.__path__ = []
            return
        _warn(self.old, self.new.name.removeprefix(PREFIX))
        sys.modules[module.__name__] = import_module(self.new.name)

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the code of the new module, for `python -m`."""
        _warn(self.old, self.new.name.removeprefix(PREFIX))
        assert isinstance(self.new.loader, SourceFileLoader)
        return self.new.loader.get_code(self.new.name)


class _ModuleWithoutNames(SourceFileLoader):
    """Loads a module that names have left."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        old = module.__name__.removeprefix(PREFIX)
        module.__getattr__ = partial(_moved, old, getattr(module, "__getattr__", None))  # type: ignore[method-assign]  # PEP 562


def _moved(module: str, present: Callable[[str], object] | None, name: str) -> object:
    """Return what has left a module. present: its `__getattr__`."""
    old = f"{module}.{name}"
    if old not in _NAMES:
        if present is not None:
            return present(name)
        raise AttributeError(f"module 'torchllm.{module}' has no attribute {name!r}")
    _warn(old, _NAMES[old])
    home, _, name = f"torchllm.{_NAMES[old]}".rpartition(".")
    return getattr(import_module(home), name)


class OldNames:
    """Finds modules by their old names, and those that names have left."""

    @staticmethod
    def find_spec(fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return how to load a module of torchllm that has moved, or that names have left; None for all others."""
        if not fullname.startswith(PREFIX):
            return None
        old = fullname.removeprefix(PREFIX)
        if old in _MODULES_WITHOUT_NAMES:
            spec = PathFinder.find_spec(fullname, path, target)
            if spec is not None and isinstance(spec.loader, SourceFileLoader):
                spec.loader = _ModuleWithoutNames(spec.loader.name, spec.loader.path)
            return spec
        new = new_module(old)
        found = find_spec(f"{PREFIX}{new}") if new is not None else None
        if found is None:
            return None
        return ModuleSpec(fullname, _OldModule(old, found), origin=found.origin)  # type: ignore[arg-type]  # a loader by duck typing


sys.meta_path.insert(0, OldNames)
