"""The observers of a run that `torchllm/tools/adapt/supervise.py` starts."""

from torchllm.config import Config
from torchllm.metrics.observer import Observer
from torchllm.runtime.process import Runtime
from torchllm.tools.watch.notices import Events, Notices
from torchllm.tools.watch.profiled_steps import ProfiledSteps


def standard_observers(config: Config, runtime: Runtime) -> list[Observer]:
    """Return the observers of this rank."""
    if not runtime.is_main:
        return [ProfiledSteps()]
    from torchllm.tools.watch.goodput import Goodput  # rank 0 alone keeps the account

    logs_time = is_worth_a_line(config, runtime)
    observers: list[Observer] = [Notices(), Events(), ProfiledSteps(logs_first=logs_time)]
    # Few runs ask for what follows.
    for tracker in config.metrics.trackers:
        from torchllm.tools.watch.trackers import TrackerHelper

        observers.append(TrackerHelper(runtime.folder, tracker))
    if config.evaluate.tasks_interval:
        from torchllm.tools.watch.task_processes import TaskProcesses

        observers.append(TaskProcesses(runtime.folder, config.evaluate.tasks_interval))
    # Last: what the others take to begin is the start-up's.
    observers.append(Goodput(runtime.folder, logs_summary=logs_time))
    return observers


def is_worth_a_line(config: Config, runtime: Runtime) -> bool:
    """Return whether the log says where the time goes: on GPUs, on several nodes, and where it is asked for.

    The files of the run say it in any case.
    """
    is_asked_for = config.metrics.profile_steps or config.metrics.peak_tflops
    return runtime.device.type == "cuda" or runtime.ranks_on_node < runtime.world_size or bool(is_asked_for)
