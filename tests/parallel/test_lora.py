"""Low-rank updates of a frozen model (LoRA) under every technique, and in checkpoints. The lattice draws them too."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.test_resume_layouts import hop_over, train
from tests.parity import CPU, Settings, tiny
from tests.workers import run
from torchllm.checkpoint.checkpointer import Checkpointer
from torchllm.checkpoint.tensors import open_checkpoint
from torchllm.config import Checkpoint
from torchllm.config.errors import UserError
from torchllm.facts.parameters import is_low_rank_factor
from torchllm.models.decoder import build_model
from torchllm.models.lora import apply_lora
from torchllm.parallel.initialize import initialize
from torchllm.tools.config.changes import log_config_changes
from torchllm.tools.hub.weights import initial_parts, load_weights
from torchllm.tools.proof.layouts import with_settings

LORA: Settings = {"lora.rank": 3, "lora.alpha": 12.0}


def test_a_checkpoint_has_the_updates_alone_and_resumes_on_another_layout(tmp_path: Path) -> None:
    layouts: list[Settings] = [
        {"parallel.tp": 2},
        {"parallel.pp": 2, "parallel.schedule": "DualPipeV"},
    ]
    common = {**LORA, "training.steps": 2, "data.document_mask": True}
    (uninterrupted,) = run(train, 1, common, range(1, 3), None)
    hops = hop_over(layouts, common, tmp_path)
    assert [hop.losses[0] for hop in hops] == pytest.approx(uninterrupted.losses, rel=1e-5)
    assert hops[1].loaded == hops[0].saved != hops[0].loaded
    stored = open_checkpoint(None, tmp_path / "checkpoints/step-00000002")
    weights = [key for key in stored.index.tensors if key.startswith("model.")]
    config = tiny(common)
    assert len(weights) == 2 * len(config.lora.targets) * config.model.layers
    assert all(is_low_rank_factor(key) for key in weights)
    frozen_keys = [key for key in hops[0].saved if "lora_" not in key]
    assert frozen_keys
    assert all(hops[1].saved[key] == hops[0].loaded[key] for key in frozen_keys)


def test_frozen_weights_come_from_a_checkpoint_without_updates(tmp_path: Path) -> None:
    config = tiny({})
    model, plain = (build_model(config.model) for _ in range(2))
    initialize([plain], config.model, CPU, seed=0)
    optimizer = torch.optim.SGD(plain.parameters())
    Checkpointer(Checkpoint(), tmp_path, [plain], optimizer, record={"config": asdict(config)}).save(1, {})
    apply_lora(model, tiny(LORA).lora, torch.float32)
    load_weights(tmp_path / "checkpoints/step-00000001", [model], to_fill=initial_parts)
    assert torch.equal(model.layers["0"].self_attn.q_proj.base_layer.weight, plain.layers["0"].self_attn.q_proj.weight)


@pytest.mark.parametrize(
    ("key", "value"), [("run.seed", 1), ("model.initial_std", 0.03)], ids=["seed", "standard deviation"]
)
def test_other_frozen_weights_than_the_checkpoints_are_refused(key: str, value: Any) -> None:
    config = tiny(LORA)
    record = {"config": asdict(config)}
    log_config_changes(record, config)
    with pytest.raises(UserError, match=rf"{key}: .*, {value} now: the checkpoint holds low-rank updates"):
        log_config_changes(record, with_settings(config, {key: value}))
    plain = tiny({})
    log_config_changes({"config": asdict(plain)}, with_settings(plain, {key: value}))
