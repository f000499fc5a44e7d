"""A step with few of the equal blocks equals the step with all of them, byte by byte and message by message."""

import multiprocessing
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.facts.test_model_sizes import MODELS_BY_FEATURES
from tests.parity import Settings, tiny
from tests.tools.dry_run import apart
from torchllm.config import Config, Kinds, gradient_accumulation
from torchllm.models.decoder import build_model
from torchllm.tools.config.load import load_config
from torchllm.tools.dry_run.memory import Span
from torchllm.tools.dry_run.repeats import (
    NotEqualError,
    Repeats,
    _joined,
    _Part,
    _repeated,
    check_parameters,
    find_repeats,
)
from torchllm.tools.dry_run.run import plan_trace, rank_kinds
from torchllm.tools.dry_run.trace import count_blocks, trace
from torchllm.tools.dry_run.tracker import BlockBegins, Sent


class Content(NamedTuple):
    """A trace as plain values."""

    steps: list[Any]
    """without the memory at the very end of the step, which nothing reads"""
    blocks: int
    """blocks that ran forward"""


def content(config: Config, ranks: list[int], all_blocks: bool) -> Content:
    """Trace the first of the pipeline ranks of one kind."""
    blocks = multiprocessing.Value("L", 0)
    count_blocks(blocks)
    plan = plan_trace(config.parallel, ranks, gradient_accumulation(config.training, config.parallel.data_ranks))
    short = plan.micro_batches, plan.pp, plan.traced_rank
    traced = trace(config, torch.bfloat16, plan.rank, *short, gpu=True, all_blocks=all_blocks)
    assert set(traced.spans[0].start) > {"parameters", "optimizer"}
    found: list[Any] = [traced.keys, traced.per_micro_batch]
    for span in traced.spans:
        levels = [span.start, span.peak, span.highest, *([] if span.name == "tail" else [span.end])]
        found.append((span.name, [{kind: size for kind, size in level.items() if size} for level in levels]))
        found.append([sent._replace(time=0) for sent in span.sent])
    return Content(found, blocks.value)


def check(config: Config) -> None:
    """Compare few blocks with all, of every kind of rank."""
    for ranks in rank_kinds(config):
        assert find_repeats(config, ranks[0])
        few, every = apart(content, config, ranks, False), apart(content, config, ranks, True)
        assert few.steps == every.steps
        assert few.blocks < every.blocks  # they were not all traced after all


EXPERTS: Settings = {
    "parallel.dp_shard": 4,
    "model.layers": 9,
    "model.dense_layers": 1,
    "model.experts": 8,
    "model.shared_experts": 1,
    "model.router_bias": True,
    "model.balance_loss": "global",
}
KINDS: Settings = {
    "model.pattern": ("local", "local", "full"),
    "model.kinds": Kinds(local={"window": 7}, full={"rotary_fraction": 0.0}),
    "parallel.dp_shard": 2,
    "training.global_batch_size": 4,
}
OTHER_SHAPES: Settings = {
    "model.pattern": ("few", "few", "sparse"),
    "model.kinds": Kinds(few={"heads": 4, "kv_heads": 2, "head_dim": 12, "ffn": 40, "experts": 0}, sparse={}),
    **{"model.experts": 8, "parallel.dp_shard": 4, "parallel.ep": 2},
}
RECOMPUTED: Settings = {"recompute.mode": "full", "model.router_dtype": "compute"}
LAYOUTS: dict[str, Settings] = {
    "FSDP": {"parallel.dp_shard": 8, "recompute.mode": "selective"},
    "one micro batch": {"parallel.dp_shard": 2, "model.layers": 5, "training.global_batch_size": 2},
    "one rank": {"recompute.mode": "every_k", "model.layers": 9, "training.global_batch_size": 2},
    "uneven shards, gathers two ahead": {
        "parallel.dp_shard": 7,
        "parallel.prefetch": 2,
        "model.layers": 8,
        "training.global_batch_size": 14,
    },
    "tensor parallel, recompute of every third block": {
        "parallel.dp_shard": 2,
        "parallel.tp": 2,
        "parallel.sequence_parallel": True,
        "recompute.mode": "every_k",
        "recompute.k": 3,
        "model.layers": 12,
        "training.global_batch_size": 4,
    },
    "context parallel, the last block freed": {
        "parallel.cp": 2,
        "parallel.dp_shard": 2,
        "parallel.keep_last_block": False,
        "recompute.mode": "ffn",
        "training.loss_chunk": 16,
        "training.global_batch_size": 4,
    },
    "HSDP, ZeRO 1, Muon": {
        "parallel.dp_replicate": 2,
        "parallel.dp_shard": 2,
        "parallel.zero_stage": 1,
        "optimizer.name": "muon",
        "optimizer.ema_decay": 0.9,
    },
    "HSDP, ZeRO 2, LoRA": {
        "parallel.dp_replicate": 2,
        "parallel.dp_shard": 2,
        "parallel.zero_stage": 2,
        "lora.rank": 4,
        "recompute.mode": "full",
    },
    "pipeline": {"parallel.pp": 3, "parallel.dp_shard": 2, "model.layers": 17, "recompute.mode": "full"},
    "pipeline, ZeRO 1, tied": {
        "parallel.pp": 2,
        "parallel.dp_shard": 2,
        "parallel.zero_stage": 1,
        "parallel.tp": 2,
        "model.tied_embeddings": True,
        "model.layers": 12,
        "training.global_batch_size": 16,
    },
    "kinds, eager attention": {**KINDS, "model.layers": 13, "model.attention": "eager"},
    "kinds, selective, documents": {
        **KINDS,
        "model.layers": 13,
        "recompute.mode": "selective",
        "data.document_mask": True,
    },
    "kinds, every other block recomputed": {**KINDS, "model.layers": 22, "recompute.mode": "every_k"},
    "kinds in a pipeline, recomputed": {
        **KINDS,
        "parallel.pp": 2,
        "parallel.split": (13, 13),  # the second stage begins with the second block of a kind
        "model.layers": 26,
        "recompute.mode": "full",
    },
    "kinds and experts": {**EXPERTS, **KINDS, "model.layers": 15, "parallel.ep": 2, "model.dense_layers": 1},
    "kinds of other shapes": {**OTHER_SHAPES, "model.layers": 16},
    "kinds of other shapes in a pipeline": {**OTHER_SHAPES, "model.layers": 40, "parallel.pp": 2, **RECOMPUTED},
    "experts after a dense block": {**EXPERTS, "parallel.ep": 4},
    "experts, routers with their blocks": {**EXPERTS, "parallel.ep": 4, "model.router_dtype": "compute"},
    "experts, all recomputed": {**EXPERTS, "recompute.mode": "full", "training.global_batch_size": 12},
    "experts in a pipeline": {**EXPERTS, "parallel.pp": 2, "parallel.split": (8, 8), "model.layers": 16},
    "experts in a pipeline, by rank, ZeRO 1": {
        **{**EXPERTS, "parallel.pp": 2, "parallel.ep": 4, "parallel.zero_stage": 1},
        **{"model.layers": 18, "recompute.mode": "full", "training.global_batch_size": 16},
    },
    "experts, tp": {**EXPERTS, "parallel.tp": 2},
    "experts by rank, tp with sp, two ahead": {
        **{**EXPERTS, "parallel.tp": 2, "parallel.sequence_parallel": True, "parallel.ep": 4, "model.layers": 13},
        **{"parallel.prefetch": 2, "recompute.mode": "full"},
    },
    "experts, tp, pipeline": {
        **{**EXPERTS, "parallel.pp": 2, "parallel.tp": 2, "parallel.sequence_parallel": True, "model.layers": 16},
        **{"parallel.split": (8, 8), "parallel.dp_shard": 2},
    },
    "two stages": {"model.layers": 10, "parallel.pp": 2, "training.global_batch_size": 2},
    "experts, ZeRO 1": {**EXPERTS, "parallel.zero_stage": 1, "recompute.mode": "selective"},
}
KINDS_TWICE: Settings = {**KINDS, "model.pattern": ("local", "full"), "model.layers": 9}
FEW_EXPERTS: Settings = {
    **{"model.experts": 4, "model.layers": 6, "training.global_batch_size": 2},
    **{"parallel.dp_shard": 2, "parallel.tp": 2},
}


@pytest.mark.parametrize(
    "settings",
    [pytest.param(KINDS_TWICE, id="kinds"), pytest.param(FEW_EXPERTS, id="experts", marks=pytest.mark.exhaustive)],
)
def test_few_blocks_stand_for_all(settings: Settings) -> None:
    check(tiny(settings))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", LAYOUTS)
def test_few_blocks_of_every_layout_stand_for_all(name: str) -> None:
    check(tiny({"model.layers": 6, **LAYOUTS[name]}))


@pytest.mark.exhaustive
@pytest.mark.parametrize("file", MODELS_BY_FEATURES, ids=lambda file: file.stem)
def test_few_blocks_of_every_form_stand_for_all(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its sizes, with four periods between both ends, after a block that is dense where the model has such."""
    monkeypatch.setenv("NPROC", "8")
    arguments = ["--training.sequence_length=256", "--training.global_batch_size=16", "--parallel.dp_shard=8"]
    config = load_config([str(file), *arguments, "--run.dry_run=true", "--cluster.name=dgx_h100"])
    dense = min(config.model.dense_layers, 1)
    layers = 4 * max(1, len(config.model.pattern)) + 3 + dense
    check(replace(config, model=replace(config.model, layers=layers, dense_layers=dense)))


def part(number: int, bytes_kept: int, sent: float = 8.0) -> _Part:
    """The forward of a block that keeps activations and sends one message, from any level on."""
    start = Counter({"activations": number * 100})
    end = start + Counter({"activations": bytes_kept})
    span = Span("", start, end, end, end, [Sent(number, "fsdp", "all_gather", sent)])
    return _Part(span, BlockBegins(number, "F", number))


def test_a_period_is_repeated_if_it_equals_the_one_before() -> None:
    repeats = Repeats(first=1, period=1, left_out=3)
    parts = [part(0, 7), part(1, 10), part(2, 10), part(6, 9)]
    whole = _joined(Counter({"activations": 5}), list(_repeated(parts, repeats)))
    assert whole.end == whole.peak == {"activations": 5 + 7 + (2 + 3) * 10 + 9}
    assert len(whole.sent) == 4 + 3
    for other in (part(2, 11), part(2, 10, sent=9.0)):
        with pytest.raises(NotEqualError, match="differ"):
            list(_repeated([part(0, 7), part(1, 10), other], repeats))
    with pytest.raises(NotEqualError, match="once each"):
        list(_repeated([part(1, 10), part(0, 7), part(2, 10)], repeats))


def test_blocks_with_frozen_parameters_are_no_model_for_others() -> None:
    repeats = Repeats(first=1, period=1, left_out=2)
    with torch.device("meta"):
        check_parameters(build_model(tiny({"model.layers": 6, "model.frozen": ".*norm.*"}).model), repeats)
        partly = build_model(tiny({"model.layers": 6, "model.frozen": "layers.[0-2][.].*"}).model)
    with pytest.raises(NotEqualError, match="block 3 differ"):
        check_parameters(partly, repeats)


def test_all_blocks_run_where_something_is_done_for_several_at_once() -> None:
    several: list[Settings] = [
        {"parallel.pp": 2, "parallel.schedule": "Interleaved1F1B"},
        {"recompute.mode": "segment"},
    ]
    for settings in (*several, {"model.layers": 4}):
        assert find_repeats(tiny({"model.layers": 64, **settings})) is None
    assert find_repeats(tiny({"model.layers": 64})) == Repeats(1, 1, 60)
    for layout in ({"parallel.tp": 2}, {"parallel.tp": 2, "parallel.pp": 2, "parallel.split": (64, 64)}):
        sparse = tiny({"model.experts": 4, "model.layers": 64 * len(layout.get("parallel.split", (64,))), **layout})
        assert find_repeats(sparse) == Repeats(2, 1, 59)
    assert find_repeats(tiny({**KINDS, "model.layers": 12})) is None  # no third period between the ends
    assert find_repeats(tiny({**KINDS, "model.layers": 13})) == Repeats(3, 3, 1)
    assert find_repeats(tiny({**KINDS, "model.layers": 64, "recompute.mode": "every_k"})) == Repeats(3, 6, 8)
    assert find_repeats(tiny({"model.layers": 64, "parallel.pp": 2, "parallel.split": (34, 30)}), 1) == Repeats(
        35, 1, 26
    )
