"""Pipeline parallelism: cuts the model into stages and runs a step's micro batches through them.

Sharded: the blocks, in order, over stages; the first stage has the embedding, the last the final norm, head and loss. A
pp rank has one stage, or several that are not neighbors (virtual stages: a smaller bubble, more messages).

Sent: hidden states (B, S, D) forward and their gradients backward, once per micro batch and stage boundary. With tp
each tp rank sends 1 / tp of them: the part it holds (sequence parallelism) or cuts out (`apply_scatter_gather`). Once
per step the gradient of a tied embedding goes between the first and the last stage. With one stage nothing is sent.

When: in the order of one of the schedules of `torch.distributed.pipelining`, chosen by its name there. Weights are
gathered as `zero_stage` says (3: each time a block is used; otherwise once per step); gradients are reduced once, at
the end of the step, in any case. Until then they are whole, in float32, which takes more memory than `zero_stage` 2 and
3 do without a pipeline.

References: 1F1B and interleaved stages, Narayanan et al. 2021; GPipe, Huang et al. 2019; looped breadth-first,
Lamy-Poirier 2023; zero bubble, Qi et al. 2024; DualPipe, DeepSeek-AI 2024.
"""

import copy
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from torch.distributed.tensor import DTensor, Replicate, Shard

from torchllm.config import SCHEDULES, Parallel, Training, gradient_accumulation
from torchllm.data.batch import Batch
from torchllm.facts.flops import recomputes_logits
from torchllm.facts.stages import balanced_split, stage_of_rank
from torchllm.models.decoder import Decoder
from torchllm.parallel.forward_backward import forward_stage
from torchllm.parallel.fsdp import effective_zero_stage, free_after_backward
from torchllm.parallel.mesh import Mesh
from torchllm.parallel.weight_gradients import WeightGradients
from torchllm.runtime.heartbeat import beat
from torchllm.runtime.torch_pipeline import ConnectedStage, standard_strides

log = logging.getLogger(__name__)


def split_into_stages(model: Decoder, mesh: DeviceMesh, parallel: Parallel, sequence_length: int) -> list[Decoder]:
    """Return this pp rank's stages of a model on the meta device, in the order of `stage_of_rank`.

    mesh: one dimension, the pp ranks.
    """
    blocks = balanced_split(model.model, parallel, sequence_length)
    log.info("pipeline %s, %d stages of %s blocks", parallel.schedule, len(blocks), "+".join(map(str, blocks)))
    return [_cut_stage(model, index, blocks) for index in stage_of_rank(parallel, mesh.get_local_rank())]


def _cut_stage(model: Decoder, index: int, blocks: Sequence[int]) -> Decoder:
    """Return a copy of `model` with the parts of stage `index` alone. blocks: how many each stage has."""
    stage = copy.deepcopy(model)  # costs nothing on the meta device
    is_first = index == 0
    is_last = index == len(blocks) - 1
    first_block = sum(blocks[:index])
    end = model.model.blocks if is_last else first_block + blocks[index]
    own_blocks = range(first_block, end)
    for name in list(stage.layers):
        if int(name) not in own_blocks:
            del stage.layers[name]
    if not is_last:
        stage.norm = None
        stage.lm_head = None
    if not is_first:
        stage.embeds = False
        stage.embed_positions = None
        # The last stage of a tied model keeps the embedding, since its head uses the same weight; or it embeds labels.
        if not (is_last and model.model.embeds_at_both_ends):
            stage.embed_tokens = None
    return stage


def apply_scatter_gather(stage: Decoder, mesh: DeviceMesh) -> None:
    """Make the tp ranks send hidden states in parts between stages: the scatter/gather optimization.

    Used without sequence parallelism, where every tp rank has the same hidden states: each sends its part of the
    sequence, and the next stage gathers its input; the same for the gradients (Narayanan et al. 2021, section 4.1).
    mesh: one dimension, the tp ranks.
    """

    def gather(module: nn.Module, args: Any) -> Any:
        hidden, *arguments = args
        hidden = DTensor.from_local(hidden, mesh, [Shard(1)], run_check=False)
        return hidden.full_tensor(), *arguments

    def scatter(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        hidden = DTensor.from_local(output, mesh, [Replicate()], run_check=False)
        return standard_strides(hidden.redistribute(placements=[Shard(1)]).to_local())

    if not stage.embeds:
        stage.register_forward_pre_hook(gather)
    if stage.lm_head is None:
        stage.register_forward_hook(scatter)


class Pipeline:
    """Runs a step's micro batches through all stages in the order of one of torch's schedules."""

    def __init__(
        self, stages: Sequence[Decoder], mesh: Mesh, parallel: Parallel, training: Training, dtype: torch.dtype
    ) -> None:
        self.stages = stages
        self.indices = stage_of_rank(parallel, mesh.pp.get_local_rank())
        self.last = parallel.stages - 1
        self.group = mesh.pp.get_group()
        self.device = next(stages[0].parameters()).device
        self.scale: Tensor
        """of the losses of the current step"""

        self.parallel, self.dtype = parallel, dtype
        self.forward_in_turn = partial(forward_in_turn, stages, mesh.pp, parallel, dtype)

        self.tied_weights: list[TiedWeight] = []  # collected now, while the weights are sharded
        for stage in stages:
            if stage.model.embeds_at_both_ends and isinstance(stage.embed_tokens, nn.Embedding):
                self.tied_weights.append(TiedWeight(stage.embed_tokens.weight, on_first_stage=stage.embeds))
        if effective_zero_stage(parallel) == 3:
            for stage in stages:
                free_after_backward(stage)
        for stage in stages:  # torch's schedule calls them
            stage.register_forward_pre_hook(lambda *_: beat("micro batch"))

        for stage in stages:
            if stage.lm_head is not None:
                stage.lm_head.recomputes_logits = recomputes_logits(training, parallel)
        input_shape = (training.micro_batch_size, training.sequence_length // parallel.cp)
        self._connect(gradient_accumulation(training, mesh.data_size), input_shape)

    def _connect(self, micro_batches: int, input_shape: tuple[int, int]) -> None:
        """Make torch's schedule for steps of `micro_batches`, each of this shape on this rank, (B, S)."""
        self.micro_batches, self.input_shape = micro_batches, input_shape
        defer_weights = SCHEDULES[self.parallel.schedule].splits_backward
        pipeline_stages = [
            self._pipeline_stage(stage, index, defer_weights)
            for index, stage in zip(self.indices, self.stages, strict=True)
        ]
        schedule = get_schedule_class(self.parallel.schedule)
        self.schedule = schedule(
            pipeline_stages[0] if issubclass(schedule, PipelineScheduleSingle) else pipeline_stages,
            n_microbatches=micro_batches,
            loss_fn=self._scaled_loss,
            # FOOTGUN: the default, True, silently divides the gradients by the number of micro batches. The loss's
            # scale, one over the global token count, is the whole normalization.
            scale_grads=False,
        )

    def _pipeline_stage(self, stage: Decoder, index: int, defer_weights: bool) -> ConnectedStage:
        """Wrap a stage for torch's schedules. index: over the whole pipeline; defer_weights: for zero bubble."""
        # FOOTGUN: without examples of both, input and output, the first step also runs a hidden forward, loss and
        # backward on uninitialized memory: a side effect of the loss or of a hook then counts garbage. Floating-point
        # examples must require gradients.
        if index == 0:
            input_example = torch.empty(self.input_shape, dtype=torch.int64, device=self.device)
        else:
            input_example = self._hidden_states().requires_grad_()
        if index == self.last:
            output_example = torch.empty((), device=self.device).requires_grad_()
        else:
            output_example = self._hidden_states().requires_grad_()
        return ConnectedStage(
            stage,
            index,
            self.last + 1,
            self.device,
            input_args=input_example,
            output_args=output_example,
            group=self.group,
            dw_builder=WeightGradients(stage).take if defer_weights else None,
        )

    def _hidden_states(self) -> Tensor:
        return empty_hidden_states(self.input_shape, self.stages[0], self.parallel, self.dtype)

    def _scaled_loss(self, loss: Tensor, target: Tensor) -> Tensor:
        """Scale the last stage's output, which is the loss already. Pure: torch may call it more than once."""
        return loss * self.scale

    def __call__(self, batches: Sequence[Batch], scale: Tensor) -> Tensor:
        """See `ForwardBackward`."""
        self.scale = scale
        size, length = batches[0].tokens.shape
        if (len(batches), (size, length)) != (self.micro_batches, self.input_shape):  # of another data.stage
            self._connect(len(batches), (size, length))
        for tied in self.tied_weights:
            if not tied.on_first_stage:
                tied.weight.grad = None  # the first stage's copy holds the sum over earlier calls
        losses: list[Tensor] = []
        # The schedule cuts the joined batch into micro batches again. Every rank passes positions, labels and document
        # ids; only the rank with the first stage passes tokens, only the one with the last stage a target.
        batch = _join(batches)
        inputs = [batch.tokens] if 0 in self.indices else []
        keywords: dict[str, Tensor | int] = {"positions": batch.positions, "labels": batch.labels}
        if batch.document_ids is not None:
            keywords |= {"document_ids": batch.document_ids, "document_limit": batch.document_limit}
        if batch.ahead is not None:
            keywords["ahead"] = batch.ahead
        self.schedule.step(
            *inputs,
            target=batch.labels if self.last in self.indices else None,
            losses=losses,
            return_outputs=False,
            **keywords,
        )
        add_tied_gradients([tied.weight for tied in self.tied_weights], self.group)
        if not losses:
            return torch.zeros((), device=self.device)
        return torch.stack(losses).detach().sum()

    def loss_sum(self, batch: Batch) -> Tensor:
        """See `ForwardBackward`."""
        return self.forward_in_turn(batch)


def _join(batches: Sequence[Batch]) -> Batch:
    """Return micro batches as one batch, with the document_limit of one micro batch."""
    documents = [batch.document_ids for batch in batches if batch.document_ids is not None]
    ahead = [batch.ahead for batch in batches if batch.ahead is not None]
    return Batch(
        tokens=torch.cat([batch.tokens for batch in batches]),
        labels=torch.cat([batch.labels for batch in batches]),
        positions=torch.cat([batch.positions for batch in batches]),
        document_ids=torch.cat(documents) if documents else None,
        document_limit=max(batch.document_limit for batch in batches),
        ahead=torch.cat(ahead) if ahead else None,
    )


@torch.no_grad()
def forward_in_turn(
    stages: Sequence[Decoder], mesh: DeviceMesh, parallel: Parallel, dtype: torch.dtype, batch: Batch
) -> Tensor:
    """Return the loss sum of one batch, of any shape: float32 (), 0 on a rank without the last stage.

    Forwards alone, one batch at a time: torch's `eval` fails on V-shaped schedules. mesh: one dimension, the pp ranks.
    """
    rank_of = {index: rank for rank in range(parallel.pp) for index in stage_of_rank(parallel, rank)}
    group, own_rank = mesh.get_group(), mesh.get_local_rank()
    hidden = batch.tokens
    loss = torch.zeros((), device=hidden.device)
    of_rank = dict(zip(stage_of_rank(parallel, own_rank), stages, strict=True))
    for index in sorted(of_rank):
        if index > 0 and rank_of[index - 1] != own_rank:
            hidden = empty_hidden_states(batch.tokens.shape, stages[0], parallel, dtype)
            dist.recv(hidden, group=group, group_src=rank_of[index - 1])
        hidden = forward_stage(of_rank[index], hidden, batch)
        if of_rank[index].lm_head is not None:
            loss = hidden
        elif rank_of[index + 1] != own_rank:
            dist.send(hidden, group=group, group_dst=rank_of[index + 1])
    return loss


def empty_hidden_states(tokens: Sequence[int], stage: Decoder, parallel: Parallel, dtype: torch.dtype) -> Tensor:
    """Return uninitialized memory for the hidden states that stages send to each other for tokens of shape (B, S)."""
    batch, length = tokens
    cuts = parallel.tp if parallel.sequence_parallel or parallel.scatter_gather else 1
    device = next(stage.parameters()).device
    return torch.empty(batch, length // cuts, stage.model.hidden, dtype=dtype, device=device)


class TiedWeight(NamedTuple):
    """One copy of a tied embedding: the first and the last stage have one each."""

    weight: Tensor
    on_first_stage: bool


def add_tied_gradients(weights: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Give both copies of a tied embedding, on the first stage and on the last, the sum of their gradients.

    weights: the copies on this rank. group: the pp ranks. The first and the last rank have one copy each, or the first
    rank has both.
    """
    gradients = [weight.grad.to_local() for weight in weights if isinstance(weight.grad, DTensor)]
    if not gradients:
        return
    if len(gradients) == 2:
        first_copy, last_copy = gradients
        first_copy += last_copy
        last_copy.copy_(first_copy)
        return
    [gradient] = gradients
    first_rank, last_rank = 0, dist.get_world_size(group) - 1
    if dist.get_rank(group) == first_rank:
        # FOOTGUN: not one batch of a send and a receive: for a batch NCCL may set up all ranks of the group, and hang.
        # One end sends first and the other receives first: two sends would wait for each other.
        dist.send(gradient, group=group, group_dst=last_rank)
        dist.recv(gradient, group=group, group_src=last_rank)
    else:
        gradient_of_first = torch.empty_like(gradient)
        dist.recv(gradient_of_first, group=group, group_src=first_rank)
        gradient += gradient_of_first
        dist.send(gradient, group=group, group_dst=first_rank)
