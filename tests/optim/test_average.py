"""The moving average of the weights: a hand loop, steps that are skipped, checkpoints on other layouts."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.parity import CPU, Settings, Trainer, tiny, whole
from tests.workers import run
from torchllm import config as c
from torchllm.checkpoint.checkpointer import Checkpointer
from torchllm.facts.parameters import canonical_name
from torchllm.models.decoder import Decoder, build_model
from torchllm.optim.average import EMA, WeightAverage
from torchllm.optim.optimizer import apply_if_finite, build_optimizer
from torchllm.parallel.fsdp import free_gathered
from torchllm.parallel.initialize import initialize
from torchllm.tools.hub.weights import AVERAGED_WEIGHTS, load_weights

DECAY = 0.8
STEPS = 4
SMALL: Settings = {
    "model.layers": 2,
    "model.hidden": 32,
    "training.sequence_length": 8,
    "training.micro_batch_size": 2,
    "optimizer.learning_rate": 0.02,
    "optimizer.ema_decay": DECAY,
    "training.steps": STEPS,
}
TIED: Settings = {"model.tied_embeddings": True}
SHARDED: Settings = {"parallel.dp_shard": 2, "model.experts": 4, "model.router_bias": True}
SHARDED["model.router_bias_rate"] = 0.01
PIPELINE: Settings = {"parallel.pp": 2, "parallel.schedule": "ZBVZeroBubble", "model.layers": 4, **TIED}
HOST: Settings = {"parallel.tp": 2, "model.layers": 4, "optimizer.ema_offload": True}
NARROW: Settings = {"parallel.dp_shard": 2, "training.weights_dtype": "bfloat16"}
LAYOUTS = [SHARDED, PIPELINE, NARROW, HOST]
"""a part of each weight and a buffer that moves; a weight of which a rank has two copies"""


class Run(Trainer):
    def __init__(self, settings: Settings, folder: Path | None = None, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(tiny({**SMALL, **settings}), dtype)
        optimizer = self.config.optimizer
        self.average = WeightAverage(self.stages, optimizer.ema_decay, optimizer.ema_offload)
        self.average.follow(self.optimizer)
        if folder is not None:
            options: dict[str, Any] = {"host_group": dist.group.WORLD, "extra_state": self.average.tensors}
            checkpoint = c.Checkpoint(asynchronous=False)
            self.checkpoints = Checkpointer(checkpoint, folder, self.stages, self.optimizer, **options)

    def take(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            self.step(step, self.batches(step))

    def resume(self) -> None:
        self.checkpoints.resume()
        self.average.restart(self.checkpoints.missing_extra_state)

    def weights(self) -> dict[str, np.ndarray]:
        weights = {}
        for stage in self.stages:
            for name, value in (*stage.named_parameters(), *stage.named_buffers()):
                weights[canonical_name(name)] = whole(value)
        return weights

    def averages(self) -> dict[str, np.ndarray]:
        return {name.removeprefix(EMA): whole(value) for name, value in self.average.tensors.items()}


def error_of_layout(settings: Settings) -> float:
    """Return by how much the averages after some steps differ from those of a loop over the whole weights."""
    trained = Run(settings)
    expected = trained.weights()
    for step in range(1, STEPS + 1):
        trained.take(step, step)
        for name, weight in trained.weights().items():
            expected[name] = DECAY * expected[name] + (1.0 - DECAY) * weight
    averages = trained.averages()
    assert averages.keys() == expected.keys()
    distances = [np.abs(averages[name] - trained.weights()[name]).max() for name in averages]
    assert max(distances) > 1e-3  # it is behind the weights
    return max(float(np.abs(averages[name] - value).max()) for name, value in expected.items())


@pytest.mark.parametrize("settings", LAYOUTS, ids=["sharded", "pipeline", "bfloat16", "host"])
def test_averages_are_those_of_a_hand_loop(settings: Settings) -> None:
    for error in run(error_of_layout, 2, settings):
        assert error <= 1e-6


def plain_run() -> tuple[Decoder, torch.optim.Optimizer, WeightAverage]:
    """Return a model on this process alone, with gradients, its optimizer and its average."""
    config = tiny(SMALL)
    model = build_model(config.model)
    initialize([model], config.model, CPU, seed=0)
    optimizer = build_optimizer([model], config.optimizer)
    average = WeightAverage([model], DECAY)
    average.follow(optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return model, optimizer, average


@pytest.mark.parametrize("is_forks", [False, True])
def test_a_step_that_is_skipped_changes_no_bit(is_forks: bool) -> None:
    """An optimizer of a fork may skip steps by not being called."""
    model, optimizer, average = plain_run()
    apply_if_finite(optimizer, 0.1, torch.tensor(True))
    if is_forks:
        optimizer = torch.optim.AdamW(model.parameters())
        average.follow(optimizer)
    copies = {name: tensor.clone() for name, tensor in average.tensors.items()}
    apply_if_finite(optimizer, 0.1, torch.tensor(False))
    assert all(torch.equal(tensor, copies[name]) for name, tensor in average.tensors.items())
    apply_if_finite(optimizer, 0.1, torch.tensor(True))
    assert not any(torch.equal(tensor, copies[name]) for name, tensor in average.tensors.items())


def averaged_copies(settings: Settings) -> int:
    """Return how many parameters of this rank's stages have their average in place, both copies of a tied one too."""
    trained = Run(settings)
    if trained.config.optimizer.ema_offload:  # as on a GPU, where averages are on another device
        vars(trained.average)["_is_like_weight"] = lambda name: False
    trained.take(1, 1)
    weights, averages = trained.weights(), trained.averages()
    count = 0
    with trained.average.in_place_of_weights(True):
        for stage in trained.stages:
            for name, parameter in stage.named_parameters():
                rounded = torch.from_numpy(averages[canonical_name(name)]).to(parameter.dtype).float()
                np.testing.assert_array_equal(whole(parameter), rounded.numpy(), name)
                count += 1
    for before, after in ((weights, trained.weights()), (averages, trained.averages())):
        for name, value in before.items():
            np.testing.assert_array_equal(value, after[name], name)
    assert count == sum(len(copies) for copies in trained.average.weights.values())
    return count - len(averages)


def test_both_copies_of_a_tied_embedding_are_replaced_where_a_rank_has_two() -> None:
    assert run(averaged_copies, 2, PIPELINE) == [1, 0]


def test_averages_are_rounded_in_place_of_weights_in_bfloat16_and_stay() -> None:
    assert run(averaged_copies, 2, NARROW) == [0, 0]


def test_averages_on_the_host_are_copied_in_place_of_weights_and_stay() -> None:
    assert run(averaged_copies, 2, HOST) == [0, 0]


FLOAT8: Settings = {
    **{"parallel.dp_shard": 2, "training.dtype": "bfloat16", "float8.recipe": "tensorwise"},
    **{"model.hidden": 64, "training.micro_batch_size": 4},
}
"""the weights are gathered in 8 bits, by a scale that is computed when they change"""


def losses_of_averages(settings: Settings) -> list[float]:
    """Return the loss of the averages, where they are beside the weights and where they are on another device."""
    trained = Run(settings, dtype=torch.bfloat16)
    trained.take(1, STEPS)
    losses = []
    for is_like_weight in (True, False):
        vars(trained.average)["_is_like_weight"] = lambda name, is_like=is_like_weight: is_like
        with trained.average.in_place_of_weights(True):
            losses.append(trained.forward_backward.loss_sum(trained.batches(1)[0]).item())
        free_gathered(trained.stages)
    return losses


def test_averages_on_the_host_are_gathered_in_8_bits_by_their_own_scales() -> None:
    for beside, apart in run(losses_of_averages, 2, FLOAT8):
        assert apart == beside


def test_without_a_decay_there_is_none() -> None:
    model, optimizer, _ = plain_run()
    average = WeightAverage([model], 0.0)
    average.follow(optimizer)
    average.restart(["ema.norm.weight"])
    with average.in_place_of_weights(False):
        assert average.tensors == {}


def save_on(settings: Settings, folder: Path) -> dict[str, np.ndarray]:
    first = Run(settings, folder)
    first.resume()
    first.take(1, 3)
    first.checkpoints.save(3, {})
    first.checkpoints.close()
    return first.averages()


def resume_on(settings: Settings, folder: Path) -> dict[str, Any]:
    """Return the averages of this rank after resuming, its weights, and those that `evaluate.ema` would load."""
    resumed = Run(settings, folder)
    resumed.resume()
    resumed.checkpoints.close()
    averages, weights = resumed.averages(), resumed.weights()
    evaluated = {}
    if resumed.average.tensors and not resumed.checkpoints.missing_extra_state:
        load_weights(
            folder / "checkpoints" / "step-00000003", resumed.stages, group=dist.group.WORLD, prefix=AVERAGED_WEIGHTS
        )
        evaluated = resumed.weights()
    return {"averages": averages, "weights": weights, "evaluated": evaluated}


def test_averages_resume_on_another_layout_to_the_bit(tmp_path: Path) -> None:
    """Also from the host."""
    saved = run(save_on, 2, {**HOST, **TIED}, tmp_path)[0]
    for of_rank in run(resume_on, 2, PIPELINE, tmp_path):
        for name, value in of_rank["averages"].items():
            np.testing.assert_array_equal(value, saved[name], name)
        for name, value in of_rank["evaluated"].items():
            np.testing.assert_array_equal(value, saved[name], name)


def test_an_average_is_added_to_a_run_and_dropped_from_it(tmp_path: Path) -> None:
    without: Settings = {"optimizer.ema_decay": 0.0}
    run(save_on, 2, {"parallel.dp_shard": 2, **without}, tmp_path / "without")
    (added,) = run(resume_on, 1, {}, tmp_path / "without")
    for name, value in added["averages"].items():
        np.testing.assert_array_equal(value, added["weights"][name], name)  # it begins with the weights
    run(save_on, 2, {"parallel.dp_shard": 2}, tmp_path / "with")
    (dropped,) = run(resume_on, 1, without, tmp_path / "with")
    assert dropped["averages"] == {}
