"""The step: what is not finite on one rank is applied on none; token counts are global; the policy's errors."""

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.profiler import profile

from tests.optim.test_optimizer import bits
from tests.parity import Settings, Trainer, rows_of, step_batch, tiny
from tests.workers import run
from torchllm.config import Training
from torchllm.config.errors import UserError
from torchllm.data.batch import Batch
from torchllm.models.decoder import build_model
from torchllm.models.head import IGNORED
from torchllm.optim.grad_norm import gradients
from torchllm.parallel.initialize import initialize
from torchllm.runtime.phase import PREFIX
from torchllm.tools.watch.breakdown import PHASES
from torchllm.train.step import Health, StepResult, read_health

CPU = torch.device("cpu")
SMALL: Settings = {"model.layers": 1, "training.sequence_length": 8, "training.steps": 10}
LAYOUTS: dict[str, Settings] = {
    "fsdp2": {"parallel.dp_shard": 2},
    "zero1": {"parallel.dp_shard": 2, "parallel.zero_stage": 1, "optimizer.name": "sgd", "optimizer.momentum": 0.9},
    "tp2": {"parallel.tp": 2},
    "pp2": {"parallel.pp": 2, "training.micro_batch_size": 4, "model.layers": 2, "model.tied_embeddings": True},
    "cp2": {"parallel.cp": 2},
    "experts": {"parallel.dp_shard": 2, "model.experts": 4, "model.router_bias": True},
}


class Rig(Trainer):
    """`spoil` may change what a step computes."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(tiny({**SMALL, **settings}))
        self.spoil: Callable[[Tensor], Tensor] = lambda loss: loss
        self.step.forward_backward = lambda batches, scale: self.spoil(self.forward_backward(batches, scale))

    def halves(self, number: int, labels: Callable[[Tensor], Tensor] = lambda labels: labels) -> list[Batch]:
        """This rank's two micro batches of a step."""
        whole = step_batch(self.config, number, ragged=False)
        whole = whole._replace(labels=labels(whole.labels))
        of_this_rank = rows_of(whole, slice(self.mesh.data_rank, None, self.mesh.data_size))
        half = len(of_this_rank.tokens) // 2
        return [rows_of(of_this_rank, slice(0, half)), rows_of(of_this_rank, slice(half, None))]

    def bits(self) -> list[list[bytes]]:
        """Weights, buffers, moments and counters of this rank."""
        return [bits(stage, self.optimizer) for stage in self.stages]


def first_norm(rig: Rig) -> torch.nn.Module:
    """Return the norm of this rank's first block.

    Whatever the stage, every block's values reach the loss and its gradients return.
    """
    return next(iter(rig.stages[0].layers.values())).input_layernorm


def bad_loss(rig: Rig, rank: int, bad: float) -> Callable[[], None]:
    """The loss that this rank reports is not finite, its gradients are."""
    rig.spoil = lambda loss: loss + bad if dist.get_rank() == rank else loss
    return lambda: setattr(rig, "spoil", lambda loss: loss)


def bad_gradient(rig: Rig, rank: int, bad: float) -> Callable[[], None]:
    """The gradients that flow back on this rank are not finite, the loss is."""

    def spoil(module: Any, inputs: Any, output: Tensor) -> None:
        if dist.get_rank() == rank:
            output.register_hook(lambda gradient: gradient * bad)

    return first_norm(rig).register_forward_hook(spoil).remove


def bad_micro_batch(rig: Rig, rank: int, bad: float) -> Callable[[], None]:
    """In the second of this rank's micro batches the hidden states overflow."""
    calls = []

    def spoil(module: Any, inputs: Any, output: Tensor) -> Tensor:
        calls.append(1)
        return output * bad if len(calls) == 2 and dist.get_rank() == rank else output

    return first_norm(rig).register_forward_hook(spoil).remove


Spoil = Callable[[Rig, int, float], Callable[[], None]]
NAN = float("nan")
INFINITY = float("inf")
FAILURES: dict[str, tuple[Spoil, float]] = {
    "loss": (bad_loss, NAN),
    "gradient": (bad_gradient, INFINITY),
    "micro batch": (bad_micro_batch, NAN),
}


class SkippedStep(NamedTuple):
    """What one rank observed around a step that was not finite on the last rank."""

    finite: bool
    """the step's loss and gradient norm"""
    untouched: bool
    """the step changed no bit of weights, moments and counters"""
    cleared: bool
    """no gradient remains"""
    skipped: int
    consecutive: int
    skipped_after_next: int
    consecutive_after_next: int
    next_step_applied: bool
    same_as_without: bool
    """bits after the next step are those of a run that never took the bad step"""


def skip_a_step(settings: Settings, spoil: Spoil, value: float) -> SkippedStep:
    last_rank = dist.get_world_size() - 1
    rig = Rig(settings)
    rig.step(1, rig.halves(1))
    bits = rig.bits()
    undo = spoil(rig, last_rank, value)
    result = rig.step(2, rig.halves(2))
    untouched = rig.bits() == bits
    cleared = not list(gradients(rig.stages))
    undo()
    next_result = rig.step(3, rig.halves(3))

    undisturbed = Rig(settings)
    undisturbed.step(1, undisturbed.halves(1))
    undisturbed.step(3, undisturbed.halves(3))
    return SkippedStep(
        finite=bool(torch.isfinite(result.loss) & torch.isfinite(result.grad_norm)),
        untouched=untouched,
        cleared=cleared,
        skipped=int(result.skipped),
        consecutive=int(result.consecutive),
        skipped_after_next=int(next_result.skipped),
        consecutive_after_next=int(next_result.consecutive),
        next_step_applied=rig.bits() != bits,
        same_as_without=rig.bits() == undisturbed.bits(),
    )


def skip_steps() -> dict[str, SkippedStep]:
    """Return what this rank observed, by layout and failure: all failures of the first layout, one of each other."""
    observed = {}
    for number, (layout, settings) in enumerate(LAYOUTS.items()):
        names = list(FAILURES) if number == 0 else [list(FAILURES)[number % len(FAILURES)]]
        for name in names:
            observed[f"{layout}, {name}"] = skip_a_step(settings, *FAILURES[name])
    return observed


def test_a_step_that_is_not_finite_on_one_rank_is_applied_on_none() -> None:
    expected = SkippedStep(
        finite=False,
        untouched=True,
        cleared=True,
        skipped=1,
        consecutive=1,
        skipped_after_next=1,
        consecutive_after_next=1,
        next_step_applied=True,
        same_as_without=True,
    )
    for rank, observed in enumerate(run(skip_steps, 2)):
        assert len(observed) == len(LAYOUTS) + len(FAILURES) - 1
        for case, step in observed.items():
            assert step == expected, f"{case}, rank {rank}"


def counted_steps() -> list[tuple[int, int]]:
    """skipped and consecutive after each of: good, bad, bad, good, bad."""
    rig = Rig({})
    counts = []
    for number, added in enumerate([0.0, NAN, NAN, 0.0, NAN], start=1):
        undo = bad_loss(rig, 0, added)
        result = rig.step(number, rig.halves(number))
        undo()
        counts.append((int(result.skipped), int(result.consecutive)))
        assert result.z_loss is None
    return counts


def test_skipped_steps_are_counted_and_the_longest_run_of_them() -> None:
    (counts,) = run(counted_steps, 1)
    assert counts == [(0, 0), (1, 1), (2, 2), (2, 2), (3, 2)]


def ragged_steps(settings: Settings) -> dict[str, list[float]]:
    """Losses and token counts with labels that leave data rank 1 none, then nobody any."""
    rig = Rig(settings)

    def only_rank_0(labels: Tensor) -> Tensor:
        labels = labels.clone()
        labels[1 :: rig.mesh.data_size] = IGNORED
        labels[0, 3:] = IGNORED
        return labels

    def none(labels: Tensor) -> Tensor:
        return torch.full_like(labels, IGNORED)

    first = rig.step(1, rig.halves(1, only_rank_0))
    second = rig.step(2, rig.halves(2, none))
    results = [first, second]
    finite = True
    for parameter in rig.stages[0].parameters():
        if isinstance(parameter, DTensor):
            finite &= bool(parameter.to_local().isfinite().all())
    return {
        "loss": [float(r.loss) for r in results],
        "norm": [float(r.grad_norm) for r in results],
        "tokens": [int(r.tokens) for r in results],
        "pairs": [int(r.pairs) for r in results],
        "skipped": [int(r.skipped) for r in results],
        "finite": [float(finite)],
    }


def test_ranks_without_targets() -> None:
    settings = LAYOUTS["fsdp2"]
    first, second = run(ragged_steps, 2, settings)
    assert first == second
    config = tiny({**SMALL, **settings})
    batch = step_batch(config, 1, ragged=False)
    labels = batch.labels.clone()
    labels[1::2] = IGNORED
    labels[0, 3:] = IGNORED
    with torch.device("meta"):
        model = build_model(config.model)
    initialize([model], config.model, CPU, config.run.seed)
    count = int((labels != IGNORED).sum())
    assert count == 4 * 8 - 5
    expected = model(batch.tokens, batch.positions, None, labels).item() / count
    assert first["loss"] == pytest.approx([expected, 0.0], rel=1e-6, abs=0.0)  # no targets at all: no loss, and no nan
    assert first["tokens"] == [count, 0]
    assert first["norm"][0] > 0
    assert first["norm"][1] == 0
    assert first["pairs"] == [8 * (8 * 9 // 2)] * 2
    assert first["skipped"] == [0, 0]
    assert first["finite"] == [1.0]


def masked_pairs() -> tuple[int, int]:
    rig = Rig({"data.document_mask": True})
    documents = step_batch(rig.config, 1, ragged=False).document_ids
    assert documents is not None
    same_document = documents.unsqueeze(1) == documents.unsqueeze(2)
    visible = same_document.tril()  # what the attention cores may see
    result = rig.step(1, rig.halves(1))
    return int(result.pairs), int(visible.sum())


def test_pairs_are_those_that_the_masks_leave() -> None:
    ((counted, visible),) = run(masked_pairs, 1)
    assert counted == visible


def parts_of_a_step() -> Counter[str]:
    """Return how often each phase and each all-reduce occurs in a step."""
    rig = Rig({**LAYOUTS["fsdp2"], "training.z_loss": 0.02})
    batches = rig.halves(1)
    with profile() as profiler:
        rig.step(1, batches)
    return Counter(event.name for event in profiler.events() if event.name.startswith((PREFIX, "c10d::allreduce_")))


def test_a_step_sums_twice_over_the_ranks_and_the_breakdown_knows_its_parts() -> None:
    """The tokens before the backward pass; gradient norm, loss and z-loss after it."""
    parts = run(parts_of_a_step, 2)[0]
    assert parts == {PREFIX + "forward_backward": 1, PREFIX + "optimizer": 1, "c10d::allreduce_": 2}
    assert {PREFIX + "forward_backward", PREFIX + "optimizer"} <= {PREFIX + phase for phase in PHASES}


def result(loss: float, norm: float, skipped: int, consecutive: int) -> StepResult:
    return StepResult(
        loss=torch.tensor(loss),
        grad_norm=torch.tensor(norm),
        tokens=torch.tensor(8),
        pairs=torch.tensor(36),
        learning_rate=1e-3,
        skipped=torch.tensor(skipped),
        consecutive=torch.tensor(consecutive),
    )


def test_the_policy_stop() -> None:
    training = Training(on_nonfinite="stop")
    well = read_health(training, 20, result(2.0, 1.0, 0, 0), 1.5)
    assert well == Health(step=20, skipped=0, validation_loss=1.5, is_lost=False, problem="")
    well.check()
    bad = read_health(training, 20, result(NAN, INFINITY, 2, 1), None)
    assert not bad.is_lost  # one bad step says nothing of the weights
    with pytest.raises(UserError, match=r"2 step\(s\) up to step 20 \(loss nan, gradient norm inf\); none was applied"):
        bad.check()


def test_the_policy_skip_gives_up_after_too_many_in_a_row() -> None:
    training = Training(on_nonfinite="skip", max_consecutive_nonfinite=3)
    two_in_a_row = read_health(training, 20, result(NAN, 1.0, 7, 2), None)
    two_in_a_row.check()
    assert not two_in_a_row.is_lost
    three_in_a_row = read_health(training, 20, result(2.0, 1.0, 7, 3), None)
    assert three_in_a_row.is_lost
    with pytest.raises(UserError, match=r"3 steps in a row up to step 20, the limit of training.max_consecutive_nonf"):
        three_in_a_row.check()


PENALIZED: Settings = {"training.z_loss": 0.02}
WITH_Z_LOSS: list[Settings] = [
    {**PENALIZED, "parallel.dp_shard": 2, "training.loss_chunk": 5},
    {**PENALIZED, "parallel.tp": 2},
    {**PENALIZED, "parallel.pp": 2, "training.micro_batch_size": 4, "model.layers": 2},
]


def losses_of_two_steps(several: list[Settings]) -> list[list[tuple[float, float]]]:
    losses = []
    for settings in several:
        rig = Rig(settings)
        results = [rig.step(1, rig.halves(1)), rig.step(2, rig.halves(1))]
        losses.append([(result.loss.item(), result.z_loss.item()) for result in results])  # type: ignore[union-attr]
    return losses


def test_the_z_loss_of_all_ranks_is_beside_the_loss() -> None:
    """Each is the mean over all target tokens of one plain process; the sum of a step is not in that of the next."""
    for losses_of_layouts in run(losses_of_two_steps, 2, WITH_Z_LOSS):
        for settings, (first, second) in zip(WITH_Z_LOSS, losses_of_layouts, strict=True):
            config = tiny({**SMALL, **settings})
            model = build_model(config.model)
            initialize([model], config.model, CPU, config.run.seed)
            batch = step_batch(config, 1, ragged=False)
            logits = model(batch.tokens, batch.positions).flatten(0, 1).double()
            loss = torch.nn.functional.cross_entropy(logits, batch.labels.flatten())
            z_loss = 0.02 * logits.logsumexp(-1).square().mean()
            assert first == pytest.approx((loss.item(), z_loss.item()), rel=1e-5), settings
            assert second[1] == pytest.approx(z_loss.item(), rel=0.2), settings
            assert second[1] < first[1], settings  # it is minimized


def test_an_optimizer_with_two_modes_trains_in_one_and_leaves_the_other() -> None:
    """Between steps the model has the weights to evaluate."""
    run(_modes_of_steps, 1)


def _modes_of_steps() -> None:
    rig = Rig({})
    modes: list[str] = []
    vars(rig.optimizer).update(train=lambda: modes.append("train"), eval=lambda: modes.append("eval"))
    rig.optimizer.register_step_pre_hook(lambda *_: modes.append("step"))
    for step in (1, 2):
        rig.step(step, rig.halves(step))
    assert modes == ["train", "step", "eval"] * 2
