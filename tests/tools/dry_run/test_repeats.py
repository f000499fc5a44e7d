"""A step with few of the equal blocks equals the step with all of them, byte by byte and message by message."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity import Settings, tiny
from tests.tools.dry_run import apart
from torchllm.config import Config, gradient_accumulation
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
from torchllm.tools.dry_run.run import plan_trace
from torchllm.tools.dry_run.trace import trace
from torchllm.tools.dry_run.tracker import BlockBegins, Sent

MODELS = sorted((Path(__file__).parents[3] / "train_configs" / "models").glob("*.toml"))


def contents(config: Config, all_blocks: bool) -> list[Any]:
    """Return a trace as plain values, without the memory at the very end of the step, which nothing reads."""
    count = gradient_accumulation(config.training, config.parallel.data_ranks)
    plan = plan_trace(config.parallel, [0], count)
    traced = trace(config, torch.bfloat16, 0, plan.micro_batches, 1, 0, gpu=True, all_blocks=all_blocks)
    assert set(traced.spans[0].start) > {"parameters", "optimizer"}
    found: list[Any] = [traced.keys, traced.per_micro_batch]
    for span in traced.spans:
        levels = [span.start, span.peak, span.highest, *([] if span.name == "tail" else [span.end])]
        found.append((span.name, [{kind: size for kind, size in level.items() if size} for level in levels]))
        found.append([sent._replace(time=0) for sent in span.sent])
    return found


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
    "experts after a dense block": {
        "parallel.dp_shard": 4,
        "parallel.ep": 4,
        "model.layers": 7,
        "model.dense_layers": 1,
        "model.experts": 8,
        "model.shared_experts": 1,
        "model.router_bias": True,
        "model.router_dtype": "compute",
        "model.balance_loss": "global",
    },
}
BY_DEFAULT = ("one micro batch",)
NAMES = [name if name in BY_DEFAULT else pytest.param(name, marks=pytest.mark.exhaustive) for name in LAYOUTS]


@pytest.mark.parametrize("name", NAMES)
def test_few_blocks_stand_for_all(name: str) -> None:
    config = tiny({"model.layers": 6, **LAYOUTS[name]})
    assert find_repeats(config)
    assert apart(contents, config, False) == apart(contents, config, True)


@pytest.mark.exhaustive
@pytest.mark.parametrize("file", MODELS, ids=lambda file: file.stem)
def test_few_blocks_of_every_model_stand_for_all(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its sizes, with five blocks after one that is dense where the model has such."""
    monkeypatch.setenv("NPROC", "8")
    arguments = ["--training.sequence_length=256", "--training.global_batch_size=16", "--parallel.dp_shard=8"]
    config = load_config([str(file), *arguments, "--run.dry_run=true", "--cluster.name=dgx_h100"])
    dense = min(config.model.dense_layers, 1)
    model = replace(config.model, layers=5 + dense, dense_layers=dense, router_dtype="compute")
    config = replace(config, model=model)
    assert find_repeats(config)
    assert apart(contents, config, False) == apart(contents, config, True)


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
    several: list[Settings] = [{"parallel.pp": 2}, {"recompute.mode": "segment"}, {"model.experts": 4}]
    for settings in (*several, {"model.layers": 4}):
        assert find_repeats(tiny({"model.layers": 64, **settings})) is None
    assert find_repeats(tiny({"model.layers": 64})) == Repeats(1, 1, 60)
