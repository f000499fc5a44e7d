"""Runs one rank of any layout on fake tensors: a step of the library's own model, parallelisms, loss and optimizer.

torch's fake process group stands for any number of other ranks; fake tensors have shapes but no values. The step runs
twice and the second counts, because DTensor propagates shapes at the first use of each operation.

A long pipeline is traced as a short one around this rank's own stages, a step of many micro batches as one of few
(`run.plan_trace`), and many equal blocks as few (`repeats.py`); `replay.py` puts the whole step together from it.
"""

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from multiprocessing.sharedctypes import Synchronized
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle, get_schedule_class

from torchllm.config import Compile, Config, Parallel
from torchllm.config.schema import Kinds
from torchllm.data.batch import Batch
from torchllm.facts.stages import stage_of_rank
from torchllm.models.decoder import Decoder, add_low_rank_updates, build_model
from torchllm.optim.average import WeightAverage
from torchllm.optim.grad_norm import gradients
from torchllm.optim.offload import OffloadedAdamW
from torchllm.optim.optimizer import build_optimizer
from torchllm.optim.rounded import RoundedState
from torchllm.optim.schedule import LearningRate
from torchllm.parallel.expert import ExchangeDispatch, Splits, routed_experts
from torchllm.parallel.forward_backward import ForwardBackward
from torchllm.parallel.initialize import materialize
from torchllm.parallel.input_offload import OffloadedInputs
from torchllm.parallel.local_tensor import local_tensor
from torchllm.parallel.mesh import Mesh, build_mesh
from torchllm.parallel.optimistic import Capacities
from torchllm.parallel.parallelize import build_forward_backward, parallelize
from torchllm.parallel.pipeline import Pipeline
from torchllm.runtime.torch_compat import FakeTensorMode
from torchllm.tools.dry_run.compiled_loss import compiled_cut_loss, use_compiled_loss
from torchllm.tools.dry_run.fused_norm import use_fused_norms
from torchllm.tools.dry_run.gpu_kernels import as_on_gpu
from torchllm.tools.dry_run.memory import memory_per_micro_batch, saved_by_forwards, spans
from torchllm.tools.dry_run.repeats import (
    OTHERS,
    NotEqualError,
    Repeats,
    check_between_steps,
    check_parameters,
    find_repeats,
    give_gradients,
    joins_the_routers,
    repeated_spans,
    take_out,
    watch_blocks,
)
from torchllm.tools.dry_run.replay import Traced, action_keys
from torchllm.tools.dry_run.tracker import NO_DEVICE, Tracker
from torchllm.tools.mesh_axes import axis_of_group
from torchllm.tools.planner.schedules import flat, orders
from torchllm.tools.torch_names import skip_pipeline_vote
from torchllm.train.step import TrainStep

log = logging.getLogger(__name__)

CPU = torch.device("cpu")
TRACED_STEPS = 2
"""steps that a trace runs: the first makes the optimizer's state"""


class _BlockCount:
    """How many blocks the traces of all processes have run forward."""

    shared: "Synchronized[int] | None" = None


def count_blocks(count: "Synchronized[int]") -> None:
    """Have the traces of this process add 1 to `count` for each block that they have run forward."""
    _BlockCount.shared = count


def _count_block(block: nn.Module, args: Any, output: Any) -> None:
    if _BlockCount.shared is not None:
        with _BlockCount.shared:
            _BlockCount.shared.value += 1


def traceable(config: Config) -> Config:
    """Return the config without features that fake tensors cannot run; `assumptions` in report.py tells the user."""
    model, untraceable = config.model, {"flash", "flex"}  # one needs its package, the other a compiler
    if untraceable & model.attention_kernels:
        kinds = {
            kind: keys | ({"attention": "sdpa"} if keys.get("attention") in untraceable else {})
            for kind, keys in model.kinds.items()
        }
        attention = "sdpa" if model.attention in untraceable else model.attention  # which keeps the same
        # sdpa keeps the same; that it has no soft cap changes numbers alone
        plain = replace(model, attention=attention, kinds=Kinds(kinds), score_softcap=0.0)
        config = replace(config, model=plain)
    return replace(config, compile=Compile(norm=False, block=False, loss=False))


@contextmanager
def fake_ranks(rank: int, ranks: int) -> Iterator[None]:
    """Provide, within a `with` block, a process group of any size that sends nothing."""
    dist.init_process_group("fake", rank=rank, world_size=ranks)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # FSDP takes the copy that a fake collective returns for a view
            yield
    finally:
        dist.destroy_process_group()


def trace(
    config: Config,
    dtype: torch.dtype,
    pp_rank: int,
    micro_batches: int,
    pp: int,
    traced_rank: int,
    gpu: bool = False,
    all_blocks: bool = False,
) -> Traced:
    """Trace a step of one of the ranks that hold the stages of `pp_rank`. config: resolved.

    It is the first of them, or the second of those that share a sequence: the first and the last send less in a ring.

    micro_batches: number in the traced step, not above the config's. pp: ranks of the traced pipeline, not above the
    config's. traced_rank: the pipeline rank that is traced. gpu: count the tensors of a GPU's kernels, where a CPU's
    hold more. all_blocks: run every block, where few would do.
    """
    compiled_loss = gpu and config.compile.loss is True
    config, parallel = traceable(config), config.parallel
    ranks = parallel.ranks
    busiest = parallel.tp if parallel.cp > 2 else 0
    cut_loss = compiled_cut_loss() if compiled_loss else nullcontext()
    kernels = as_on_gpu() if gpu else nullcontext()
    with fake_ranks(pp_rank * (ranks // parallel.pp) + busiest, ranks), kernels, cut_loss:
        mesh = build_mesh(parallel, CPU)
        part = _part(mesh, parallel, pp, traced_rank) if pp < parallel.pp else (mesh, parallel)
        repeats = None if all_blocks else find_repeats(config, pp_rank)
        try:
            return _trace(config, dtype, gpu, mesh, part, micro_batches, repeats, compiled_loss)
        except NotEqualError as difference:
            log.info("tracing all blocks: %s", difference)
            return _trace(config, dtype, gpu, mesh, part, micro_batches, None, compiled_loss)


def _build_stages(config: Config, dtype: torch.dtype, gpu: bool, mesh: Mesh, model: Decoder) -> list[Decoder]:
    """Return this rank's stages of a model on the meta device, still without memory."""
    training = config.training
    add_low_rank_updates(model, config, dtype)
    if gpu:
        use_fused_norms(model)
    arguments = config.recompute, config.compile, config.float8, dtype, training.sequence_length
    stages = parallelize(model, mesh, config.parallel, *arguments)
    for stage in stages:
        split_evenly(stage)
        if isinstance(stage.run_blocks, OffloadedInputs):
            stage.run_blocks.host = NO_DEVICE
    return stages


def _trace(
    config: Config,
    dtype: torch.dtype,
    gpu: bool,
    mesh: Mesh,
    part: tuple[Mesh, Parallel],
    micro_batches: int,
    repeats: Repeats | None,
    compiled_loss: bool = False,
) -> Traced:
    training, (line, parallel) = config.training, part
    with torch.device("meta"):
        model = build_model(config.model, training.loss_chunk, training.z_loss, training.weights_dtype)
    if repeats is not None:
        check_parameters(model, repeats)
    if compiled_loss:
        use_compiled_loss(model)
    stages = _build_stages(config, dtype, gpu, mesh, model)
    others: list[Decoder] = []  # blocks that are not run
    routers: list[nn.Module] = []  # of these, in the unit of all routers
    if repeats is not None:
        others = [take_out(stages[0], repeats.others, parallel.prefetch)]
        if joins_the_routers(config.model):
            routers = [routed.router for routed in routed_experts(others[0])]
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        materialize([*stages, *others], CPU)
        optimizer = build_optimizer([*stages, *others], config.optimizer)
        storage = getattr(optimizer, "storage", None)
        if isinstance(storage, RoundedState):  # it rounds pieces of some MiB, too many of them to trace
            storage.store = lambda *tensors: None
        on_host: list[Tensor] = []
        if isinstance(optimizer, OffloadedAdamW):
            # It holds memory of the host alone.
            optimizer.update_part = lambda *of_parameter: None  # type: ignore[method-assign]  # as of `store`
            on_host = list(_state(optimizer))
        average = WeightAverage([*stages, *others], config.optimizer.ema_decay, config.optimizer.ema_offload)
        if average.device is None:
            average.follow(optimizer)
        else:  # it holds memory of the host alone
            on_host += average.tensors.values()
        tracker = Tracker(fake, axis_of_group(mesh) | axis_of_group(line), line.pp.get_group().group_name)
        fewer = replace(training, global_batch_size=training.micro_batch_size * mesh.data_size * micro_batches)
        with tracker:
            forward_backward = build_forward_backward(stages, line, parallel, fewer, dtype)
            names_actions = False
            if isinstance(forward_backward, Pipeline):
                skip_pipeline_vote(forward_backward.schedule)
                names_actions = isinstance(forward_backward.schedule, PipelineScheduleMulti)
                tracker.watches_reductions = repeats is not None
            for block in (block for stage in stages for block in stage.layers.values()):
                block.register_forward_hook(_count_block)
            for index, stage in enumerate(stages):
                _watch(
                    stage, index, tracker, columns=-(-config.model.vocab_rows // parallel.tp), marks=not names_actions
                )
                if repeats is not None:
                    watch_blocks(stage, tracker, repeats, routers)
            rate = LearningRate(config.schedule, config.optimizer.learning_rate, training.steps)
            watched = _Watched(forward_backward, tracker, others)
            step = TrainStep([*stages, *others], watched, optimizer, rate, mesh, fewer, CPU)
            if isinstance(step.capacities, Capacities):  # even loads need the first level
                step.capacities.read = lambda needed: [0] * len(needed)
            shape = (training.micro_batch_size, training.sequence_length // parallel.cp)
            batches = [_batch(shape, config.data.document_mask, config.model.mtp_depth) for _ in range(micro_batches)]
            built = tracker.now
            step(1, batches)
            blocks = tracker.blocks
            tracker.restart()
            for stage in step.stages:
                tracker.claim((*stage.parameters(), *stage.buffers()), "parameters")
            tracker.claim((*_state(optimizer), *average.tensors.values()), "optimizer")
            tracker.leave_out((*on_host, *(x for buffer in getattr(optimizer, "buffers", ()) for x in buffer)))
            tracker.claim((x for batch in batches for x in batch if isinstance(x, Tensor)), "inputs")
            if repeats is not None:
                check_between_steps(tracker, blocks, repeats)
            tracker.mark("begin")
            step(2, batches)
    rank = line.pp.get_local_rank()
    return Traced(
        spans(tracker) if repeats is None else repeated_spans(tracker, repeats),
        action_keys(true_orders(parallel, micro_batches, line.pp.get_group())[rank], stage_of_rank(parallel, rank)),
        micro_batches,
        memory_per_micro_batch(tracker, built, batches[0].tokens.nbytes, micro_batches),
        saved_by_forwards(tracker),
        sum(local_tensor(tensor).nbytes for tensor in on_host),
    )


def true_orders(parallel: Parallel, micro_batches: int, group: dist.ProcessGroup | None) -> list[list[str]]:
    """Return the names of the actions in a step, such as 2F0, in order: one list per pipeline rank.

    They are torch's lists if the schedule has some. group: the pipeline's; None: all ranks.
    """
    schedule_class = get_schedule_class(parallel.schedule)
    if parallel.pp == 1 or issubclass(schedule_class, PipelineScheduleSingle):
        names_of_ranks = []
        for order in orders(parallel, micro_batches):
            names_of_ranks.append([f"{action.stage}{action.kind}" for action in flat(order)])
        return names_of_ranks
    like = torch.empty(1, requires_grad=True)
    stages = [
        PipelineStage(nn.Identity(), index, parallel.stages, CPU, input_args=like, output_args=like, group=group)
        for index in stage_of_rank(parallel, dist.get_rank(group))
    ]
    schedule = schedule_class(stages, n_microbatches=micro_batches, scale_grads=False)
    listed = schedule.pipeline_order_with_comms
    return [[str(action) for action in listed[rank]] for rank in sorted(listed)]


class _Watched:
    """Runs forward and backward, then claims the gradients, which are complete, and marks the tail of the step.

    others: blocks that do not run. They are given gradients after the others' backward.
    """

    def __init__(self, inner: ForwardBackward, tracker: Tracker, others: Sequence[Decoder]) -> None:
        self.inner, self.tracker, self.others, self.stages = inner, tracker, others, inner.stages
        self.loss_sum = inner.loss_sum

    def __call__(self, batches: Sequence[Batch], scale: Tensor) -> Tensor:
        loss = self.inner(batches, scale)
        self.tracker.claim(gradients(self.stages), "gradients")
        if self.others:
            self.tracker.mark(OTHERS)
            give_gradients(self.others, self.stages[0])
        self.tracker.mark("tail")
        return loss


def _watch(stage: Decoder, position: int, tracker: Tracker, columns: int, marks: bool) -> None:
    """Tell the tracker when a stage runs forward, and when its head makes logits.

    columns: width of the logits. marks: whether to mark each forward and backward as an action.
    """

    begun: set[int] = set()  # forward passes whose backward has begun

    def begin(module: nn.Module, args: Any) -> None:
        if marks:
            tracker.mark(f"{position}F")
        tracker.begin_forward()

    def end(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        if not output.requires_grad:  # all is frozen; the schedule has a backward of the stage all the same
            output = output.detach().requires_grad_()
        mark_backward(module, args, output)
        tracker.end_forward()
        return output

    def mark_backward(module: nn.Module, args: Any, output: Tensor) -> None:
        number = tracker.window
        if marks and number >= 0 and output.requires_grad:  # not while recomputing, nor where all is frozen
            output.register_hook(lambda gradient: backward_begins(number))

    def backward_begins(number: int) -> None:
        if number not in begun:
            begun.add(number)
            tracker.mark(f"{position}B")

    def head_at_work(width: int) -> None:
        tracker.columns = width

    def into_head(head: nn.Module, args: Any) -> None:
        head_at_work(columns)
        if args[0].requires_grad:
            args[0].register_hook(lambda gradient: head_at_work(0))

    def out_of_head(head: nn.Module, args: Any, output: Tensor) -> None:
        head_at_work(0)
        output.register_hook(lambda gradient: head_at_work(columns))

    stage.register_forward_pre_hook(begin, prepend=True)
    stage.register_forward_hook(end)
    # Where the stage's result is its last module's, FSDP's hook on that gathers weights: be there before.
    last = stage.lm_head if stage.lm_head is not None else list(stage.layers.values())[-1]
    last.register_forward_hook(mark_backward, prepend=True)
    if stage.lm_head is not None:
        stage.lm_head.register_forward_pre_hook(into_head, prepend=True)
        stage.lm_head.register_forward_hook(out_of_head)


def _batch(shape: tuple[int, int], documents: bool, depth: int) -> Batch:
    """Return a micro batch of any content; its tensors are of `shape` (B, S / n), on one of n cp ranks."""
    tokens, labels, positions, ids = (torch.empty(shape, dtype=torch.int64) for _ in range(4))
    sequences, length = shape
    ahead = torch.empty(sequences, 2, depth, length, dtype=torch.int64) if depth else None
    batch = Batch(tokens, labels, positions, None, ahead=ahead)
    return batch._replace(document_ids=ids, document_limit=len(ids)) if documents else batch


def _state(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Return the tensors of the optimizer's state."""
    return (value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor))


def _part(mesh: Mesh, parallel: Parallel, pp: int, traced_rank: int) -> tuple[Mesh, Parallel]:
    """Return a pipeline of `pp` ranks with this rank as number `traced_rank`; the choice of the others is free."""
    ranks = dist.get_process_group_ranks(mesh.pp.get_group())
    first = mesh.pp.get_local_rank() - traced_rank
    line = DeviceMesh("cpu", ranks[first : first + pp], mesh_dim_names=mesh.pp.mesh_dim_names)
    return replace(mesh, pp=line), replace(parallel, pp=pp, split=())


def even_splits(sent: Tensor, received: Tensor, rows: int) -> Splits:
    """Return the numbers of rows for perfectly balanced experts, without reading a tensor."""
    ranks = len(sent)
    share, rest = divmod(rows, ranks)
    each = [share + int(rank < rest) for rank in range(ranks)]
    return Splits(each, each)


def split_evenly(stage: nn.Module) -> None:
    """Let a stage on fake tensors, which have no values, send the same number of rows to each rank."""
    for routed in routed_experts(stage):
        if isinstance(routed.dispatch, ExchangeDispatch):
            routed.dispatch.splits = even_splits
