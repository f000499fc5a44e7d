"""What a run changes in itself, at a checkpoint, from which it goes on with the new config: nothing else is lost.

    data waits                  one more worker a rank (`data.workers`)
    stages take unequal times   the blocks are split anew (`parallel.rebalance`, metrics/balance.py)

And what it cannot change alone: a slow rank's node is written to RUN_FOLDER/slow_nodes, to be left out at the next
start (Slurm: sbatch --exclude=$(cat RUN_FOLDER/slow_nodes)). Each action is logged when it is decided and when it is
taken. All ranks decide the same, from figures that all of them have.
"""

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from torchllm.adapt.balance import STEPS, StageClock, better_split, gathered
from torchllm.config import Config
from torchllm.metrics.watch import Profiled
from torchllm.models.decoder import Decoder
from torchllm.parallel.mesh import Mesh
from torchllm.spec.stages import balanced_split, end_costs, stage_costs, stage_of_rank

log = logging.getLogger("torchllm")

STARVED = 0.05
"""share of the time since the last checkpoint that a rank may wait for data"""
WORTH = 5.0
MOST_WORKERS = 8
SLOW_NODES = "slow_nodes"


class Adapter:
    """One of a process, for the configs that it runs one after the other. Rank 0's writes to `folder`.

    worth: seconds of waiting for data since the last checkpoint that make a new start of the loader worth it.
    """

    def __init__(self, folder: Path, host_group: dist.ProcessGroup, worth: float = WORTH) -> None:
        self.folder, self.host_group, self.worth = folder, host_group, worth
        self.is_main = dist.get_rank(host_group) == 0
        self.slow_nodes: list[str] = []
        self.before: tuple[str, float] | None = None
        """the last change, and seconds a step before it"""

    def begin(self, config: Config, stages: Sequence[Decoder], mesh: Mesh, device: torch.device) -> None:
        """Before the first step with a config."""
        self.config, self.changed, self.why = config, config, ""
        self.seconds: deque[float] = deque(maxlen=STEPS + 2)
        self.last = self.begun = time.perf_counter()
        self.waited = 0.0
        self.clock = None
        if config.parallel.rebalance and mesh.pp.size() > 1:
            indices = stage_of_rank(config.parallel, mesh.pp.get_local_rank())
            self.clock = StageClock(stages, indices, device)

    def after_step(self, profiled: Profiled | None) -> None:
        """Learn from a step, and from its profile, if it has one. Call it on all ranks."""
        now = time.perf_counter()
        self.seconds.append(now - self.last)
        self.last = now
        if len(self.seconds) == STEPS + 1:  # once
            usual = self._usual()
            if self.before is not None:
                change, then = self.before
                log.info("%s: steps took %.3g s, now %.3g s (%+.0f %%)", change, then, usual, 100 * (usual / then - 1))
            self.before = None
            self._balance()
        if profiled is not None and profiled.slow is not None:
            self._leave_out(profiled.slow.host)

    def at_checkpoint(self, n: int, waited: float) -> Config | None:
        """After a checkpoint of step `n`: the config to go on with from there, if it is another. Call it on all ranks.

        waited: seconds that this rank has waited for data since `begin`.
        """
        self._feed(waited)
        if not self.why:
            return None
        log.info("step %d: %s, from this checkpoint on", n, self.why)
        self.before = self.why, self._usual()
        return replace(self.changed, checkpoint=replace(self.config.checkpoint, resume="auto"))

    def _usual(self) -> float:
        """Seconds of a step lately; the first is not like the others."""
        return median(list(self.seconds)[1:] or self.seconds)

    def _decide(self, why: str, changed: Config) -> None:
        self.changed = changed
        self.why = f"{self.why}, {why}" if self.why else why
        log.info("decided, for the next checkpoint: %s", why)

    def _feed(self, waited: float) -> None:
        now = time.perf_counter()
        mine = waited - self.waited, now - self.begun
        ranks = [mine] * dist.get_world_size(self.host_group)
        dist.all_gather_object(ranks, mine, group=self.host_group)
        self.waited, self.begun = waited, now
        # FOOTGUN: only what all ranks have decides; this rank's own clock would part them, and hang the run.
        rank = max(range(len(ranks)), key=lambda rank: ranks[rank][0])
        most, elapsed = ranks[rank]
        workers, data = self.config.data.workers, self.changed.data
        if most > max(STARVED * elapsed, self.worth) and workers < MOST_WORKERS:
            why = f"rank {rank} waits {most / elapsed:.0%} of its time for data, so data.workers = {workers + 1}"
            self._decide(why, replace(self.changed, data=replace(data, workers=workers + 1)))

    def _balance(self) -> None:
        if self.clock is None:
            return
        clock, self.clock = self.clock, None
        clock.close()
        seconds = gathered(clock.seconds(), self.host_group)
        config = self.changed
        length = config.training.sequence_length
        split = balanced_split(config.model, config.parallel, length)
        costs, ends = stage_costs(config.model, split, length), end_costs(config.model)
        better = better_split(split, seconds, (ends[0] / costs[0], ends[1] / costs[-1]))
        log.info("forwards of the stages take %s s", ", ".join(f"{second:.3g}" for second in seconds))
        if better is not None:
            why = f"stages of {_text(better)} blocks instead of {_text(split)}"
            self._decide(why, replace(config, parallel=replace(config.parallel, split=better)))

    def _leave_out(self, node: str) -> None:
        if self.is_main and node not in self.slow_nodes:
            self.slow_nodes.append(node)
            file = self.folder / SLOW_NODES
            file.write_text(",".join(self.slow_nodes))
            log.warning("to leave %s out at the next start: sbatch --exclude=$(cat %s)", node, file)


def _text(split: Sequence[int]) -> str:
    return "+".join(map(str, split))
