"""A step put together from a short one equals the step traced whole."""

from collections import Counter

import pytest
import torch

from tests.parity import Settings, tiny
from tests.tools.dry_run import apart
from torchllm.config import SCHEDULES, Kinds, gradient_accumulation
from torchllm.tools.dry_run.memory import PURPOSES, PerMicroBatch, Span, largest
from torchllm.tools.dry_run.replay import Traced, action_keys, replay
from torchllm.tools.dry_run.run import _keys, plan_trace, rank_kinds
from torchllm.tools.dry_run.trace import trace

SCALARS = 32
"""bytes per micro batch that the short step does not scale: numbers of tokens and pairs, losses. Tensors are exact."""


def test_keys_tell_actions_apart_by_what_comes_before_and_after_on_their_stage() -> None:
    order = ["1UNSHARD", "1F0", "1SEND_F0", "5F0", "1F1", "(1F2;5B0)OVERLAP_F_B", "5I1", "5W1", "1B0", "5REDUCE_GRAD"]
    assert action_keys(order, (1, 5)) == [
        ((0, "UNSHARD", "", "F", True, False, False),),
        ((0, "F", "UNSHARD", "F", False, False, False),),
        ((0, "SEND_F", "", "", False, False, False),),
        ((1, "F", "", "B", False, False, False),),
        ((0, "F", "F", "F", False, False, False),),
        ((0, "F", "F", "B", False, False, False), (1, "B", "F", "I", True, True, False)),
        ((1, "I", "B", "W", True, False, False),),
        ((1, "W", "I", "REDUCE_GRAD", True, True, False),),
        ((0, "B", "F", "", True, True, False),),
        ((1, "REDUCE_GRAD", "W", "", True, False, True),),
    ]


CASES: dict[str, tuple[Settings, int]] = {  # and which kind of rank
    "one stage, ZeRO 3": ({"parallel.dp_shard": 2, "parallel.tp": 2, "training.global_batch_size": 16}, 0),
    "1F1B, ZeRO 3": ({"parallel.schedule": "1F1B", "parallel.dp_shard": 2, "training.global_batch_size": 24}, 1),
    "1F1B, tensor parallel and recompute of every other block": (
        {
            "parallel.schedule": "1F1B",
            "parallel.tp": 2,
            "parallel.zero_stage": 1,
            "recompute.mode": "every_k",
            "training.global_batch_size": 10,
        },
        -1,
    ),
    "stages that are evicted and fetched": (
        {
            "model.layers": 16,
            "parallel.schedule": "Interleaved1F1B",
            "parallel.virtual_stages": 4,
            "parallel.dp_shard": 2,
            "training.global_batch_size": 24,
        },
        0,
    ),
    "GPT whose root is gathered ahead of a backward": (
        {
            "model.family": "gpt",
            "model.tied_embeddings": True,
            "parallel.schedule": "1F1B",
            "parallel.dp_shard": 2,
            "parallel.tp": 2,
            "recompute.mode": "full",
            "training.global_batch_size": 24,
        },
        0,
    ),
    "kinds of blocks": (
        {
            "model.pattern": ("local", "full", "full"),
            "model.kinds": Kinds(local={"window": 7, "rotary_fraction": 0.0}, full={}),
            "model.attention": "eager",
            "parallel.schedule": "1F1B",
            "parallel.dp_shard": 2,
            "training.global_batch_size": 24,
        },
        2,
    ),
    "ZBVZeroBubble": (
        {
            "parallel.schedule": "ZBVZeroBubble",
            "parallel.dp_shard": 2,
            "recompute.mode": "full",
            "training.global_batch_size": 24,
        },
        0,
    ),
}


BY_DEFAULT = ("1F1B, tensor parallel and recompute of every other block",)
NAMES = [name if name in BY_DEFAULT else pytest.param(name, marks=pytest.mark.exhaustive) for name in CASES]


@pytest.mark.parametrize("name", NAMES)
def test_a_step_put_together_is_the_step_traced_whole(name: str) -> None:
    settings, kind = CASES[name]
    pp = 1 if "parallel.schedule" not in settings else 4
    config = tiny({"model.layers": 8, "parallel.pp": pp} | settings)
    parallel = config.parallel
    count = gradient_accumulation(config.training, parallel.dp_shard)
    short = plan_trace(parallel, rank_kinds(config)[kind], count)
    assert short.micro_batches < count
    arguments = [(short.rank, *short[2:]), (short.ranks[0], count, pp, short.ranks[0])]
    few, whole = (apart(trace, config, torch.float32, *of_trace) for of_trace in arguments)
    order = _keys(parallel, count, short.ranks[0])
    assert order == whole.keys
    put_together, truth = replay(few, order, count), replay(whole, order, count)
    missed = SCALARS * (count - short.micro_batches)
    assert missed < min(few.saved) / 20  # less than a twentieth of one micro batch's activations
    peak = largest(span.peak for span in whole.spans)
    for mine, true in ((put_together.peak, peak), (put_together.end, whole.spans[-1].start)):
        assert [p for p in PURPOSES if abs(mine[p] - true[p]) > missed] == []
    assert put_together.sent == truth.sent


def test_a_short_step_is_traced_whole_and_a_long_one_short() -> None:
    for settings, count in (({}, 2), ({"parallel.pp": 2}, 2), ({"parallel.pp": 4, "parallel.schedule": "GPipe"}, 2)):
        parallel = tiny(settings).parallel
        for rank in range(parallel.pp):
            found = plan_trace(parallel, [rank], count)
            assert found.micro_batches == count
    for schedule in SCHEDULES:
        parallel = tiny({"parallel.pp": 4, "parallel.schedule": schedule, "model.layers": 8}).parallel
        assert plan_trace(parallel, [1], 24).micro_batches <= 12, schedule


def test_ranks_are_of_one_kind_when_their_stages_are_alike() -> None:
    assert rank_kinds(tiny({})) == [[0]]
    assert rank_kinds(tiny({"model.layers": 16, "parallel.pp": 8, "parallel.split": (2,) * 8})) == [
        [0], [1, 2, 3, 4, 5, 6], [7]
    ]  # fmt: skip
    uneven = {"model.layers": 9, "parallel.pp": 4, "parallel.split": (2, 3, 2, 2)}
    assert rank_kinds(tiny(uneven)) == [[0], [1], [2], [3]]
    every = {"model.layers": 12, "parallel.pp": 4, "parallel.split": (3,) * 4, "recompute.mode": "every_k"}
    assert rank_kinds(tiny(every)) == [[0], [1], [2], [3]]  # recomputed: first and third block, or the second
    experts = {"model.layers": 12, "parallel.pp": 6, "parallel.split": (2,) * 6, "model.experts": 4}
    assert rank_kinds(tiny(experts)) == [[0], [1, 2, 3, 4], [5]]
    assert rank_kinds(tiny(experts | {"model.dense_layers": 5})) == [[0], [1], [2], [3, 4], [5]]
    kinds = {"model.pattern": ("a", "b"), "model.kinds": Kinds(a={"window": 7}, b={})}
    eight = {**kinds, "model.layers": 16, "parallel.pp": 8, "parallel.split": (2,) * 8}
    assert rank_kinds(tiny(eight)) == [[0], [1, 2, 3, 4, 5, 6], [7]]
    odd = {**kinds, "model.layers": 18, "parallel.pp": 6, "parallel.split": (3,) * 6}
    assert rank_kinds(tiny(odd)) == [[0], [1, 3], [2, 4], [5]]


def test_a_graph_keeps_what_its_actions_had() -> None:
    """The update of a captured step comes on top of the pool; else it takes the place of the activations."""
    held, peak, update = (
        Counter(parameters=10),
        Counter(parameters=10, activations=7),
        Counter(parameters=10, temporary=3),
    )
    spans = [Span("begin", held, held, held, held, []), Span("0F0", held, held, peak, peak, [])]
    spans.append(Span("tail", held, held, update, update, []))
    keys = action_keys(["0F0"], [0])
    traced = Traced(spans, keys, 1, PerMicroBatch(Counter(), Counter()), [])
    assert sum(replay(traced, keys, 1).peak.values()) == 17
    assert sum(replay(traced, keys, 1, graphs=True).peak.values()) == 20
