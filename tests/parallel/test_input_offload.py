"""Inputs of blocks on the host: the same bits in every layout, and no memory of the device."""

import math
import weakref
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
from torch import Tensor, nn

from tests.checkpoint.test_resume_layouts import digests
from tests.parallel.test_recompute import HIDDEN_BYTES, SMALL, built, inputs
from tests.parity import CPU, SHORT, Settings, Trainer, tiny, world_size
from tests.workers import run
from torchllm.config import Recompute, gradient_accumulation
from torchllm.facts.flops import recompute_interval
from torchllm.models.decoder import Block
from torchllm.parallel.input_offload import InputOnHost
from torchllm.runtime.device import compute_dtype

FULL: Settings = {"recompute.mode": "full"}
LAYOUTS: dict[str, Settings] = {
    "zero 3, bfloat16": {"parallel.dp_shard": 2, "training.dtype": "bfloat16"},
    "tp, sp": {"parallel.tp": 2, "parallel.sequence_parallel": True},
    "tp": {"parallel.tp": 2, "parallel.sequence_parallel": False},
    "ring": {"parallel.cp": 2},
    "1F1B": {"parallel.pp": 2, "parallel.schedule": "1F1B"},
    "ZBV": {"parallel.pp": 2, "parallel.schedule": "ZBVZeroBubble", "model.layers": 4},
    "segments in a pipeline": {"parallel.pp": 2, "recompute.mode": "segment", "recompute.k": 2, "model.layers": 4},
    "experts": {"parallel.dp_shard": 2, "parallel.ep": 2, "model.experts": 4},
    "multi-token": {"parallel.dp_shard": 2, "model.mtp_depth": 1},
    "compiled": {"parallel.dp_shard": 2, "compile.block": True},
    "compiled, segments": {"compile.block": True, "recompute.mode": "segment"},
    "low-rank updates": {"parallel.dp_shard": 2, "lora.rank": 2},
}
BY_DEFAULT = ("tp, sp", "1F1B", "experts")
NAMES = [name if name in BY_DEFAULT else pytest.param(name, marks=pytest.mark.exhaustive) for name in LAYOUTS]


class Ended(NamedTuple):
    losses: list[float]
    norms: list[float]
    digests: dict[str, str]
    """of whole weights, moments and counters"""
    moved: int
    """inputs that were on the host"""


def trained(settings: Settings) -> Ended:
    """Train on this rank of a layout."""
    config = tiny(SHORT | FULL | settings)
    trainer = Trainer(config, compute_dtype(config.training, CPU))
    losses, norms = [], []
    with patch.object(InputOnHost, "_leave", autospec=True, side_effect=InputOnHost._leave) as leave:
        for step in (1, 2):
            result = trainer.step(step, trainer.batches(step))
            losses.append(result.loss.item())
            norms.append(result.grad_norm.item())
    return Ended(losses, norms, digests(trainer.stages, trainer.optimizer, {}), leave.call_count)


@pytest.mark.parametrize("name", NAMES)
def test_every_layout_computes_the_same_bits(name: str) -> None:
    settings = FULL | LAYOUTS[name]
    config = tiny(SHORT | settings)
    kept, moved = (run(trained, world_size(config), settings | {"recompute.offload": dial}) for dial in (False, True))
    size = recompute_interval(config.recompute, config.model.layers) if config.recompute.mode == "segment" else 1
    stages = config.parallel.stages
    each = stages * math.ceil(config.model.blocks / stages / size) / config.parallel.pp
    micro_batches = gradient_accumulation(config.training, config.parallel.data_ranks)
    assert [rank.moved for rank in kept] == [0] * len(kept)
    assert [rank.moved for rank in moved] == [2 * micro_batches * each] * len(moved)
    assert [rank._replace(moved=0) for rank in moved] == kept


class Inputs(NamedTuple):
    """The inputs of five blocks that exist on the device."""

    after_forward: int
    in_backward: list[int]
    """as the recomputation of each block begins"""


def counted(recompute: Recompute) -> Inputs:
    decoder = built(SMALL, recompute)
    live: weakref.WeakSet[Any] = weakref.WeakSet()
    seen: list[int] = []
    start_return = InputOnHost.start_return

    def enter(block: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        live.add(arguments[0].untyped_storage())
        seen.append(len(live))

    def note_return(kept: InputOnHost) -> Tensor:
        x = start_return(kept)
        live.add(x.untyped_storage())
        return x

    for block in decoder.modules():
        if isinstance(block, Block):
            block.register_forward_pre_hook(enter)
    with patch.object(InputOnHost, "start_return", autospec=True, side_effect=note_return):
        loss = decoder(*inputs(SMALL))
        after = len(live)
        loss.backward()
    return Inputs(after, seen[len(decoder.layers) :])


def test_inputs_leave_and_return_one_ahead() -> None:
    """A copy on the host is other memory here, too."""
    assert counted(Recompute("full")) == Inputs(5, [5, 4, 3, 2, 1])
    assert counted(Recompute("full", offload=True)) == Inputs(0, [2, 2, 2, 2, 1])


def test_only_inputs_of_blocks_are_moved() -> None:
    """No weight, and no mask or angle that blocks share."""
    sizes = []

    def note(kept: InputOnHost, x: Tensor) -> Tensor:
        sizes.append(x.numel())
        return leave(kept, x)

    leave = InputOnHost._leave
    with patch.object(InputOnHost, "_leave", autospec=True, side_effect=note):
        built(SMALL, Recompute("segment", 2, offload=True))(*inputs(SMALL)).backward()
    assert sizes == [HIDDEN_BYTES // 4] * 3
