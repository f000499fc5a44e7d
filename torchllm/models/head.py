"""Output projection and loss in one module: the last thing a pipeline's last stage runs.

One forward does both, so that chunks of logits never leave it, the vocabulary can be sharded, and FSDP gathers the
weight once. It returns sums: only the step knows the number of target tokens over all ranks, and means of means are
wrong.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torchllm.config import Model
from torchllm.facts.parts.part import found
from torchllm.models.layers import soft_capped, widened

IGNORED = -100
"""label of a position that has no target"""
Sum = Literal["squares", "ahead"]
SUMS: tuple[Sum, ...] = get_args(Sum)
"""attributes of a head that sum over forward passes"""


def cross_entropy_sum(logits: Tensor, labels: Tensor, vocab: int | None = None) -> Tensor:
    """Return the sum of -log p(label), in nats, over the labels that are not `IGNORED`.

    logits (N, V), labels (N) -> () float32. vocab: number of tokens; columns after it are left out; None: V.
    """
    logits = logits_of_tokens(logits, vocab)
    return F.cross_entropy(widened(logits), labels, ignore_index=IGNORED, reduction="sum")


def cross_entropy_and_squares(logits: Tensor, labels: Tensor, vocab: int | None = None) -> Tensor:
    """Return `cross_entropy_sum`, and the sum of the squared log-sum-exps of the logits, over the same labels.

    logits (N, V), labels (N) -> (2) float32. The log-sum-exp is the loss plus the target's logit, so that it needs no
    tensor as large as the logits except, in the backward pass, a gradient in the dtype of the logits.
    """
    logits = logits_of_tokens(logits, vocab)
    is_target = labels != IGNORED
    rows = torch.arange(len(labels), device=labels.device)
    targets = widened(logits[rows, labels.where(is_target, 0)])  # gather would keep the logits for its backward
    losses = F.cross_entropy(widened(logits), labels, ignore_index=IGNORED, reduction="none")
    log_sum_exp = (losses + targets).where(is_target, 0.0)
    return torch.stack((losses.sum(), log_sum_exp.square().sum()))


def logits_of_tokens(logits: Tensor, vocab: int | None) -> Tensor:
    """Return the logits (..., V) of the first `vocab` tokens, all if it is None."""
    return logits if vocab is None else logits[..., :vocab]


class Head(nn.Module):
    """Computes the sum of the loss from hidden states and labels, or logits if there are no labels.

    `cross_entropy` (compiled, vocabulary-parallel), `project` (with its weight's gradient deferred) and `local` (the
    part of a sharded factor that is on this rank) are replaceable. If `chunk` is over 0, logits of only that many
    tokens exist at a time.

    With `z_loss` over 0 the gradients include z_loss times the squared log-sum-exp of each target token's logits (PaLM,
    section 5: Chowdhery et al. 2022, arXiv 2204.02311); `cross_entropy` then returns both sums. The head still returns
    the loss alone, comparable with a run without z-loss.
    """

    def __init__(self, model: Model, chunk: int, z_loss: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(model.vocab_rows, model.hidden))
        self.vocab = model.vocab if model.vocab_padding else None
        """number of tokens, if there are more rows"""
        self.cross_entropy: Callable[[Tensor, Tensor], Tensor] = partial(
            cross_entropy_and_squares if z_loss else cross_entropy_sum, vocab=self.vocab
        )
        self.local: Callable[[Tensor], Tensor] = lambda factor: factor
        self.divisor = model.logit_divisor
        self.softcap = model.logit_softcap
        self.chunk = chunk
        self.z_loss = z_loss
        self.squares: Tensor | None = None
        """with z_loss: sum of the squared log-sum-exps of the forward passes since `take_sum`, float32 ()"""
        self.mtp_weight = model.mtp_weight
        self.ahead: Tensor | None = None
        """with model.mtp_depth: sum of the mean loss of the tokens further ahead, in the same way"""
        self.text_labels: Tensor | None = None
        """in an evaluation: labels (B, S) of the next forward pass without special tokens, and ..."""
        self.text_loss: Tensor | None = None
        """... the sum of the loss over these, () float32"""
        self.recomputes_logits = False
        """with a chunk: compute the logits again in the backward pass, instead of all gradients in the forward pass.
        For pipeline schedules that defer the weight's gradient, or run many forward passes before a backward pass:
        each forward would keep a gradient as large as the weight"""

    def forward(self, hidden: Tensor, labels: Tensor | None = None, depth: int = 0) -> Tensor:
        """Return the sum of the loss in nats, () float32; with labels None, the logits (B, S, V) of all tokens.

        hidden: (B, S, D). labels: (B, S). depth: tokens further ahead whose hidden states and labels follow in both,
        ((1 + depth) B, ...); their mean loss is in the gradients, times `mtp_weight`, and not in the result.
        """
        if self.divisor != 1:
            hidden = hidden / self.divisor  # smaller than the logits
        if labels is None:
            return soft_capped(logits_of_tokens(self.project(hidden), self.vocab), self.softcap)
        of_depths = zip(hidden.chunk(1 + depth), labels.chunk(1 + depth), strict=True) if depth else [(hidden, labels)]
        sums, *further = [self._sums(rows.flatten(0, 1), targets.flatten()) for rows, targets in of_depths]
        loss, squares = self._with_penalty(sums)
        if self.text_labels is not None:
            self.text_loss = self._with_penalty(self._sums(hidden.flatten(0, 1), self.text_labels.flatten())).loss
            self.text_labels = None
        if squares is not None:
            self.squares = squares if self.squares is None else self.squares + squares
        if not further:
            return loss
        mean = torch.stack([self._with_penalty(sums).loss for sums in further]).mean()
        self.ahead = mean.detach() if self.ahead is None else self.ahead + mean.detach()
        return _with_gradient(loss, self.mtp_weight * mean)

    def _with_penalty(self, sums: Tensor) -> "_Loss":
        """Return the loss, whose gradient includes its z-loss. sums: as `cross_entropy` returns them."""
        if not self.z_loss:
            return _Loss(sums, None)
        loss, squares = sums
        if not torch.is_grad_enabled():
            return _Loss(loss, None)
        return _Loss(_with_gradient(loss, self.z_loss * squares), squares.detach())

    def _sums(self, rows: Tensor, targets: Tensor) -> Tensor:
        """Return the result of `cross_entropy` over all rows (N, D) and targets (N)."""
        if not self.chunk:
            return self._chunk_sums(rows, targets)
        if torch.is_grad_enabled() and not self.recomputes_logits:
            with_gradients: Any = found("torchllm.models.chunked_loss:SumsWithGradients")  # for runs with chunks alone
            sums: Tensor = with_gradients.apply(self.local(rows), self.local(self.weight), targets, self)
            return sums
        chunks = []
        for some_rows, some_targets in zip(rows.split(self.chunk), targets.split(self.chunk), strict=True):
            chunks.append(checkpoint(self._chunk_sums, some_rows, some_targets, use_reentrant=False))
        return torch.stack(chunks).sum(0)

    def _chunk_sums(self, rows: Tensor, targets: Tensor) -> Tensor:
        return self.cross_entropy(soft_capped(self.project(rows), self.softcap), targets)

    def project(self, rows: Tensor) -> Tensor:
        """Return the logits of hidden states: (..., D) -> (..., V)."""
        return F.linear(rows, self.weight)


class _Loss(NamedTuple):
    """A loss, () float32, and with a z-loss the sum of the squared log-sum-exps."""

    loss: Tensor
    squares: Tensor | None


def _with_gradient(loss: Tensor, other: Tensor) -> Tensor:
    """Return the value of the loss, with the gradient of both."""
    return loss + (other - other.detach())


def take_sum(stages: Iterable[nn.Module], name: Sum) -> Tensor | None:
    """Return a sum of the heads in these stages, `Head.squares` or `Head.ahead`, float32 (), and reset it.

    None if there is no head, or none of its forward passes has the sum.
    """
    for stage in stages:
        head = getattr(stage, "lm_head", None)
        if head is not None and getattr(head, name) is not None:
            total: Tensor = getattr(head, name)
            setattr(head, name, None)
            return total
    return None
