"""Inputs that are gathered again in the backward: the same model, what is sent, and what is kept."""

import functools
from typing import Any
from unittest import mock

import pytest
import torch
from functorch.compile import min_cut_rematerialization_partition, nop
from torch._dynamo.backends.common import aot_autograd

from tests.operations import Operations
from tests.parallel.test_compile import BLOCK, TRACED, check_compiled
from tests.parallel.trace import Collective, traced
from tests.parity import SHORT, Settings, Trainer, build, check, tiny
from tests.workers import run
from torchllm.facts.parameters import canonical_name
from torchllm.parallel.tensor import gathered
from torchllm.tools.dry_run.memory import saved_by_forwards
from torchllm.tools.dry_run.tracker import Tracker
from torchllm.tools.mesh_axes import axis_of_group

SP: Settings = {"parallel.tp": 2, "parallel.sequence_parallel": True}
AGAIN: Settings = {**SP, "parallel.regather": True}
EXPERTS: Settings = {"model.experts": 4, "model.top_k": 2, "model.expert_ffn": 32, "model.shared_experts": 1}
LAYOUTS: dict[str, Settings] = {
    "plain": {},
    "selective": {"recompute.mode": "selective"},
    "fsdp, documents, ffn": {"parallel.dp_shard": 2, "data.document_mask": True, "recompute.mode": "ffn"},
    "experts over ep": {**EXPERTS, "parallel.ep": 2},
}
AT_NIGHT: dict[str, Settings] = {
    "split backward": {"parallel.pp": 2, "parallel.schedule": "ZBVZeroBubble"},
    "segment": {"recompute.mode": "segment"},
    "full": {"recompute.mode": "full"},
    "split backward, ffn": {"parallel.pp": 2, "parallel.schedule": "InterleavedZeroBubble", "recompute.mode": "ffn"},
}
exhaustive = pytest.mark.exhaustive


@pytest.mark.parametrize("name", [*LAYOUTS, *(pytest.param(name, marks=exhaustive) for name in AT_NIGHT)])
def test_it_trains_the_same_model(name: str) -> None:
    settings = {**LAYOUTS, **AT_NIGHT}[name]
    layers = 4 if "parallel.pp" in settings else 2
    check({**SHORT, **AGAIN, **settings, "model.layers": layers}, ragged=True)


@exhaustive
@pytest.mark.parametrize("mode", ["none", "ffn"])
def test_compiled_blocks_train_the_same_model_in_one_graph(mode: str) -> None:
    assert check_compiled({**SHORT, **AGAIN, **BLOCK, "recompute.mode": mode}, TRACED) == 1


def graphs_of_a_block(settings: Settings) -> list[tuple[int, int]]:
    """Return the numbers that a compiled block's forward returns, kept ones among them, and gathers of its backward."""
    found = []

    def partition(*arguments: Any, **options: Any) -> Any:
        forward, backward = min_cut_rematerialization_partition(*arguments, **options)
        (out,) = (node.args[0] for node in forward.graph.nodes if node.op == "output")
        values = (node.meta["val"] for node in out if isinstance(node, torch.fx.Node))
        kept = sum(value.numel() for value in values if isinstance(value, torch.Tensor))
        found.append((kept, sum("all_gather" in str(node.target) for node in backward.graph.nodes)))
        return forward, backward

    backend = aot_autograd(fw_compiler=nop, bw_compiler=nop, partition_fn=partition)
    torch.compiler.reset()
    with mock.patch.object(torch, "compile", functools.partial(torch.compile, backend=backend)):
        trainer = Trainer(tiny(settings))
        trainer.forward_backward(trainer.batches(1), torch.tensor(1.0))
    torch.compiler.reset()
    return found


@exhaustive
def test_a_compiled_block_keeps_a_ranks_part_of_two_inputs() -> None:
    """Its backward gathers both once more, beside the gradients of both sums. A rank's part is a norm's result."""
    settings = {**SHORT, **BLOCK}
    ((kept, gathers),) = run(graphs_of_a_block, 2, {**settings, **SP})[0]
    ((kept_again, gathers_again),) = run(graphs_of_a_block, 2, {**settings, **AGAIN})[0]
    whole = 2 * 32 * 64  # of a micro batch's hidden states
    assert (gathers, gathers_again) == (2, 4)
    assert kept - kept_again == 2 * whole  # the norms' results are computed again


MODES = ("none", "full", "segment", "every_k", "ffn", "selective", "selective_half")


def gathers_of_a_step(settings: Settings) -> dict[str, tuple[int, int]]:
    """Return by mode the gathers over tp of a step, with kept inputs and with regather."""
    found = {}
    for mode in MODES:
        counts = []
        for regather in (False, True):
            events = traced({**settings, "recompute.mode": mode, "parallel.regather": regather})
            sent = [event for event in events if isinstance(event, Collective) and event.axis == "tp"]
            counts.append(sum(event.kind == "gather" for event in sent))
        found[mode] = (counts[0], counts[1])
    return found


def test_each_input_is_gathered_once_more() -> None:
    """One gather for q, k and v, one for gate and up. What is recomputed gathers again with or without it."""
    two = {**SP, "model.layers": 2, "training.global_batch_size": 1}
    found = run(gathers_of_a_step, 2, two)[0]
    kept = found["none"][0]
    more = {mode: again - kept for mode, (kept, again) in found.items()}
    assert kept == 2 * 4 + 2  # forward and backward of each block; before the head, and of the embedding
    assert more == {"none": 4, "full": 0, "segment": 0, "every_k": 2, "ffn": 2, "selective": 4, "selective_half": 4}


def parts_that_gather_again(settings: Settings) -> dict[str, list[str]]:
    """Return by mode the modules whose gather is `regather.py`'s."""
    found = {}
    for mode in MODES:
        _, (stage,) = build(tiny({**settings, "recompute.mode": mode}))
        modules = {canonical_name(f"{name}."): module for name, module in stage.named_modules()}
        found[mode] = [name for name, module in modules.items() if getattr(module, "gather", gathered) is not gathered]
    return found


def test_what_is_recomputed_is_left_as_it_is() -> None:
    """Else its recomputation, in a backward, would note inputs that are never forgotten."""
    found = run(parts_that_gather_again, 2, {**AGAIN, "model.layers": 2})[0]
    first, second = ([f"layers.{block}.{part}." for part in ("self_attn", "mlp")] for block in (0, 1))
    assert found.pop("none") == [*first, *second]
    assert found.pop("ffn") == [first[0], second[0]]
    assert found.pop("every_k") == second
    assert not any(found.values())


KEPT: dict[str, Settings] = {
    "tp": {"parallel.tp": 2},
    "sp": SP,
    "regather": AGAIN,
    "sp, norms after": {**SP, "model.norm_position": "after", "model.qk_norm": "width"},
    "sp, gpt": {**SP, "model.family": "gpt", "model.kv_heads": 0},
    "sp, ring": {**SP, "parallel.cp": 2},
    "sp, experts": {**SP, **EXPERTS},
    "regather, experts over ep": {**AGAIN, **EXPERTS, "parallel.ep": 2},
}


def kept_by_a_forward(settings: Settings) -> dict[str, int]:
    """Return by mode the bytes that a forward keeps for its backward, and leaves as its result."""
    found = {}
    for mode in MODES:
        trainer = Trainer(tiny({**settings, "recompute.mode": mode}))
        (stage,) = trainer.stages
        (batch,) = trainer.batches(1)
        tracker = Tracker(None, axis_of_group(trainer.mesh))
        with tracker:
            tracker.claim(stage.parameters(), "parameters")
            tracker.mark("forward")
            tracker.begin_forward()
            loss = stage(batch.tokens, batch.positions, batch.document_ids, batch.labels)
            tracker.end_forward()
            tracker.mark("backward")
            loss.backward()
        (found[mode],) = saved_by_forwards(tracker)
    return found


LONG: Settings = {"training.global_batch_size": 1, "training.sequence_length": 64, "model.layers": 2}
LONG["model.ffn"] = 32  # narrow: parts of sums would outweigh what else a selective recomputation frees


@functools.cache
def kept_under(name: str) -> dict[str, int]:
    settings = {**LONG, **KEPT[name]}
    return run(kept_by_a_forward, tiny(settings).parallel.ranks, settings)[0]


BY_DEFAULT = ("regather",)


@pytest.mark.parametrize("name", [n if n in BY_DEFAULT else pytest.param(n, marks=exhaustive) for n in KEPT])
def test_no_recomputation_keeps_more_than_none(name: str) -> None:
    kept = kept_under(name)
    # Selective modes save the sum after down, too, on which no gradient depends. A GPT's blocks have hardly anything
    # that they compute again instead.
    unused = 2 * 64 * 64 * 4 // 2 if name == "sp, gpt" else 0
    assert max(kept.values()) <= kept["none"] + unused
    assert kept["selective_half"] <= kept["selective"]


def products_of_a_step(settings: Settings) -> int:
    """Return the number of products of a step on this rank."""
    trainer = Trainer(tiny(settings))
    batches = trainer.batches(1)
    with Operations() as operations:
        trainer.forward_backward(batches, torch.tensor(1.0))
    return operations.all.count(torch.ops.aten.mm.default)


@pytest.mark.parametrize("layout", [SP, AGAIN], ids=["sp", "regather"])
def test_selective_recomputation_computes_no_product_again(layout: Settings) -> None:
    modes = ({"recompute.mode": mode} for mode in ("none", "selective"))
    assert len({run(products_of_a_step, 2, {**LONG, **layout, **mode})[0] for mode in modes}) == 1


def test_kept_is_a_ranks_part_of_each_input() -> None:
    """Two inputs in each of two blocks, in float32: a half of each. To some numbers per token."""
    whole = 64 * 64 * 4
    plain, again = kept_under("sp"), kept_under("regather")
    freed = {mode: plain[mode] - again[mode] for mode in MODES}
    inputs = {
        "none": 2.0,
        "ffn": 1.0,
        "every_k": 1.0,
        "selective": 4.0,
        "selective_half": 4.0,
        "full": 0.0,
        "segment": 0.0,
    }
    for mode, expected in inputs.items():  # a selective recomputation computes the part again, too
        assert freed[mode] == pytest.approx(expected * whole, abs=16 * 64), mode
