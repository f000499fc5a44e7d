"""Changes of a run to its config at a checkpoint; weights and samples stay the same.

    ranks wait for data           one more worker per rank (`data.workers`)
    stages take unequal times     another split of the blocks (`parallel.rebalance`, `torchllm/tools/adapt/balance.py`)

All ranks decide the same, from figures that all of them have.
"""

from collections.abc import Sequence
from dataclasses import replace

from torchllm.config import Config
from torchllm.facts.flops import block_flops
from torchllm.facts.stages import balanced_split, end_costs
from torchllm.metrics.observer import Change
from torchllm.tools.adapt.balance import Costs, Rebalancer
from torchllm.tools.watch.bottlenecks import Bottlenecks
from torchllm.tools.watch.stage_times import ForwardTimes

MAX_WORKERS = 8


def change_config(rebalancer: Rebalancer, config: Config, bottlenecks: Bottlenecks) -> Change | None:
    """Return the config to go on with and the reasons, or None where nothing would help.

    rebalancer: of the run; it remembers the splits that were tried.
    """
    reasons = []
    changed = config
    data_wait, workers = bottlenecks.data_wait, config.data.workers + 1
    if data_wait is not None and workers <= MAX_WORKERS:
        changed = replace(changed, data=replace(config.data, workers=workers))
        waits = f"rank {data_wait.rank} waits {data_wait.share:.0%} of its time for data"
        reasons.append(f"{waits}, so data.workers = {workers}")
    if bottlenecks.stage_times is not None:
        rebalanced = with_next_split(changed, bottlenecks.stage_times, rebalancer)
        if rebalanced is not None:
            changed, reason = rebalanced
            reasons.append(reason)
    if not reasons:
        return None
    # A run may have begun at a checkpoint that its config names; it goes on from the one just written.
    changed = replace(changed, checkpoint=replace(config.checkpoint, resume="auto"))
    return Change(changed, ", ".join(reasons))


def with_next_split(config: Config, times: ForwardTimes, rebalancer: Rebalancer) -> Change | None:
    """Return the config with the next split of the blocks that the measured times ask for; None: keep the split."""
    length = config.training.sequence_length
    split = balanced_split(config.model, config.parallel, length)
    embedding, head = end_costs(config.model, length)
    blocks = [block_flops(config.model, layer, length) for layer in range(config.model.layers)]
    following = rebalancer.next_split(split, times, Costs(embedding, blocks, head))
    if following is None:
        return None
    reason = f"stages of {_text(following)} blocks instead of {_text(split)}"
    return Change(replace(config, parallel=replace(config.parallel, split=following)), reason)


def _text(split: Sequence[int]) -> str:
    return "+".join(str(blocks) for blocks in split)
