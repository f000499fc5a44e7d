"""Experts that start as a dense model's layers: the same function, and the same bytes in every layout."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.parity import CPU, build, tiny, world_size
from tests.tools.hub.published import save_published
from tests.tools.hub.test_import import Arrays, config_of, error_of_logits
from tests.workers import run
from torchllm.checkpoint.checkpointer import Checkpointer
from torchllm.config import Checkpoint, Config
from torchllm.models.decoder import Decoder, build_model
from torchllm.optim.optimizer import build_optimizer
from torchllm.parallel.initialize import initialize
from torchllm.tools.config.checks import problems
from torchllm.tools.hub.initial import initial_weights
from torchllm.tools.proof.gather import gather_whole
from torchllm.tools.proof.layouts import Settings, describe_layout, with_settings

EXPERTS: Settings = {"model.experts": 6, "model.upcycle": True, "model.dense_layers": 1}
NOISE = 0.3
DENSE: Settings = {"model.layers": 2, "model.qkv_bias": True}
LAYOUT: Settings = {"parallel.dp_shard": 2}
EMPTY_RANK: Settings = {"parallel.dp_shard": 4, "model.hidden": 30, "model.head_dim": 4}
"""the last rank has no expert"""
OTHER_LAYOUTS: list[Settings] = [
    {"parallel.dp_shard": 4},  # along the hidden states
    {"parallel.dp_shard": 2, "parallel.tp": 2},
    {"parallel.dp_shard": 4, "parallel.ep": 2},
    {"parallel.pp": 2, "parallel.schedule": "ZBVZeroBubble", "parallel.dp_replicate": 2, "parallel.zero_stage": 0},
]
AT_NIGHT = [pytest.param(layout, marks=pytest.mark.exhaustive) for layout in OTHER_LAYOUTS]


def save_dense(config: Config, folder: Path) -> None:
    _, stages = build(config)
    optimizer = build_optimizer(stages, config.optimizer)
    checkpoints = Checkpointer(Checkpoint(asynchronous=False), folder, stages, optimizer, host_group=dist.group.WORLD)
    checkpoints.save(1, {})
    checkpoints.close()


def upcycled(config: Config) -> Arrays:
    """Return the whole weights and buffers that a layout starts from; of rank 0."""
    _, stages = build(config)
    initial = initial_weights(config)
    assert initial is not None
    initial.load(stages, dist.group.WORLD)
    whole = gather_whole(stages, lambda parameter: parameter.detach())
    return {} if whole is None else whole.tensors


def fresh(config: Config) -> Decoder:
    model = build_model(config.model)
    initialize([model], config.model, CPU, config.run.seed)
    return model


@pytest.mark.parametrize("layout", [LAYOUT, EMPTY_RANK, *AT_NIGHT], ids=describe_layout)
def test_each_expert_is_the_dense_layer_and_noise_to_the_bit(layout: Settings, tmp_path: Path) -> None:
    sizes = {key: value for key, value in layout.items() if key.startswith("model.")}
    dense = tiny({**DENSE, **sizes, "model.layers": 4, "run.seed": 5})
    run(save_dense, 1, dense, tmp_path)
    settings = {**DENSE, "model.layers": 4, **EXPERTS, **layout, "checkpoint.initial": str(tmp_path)}
    config = tiny({**settings, "model.upcycle_noise": NOISE, "run.seed": 7})
    assert not problems(config, world_size(config))
    found = run(upcycled, world_size(config), config)[0]
    copied = dict(fresh(dense).named_parameters())
    random = dict(fresh(config).named_parameters())
    assert found.keys() == random.keys()
    for name, start in random.items():
        expected: torch.Tensor = start
        if name in copied:
            expected = copied[name]
        elif "router" not in name:
            of_dense = copied[name.replace("routed.experts.", "") + ".weight"]
            assert len({expert.tobytes() for expert in found[name]}) == 6  # no two are alike
            expected = start * NOISE + of_dense
        np.testing.assert_array_equal(found[name], expected.detach().numpy(), name)


@pytest.mark.parametrize("layout", [LAYOUT, *AT_NIGHT], ids=describe_layout)
@pytest.mark.parametrize("top_k", [2, pytest.param(6, marks=pytest.mark.exhaustive)])
def test_without_noise_the_logits_are_those_of_the_published_dense_model(
    top_k: int, layout: Settings, tmp_path: Path
) -> None:
    hub_model = save_published("qwen2", tmp_path)
    config = with_settings(config_of(tmp_path, layout), {**EXPERTS, "model.top_k": top_k, "model.window": 0})
    weights = run(upcycled, world_size(config), config)[0]
    model = fresh(config)
    tensors = {name: torch.from_numpy(value) for name, value in weights.items()}
    model.load_state_dict(tensors)
    tokens = torch.randint(0, 96, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = hub_model(tokens).logits.numpy()
        logits = model(tokens, torch.arange(32).expand(2, 32)).numpy()
    assert error_of_logits(logits, expected) <= 1e-5
    assert not torch.equal(tensors["layers.1.mlp.routed.router.weight"], torch.zeros(6, config.model.hidden))


def test_a_dense_model_of_another_width_is_refused(tmp_path: Path) -> None:
    run(save_dense, 1, tiny({"model.ffn": 64}), tmp_path)
    config = tiny({**EXPERTS, "checkpoint.initial": str(tmp_path)})
    config = replace(config, run=replace(config.run, seed=7))
    with pytest.raises(Exception, match=r"gate_proj.weight: \(64, 64\) in the checkpoint, \(96, 64\) here"):
        run(upcycled, 1, config)
