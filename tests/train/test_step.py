"""The step: what is not finite on one rank is applied on none; token counts are global; the policy's errors."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import profile

from tests.optim.test_optimizer import bits
from tests.parity import Settings, Trainer, rows_of, step_batch, tiny
from tests.workers import WorkerFailed, run
from torchllm.config import Kinds, Training
from torchllm.config.errors import UserError
from torchllm.data.batch import Batch
from torchllm.models.decoder import build_model
from torchllm.models.head import IGNORED
from torchllm.optim.grad_norm import gradients
from torchllm.optim.router_balance import find_routers
from torchllm.parallel.initialize import initialize
from torchllm.runtime.heartbeat import PREFIX
from torchllm.tools.watch.breakdown import PHASES
from torchllm.train.step import Health, StepResult, TrainStep, read_health

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
        whole = step_batch(self.config, number, ragged=False)
        whole = whole._replace(labels=labels(whole.labels))
        of_this_rank = rows_of(whole, slice(self.mesh.data_rank, None, self.mesh.data_size))
        half = len(of_this_rank.tokens) // 2
        return [rows_of(of_this_rank, slice(0, half)), rows_of(of_this_rank, slice(half, None))]

    def bits(self) -> list[list[bytes]]:
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


def sizes_of_steps(settings: Settings) -> list[tuple[int, int, int]]:
    """Return sequences, length and the routers' tokens per step of two steps, of which the second is half a batch."""
    rig = Rig(settings)
    (router,) = find_routers(rig.stages).values()
    found = []
    for batches in (rig.halves(1), rig.halves(2)[:1]):
        result = rig.step(1, batches)
        found.append((result.sequences, result.length, router.tokens_per_step))
    return found


@pytest.mark.parametrize("layout", [{"parallel.dp_shard": 2}, {"parallel.cp": 2}], ids=["dp2", "cp2"])
def test_a_step_tells_its_size_also_to_routers(layout: Settings) -> None:
    settings = {**layout, "model.experts": 4, "model.balance_loss": "sequence"}
    if "parallel.cp" in layout:  # `halves` cuts no sequences: each rank has 8 tokens of 16
        assert run(sizes_of_steps, 2, settings)[0] == [(8, 16, 128), (4, 16, 64)]
    else:
        assert run(sizes_of_steps, 2, settings) == [[(8, 8, 64), (4, 8, 32)]] * 2


Spoil = Callable[[Rig, int, float], Callable[[], None]]
NAN = float("nan")
INFINITY = float("inf")
FAILURES: dict[str, tuple[Spoil, float]] = {
    "loss": (bad_loss, NAN),
    "gradient": (bad_gradient, INFINITY),
    "micro batch": (bad_micro_batch, NAN),
}


def check_skipped_step(settings: Settings, spoil: Spoil, value: float) -> None:
    """Check, on this rank, that a step that is not finite on the last rank changes nothing."""
    rig = Rig(settings)
    rig.step(1, rig.halves(1))
    before = rig.bits()
    undo = spoil(rig, dist.get_world_size() - 1, value)
    skipped = rig.step(2, rig.halves(2))
    assert not torch.isfinite(skipped.loss) & torch.isfinite(skipped.grad_norm)
    assert rig.bits() == before
    assert not list(gradients(rig.stages))
    undo()
    applied = rig.step(3, rig.halves(3))
    assert [(int(result.skipped), int(result.consecutive)) for result in (skipped, applied)] == [(1, 1)] * 2
    undisturbed = Rig(settings)
    undisturbed.step(1, undisturbed.halves(1))
    undisturbed.step(3, undisturbed.halves(3))
    assert rig.bits() == undisturbed.bits() != before


def check_skipped_steps() -> None:
    """Check all failures of the first layout, one of each other."""
    for number, (layout, settings) in enumerate(LAYOUTS.items()):
        names = list(FAILURES) if number == 0 else [list(FAILURES)[number % len(FAILURES)]]
        for name in names:
            try:
                check_skipped_step(settings, *FAILURES[name])
            except AssertionError as error:
                raise AssertionError(f"{layout}, {name}") from error


def test_a_step_that_is_not_finite_on_one_rank_is_applied_on_none() -> None:
    run(check_skipped_steps, 2)


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


def step_without_targets() -> tuple[float, ...]:
    """Return loss, gradient norm, tokens, pairs and skipped steps, and whether this rank's weights are finite."""
    rig = Rig(LAYOUTS["fsdp2"])
    result = rig.step(1, rig.halves(1, lambda labels: torch.full_like(labels, IGNORED)))
    is_finite = all(parameter.to_local().isfinite().all() for parameter in rig.stages[0].parameters())
    numbers = (result.loss, result.grad_norm, result.tokens, result.pairs, result.skipped)
    return *map(float, numbers), is_finite


def test_without_any_target_there_is_no_loss_and_no_nan() -> None:
    """The lattice has batches of which one rank has none."""
    assert run(step_without_targets, 2) == [(0, 0, 0, 8 * (8 * 9 // 2), 0, True)] * 2


def parts_of_a_step(settings: Settings) -> Counter[str]:
    """Return how often each phase and each all-reduce occurs in a step."""
    rig = Rig({**LAYOUTS["fsdp2"], **settings})
    batches = rig.halves(1)
    with profile() as profiler:
        rig.step(1, batches)
    names = [event.name for event in profiler.events() if not event.name.startswith("torchllm::grouped_")]  # products
    return Counter(name for name in names if name.startswith((PREFIX, "c10d::allreduce_")))


@pytest.mark.parametrize("settings", [{"training.z_loss": 0.02}, {"model.experts": 4, "model.router_bias": True}])
def test_a_step_sums_twice_over_the_ranks_and_the_breakdown_knows_its_parts(settings: Settings) -> None:
    """The tokens before the backward pass; gradient norm, losses and the tokens of each expert after it."""
    parts = run(parts_of_a_step, 2, settings)[0]
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
    with pytest.raises(UserError, match=r"3 steps in a row up to step 20, .*; none was applied\. Lower optimizer\."):
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


KINDS: Settings = {
    "model.layers": 3,
    "model.window": 4,
    "model.pattern": ("local", "usual", "full"),
    "model.kinds": Kinds(local={"window": 2}, usual={}, full={"window": 0}),
    "data.document_mask": True,
}


def pairs_of_layouts(several: list[Settings]) -> list[float]:
    return [(rig := Rig({**KINDS, **settings})).step(1, rig.halves(1)).pairs.item() for settings in several]


def test_pairs_are_those_of_the_windows_of_all_blocks() -> None:
    """On average over blocks with attention; a stage counts those of the others, too."""
    positions = step_batch(tiny({**SMALL, **KINDS}), 1, ragged=False).positions
    two, four, all_tokens = ((positions + 1).clamp(max=window).sum().item() for window in (2, 4, 8))
    delta = {"mixer": "gated_delta", "window": 0}
    layouts: list[Settings] = [{"parallel.dp_shard": 2}, {"parallel.pp": 2, "training.micro_batch_size": 4}]
    for kinds in (
        {"local": {"window": 2}, "usual": delta, "full": {"window": 0}},
        dict.fromkeys(KINDS["model.pattern"], delta),
    ):
        layouts.append({"parallel.dp_shard": 2, "model.kinds": Kinds(kinds)})
    mean = (two + four + all_tokens) / 3
    for found in run(pairs_of_layouts, 2, layouts):
        assert found == pytest.approx([mean, mean, (two + all_tokens) / 2, 0], rel=1e-12)


def rate_of_a_step(rate: Any) -> float:
    trainer = Trainer(tiny({}))
    trainer.step.learning_rate = lambda step: rate
    return trainer.step(1, trainer.batches(1, ragged=False)).learning_rate


def test_a_rate_is_a_number_that_records_can_hold_or_is_refused() -> None:
    """A schedule of a fork may compute with torch or numpy; with a rate that is nan all weights would be lost."""
    (rate,) = run(rate_of_a_step, 1, torch.tensor(0.5))
    assert (type(rate), rate) == (float, 0.5)
    for wrong in (float("nan"), float("inf"), -0.5):
        with pytest.raises(WorkerFailed, match=rf"step 1: the learning rate is {wrong}: it must be a number of at"):
            run(rate_of_a_step, 1, wrong)


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


def test_an_optimizer_whose_step_needs_a_closure_is_refused() -> None:
    optimizer = torch.optim.LBFGS([torch.zeros(2, requires_grad=True)])
    stages = [build_model(tiny(SMALL).model)]
    with pytest.raises(UserError, match="LBFGS: its step needs a closure"):
        TrainStep(stages, lambda *_: None, optimizer, lambda _: 0.1, None, Training(), CPU)  # type: ignore[arg-type]  # not reached
