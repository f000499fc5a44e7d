"""Tensor and sequence parallelism (Narayanan et al. 2021, section 3; Korthikanti et al. 2022, section 4.2.2).

Sharded: q, k, v, gate and up by output features, so that each tp rank has some heads and some of F; o and down by input
features; embedding and head by vocabulary. Norms, position table and the biases after a sum are whole on every rank.

Sent, without sequence parallelism: one all-reduce of the (B, S, D) hidden states after o and one after down, and their
mirror images in the backward pass. With it, each of these is a reduce-scatter over the sequence and, before q and gate,
an all-gather: the same bytes, but norms and residuals hold only S / tp tokens; and the gradients of the norms' weights,
D numbers each, are summed. The loss sends three numbers a token, never the logits.

The table of `layout.py` says how each parameter is cut; `parallelize_module` cuts it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from torchllm.models.decoder import Decoder
from torchllm.models.head import IGNORED, Head
from torchllm.models.layers import LayerNorm, RMSNorm
from torchllm.runtime.torch_compat import local_region
from torchllm.spec.parameters import canonical_name, row_of


def apply_tensor_parallel(stage: Decoder, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    """Cut a stage's parameters over the tp mesh, in place. `mesh` has one axis."""
    hidden: Placement = Shard(1) if sequence_parallel else Replicate()  # of (B, S, D) between the matrices
    gather = PrepareModuleInput(  # one gather for q, k and v, and their gradients summed before one reduction
        input_layouts=(hidden, None, None), desired_input_layouts=(Replicate(), None, None), use_local_output=False
    )
    gather_mlp = PrepareModuleInput(
        input_layouts=(hidden,), desired_input_layouts=(Replicate(),), use_local_output=False
    )
    styles: dict[tuple[str, type[nn.Module]], Callable[[], ParallelStyle]] = {
        ("vocab", nn.Embedding): lambda: VocabParallelEmbedding(hidden),
        ("vocab", Head): lambda: VocabParallelHead(hidden),
        ("colwise", nn.Linear): ColwiseParallel,
        ("rowwise", nn.Linear): lambda: RowwiseParallel(output_layouts=hidden),
        ("whole", RMSNorm): lambda: WholeNorm(hidden),
        ("whole", LayerNorm): lambda: WholeNorm(hidden),
        ("whole", nn.Embedding): lambda: WholePositions(hidden),
    }
    plan: dict[str, ParallelStyle] = {}
    for name, module in stage.named_modules():
        if "weight" in dict(module.named_parameters(recurse=False)):
            plan[name] = styles[row_of(canonical_name(f"{name}.weight")).cut, type(module)]()
        elif name.endswith(".self_attn"):
            plan[name] = gather
        elif name.endswith(".mlp"):
            plan[name] = gather_mlp
    parallelize_module(stage, mesh, plan)
    stage.tie_embeddings()


class WholeNorm(ParallelStyle):
    """A norm whose weights are on every rank while its tokens may be sharded.

    The weights become replicated DTensors (so that every parameter is on the tp mesh: the gradient norm and checkpoints
    see one kind), but the kernel gets plain tensors. Under sequence parallelism each rank's weight gradient covers its
    own tokens only, a partial sum; without it every rank has the whole.
    """

    def __init__(self, hidden: Placement) -> None:
        self.gradient = Partial() if hidden.is_shard() else Replicate()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, RMSNorm | LayerNorm)
        distribute_module(module, device_mesh)
        kernel = module.kernel

        def on_local_weights(x: Tensor, *rest: Any) -> Tensor:
            return kernel(
                x, *(r.to_local(grad_placements=[self.gradient]) if isinstance(r, DTensor) else r for r in rest)
            )

        module.kernel = on_local_weights
        return module


class WholePositions(ParallelStyle):
    """The learned position table, whole on every rank; looks up only this rank's part of a sharded sequence."""

    def __init__(self, hidden: Placement) -> None:
        self.hidden = hidden

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def take_part(module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            whole = DTensor.from_local(inputs[0], mesh, [Replicate()], run_check=False)
            return whole.redistribute(placements=[self.hidden])

        return distribute_module(
            module, device_mesh, input_fn=take_part, output_fn=lambda module, out, mesh: out.to_local()
        )


class VocabParallelEmbedding(ParallelStyle):
    """The embedding with its weight cut by vocabulary: a rank looks up the tokens that it has, and the rows are summed.

    RowwiseParallel does that too, but its backward pass makes the gradient of the whole table on every rank, and its
    output is still in flight: FOOTGUN, a compiled first block behind it loses this gradient without a word.
    """

    def __init__(self, hidden: Placement) -> None:
        self.hidden = hidden

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Embedding)
        weight = distribute_tensor(module.weight, device_mesh, [Shard(0)])
        module.register_parameter("weight", nn.Parameter(weight))
        first = local_region(weight)[1][0]

        def look_up(tokens: Tensor) -> Tensor:
            assert isinstance(module.weight, DTensor)
            mine = module.weight.to_local(grad_placements=[Shard(0)])
            row = tokens - first
            here = (row >= 0) & (row < len(mine))
            rows = F.embedding(row.where(here, 0), mine).where(here.unsqueeze(-1), 0.0)
            out = DTensor.from_local(rows, device_mesh, [Partial()], run_check=False)
            return out.redistribute(placements=[self.hidden]).to_local()

        module.forward = look_up  # type: ignore[method-assign, assignment]
        return module


class VocabParallelHead(ParallelStyle):
    """The head with its weight cut by vocabulary: hidden states are gathered once, logits never."""

    def __init__(self, hidden: Placement) -> None:
        self.hidden = hidden

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def cut(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
            assert isinstance(module, Head)
            weight = distribute_tensor(module.weight, mesh, [Shard(0)])
            module.register_parameter("weight", nn.Parameter(weight))
            module.cross_entropy = partial(
                vocab_parallel_cross_entropy_sum, first=local_region(weight)[1][0], group=mesh.get_group()
            )

        def gather(module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            hidden = DTensor.from_local(inputs[0], mesh, [self.hidden], run_check=False)
            return hidden.redistribute(placements=[Replicate()]), *inputs[1:]

        return distribute_module(module, device_mesh, cut, gather)


def vocab_parallel_cross_entropy_sum(logits: Tensor, labels: Tensor, first: int, group: dist.ProcessGroup) -> Tensor:
    """`models.head.cross_entropy_sum` for logits (N, V) sharded over V: float32 (), the same on every tp rank.

    `first`: the token of this rank's first column. `group`: the tp ranks.
    """
    assert isinstance(logits, DTensor)
    return _VocabParallelCrossEntropy.apply(logits.to_local().float(), labels, first, group)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """log-sum-exp over all ranks minus the target's logit; the gradient, softmax - one-hot, needs no more sending."""

    @staticmethod
    def forward(ctx: FunctionCtx, logits: Tensor, labels: Tensor, first: int, group: dist.ProcessGroup) -> Tensor:
        largest = logits.amax(-1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        shifted = logits - largest.unsqueeze(-1)
        column = labels - first
        mine = (column >= 0) & (column < logits.shape[-1])
        column = column.where(mine, 0).unsqueeze(-1)
        target = shifted.gather(-1, column).squeeze(-1).where(mine, 0.0)
        exponentials = shifted.exp_()
        total, target = sums = torch.stack((exponentials.sum(-1), target))
        dist.all_reduce(sums, group=group)
        valid = labels != IGNORED
        ctx.save_for_backward(exponentials.div_(total.unsqueeze(-1)), column, mine, valid)
        return (total.log() - target).where(valid, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        softmax, column, mine, valid = ctx.saved_tensors
        difference = softmax.scatter_add(-1, column, -mine.to(softmax.dtype).unsqueeze(-1))
        return difference * (valid * gradient).unsqueeze(-1), None, None, None
