"""One optimizer step: micro batches -> token-normalized backward -> finite check -> clip -> update."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from inspect import signature
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torchllm.config import Training
from torchllm.config.applied_keys import applied, refuse_unchecked_step
from torchllm.config.errors import UserError
from torchllm.data.batch import Batch
from torchllm.facts.flops import flops_per_key
from torchllm.models.decoder import Decoder
from torchllm.models.head import IGNORED, take_sum
from torchllm.optim.expert_balance import ExpertBalance
from torchllm.optim.grad_norm import clip, squared_norm
from torchllm.optim.optimizer import apply_if_finite, set_mode
from torchllm.parallel.forward_backward import ForwardBackward
from torchllm.parallel.mesh import Mesh
from torchllm.runtime.heartbeat import heartbeat, phase

if TYPE_CHECKING:
    from torchllm.optim.router_balance import StepRouting
    from torchllm.parallel.optimistic import Capacities, Padding


class StepResult(NamedTuple):
    """Results of a step. The tensors are on the device and equal on all ranks; reading one synchronizes."""

    loss: Tensor
    """mean loss in nats over the step's target tokens of all ranks, float32 ()"""
    grad_norm: Tensor
    """global norm before clipping, float64 ()"""
    tokens: Tensor
    """target tokens of all ranks, int64 ()"""
    pairs: Tensor
    """(query, key) pairs that causal mask, window and document mask allow, of all ranks, on average over blocks by
    their `flops_per_key`, float64 (); 0 without attention"""
    learning_rate: float
    skipped: Tensor
    """steps since the start of this process not applied due to a non-finite loss or gradient, int64 ()"""
    consecutive: Tensor
    """longest run of such steps since the start of this process, int64 ()"""
    z_loss: Tensor | None = None
    """training.z_loss times the mean squared log-sum-exp of the target tokens' logits, float32 (); None: z_loss is 0"""
    routing: "StepRouting | None" = None
    """routing statistics of all ranks; None: there are no experts"""
    mtp_loss: Tensor | None = None
    """mean loss of the tokens further ahead, per target token, float32 (); None: model.mtp_depth is 0"""
    padding: "Padding | None" = None
    """cost of the dispatch of experts; None: it is exact"""
    sequences: int = 0
    """of all ranks; 0: training.global_batch_size"""
    length: int = 0
    """tokens in a sequence; 0: training.sequence_length"""


class _OverAllRanks(NamedTuple):
    """Results of a step's backward passes, see `StepResult`."""

    grad_norm: Tensor
    losses: dict[str, Tensor]
    """`loss`, `z_loss` and `mtp_loss` of `StepResult`, those that there are"""
    routing_sums: Tensor
    """for `ExpertBalance.finish_step`; empty without experts"""
    needed: Tensor
    """for `Capacities.fits`; empty if no buffer of experts has a capacity"""


class _Attempt(NamedTuple):
    """Results of running the batches of a step once, see `StepResult`."""

    grad_norm: Tensor
    losses: dict[str, Tensor]
    routing: "StepRouting | None"
    finite: Tensor
    """whether loss and gradient are, bool ()"""


class _NoCapacities:
    """Takes the place of `Capacities` if the buffers of experts have none: every step runs once."""

    padding: "Padding | None" = None

    def __init__(self, device: torch.device) -> None:
        self.nothing = torch.empty(0, dtype=torch.float64, device=device)

    def take_sums(self) -> Tensor:
        return self.nothing

    def fits(self, finite: Tensor, needed: Tensor) -> Tensor:
        return finite

    def must_repeat(self) -> bool:
        return False


class TrainStep:
    """Takes one step on all ranks; the call is the same for every layout.

    Between steps an optimizer with `train` and `eval` has the weights to evaluate and to save in the model.
    """

    def __init__(
        self,
        stages: Sequence[Decoder],
        forward_backward: ForwardBackward,
        optimizer: torch.optim.Optimizer,
        learning_rate: Callable[[int], float],
        mesh: Mesh,
        training: Training,
        device: torch.device,
    ) -> None:
        if (closure := signature(optimizer.step).parameters.get("closure")) and closure.default is closure.empty:
            raise UserError(f"{type(optimizer).__name__}: its step needs a closure, which no step has: use another one")
        self.stages = stages
        self.windows = Counter[int]()
        """weights of blocks with a window in the mean over blocks, by the window"""
        for view in stages[0].model.views:
            self.windows[view.window] += flops_per_key(view)
        divisor = math.gcd(*self.windows.values()) or 1
        self.windows = Counter({window: flops // divisor for window, flops in self.windows.items()})
        self.forward_backward = forward_backward
        self.optimizer = optimizer
        self.learning_rate = learning_rate
        self.mesh = mesh
        self.training = training
        self.device = device
        self.sums_of_head: list[tuple[str, Literal["squares", "ahead"], float]] = []
        """sums of the head that are logged, each with its name and factor"""
        if training.z_loss:
            self.sums_of_head.append(("z_loss", "squares", training.z_loss))
        if stages[0].model.predictions > 1:
            self.sums_of_head.append(("mtp_loss", "ahead", 1.0))
        self.expert_balance = ExpertBalance(stages, training)
        self.capacities: Capacities | _NoCapacities = _NoCapacities(device)
        """of the buffers of experts"""
        if stages[0].padded_chunks:
            from torchllm.parallel import optimistic  # of few runs

            self.capacities = optimistic.Capacities(stages, training, mesh, device)
        applied("parallel.expert_dispatch", "optimistic" if stages[0].padded_chunks else "exact")
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)
        self.skipped_in_a_row = torch.zeros((), dtype=torch.int64, device=device)
        self.longest_run = torch.zeros((), dtype=torch.int64, device=device)

    def __call__(self, step: int, batches: Sequence[Batch]) -> StepResult:
        """Take step number `step` (from 1) on this rank's micro batches of it, which are on its device."""
        refuse_unchecked_step()
        heartbeat().step = step
        set_mode(self.optimizer, "train")
        tokens, pairs = self._count(batches)
        size, length_here = batches[0].tokens.shape
        sequences, length = len(batches) * size * self.mesh.data_size, length_here * self.mesh.cp.size()
        self.expert_balance.begin_step(sequences * length)
        learning_rate = float(self.learning_rate(step))
        if not 0 <= learning_rate < math.inf:
            raise UserError(f"step {step}: the learning rate is {learning_rate}: it must be a number of at least 0")
        done = self._attempt(batches, tokens, learning_rate)
        while self.capacities.must_repeat():
            done = self._attempt(batches, tokens, learning_rate)
        set_mode(self.optimizer, "eval")
        # Not in place: the results of earlier steps have these tensors, and may be read later.
        self.skipped = self.skipped + ~done.finite
        self.skipped_in_a_row = (self.skipped_in_a_row + 1) * ~done.finite
        self.longest_run = torch.maximum(self.longest_run, self.skipped_in_a_row)
        return StepResult(
            grad_norm=done.grad_norm,
            tokens=tokens,
            pairs=pairs,
            learning_rate=learning_rate,
            skipped=self.skipped,
            consecutive=self.longest_run,
            routing=done.routing,
            padding=self.capacities.padding,
            sequences=sequences,
            length=length,
            **done.losses,
        )

    def _attempt(self, batches: Sequence[Batch], tokens: Tensor, learning_rate: float) -> _Attempt:
        """Run the batches, and update the weights unless a number is not finite or rows of experts did not fit."""
        with phase("forward_backward"):  # a step without a target has gradients of 0, not nan
            loss = self.forward_backward(batches, 1.0 / tokens.clamp(min=1))
        norm, losses, routing_sums, needed = self._over_all_ranks(loss, tokens)
        # Both: a gradient may overflow behind a finite loss, and one rank of tp alone may have a loss that is nan.
        finite = torch.isfinite(norm) & torch.isfinite(losses["loss"])
        is_applied = self.capacities.fits(finite, needed)
        clip(self.stages, norm, self.training.max_grad_norm)
        routing = self.expert_balance.finish_step(is_applied, sums=routing_sums)
        with phase("optimizer"):
            apply_if_finite(self.optimizer, learning_rate, is_applied)
            self.optimizer.zero_grad()  # frees them before an evaluation or a save
        return _Attempt(norm, losses, routing, finite)

    def _over_all_ranks(self, loss: Tensor, tokens: Tensor) -> _OverAllRanks:
        """Return the results of all ranks, by one message; `loss`: this rank's part.

        Losses are also summed over tp ranks, although they have equal values: a nan on one of them must stop all.
        """
        parts = {"norm": squared_norm(self.stages, self.device), "loss": loss.double()}
        for name, in_head, factor in self.sums_of_head:
            total = take_sum(self.stages, in_head)
            parts[name] = (torch.zeros_like(loss) if total is None else factor * total / tokens.clamp(min=1)).double()
        own = [part.view(1) for part in parts.values()]
        routed, needed = self.expert_balance.take_sums(self.device).flatten(), self.capacities.take_sums()
        message = torch.cat((*own, routed, needed))
        dist.all_reduce(message)
        sums, routed, needed = message.split((len(own), len(routed), len(needed)))
        losses = dict(zip([*parts][1:], sums[1:].float() / self.mesh.tp.size(), strict=True))
        return _OverAllRanks(sums[0].sqrt(), losses, routed, needed)

    def _count(self, batches: Sequence[Batch]) -> tuple[Tensor, Tensor]:
        """Return the target tokens, int64 (), and the pairs of `StepResult` of the micro batches of all ranks.

        FOOTGUN: the sum over ranks comes before the first backward, so that every gradient is divided by the global
        token count. A mean per rank, averaged over ranks, is silently wrong where ranks have unequal numbers of
        targets.
        """
        counts = []
        for batch in batches:
            tokens = (batch.labels != IGNORED).sum()
            keys = batch.positions + 1  # that each token sees
            pairs = torch.zeros_like(tokens)
            for window, weight in self.windows.items():
                pairs += weight * (keys.clamp(max=window) if window else keys).sum()
            counts.append(torch.stack((tokens, pairs)))
        sums = torch.stack(counts).sum(0)
        dist.all_reduce(sums, group=self.mesh.loss_group)
        tokens, pairs = sums
        return tokens, pairs.double() / max(1, self.windows.total())


class Health(NamedTuple):
    """Health of a run at a logged step, equal on all ranks."""

    step: int
    skipped: int
    """steps since the start of this process not applied due to a non-finite loss or gradient"""
    validation_loss: float | None
    """nats per token; None: nothing was evaluated in this step"""
    is_lost: bool
    """the weights may be bad: too many non-finite steps in a row"""
    problem: str
    """message to the user why the run must end; empty: it goes on"""

    def check(self) -> None:
        """Raise UserError if the run must end."""
        if self.problem:
            raise UserError(self.problem)


def read_health(training: Training, step: int, result: StepResult, validation_loss: float | None) -> Health:
    """Return the health of the run by its policy for non-finite steps. Waits for the device."""
    applied("training.on_nonfinite", training.on_nonfinite)
    applied("training.max_consecutive_nonfinite", training.max_consecutive_nonfinite)
    skipped, consecutive = int(result.skipped), int(result.consecutive)
    is_lost = consecutive >= training.max_consecutive_nonfinite
    problem = ""
    if training.on_nonfinite == "stop" and skipped:
        problem = (
            f"loss or gradient was not finite in {skipped} step(s) up to step {step} (loss {float(result.loss):g}, "
            f"gradient norm {float(result.grad_norm):g}); none was applied. Lower optimizer.learning_rate, check the "
            'data of these steps, or set training.on_nonfinite = "skip".'
        )
    elif is_lost:
        problem = (
            f"loss or gradient was not finite in {consecutive} steps in a row up to step {step}, the limit of "
            "training.max_consecutive_nonfinite; none was applied. Lower optimizer.learning_rate, or check the data of "
            "these steps."
        )
    return Health(step, skipped, validation_loss, is_lost, problem)
