"""The observers of a run that `torchllm/tools/adapt/supervise.py` starts."""

from torchllm.config import Config
from torchllm.metrics.observer import Observer
from torchllm.runtime.process import Runtime
from torchllm.tools.watch.goodput import GoodputObserver
from torchllm.tools.watch.notices import Events, Notices
from torchllm.tools.watch.profiled_steps import ProfiledSteps


def standard_observers(config: Config, runtime: Runtime) -> list[Observer]:
    """Return the observers of this rank."""
    if not runtime.is_main:
        return [ProfiledSteps()]
    observers: list[Observer] = [Notices(), Events(), ProfiledSteps()]
    # Few runs ask for what follows.
    if config.metrics.trackers:
        from torchllm.tools.watch.trackers import Trackers

        observers.append(Trackers())
    if config.evaluate.tasks_interval:
        from torchllm.tools.watch.task_processes import TaskEvaluations

        observers.append(TaskEvaluations())
    observers.append(GoodputObserver(runtime.folder))  # last: what the others take to begin is the start-up's
    return observers
