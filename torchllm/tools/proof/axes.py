"""The effect of each technique of a layout on a training, and where to look in a fork whose training is wrong."""

from collections.abc import Callable
from typing import NamedTuple

from torchllm.config import SCHEDULES, Config, gradient_accumulation
from torchllm.tools.proof.layouts import MICRO_BATCH, Settings, describe_layout


class Technique(NamedTuple):
    """A part of a layout that may be wrong by itself."""

    settings: Settings
    """the smallest layout that has it: keys and values over degrees of 1; a micro batch size is the largest allowed"""
    is_used: Callable[[Config], bool]
    """whether a config of one layout has it"""
    hint: str
    """its effect, and where to look"""

    @property
    def name(self) -> str:
        """The settings in one line."""
        return describe_layout(self.settings) or "compile"


def _accumulates(config: Config) -> bool:
    return gradient_accumulation(config.training, config.parallel.data_ranks) > 1


def _splits_backward(config: Config) -> bool:
    return config.parallel.pp > 1 and SCHEDULES[config.parallel.schedule].splits_backward


def _shards_sequence(config: Config) -> bool:
    return config.parallel.tp > 1 and config.parallel.sequence_parallel


def _uses(cp_method: str) -> Callable[[Config], bool]:
    """Return whether a config has context parallelism of this kind."""
    return lambda config: config.parallel.cp > 1 and config.parallel.cp_method == cp_method


def _compiles(config: Config) -> bool:
    return config.compile.norm or config.compile.block is True or config.compile.loss is True


TWO_AXES = (
    "both axes at once. Look for a rank among all ranks (runtime.rank, torch.distributed.get_rank()) "
    "where a rank along an axis is meant (mesh.data_rank, mesh.tp.get_local_rank()), for an exchange over all ranks, "
    "and for a sum, a norm or a count that is missing: over the ranks of one axis where it must be over both, or over "
    "a rank's own part"
)
AFTER_GRADIENTS = (
    "the gradients are right and the update is not: look at the optimizer. Where it takes a norm, a mean or a sum, it "
    "reduces over a local shard: use the DTensor, not to_local(). Look at clipping and the learning rate, too: for a "
    "norm that is not added up over all ranks (with pp one has the parameters of its blocks alone), for a rank among "
    "all ranks, for their number, and for an exchange over all"
)
"""where a gradient's norm or an update is wrong alone, in whatever layout"""
TECHNIQUES = (
    Technique(
        {MICRO_BATCH: 1},
        _accumulates,
        "a step has several micro batches. Look for a loss that is a mean where it must be a sum, for a number that "
        "depends on the whole batch, for random numbers, and for state that outlives a forward",
    ),
    Technique(
        {"training.loss_chunk": 20},
        lambda config: config.training.loss_chunk > 0,
        "cross_entropy gets some of the tokens at a time. Look for a loss that is no sum over tokens",
    ),
    Technique(
        {"recompute.mode": "full"},
        lambda config: config.recompute.mode != "none",
        "a part of the forward runs again in the backward. Look for random numbers, and for state that a forward "
        "changes or reads",
    ),
    Technique(
        {},
        _compiles,
        "torch.compile fuses operations. Look for a function that reads or changes Python state, and for a module that "
        "was replaced after it had been compiled",
    ),
    Technique(
        {"parallel.dp_replicate": 2},
        lambda config: config.parallel.dp_replicate > 1,
        "each rank reads other sequences. Look for a loss that is a mean where it must be a sum, and for a number that "
        "depends on the whole batch",
    ),
    Technique(
        {"parallel.dp_shard": 2},
        lambda config: config.parallel.dp_shard > 1,
        "each rank reads other sequences and holds a part of each weight. Look for a loss that is a mean where it must "
        "be a sum, and for a weight that is used outside of its module's forward",
    ),
    Technique(
        {"parallel.tp": 2},
        lambda config: config.parallel.tp > 1,
        "each rank has some of the heads, of the feed-forward width and of the vocabulary. Look for a mean, a norm or "
        "a sum over one of these: a rank sees only its own part",
    ),
    Technique(
        {"parallel.tp": 2, "parallel.sequence_parallel": True},
        _shards_sequence,
        "between the matrices each rank has some of the tokens. Look for a mean or a norm over tokens, and for a "
        "parameter used there whose gradient nobody adds up over tp",
    ),
    Technique(
        {"parallel.dp_shard": 2, "parallel.ep": 2},
        lambda config: config.parallel.ep > 1,
        "each rank has some of the experts, whole, and tokens travel to them. Look for a number that depends on all "
        "experts, or on all tokens of a rank",
    ),
    Technique(
        {"parallel.dp_shard": 2, "parallel.ep": 2, "parallel.expert_dispatch": "optimistic"},
        lambda config: config.parallel.expert_dispatch == "optimistic",
        "tokens travel in padded buffers, and a step in which they do not fit runs again. Look for state that a "
        "forward or a backward changes, and for a number that depends on all rows of the experts",
    ),
    Technique(
        {"parallel.dp_shard": 2, "parallel.ep": 2, "parallel.expert_chunks": 2},
        lambda config: config.parallel.expert_chunks > 1,
        "the tokens of a block go to the experts in two chunks. Look for a number that depends on all rows of the "
        "experts, and for state that a call of the experts changes",
    ),
    Technique(
        {"parallel.cp": 2, "parallel.cp_method": "ring"},
        _uses("ring"),
        "each rank has two pieces of every sequence. Look for a mean or a norm over the tokens of a sequence, for a "
        "shift to the neighboring token, and for positions that do not come from the batch",
    ),
    Technique(
        {"parallel.cp": 2, "parallel.cp_method": "ulysses"},
        _uses("ulysses"),
        "each rank has a piece of every sequence and, in attention, some of the heads. Look for a mean, a norm or a "
        "shift over the tokens of a sequence, and for positions that do not come from the batch",
    ),
    Technique(
        {"parallel.pp": 2},
        lambda config: config.parallel.pp > 1,
        "each rank has some of the blocks, and only the ends have the embedding and the head. Look for what one block "
        "gives to another past the residual stream, for state that outlives a forward (micro batches overlap), and for "
        "a sum, a norm or a count over all blocks that is not added up over mesh.pp",
    ),
    Technique(
        {"parallel.pp": 2, "parallel.schedule": "ZBVZeroBubble"},
        _splits_backward,
        "gradients of weights are computed later than those of inputs (torchllm/parallel/weight_gradients.py). Look "
        "for a forward of nn.Linear or a Head.project that was replaced",
    ),
    Technique(
        {"parallel.dp_shard": 2, "parallel.tp": 2},
        lambda config: config.parallel.dp_shard > 1 and config.parallel.tp > 1,
        TWO_AXES,
    ),
    Technique(
        {"parallel.dp_shard": 2, "parallel.cp": 2, "parallel.cp_method": "ring"},
        lambda config: config.parallel.dp_shard > 1 and config.parallel.cp > 1,
        TWO_AXES,
    ),
    Technique(
        {"parallel.dp_shard": 2, "parallel.pp": 2},
        lambda config: config.parallel.dp_shard > 1 and config.parallel.pp > 1,
        TWO_AXES,
    ),
    Technique(
        {"parallel.tp": 2, "parallel.pp": 2},
        lambda config: config.parallel.tp > 1 and config.parallel.pp > 1,
        TWO_AXES,
    ),
)
"""the simplest first, and pairs of axes last: a layout that is wrong has, as a rule, a technique that is wrong alone"""

RESUMED = Technique(
    {"checkpoint.resume": "auto"},
    lambda config: False,
    "a run that goes on from a checkpoint has what was saved, and nothing else. Look for state that is neither in the "
    "model nor in the optimizer: give it to Checkpointer(extra_state=...)",
)
"""a run that is saved in one layout and goes on in another one"""
