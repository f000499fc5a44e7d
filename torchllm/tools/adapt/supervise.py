"""Stands around a recipe's `train`: picks the layout to start with, and starts it again where the run adapts.

The rest of this folder is imported only when it is needed: `tune` with parallel.layout = "tune", `adapter` where a
loader is starved or stages were timed (`parallel.rebalance`), `out_of_memory` when a rank runs out of memory.

A run that starts again keeps its process groups (`build_mesh` returns the mesh that exists) and frees everything else.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torchllm.config import Config
from torchllm.config.applied_keys import new_training
from torchllm.config.errors import UserError
from torchllm.config.files import cache_root
from torchllm.metrics.monitor import Monitor
from torchllm.metrics.observer import Observer
from torchllm.runtime.process import Runtime
from torchllm.tools.adapt.adaptation import Adaptation
from torchllm.tools.watch.bottlenecks import STARVED_SECONDS
from torchllm.tools.watch.notices import Events, Notices
from torchllm.tools.watch.profiled_steps import ProfiledSteps

Train = Callable[[Any, Runtime, Monitor], None]
"""of a recipe; its config may have additional sections"""


def supervise(
    train: Train, configs: Sequence[Config], runtime: Runtime, starved_seconds: float = STARVED_SECONDS
) -> None:
    """Call `train` with the fastest of `configs`, and again with another config wherever the run changes its own.

    UserError, with advice, where this rank runs out of memory; `train` may raise others.
    """
    observers = [*standard_observers(configs[0], runtime), Adaptation(starved_seconds=starved_seconds)]
    if configs[0].evaluate.tasks_interval:
        from torchllm.tools.watch.task_evaluations import TaskEvaluations  # few runs ask for it

        observers.insert(0, TaskEvaluations())  # outside of the steps that others time
    monitor = Monitor(runtime, observers)
    config: Config | None = configs[0]
    if len(configs) > 1:
        from torchllm.tools.adapt.tune import fastest

        config = fastest(configs, runtime, cache_root(configs[0].data))
    while config is not None:
        try:
            with new_training(config), monitor.start_up:  # the monitor closes it when the steps begin
                train(config, runtime, monitor)
        except RuntimeError as error:
            from torchllm.tools.adapt.out_of_memory import explain, is_out_of_memory

            if is_out_of_memory(error):
                raise UserError(explain(error, config, runtime)) from error
            raise
        config = monitor.change.config if monitor.change is not None else None
        if config is not None:
            runtime.release_memory()  # of the old model, before the new one is built
    monitor.close()


def standard_observers(config: Config, runtime: Runtime) -> list[Observer]:
    if not runtime.is_main:
        return [ProfiledSteps()]
    from torchllm.tools.watch.goodput import Goodput  # rank 0 alone keeps the account

    logs_time = is_worth_a_line(config, runtime)
    observers: list[Observer] = [Notices(), Events(), ProfiledSteps(logs_first=logs_time)]
    # Few runs ask for what follows.
    for tracker in config.metrics.trackers:
        from torchllm.tools.watch.trackers import TrackerHelper

        observers.append(TrackerHelper(runtime.folder, tracker))
    # Last: what the others take to begin is the start-up's.
    observers.append(Goodput(runtime.folder, logs_summary=logs_time))
    return observers


def is_worth_a_line(config: Config, runtime: Runtime) -> bool:
    """Return whether the log says where the time goes: on GPUs, on several nodes, and where it is asked for.

    The files of the run say it in any case.
    """
    is_asked_for = config.metrics.profile_steps or config.metrics.peak_tflops
    return runtime.device.type == "cuda" or runtime.ranks_on_node < runtime.world_size or bool(is_asked_for)
