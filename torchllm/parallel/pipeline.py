"""Pipeline parallelism: the model cut into stages, and how a step's micro batches go through them.

Sharded: the blocks, in order, over stages; the first has the embedding, the last the final norm, head and loss. A pp
rank holds one stage, or several that are not neighbours (virtual stages: a smaller bubble, more sending).

Sent: hidden states (B, S, D) forward and their gradients backward, once a micro batch and boundary; with tp each tp
rank sends the 1 / tp of them that it holds (sequence parallel) or keeps (`apply_scatter_gather`). Once a step, the
gradient of a tied embedding goes between the first and the last stage. With one stage nothing is sent.

When: `torch.distributed.pipelining`'s schedules, by their names. Weights are gathered as `zero_stage` says (3: each
time a block is used; else once a step); gradients are reduced once a step, at its end, in any case. Until then they are
whole, in float32: more memory than `zero_stage` 2 and 3 take without a pipeline.

The step asks only `ForwardBackward`: micro batches and a scale in, the scaled loss out, gradients in the parameters.
"""

import copy
import logging
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from torch.distributed.tensor import DTensor, Replicate, Shard

from torchllm.config import SCHEDULES, Parallel, Training, gradient_accumulation
from torchllm.data.batch import Batch
from torchllm.models.decoder import Decoder
from torchllm.parallel.fsdp import begin_micro_batch, effective_zero_stage, free_after_backward
from torchllm.parallel.mesh import Mesh
from torchllm.parallel.weight_gradients import WeightGradients
from torchllm.spec.stages import balanced_split, stage_of_rank

log = logging.getLogger(__name__)


class ForwardBackward(Protocol):
    """One step's forwards and backwards on this rank."""

    stages: Sequence[Decoder]

    def __call__(self, batches: Sequence[Batch], scale: Tensor) -> Tensor:
        """Add d(scale x loss sum) to the gradients; returns scale x loss sum of this rank's batches, float32 ().

        A rank without the last stage returns 0.
        """

    def loss_sum(self, batch: Batch) -> Tensor:
        """The loss sum of one batch, float32 (), without gradients; 0 on a rank without the last stage."""


def build_forward_backward(
    stages: Sequence[Decoder], mesh: Mesh, parallel: Parallel, training: Training, dtype: torch.dtype
) -> ForwardBackward:
    """The plain step, or the pipelined one; dtype: of the hidden states that are sent."""
    if mesh.pp.size() == 1:
        return OneStage(stages, parallel)
    return Pipeline(stages, mesh, parallel, training, dtype)


class OneStage:
    """Every micro batch in turn through the whole model."""

    def __init__(self, stages: Sequence[Decoder], parallel: Parallel) -> None:
        self.stages = stages
        self.zero_stage = effective_zero_stage(parallel)

    def __call__(self, batches: Sequence[Batch], scale: Tensor) -> Tensor:
        """See `ForwardBackward`."""
        (model,) = self.stages
        losses = []
        for index, batch in enumerate(batches):
            begin_micro_batch(self.stages, self.zero_stage, last=index == len(batches) - 1)
            loss = model(batch.tokens, batch.positions, batch.document_ids, batch.labels) * scale
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    @torch.no_grad()
    def loss_sum(self, batch: Batch) -> Tensor:
        """See `ForwardBackward`."""
        (model,) = self.stages
        return model(batch.tokens, batch.positions, batch.document_ids, batch.labels)


def split_into_stages(model: Decoder, mesh: DeviceMesh, parallel: Parallel, sequence_length: int) -> list[Decoder]:
    """This pp rank's stages, of a model on the meta device, in the order of `stage_of_rank`; `mesh`: the pp ranks."""
    if parallel.pp == 1:
        return [model]
    blocks = balanced_split(model.model, parallel, sequence_length)
    log.info("pipeline %s, %d stages of %s blocks", parallel.schedule, len(blocks), "+".join(map(str, blocks)))
    stages = []
    for index in stage_of_rank(parallel, mesh.get_local_rank()):
        first, is_last = sum(blocks[:index]), index == len(blocks) - 1
        stage = copy.deepcopy(model)  # costs nothing on the meta device
        for name in list(stage.layers):
            if not first <= int(name) < first + blocks[index]:
                del stage.layers[name]
        if not is_last:
            stage.norm = stage.lm_head = None
        if index > 0:
            stage.embeds, stage.embed_positions = False, None
            if not (is_last and model.model.tied_embeddings):  # there it stays, for its weight
                stage.embed_tokens = None
        stages.append(stage)
    return stages


def apply_scatter_gather(stage: Decoder, mesh: DeviceMesh) -> None:
    """Without sequence parallelism: what leaves a stage is cut to this tp rank's part of the sequence, what enters it
    is gathered (Narayanan et al. 2021, section 4.1); the same for the gradients. `mesh`: the tp ranks.
    """

    def gather(module: nn.Module, args: Any) -> Any:
        return DTensor.from_local(args[0], mesh, [Shard(1)], run_check=False).full_tensor(), *args[1:]

    def scatter(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        whole = DTensor.from_local(output, mesh, [Replicate()], run_check=False)
        return whole.redistribute(placements=[Shard(1)]).to_local()

    if not stage.embeds:
        stage.register_forward_pre_hook(gather)
    if stage.lm_head is None:
        stage.register_forward_hook(scatter)


class Pipeline:
    """A step's micro batches through all stages in the order of one of torch's schedules."""

    def __init__(
        self, stages: Sequence[Decoder], mesh: Mesh, parallel: Parallel, training: Training, dtype: torch.dtype
    ) -> None:
        self.stages = stages
        self.indices = stage_of_rank(parallel, mesh.pp.get_local_rank())
        self.count = parallel.stages
        self.rank_of = {i: rank for rank in range(parallel.pp) for i in stage_of_rank(parallel, rank)}
        self.group = mesh.pp.get_group()
        self.device = next(stages[0].parameters()).device
        self.scale = torch.ones(())
        tp = parallel.tp if parallel.sequence_parallel or parallel.scatter_gather else 1
        length = training.sequence_length // parallel.cp
        self.hidden = (training.micro_batch_size, length // tp, stages[0].model.hidden)
        self.dtype = dtype
        self.tied: list[tuple[bool, Tensor]] = []  # of the first stage?, the weight; taken now, while it is sharded
        for stage in stages:
            if stage.model.tied_embeddings and isinstance(stage.embed_tokens, nn.Embedding):
                self.tied.append((stage.embeds, stage.embed_tokens.weight))
        if effective_zero_stage(parallel) == 3:
            for stage in stages:
                free_after_backward(stage)
        splits = SCHEDULES[parallel.schedule].splits_backward
        pipeline_stages = [
            PipelineStage(
                stage,
                index,
                self.count,
                self.device,
                # FOOTGUN: without both examples the first step runs a hidden forward, loss and backward on garbage.
                input_args=torch.empty(self.hidden[0], length, dtype=torch.int64, device=self.device)
                if index == 0
                else self._hidden_states().requires_grad_(),
                output_args=(
                    torch.empty((), device=self.device) if index == self.count - 1 else self._hidden_states()
                ).requires_grad_(),
                group=self.group,
                dw_builder=WeightGradients(stage).take if splits else None,
            )
            for index, stage in zip(self.indices, stages, strict=True)
        ]
        kind = get_schedule_class(parallel.schedule)
        self.schedule = kind(
            pipeline_stages[0] if issubclass(kind, PipelineScheduleSingle) else pipeline_stages,
            n_microbatches=gradient_accumulation(training, mesh.data_size),
            loss_fn=lambda loss, target: loss * self.scale,
            scale_grads=False,  # FOOTGUN: True divides by the number of micro batches; the scale has it all
        )

    def __call__(self, batches: Sequence[Batch], scale: Tensor) -> Tensor:
        """See `ForwardBackward`."""
        self.scale = scale
        for embeds, weight in self.tied:
            if not embeds:
                weight.grad = None  # the first stage's has the sum over earlier calls
        losses: list[Tensor] = []
        tokens, labels, positions, documents = (_joined(parts) for parts in zip(*batches, strict=True))
        more = {} if documents is None else {"document_ids": documents}
        self.schedule.step(
            *([tokens] if 0 in self.indices else []),
            target=labels if self.count - 1 in self.indices else None,
            losses=losses,
            return_outputs=False,
            positions=positions,
            labels=labels,
            **more,
        )
        add_tied_gradients([weight for _, weight in self.tied], self.group)
        return torch.stack(losses).detach().sum() if losses else torch.zeros((), device=self.device)

    @torch.no_grad()
    def loss_sum(self, batch: Batch) -> Tensor:
        """See `ForwardBackward`. Forwards alone, one batch at a time: torch's `eval` fails on V-shaped schedules."""
        loss = torch.zeros((), device=self.device)
        hidden = loss
        for index, stage in sorted(zip(self.indices, self.stages, strict=True), key=lambda pair: pair[0]):
            before, after = self.rank_of.get(index - 1), self.rank_of.get(index + 1)
            here = self.rank_of[index]
            if index == 0:
                hidden = batch.tokens
            elif before != here:
                hidden = self._hidden_states()
                dist.recv(hidden, group=self.group, group_src=before)
            hidden = stage(hidden, batch.positions, batch.document_ids, batch.labels)
            if after is None:
                loss = hidden
            elif after != here:
                dist.send(hidden, group=self.group, group_dst=after)
        return loss

    def _hidden_states(self) -> Tensor:
        return torch.empty(self.hidden, dtype=self.dtype, device=self.device)


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    """The micro batches as one batch, which the schedule cuts again."""
    there = [part for part in parts if part is not None]
    return torch.cat(there) if there else None


def add_tied_gradients(weights: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Give both copies of a tied embedding, on the first stage and on the last, the sum of their gradients.

    weights: those of them that this rank holds; group: the pp ranks, the first and the last of which hold one each, or
    the first both.
    """
    ends = [weight.grad.to_local() for weight in weights if isinstance(weight.grad, DTensor)]
    first, last = 0, dist.get_world_size(group) - 1
    if len(ends) == 2:
        ends[0] += ends[1]
        ends[1].copy_(ends[0])
    elif ends and dist.get_rank(group) == first:
        # FOOTGUN: not one batch of a send and a receive, for which NCCL may set up all ranks of the group, and hang.
        dist.send(ends[0], group=group, group_dst=last)
        dist.recv(ends[0], group=group, group_src=last)
    elif ends:
        theirs = torch.empty_like(ends[0])
        dist.recv(theirs, group=group, group_src=first)
        ends[0] += theirs
        dist.send(ends[0], group=group, group_dst=first)
