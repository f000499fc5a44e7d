"""Every layout trains the same model as one process: loss, every gradient, the norm, the updated weights."""

import itertools
from typing import Any

import pytest

from tests.parity import Settings, check, tiny, world_size

LAYOUTS: dict[str, Settings] = {
    "dp2": {"parallel.dp_shard": 2, "parallel.zero_stage": 0},
    **{
        f"zero{stage}-{ranks}": {"parallel.dp_shard": ranks, "parallel.zero_stage": stage}
        for stage in (1, 2, 3)
        for ranks in (2, 4, 8)
    },
    "hsdp2x2": {"parallel.dp_replicate": 2, "parallel.dp_shard": 2},
    "hsdp2x4": {"parallel.dp_replicate": 2, "parallel.dp_shard": 4},
    "tp2": {"parallel.tp": 2},
    "tp4": {"parallel.tp": 4},
    "tp2+sp": {"parallel.tp": 2, "parallel.sequence_parallel": True},
    "tp4+sp": {"parallel.tp": 4, "parallel.sequence_parallel": True},
    **{
        f"fsdp{dp}xtp{tp}{'+sp' * sp}": {
            "parallel.dp_shard": dp,
            "parallel.tp": tp,
            "parallel.sequence_parallel": sp,
        }
        for dp, tp in ((2, 2), (2, 4), (4, 2))
        for sp in (False, True)
    },
    "hsdp2x2xtp2": {"parallel.dp_replicate": 2, "parallel.dp_shard": 2, "parallel.tp": 2},
}

OPTIONS: dict[str, list[Any]] = {
    "layout": ["dp2", "zero1-2", "zero2-2", "zero3-2", "hsdp2x2", "tp2", "tp2+sp", "fsdp2xtp2+sp"],
    "recompute.mode": ["none", "full", "segment", "every_k", "ffn", "selective"],
    "model.family": ["llama", "gpt"],
    "model.kv_heads": [4, 0],
    "model.tied_embeddings": [False, True],
    "model.vocab": [96, 97],  # 97: shards of unequal size
    "ragged": [False, True],
    "accumulation": [1, 4],
    "data.document_mask": [False, True],
    "training.loss_chunk": [0, 20],  # 20 does not divide a micro batch's tokens
    "parallel.prefetch": [1, 0],
    "optimizer.name": ["adamw", "sgd"],
}


def covering_array(factors: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """Rows in which every two factors take every pair of their values, greedily few (deterministic)."""
    names = list(factors)
    open_pairs = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(names, 2)
        for i in range(len(factors[a]))
        for j in range(len(factors[b]))
    }
    rows = []
    while open_pairs:
        row = dict(min(open_pairs))
        for name in names:
            if name not in row:
                gains = [
                    sum(
                        (tuple(sorted(((name, i), other), key=lambda f: names.index(f[0])))) in open_pairs
                        for other in row.items()
                    )
                    for i in range(len(factors[name]))
                ]
                row[name] = max(range(len(gains)), key=lambda i: (gains[i], (i + len(rows)) % len(gains)))
        ordered = [(name, row[name]) for name in names]
        open_pairs -= set(itertools.combinations(ordered, 2))
        rows.append({name: factors[name][index] for name, index in ordered})
    return rows


def option_settings(row: dict[str, Any]) -> tuple[Settings, bool]:
    """A row's settings and whether its labels are ragged."""
    settings = {**LAYOUTS[row["layout"]], **{k: v for k, v in row.items() if "." in k}}
    config = tiny(settings)
    ranks = world_size(config) // config.parallel.tp
    settings["training.global_batch_size"] = 16
    settings["training.micro_batch_size"] = 16 // (ranks * row["accumulation"])
    return settings, row["ragged"]


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_trains_the_same_model(name: str) -> None:
    check(LAYOUTS[name])


@pytest.mark.parametrize("row", covering_array(OPTIONS), ids=lambda row: "-".join(str(v) for v in row.values()))
def test_options_train_the_same_model(row: dict[str, Any]) -> None:
    settings, ragged = option_settings(row)
    check(settings, ragged)
