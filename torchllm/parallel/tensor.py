"""Tensor parallelism (Narayanan et al. 2021, section 2.3) and sequence parallelism (Korthikanti et al. 2022, 4.2.2).

Sharded: q, k, v, gate and up by output features, so that each tp rank has some heads and some of F; o and down by input
features; embedding and head by vocabulary. Norms, position table and the biases after a sum are whole on every rank.
The declarations in `facts/parts` say how each parameter is cut; `parallelize_module` cuts it.

Sent, in every block, without sequence parallelism: an all-reduce of the hidden states (B, S, D) after o and one after
down, and in the backward one before q and one before gate. With sequence parallelism each of these is a reduce-scatter
over the sequence and, before q and gate, an all-gather: the same bytes, but norms and residuals hold only S / tp
tokens. The gradients of the norms' weights, D numbers each, are summed then; for the norms of q and k (model.qk_norm =
"head"), Q numbers each, always, because each rank has other heads. Norms of q and k over the whole width (model.qk_norm
= "width") are sharded like the heads, and all-reduce one number per token each, in the forward and in the backward. The
loss sends three numbers per token, never the logits. Low-rank updates (LoRA) are sharded like their matrices; one
factor is whole on every rank, and its gradient is summed (`LowRankUpdate`). A part whose cuts do not say all has styles
in a file here (`BlockPart.styles`), as experts have (`tensor_experts.py`).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from torchllm.facts.parameters import canonical_name, rule_of
from torchllm.facts.parts.part import Cut, found
from torchllm.facts.parts.registry import around, feed_forward, mixer
from torchllm.models.decoder import Decoder
from torchllm.models.gpt_layers import LayerNorm
from torchllm.models.head import IGNORED, Head
from torchllm.models.layers import RMSNorm, widened
from torchllm.models.lora import LowRankFactor, UpdatedLinear, add_low_rank_update
from torchllm.runtime.torch_compat import local_region


def apply_tensor_parallel(stage: Decoder, mesh: DeviceMesh, sequence_parallel: bool, shares_experts: bool) -> None:
    """Cut a stage's parameters over the tp ranks, in place. mesh: one dimension, the tp ranks.

    shares_experts: each rank has some experts, whole (expert parallelism).

    FOOTGUN: `parallelize_module` replaces the embedding's and the head's parameters one by one, so a tied embedding
    would silently become two weights; `tie_embeddings` makes them one again.
    """
    hidden: Placement = Shard(1) if sequence_parallel else Replicate()  # layout of (B, S, D) between the matrices
    styles: dict[tuple[str, type[nn.Module]], Callable[[], ParallelStyle]] = {
        ("vocab", nn.Embedding): lambda: VocabParallelEmbedding(hidden),
        ("vocab", Head): lambda: VocabParallelHead(hidden),
        ("colwise", nn.Linear): ColwiseParallel,
        ("rowwise", nn.Linear): lambda: RowwiseParallel(output_layouts=hidden),
        ("whole", RMSNorm): lambda: WholeNorm(Partial() if sequence_parallel else Replicate()),
        ("whole", LayerNorm): lambda: WholeNorm(Partial() if sequence_parallel else Replicate()),
        ("whole_per_head", RMSNorm): lambda: WholeNorm(Partial()),
        ("colwise", RMSNorm): WidthParallelNorm,
        ("whole", nn.Embedding): lambda: WholePositions(hidden),
    }
    plan: dict[str, ParallelStyle] = {}
    done: list[str] = []
    """prefixes of low-rank updates, whose styles cut all that is inside"""
    of_parts: set[str] = set()
    """modules that the styles of their part cut: itself, and those with parameters"""
    for index, block in stage.layers.items():
        view = stage.model.of_block(int(index))
        for place, part in (("", around(view)), ("self_attn", mixer(view)), ("mlp", feed_forward(view))):
            if part and part.styles:
                styles_inside = found(part.styles)(block.get_submodule(place), hidden, shares_experts)
                prefix = f"layers.{index}.{place}".removesuffix(".")
                plan |= {f"{prefix}.{name}".removesuffix("."): style for name, style in styles_inside.items()}
                of_parts |= {prefix, *(f"layers.{index}.{parameter.module}" for parameter in part.parameters)}
    for name, module in stage.named_modules():
        if isinstance(module, UpdatedLinear):
            plan[name] = LowRankUpdate(rule_of(canonical_name(f"{name}.weight")).cut, hidden)
            done.append(f"{name}.")
        elif name in plan or name in of_parts or f"{name}.".startswith(tuple(done)):
            continue
        elif parameters := dict(module.named_parameters(recurse=False)):
            kind = nn.Linear if isinstance(module, nn.Linear) else type(module)  # the float8 style is derived from it
            cuts = {parameter: rule_of(canonical_name(f"{name}.{parameter}")).cut for parameter in parameters}
            if make_style := styles.get((cuts.get("weight", "whole"), kind)):
                plan[name] = make_style()
            else:
                from torchllm.parallel.added_parameters import AddedParameters  # of no use to other models

                plan[name] = AddedParameters(name, set(cuts.values()), sequence_parallel)
        elif name.endswith((".self_attn", ".mlp")):
            plan[name] = WholeInput(hidden)
    frozen = [name for name, parameter in stage.named_parameters() if not parameter.requires_grad]
    parallelize_module(stage, mesh, plan)
    for name in frozen:  # a style may have made a new parameter, which is trained
        stage.get_parameter(name).requires_grad_(False)
    stage.tie_embeddings()


def gathered(x: DTensor) -> DTensor:
    """Return hidden states (B, S, D) that every rank has whole. The attribute `gather` of modules: `regather.py`."""
    return x.redistribute(placements=[Replicate()])


class WholeInput(ParallelStyle):
    """Gives a module whole hidden states: one gather for q, k and v, and one reduction of the sum of their gradients.

    of_output: style of the module's output; None: the modules inside have their own.
    """

    def __init__(self, hidden: Placement, of_output: ParallelStyle | None = None) -> None:
        self.hidden = hidden
        self.of_output = of_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.gather = gathered  # type: ignore[assignment]  # a seam
        module.register_forward_pre_hook(partial(self._gather, device_mesh))
        return self.of_output._apply(module, device_mesh) if self.of_output else module

    def _gather(self, mesh: DeviceMesh, module: nn.Module, inputs: Any) -> Any:
        x, *others = inputs
        return module.gather(DTensor.from_local(x, mesh, [self.hidden], run_check=False)), *others  # type: ignore[operator]


class WholeNorm(ParallelStyle):
    """A norm whose weights are on every rank while its tokens or heads may be sharded.

    The weights become replicated DTensors, so that every parameter is on the tp mesh and the gradient norm and
    checkpoints see one kind; the kernel gets plain tensors. `gradient` is the placement of their gradient: Partial,
    which DTensor sums, if a rank has only its own tokens (sequence parallelism) or its own heads (norms of q and k);
    Replicate if every rank computes the same.
    """

    def __init__(self, gradient: Placement) -> None:
        self.gradient = gradient

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, RMSNorm | LayerNorm)
        distribute_module(module, device_mesh)
        kernel = module.kernel

        def on_local_weights(x: Tensor, *arguments: Any) -> Tensor:
            return kernel(x, *map(self._to_local, arguments))

        module.kernel = on_local_weights
        return module

    def _to_local(self, argument: Any) -> Any:
        """Return the plain tensor of a weight or bias; any other argument of the kernel unchanged."""
        if isinstance(argument, DTensor):
            return argument.to_local(grad_placements=[self.gradient])
        return argument


class WidthParallelNorm(ParallelStyle):
    """An RMSNorm over a width that is sharded over the ranks, in its input and in its weight.

    The mean square covers the whole width: the ranks' sums of squares are added up, and in the backward the gradients
    of that sum.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, RMSNorm)
        assert module.weight is not None
        weight = distribute_tensor(module.weight, device_mesh, [Shard(0)])
        module.register_parameter("weight", nn.Parameter(weight))
        module.kernel = partial(width_parallel_rms_norm, mesh=device_mesh, has_offset=module.has_offset)
        return module


def width_parallel_rms_norm(
    x: Tensor, weight: DTensor, epsilon: float, mesh: DeviceMesh, has_offset: bool = False
) -> Tensor:
    """Return `models.layers.rms_norm` of x (..., width / tp), this rank's part of the width, in x's dtype.

    weight: (width), sharded. mesh: one dimension, the tp ranks. has_offset: the weight is added to 1.
    """
    wide = widened(x)
    squares = sum_over_ranks(wide.square().sum(-1, keepdim=True), mesh)
    scale = torch.rsqrt(squares / weight.shape[0] + epsilon)
    own_weight = weight.to_local(grad_placements=[Shard(0)])
    factor = 1.0 + widened(own_weight) if has_offset else own_weight
    return (wide * scale * factor).to(x.dtype)


def sum_over_ranks(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the sum of the tensors `x` of all ranks, if each rank computes a different result from it.

    Its gradient is therefore summed over the ranks too. FOOTGUN: DTensor's own backward of a sum sends nothing, because
    it assumes that every rank uses the sum in the same way: the second DTensor here sums the gradients.
    """
    total = DTensor.from_local(x, mesh, [Partial()], run_check=False).redistribute(placements=[Replicate()]).to_local()
    same_on_all_ranks = DTensor.from_local(total, mesh, [Replicate()], run_check=False)
    return same_on_all_ranks.to_local(grad_placements=[Partial()])


class LowRankUpdate(ParallelStyle):
    """A linear layer and its low-rank update (LoRA), sharded equally; only gradients are sent for the update.

    colwise: each rank has some of the rows of W and of B, so some of the output features, and the whole A. Its gradient
    of A comes from these features alone: a part of a sum over tp.

    rowwise: each rank has some of the columns of W and of A, so a part of the sums W x and A x, and the whole B. W x
    and the update are added before they are summed over tp, as W x alone would be. A rank's gradient of B comes from
    its own part of A x: again a part of a sum.
    """

    gradient_of_whole_factor: Placement = Partial()
    """placement of the gradient of the factor that is whole on every rank"""

    def __init__(self, cut: Cut, hidden: Placement) -> None:
        self.cut = cut
        self.hidden = hidden

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, UpdatedLinear)
        if self.cut == "colwise":
            parallelize_module(module.base_layer, device_mesh, ColwiseParallel())
            _distribute_factor(module.lora_A, device_mesh, Replicate())
            _distribute_factor(module.lora_B, device_mesh, Shard(0))
            module.add_update = self._add_to_own_features
        else:
            sums = RowwiseParallel(output_layouts=Partial(), use_local_output=False)
            parallelize_module(module.base_layer, device_mesh, sums)
            _distribute_factor(module.lora_A, device_mesh, Shard(1))
            _distribute_factor(module.lora_B, device_mesh, Replicate())
            module.add_update = self._add_to_part_of_sum
        return module

    def _add_to_own_features(self, out: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        """Return this rank's features, out (..., N / tp), from x (..., M), whole on each rank."""
        assert isinstance(x, DTensor)
        assert isinstance(a, DTensor)
        assert isinstance(b, DTensor)
        local_x = x.to_local(grad_placements=[Partial()])
        local_a = a.to_local(grad_placements=[self.gradient_of_whole_factor])
        return add_low_rank_update(out, local_x, local_a, b.to_local(grad_placements=[Shard(0)]), scale)

    def _add_to_part_of_sum(self, out: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        """Return the sum over tp, laid out as hidden states are: out (..., N), a part of it; x (..., M / tp), local."""
        assert isinstance(out, DTensor)
        assert isinstance(a, DTensor)
        assert isinstance(b, DTensor)
        local_out = out.to_local(grad_placements=[Replicate()])
        local_b = b.to_local(grad_placements=[self.gradient_of_whole_factor])
        part = add_low_rank_update(local_out, x, a.to_local(grad_placements=[Shard(1)]), local_b, scale)
        total = DTensor.from_local(part, out.device_mesh, [Partial()], run_check=False)
        return total.redistribute(placements=[self.hidden]).to_local()


def _distribute_factor(factor: LowRankFactor, mesh: DeviceMesh, placement: Placement) -> None:
    """Cut one factor of an update over the tp ranks, in place."""
    factor.weight = nn.Parameter(distribute_tensor(factor.weight, mesh, [placement]))


class WholePositions(ParallelStyle):
    """The learned position table, whole on every rank; looks up only this rank's part of a sharded sequence."""

    def __init__(self, hidden: Placement) -> None:
        self.hidden = hidden

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, input_fn=self._take_part, output_fn=self._to_local)

    def _take_part(self, module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        positions = DTensor.from_local(inputs[0], mesh, [Replicate()], run_check=False)
        return positions.redistribute(placements=[self.hidden])

    def _to_local(self, module: nn.Module, out: Any, mesh: DeviceMesh) -> Any:
        return out.to_local()


class VocabParallelEmbedding(ParallelStyle):
    """The embedding, cut by vocabulary: a rank looks up the tokens whose rows it holds, and the results are summed.

    torch's RowwiseParallel does that too, but its backward makes the gradient of the whole table on every rank.
    FOOTGUN: its output is also still in flight, and a compiled first block behind it silently loses the embedding's
    gradient.
    """

    def __init__(self, hidden: Placement) -> None:
        self.hidden = hidden

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Embedding)
        weight = distribute_tensor(module.weight, device_mesh, [Shard(0)])
        module.register_parameter("weight", nn.Parameter(weight))
        first = _first_row(weight)

        def look_up(tokens: Tensor) -> Tensor:
            """Map tokens (B, S) -> hidden states (B, S, D), or (B, S / tp, D) under sequence parallelism."""
            assert isinstance(module.weight, DTensor)
            local_weight = module.weight.to_local(grad_placements=[Shard(0)])
            row = tokens - first
            is_local = (row >= 0) & (row < len(local_weight))
            rows = F.embedding(row.where(is_local, 0), local_weight)  # of other ranks' tokens: any row, then 0
            rows = rows.where(is_local.unsqueeze(-1), 0.0)
            out = DTensor.from_local(rows, device_mesh, [Partial()], run_check=False)
            return out.redistribute(placements=[self.hidden]).to_local()

        module.forward = look_up  # type: ignore[method-assign, assignment]  # the module stays torch's own
        return module


class VocabParallelHead(ParallelStyle):
    """The head, cut by vocabulary: hidden states are gathered once, logits never."""

    def __init__(self, hidden: Placement) -> None:
        self.hidden = hidden

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, self._cut, self._gather)

    def _cut(self, name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        assert isinstance(module, Head)
        weight = distribute_tensor(module.weight, mesh, [Shard(0)])
        module.register_parameter("weight", nn.Parameter(weight))
        module.cross_entropy = partial(
            vocab_parallel_cross_entropy_sum,
            first=_first_row(weight),
            group=mesh.get_group(),
            with_squares=module.z_loss > 0,
            vocab=module.vocab,
        )
        module.local = _local_factor

    def _gather(self, module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        hidden, *labels = inputs
        hidden = DTensor.from_local(hidden, mesh, [self.hidden], run_check=False)
        return hidden.redistribute(placements=[Replicate()]), *labels


def _local_factor(factor: Tensor) -> Tensor:
    """Return this rank's part of hidden states (N, D), whole on each rank, or of the weight (V, D), sharded over V.

    Each rank has some of the columns of their product, and so a part of the sum that the whole factor's gradient is.
    """
    assert isinstance(factor, DTensor)
    gradients = [Partial() if placement.is_replicate() else placement for placement in factor.placements]
    return factor.to_local(grad_placements=gradients)


def _first_row(weight: DTensor) -> int:
    """Return the token of the first row of the vocabulary that this rank holds."""
    _, offset = local_region(weight)
    return offset[0]


def vocab_parallel_cross_entropy_sum(
    logits: Tensor,
    labels: Tensor,
    first: int,
    group: dist.ProcessGroup,
    with_squares: bool = False,
    vocab: int | None = None,
) -> Tensor:
    """Return `models.head.cross_entropy_sum` of logits (N, V) sharded over V: float32 (), the same on every tp rank.

    logits: a DTensor, or this rank's part of it. first: the token of this rank's first column. group: the tp ranks.
    with_squares: return both sums of `models.head.cross_entropy_and_squares`, (2), instead. vocab: number of tokens;
    later columns, which may be on several ranks, are ignored; None: V.
    """
    local_logits = logits.to_local() if isinstance(logits, DTensor) else logits
    if vocab is not None and first + local_logits.shape[-1] > vocab:
        token = torch.arange(local_logits.shape[-1], device=local_logits.device) + first
        local_logits = local_logits.masked_fill(token >= vocab, -torch.inf)
    return cut_cross_entropy(local_logits, labels, first, group, with_squares)


class _CutCrossEntropy(torch.autograd.Function):
    """log-sum-exp over all ranks minus the target's logit. Its gradient, softmax - one-hot, sends nothing more.

    Nor does the squared log-sum-exp of a z-loss.

    Sent per token: its largest logit, the sum of its exponentials and its target's logit. Kept: the logits in their own
    dtype; the backward takes their exponentials again, as a softmax in float32 is twice as large.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, first: int, group: dist.ProcessGroup, with_squares: bool
    ) -> Tensor:
        largest = widened(logits.amax(-1))  # over all ranks, so that their exponentials add up and none overflows
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        column = labels - first
        is_local = (column >= 0) & (column < logits.shape[-1])
        target = logits.gather(-1, column.where(is_local, 0).unsqueeze(-1)).squeeze(-1)
        target = (target - largest).where(is_local, 0.0)
        total = (logits - largest.unsqueeze(-1)).exp_().sum(-1)  # in float32, without such a copy of the logits
        total, target = sums = torch.stack((total, target))
        dist.all_reduce(sums, group=group)
        valid = labels != IGNORED
        ctx.save_for_backward(logits, largest, total, column, valid)
        ctx.with_squares = with_squares
        loss = (total.log() - target).where(valid, 0.0).sum()
        if not with_squares:
            return loss
        log_sum_exp = (total.log() + largest).where(valid, 0.0)
        return torch.stack((loss, log_sum_exp.square().sum()))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        logits, largest, total, column, valid = ctx.saved_tensors
        softmax = (logits - largest.unsqueeze(-1)).exp_().div_(total.unsqueeze(-1))
        # Compared, not scattered: a compiled kernel then holds no softmax.
        columns, column = torch.arange(logits.shape[-1], device=logits.device), column.unsqueeze(-1)
        if not ctx.with_squares:
            d_loss = (valid * gradient).unsqueeze(-1)
            d_logits = softmax.add_(columns == column, alpha=-1).mul_(d_loss)
            return d_logits.to(logits.dtype), None, None, None, None
        log_sum_exp = (total.log() + largest).where(valid, 0.0)
        d_loss = (valid * gradient[0]).unsqueeze(-1)
        d_log_sum_exp = (2.0 * log_sum_exp * gradient[1]).unsqueeze(-1)  # its own gradient is the softmax
        d_logits = softmax.mul_(d_loss + d_log_sum_exp).sub_((columns == column) * d_loss)
        return d_logits.to(logits.dtype), None, None, None, None


cut_cross_entropy: Callable[[Tensor, Tensor, int, dist.ProcessGroup, bool], Tensor] = _CutCrossEntropy.apply
"""replaceable: a dry run holds the tensors of a compiled one"""
