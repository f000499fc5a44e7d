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
from torchllm.data.cache_root import cache_root
from torchllm.runtime.process import Runtime
from torchllm.tools.watch.bottlenecks import STARVED_SECONDS
from torchllm.tools.watch.monitor import Bottlenecks, Change, Monitor

Train = Callable[[Any, Runtime, Monitor], None]
"""of a recipe; its config may have sections of its own"""


def supervise(
    train: Train, configs: Sequence[Config], runtime: Runtime, starved_seconds: float = STARVED_SECONDS
) -> None:
    """Call `train` with the fastest of `configs`, and again with another config wherever the run changes its own.

    UserError, with advice, where this rank runs out of memory; `train` may raise others.
    """
    monitor = Monitor(runtime, Adaptation(), starved_seconds)
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
        config = monitor.next_config
        if config is not None:
            runtime.release_memory()  # of the old model, before the new one is built
    monitor.close()


class Adaptation:
    """Decides at a checkpoint whether a run goes on with another config; loads the adapter when there is a reason."""

    def __init__(self) -> None:
        self.adapter: Any = None

    def __call__(self, config: Config, bottlenecks: Bottlenecks) -> Change | None:
        """Return the config to go on with from a checkpoint, or None: go on as before."""
        if bottlenecks.data_wait is None and bottlenecks.stage_times is None:
            return None
        if self.adapter is None:
            from torchllm.tools.adapt.adapter import Adapter

            self.adapter = Adapter()
        change: Change | None = self.adapter.change(config, bottlenecks)
        return change
