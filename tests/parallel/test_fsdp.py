"""FSDP, HSDP and DDP on the trace: what is sent, how often, how much, in which type, and before which computation."""

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.parallel.trace import Collective, Trace, module_named, traced
from tests.parity import FEW, Settings, Trainer, build, check, tiny
from tests.workers import run
from torchllm.config import Parallel
from torchllm.models.decoder import Decoder, build_model
from torchllm.models.experts import Experts
from torchllm.optim.optimizer import apply_if_finite
from torchllm.parallel.fsdp import effective_zero_stage, fsdp_modules

THREE: Settings = {"model.layers": 3}
FSDP2 = {**THREE, "parallel.dp_shard": 2, "training.global_batch_size": 2}
TWO_MICRO_BATCHES = {**FSDP2, "training.global_batch_size": 4}
EMBED, BLOCK, HEAD = 96 * 64, 30_848, 96 * 64 + 64  # elements of the units; the head's has the final norm


def mark_units(trace: Trace, stage: Decoder) -> None:
    for name in ("embed_tokens", "layers.0", "layers.1", "layers.2", "lm_head"):
        # FSDP's own hooks come first: this is when a unit starts to compute.
        module_named(stage, name).register_forward_pre_hook(trace.mark(f"-> {name}"))
    for name in ("layers.0", "layers.1", "layers.2"):
        module_named(stage, f"{name}.mlp").register_full_backward_pre_hook(trace.mark(f"<- {name}"))
    head = stage.lm_head
    assert head is not None
    cross_entropy = head.cross_entropy

    def marking_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits.register_hook(trace.mark("<- logits"))
        return cross_entropy(logits, labels)

    head.cross_entropy = marking_cross_entropy


def order_of_a_step(settings: Settings) -> list[str]:
    units = {EMBED: "embed_tokens", BLOCK: "block", HEAD: "lm_head"}
    events = traced(settings, mark_units)
    return [event if isinstance(event, str) else f"{event.kind} {units[event.elements]}" for event in events]


def test_the_next_unit_is_gathered_before_this_one_computes() -> None:
    assert run(order_of_a_step, 2, FSDP2)[0] == [
        "gather embed_tokens",
        "gather block",  # 0
        "-> embed_tokens",
        "gather block",  # 1
        "-> layers.0",
        "gather block",  # 2, kept for its backward
        "-> layers.1",
        "gather lm_head",
        "-> layers.2",
        "-> lm_head",
        "<- logits",
        "scatter lm_head",
        "gather block",  # 1
        "<- layers.2",
        "scatter block",
        "gather block",  # 0
        "<- layers.1",
        "scatter block",
        "<- layers.0",
        "scatter block",
        "scatter embed_tokens",
    ]


def test_prefetch_0_gathers_a_unit_when_it_is_needed() -> None:
    order = run(order_of_a_step, 2, {**FSDP2, "parallel.prefetch": 0, "parallel.keep_last_block": False})[0]
    arrows = {"-> embed": "embed_tokens", "-> layers": "block", "-> lm": "lm_head", "<- layers": "block"}
    for arrow, unit in arrows.items():
        for index, event in enumerate(order):
            if event.startswith(arrow):
                assert order[index - 1] == f"gather {unit}", order
    assert order.count("gather block") == 6


def test_prefetch_2() -> None:
    order = run(order_of_a_step, 2, {**FSDP2, "parallel.prefetch": 2})[0]
    forward, backward = order.index("-> layers.0"), order.index("-> lm_head") + 1
    assert order[:forward] == ["gather embed_tokens", *["gather block"] * 2, "-> embed_tokens", "gather block"]
    assert order[backward:][:5] == ["gather block", "<- logits", "scatter lm_head", "gather block", "<- layers.2"]


def test_a_freed_last_block_is_gathered_once_the_logits_have_gradients() -> None:
    """And before the head's gradient is scattered, for which it would have to wait."""
    settings = {**FSDP2, "parallel.keep_last_block": False, "parallel.prefetch": 2}
    order = run(order_of_a_step, 2, settings)[0]
    backward = order[order.index("-> lm_head") + 1 : order.index("<- layers.2")]
    assert backward == ["<- logits", "gather block", "scatter lm_head", *["gather block"] * 2]


# gathers, reduce-scatters and all-reduces of 5 units (3 blocks, 2 ends) in a step of two micro batches
COUNTS: dict[str, tuple[Settings, tuple[int, int, int]]] = {
    # every unit before the forward; before the backward the blocks but the last
    "zero3": ({}, (2 * (5 + 2), 2 * 5, 0)),
    "zero3, last block freed": ({"parallel.keep_last_block": False}, (2 * (5 + 3), 2 * 5, 0)),
    "zero2": ({"parallel.zero_stage": 2}, (5, 2 * 5, 0)),
    "zero1": ({"parallel.zero_stage": 1}, (5, 5, 0)),
    "zero0": ({"parallel.zero_stage": 0}, (0, 0, 5)),
    # the ends are one unit, gathered once and kept until their backward
    "zero3, tied": ({"model.tied_embeddings": True}, (2 * (4 + 2), 2 * 4, 0)),
    # the position table is a unit of its own
    "zero3, gpt": ({"model.family": "gpt", "model.kv_heads": 0}, (2 * (6 + 2), 2 * 6, 0)),
    # the routers of all blocks are one unit, gathered once and kept until their backward
    "zero3, experts": ({"model.experts": 4}, (2 * (6 + 2), 2 * 6, 0)),
    "zero3, experts, recompute full": ({"model.experts": 4, "recompute.mode": "full"}, (2 * (6 + 2), 2 * 6, 0)),
    "zero1, experts": ({"model.experts": 4, "parallel.zero_stage": 1}, (6, 6, 0)),
    # the recomputed forward finds what the backward has gathered
    "zero3, recompute full": ({"recompute.mode": "full"}, (2 * (5 + 2), 2 * 5, 0)),
    # a segment's blocks are gathered for its recomputation and stay until their backward: as many, k at a time
    "zero3, segments of 2": ({"recompute.mode": "segment"}, (2 * (5 + 2), 2 * 5, 0)),
    "zero3, segments of 3": ({"recompute.mode": "segment", "recompute.k": 3}, (2 * (5 + 2), 2 * 5, 0)),
}


def collectives(settings: Settings) -> tuple[int, ...]:
    kinds = [event.kind for event in traced(settings) if isinstance(event, Collective)]
    return tuple(kinds.count(kind) for kind in ("gather", "scatter", "reduce"))


def count_all() -> dict[str, tuple[int, ...]]:
    return {name: collectives({**TWO_MICRO_BATCHES, **settings}) for name, (settings, _) in COUNTS.items()}


def test_collectives_of_a_step() -> None:
    assert run(count_all, 2)[0] == {name: expected for name, (_, expected) in COUNTS.items()}


@pytest.mark.parametrize("mode", ["none", "full"])
def test_experts_are_gathered_and_reduced_once_for_all_chunks_of_tokens(mode: str) -> None:
    """In each pass; as often as without chunks."""
    experts: Settings = {"model.experts": 4, "parallel.dp_shard": 4, "parallel.ep": 2, "recompute.mode": mode}
    settings = {**THREE, **experts, "training.global_batch_size": 4}
    (one, *_), (three, *_) = (run(collectives, 4, {**settings, "parallel.expert_chunks": count}) for count in (1, 3))
    assert three == one
    assert one[1] == 2 * 3 + 3  # blocks and experts; embedding, routers and head


def roots_after_backwards(settings: Settings) -> list[object]:
    """Return what FSDP takes for the unit whose forward is under way, after each of two backwards."""
    trainer = Trainer(tiny({**FSDP2, "model.experts": 4, **settings}))
    roots = []
    for step in (1, 2):
        trainer.forward_backward(trainer.batches(step), torch.tensor(1 / 64))
        # Private: FSDP tells no one, and a profile shows only that a unit was the root, not that it has stayed it.
        roots.append(trainer.stages[0]._get_fsdp_state()._state_ctx.iter_forward_root)
    return roots


@pytest.mark.parametrize("mode", ["full", "ffn", "selective"])
def test_recomputed_routers_are_not_taken_for_the_root(mode: str) -> None:
    """The root's gathers wait for the optimizer, on a GPU; another unit's do not."""
    for roots in run(roots_after_backwards, 2, {"recompute.mode": mode}):
        assert roots == [None, None]


def test_hsdp_sends_a_shard_across_nodes_once_a_step() -> None:
    hsdp = {**THREE, "parallel.dp_replicate": 2, "parallel.dp_shard": 2}  # two micro batches
    ddp = {**THREE, "parallel.dp_shard": 4, "parallel.zero_stage": 0}
    parameters = sum(p.numel() for p in build_model(tiny(THREE).model).parameters())
    across: dict[str, list[Collective]] = {}
    for name, settings in (("hsdp", hsdp), ("ddp", ddp)):
        events = run(traced, 4, settings)[0]
        across[name] = [e for e in events if e.axis in ("dp_replicate", "loss")]
        assert {e.kind for e in across[name]} == {"reduce"}
    assert sum(e.elements for e in across["ddp"]) == parameters
    assert 2 * sum(e.elements for e in across["hsdp"]) == parameters
    assert {e.dtype for e in across["hsdp"]} == {torch.float32}


def types_of_a_step(settings: Settings) -> dict[str, list[str]]:
    """With bfloat16 computation: the types of everything that has one."""
    trainer = Trainer(tiny(settings), torch.bfloat16)
    types: dict[str, set[str]] = {}

    def see(name: str, value: torch.Tensor) -> None:
        types.setdefault(name, set()).add(str(value.dtype))

    def see_weight(module: Any, args: Any) -> None:
        see("weights in the forward", module.weight)

    def see_output(module: Any, args: Any, out: torch.Tensor) -> None:
        see("activations" if out.dim() else "loss", out)

    def see_angles(module: Any, args: Any) -> None:
        _, rotary, _ = args
        for angles in rotary[:2]:
            see("rotary angles", angles)

    for name, module in trainer.stages[0].named_modules():
        if name.endswith("self_attn"):
            module.register_forward_pre_hook(see_angles)
        if name.endswith(("_proj", "norm", "embed_tokens", "lm_head")):
            module.register_forward_pre_hook(see_weight)
            module.register_forward_hook(see_output)
    trace = Trace(trainer.mesh)
    batches = trainer.batches(1)
    with trace:
        trainer.forward_backward(batches, torch.tensor(1 / 64))
    for kind in ("gather", "scatter", "reduce"):
        for event in trace.sent("fsdp", kind) + trace.sent("dp_replicate", kind):
            types.setdefault(kind, set()).add(str(event.dtype))
    apply_if_finite(trainer.optimizer, 1e-2, torch.tensor(True))
    for parameter in trainer.stages[0].parameters():
        assert isinstance(parameter, DTensor)
        see("weights", parameter)
        see("gradients", parameter.grad)
        for name, value in trainer.optimizer.state[parameter].items():
            see(f"optimizer {name}", value)
    return {name: sorted(types) for name, types in types.items()}


LOW, FULL = ["torch.bfloat16"], ["torch.float32"]
TYPES = {
    "weights in the forward": LOW,
    "rotary angles": FULL,
    "activations": LOW,
    "loss": FULL,
    "weights": FULL,
    "gradients": FULL,
    "optimizer exp_avg": FULL,
    "optimizer exp_avg_sq": FULL,
    "optimizer step": FULL,
}


@pytest.mark.parametrize("zero_stage", [3, 0])
def test_bfloat16_computes_over_float32_weights_and_reductions(zero_stage: int) -> None:
    settings = {**TWO_MICRO_BATCHES, "parallel.zero_stage": zero_stage}
    types = run(types_of_a_step, 2, settings)[0]
    sent = {"reduce": FULL} if zero_stage == 0 else {"gather": LOW, "scatter": FULL}
    assert types == TYPES | sent


def units(settings: Settings) -> int:
    return len(fsdp_modules(build(tiny(settings))[1][0]))


def test_fsdp_modules_are_all_units() -> None:
    """Norm and head are two modules of one unit; the stage is the root, which without tied ends holds nothing."""
    assert run(units, 2, FSDP2) == [1 + 3 + 2 + 1] * 2
    assert run(units, 2, {**FSDP2, "model.tied_embeddings": True}) == [3 + 1] * 2


def test_one_rank_in_float32_goes_without() -> None:
    assert run(units, 1, THREE) == [0]


def test_nothing_is_gathered_per_use_where_nothing_is_sharded() -> None:
    for shards, expected in ((1, [0, 1, 1, 1]), (2, [0, 1, 2, 3])):
        layouts = [Parallel(dp_shard=shards, tp=2, zero_stage=stage) for stage in range(4)]
        assert list(map(effective_zero_stage, layouts)) == expected


@pytest.mark.quick
def test_a_step_of_two_ranks_is_that_of_one_process() -> None:
    check({"parallel.dp_shard": 2, "model.layers": 2, "training.steps": 1}, ragged=True)


def test_a_gather_too_many_is_never_used() -> None:
    """Recomputing a segment prefetches past its end; what it gathers in vain must not live on as stale weights."""
    check({**FEW, "parallel.dp_shard": 2, "recompute.mode": "segment", "parallel.prefetch": 3})


def expert_buffers_kept(settings: Settings) -> list[bool]:
    """Return, of each FSDP unit of experts, whether it keeps its all-gather buffer until the next one is copied out."""
    (stage,) = build(tiny(settings))[1]
    experts = [module for module in fsdp_modules(stage) if isinstance(module, Experts)]
    return [not unit._get_fsdp_state()._fsdp_param_group.unshard_async_op for unit in experts]


def test_experts_free_their_gather_buffer() -> None:
    """Else the buffer of one block's experts stays through the backward of blocks that are recomputed.

    Private: FSDP has no public name for it. The memory is compared in tests/tools/planner/test_memory_of_models.py.
    """
    settings = {**FEW, "model.experts": 4, "model.top_k": 2, "parallel.dp_shard": 4, "parallel.ep": 2}
    assert run(expert_buffers_kept, 4, settings) == [[False] * tiny(settings).model.layers] * 4
