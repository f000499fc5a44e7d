"""Where parallelism is applied: every technique once, in the one order that works.

First the model is cut into pipeline stages. Then, to each stage:
  float8             replaces layers by others with the same parameters
  expert parallel    needs plain parameters
  tensor parallel    needs plain parameters, but for the experts
  context parallel   its attention core gets this rank's heads under tensor parallelism
  recompute          wraps modules that both have changed
  regather           leaves recomputed modules alone
  compile            sees the recomputation
  FSDP               outermost, so that its gathers stay out of the compiled graphs

A technique is imported by the runs that use it.
"""

import logging
from collections.abc import Sequence

import torch

from torchllm.config import Compile, Float8, Parallel, Recompute, Training
from torchllm.config.applied_keys import applied
from torchllm.models.decoder import Decoder
from torchllm.parallel.forward_backward import ForwardBackward, OneStage
from torchllm.parallel.fsdp import apply_fsdp, effective_zero_stage
from torchllm.parallel.mesh import Mesh

log = logging.getLogger(__name__)


def parallelize(
    model: Decoder,
    mesh: Mesh,
    parallel: Parallel,
    recompute: Recompute,
    compile: Compile,
    float8: Float8,
    dtype: torch.dtype,
    sequence_length: int,
) -> list[Decoder]:
    """Return this rank's stages of a model built on the meta device, sharded and wrapped, still without memory.

    dtype: of the computation; gradient reductions are float32. sequence_length: in tokens; it decides how
    much a block costs compared with the head when stages are balanced, and which windows are shorter.
    """
    applied("recompute", recompute)
    applied("compile", compile)
    applied("float8", float8)
    stages = [model]
    if parallel.pp > 1:
        from torchllm.parallel.pipeline import split_into_stages

        stages = split_into_stages(model, mesh.pp, parallel, sequence_length)
    layers = model.model.layers
    regathers = parallel.regather and parallel.tp > 1 and parallel.sequence_parallel
    for stage in stages:
        log_layout = log.info if stage is stages[0] else log.debug
        if float8.is_on:
            from torchllm.parallel.float8 import apply_float8

            shards_weights = mesh.fsdp.size(mesh.fsdp.ndim - 1) > 1 and parallel.tp == 1
            apply_float8(stage, float8, dtype, mesh.world.device_type, shards_weights)
            log_layout("float8 %s products in the blocks", float8.recipe)

        if mesh.ep is not None:
            from torchllm.parallel.expert import apply_expert_parallel

            apply_expert_parallel(stage, mesh.ep, parallel.expert_chunks)
            if parallel.expert_dispatch == "optimistic":
                from torchllm.parallel.optimistic import apply_optimistic_dispatch

                apply_optimistic_dispatch(stage, parallel.expert_chunks)
            log_layout("expert parallel over %d ranks, %s dispatch", parallel.ep, parallel.expert_dispatch)

        if parallel.tp > 1:
            from torchllm.parallel.tensor import apply_tensor_parallel

            apply_tensor_parallel(stage, mesh.tp, parallel.sequence_parallel, shares_experts=mesh.ep is not None)
            log_layout("tensor parallel over %d ranks, sequence parallel %s", parallel.tp, parallel.sequence_parallel)
            if parallel.scatter_gather and not parallel.sequence_parallel:
                from torchllm.parallel.pipeline import apply_scatter_gather

                apply_scatter_gather(stage, mesh.tp)

        if parallel.cp > 1:
            from torchllm.parallel.context import apply_context_parallel

            apply_context_parallel(stage, mesh.cp, parallel.cp_method, dtype, sequence_length)
            log_layout("context parallel over %d ranks, %s", parallel.cp, parallel.cp_method)

        if recompute.mode != "none":
            from torchllm.parallel.recompute import apply_recompute

            apply_recompute(
                stage,
                recompute,
                layers,
                compiles_blocks=compile.block is True,
                sums_over_tp=parallel.tp > 1,
                gathers_again=regathers,
            )
            log_layout("recompute %s", recompute.mode)

        if regathers:
            from torchllm.parallel.regather import apply_regather

            apply_regather(stage)
            log_layout("gathered inputs are gathered again")

        stage.is_graphed = compile.graphs
        if compile.compiles_anything:
            from torchllm.parallel.compile import apply_compile, must_recompute_outside

            apply_compile(stage, compile, must_recompute_outside(recompute, stage.model, mesh.tp, compile.graphs))
            log_layout("compile norm %s, block %s, loss %s", compile.norm, compile.block is True, compile.loss is True)

        # On one rank without mixed precision FSDP would only copy and run hooks: 40 % of a small step.
        in_default = all(weight.dtype == torch.get_default_dtype() for weight in stage.parameters())
        if mesh.world.size() > 1 or dtype != torch.get_default_dtype() or not in_default:
            apply_fsdp(stage, mesh.fsdp, parallel, dtype, mesh.expert_fsdp)
            log_layout("FSDP, ZeRO stage %d, over %s", effective_zero_stage(parallel), mesh.describe())
    return stages


def build_forward_backward(
    stages: Sequence[Decoder], mesh: Mesh, parallel: Parallel, training: Training, dtype: torch.dtype
) -> ForwardBackward:
    """Return the plain forward and backward, the captured one (`compile.graphs`), or the pipelined one.

    dtype: of the hidden states that are sent.
    """
    if mesh.pp.size() == 1:
        plain = OneStage(stages, parallel)
        if not stages[0].is_graphed:
            return plain
        from torchllm.parallel.graphs import Graphed

        return Graphed(plain, torch.device(mesh.world.device_type))
    from torchllm.parallel.pipeline import Pipeline

    return Pipeline(stages, mesh, parallel, training, dtype)
