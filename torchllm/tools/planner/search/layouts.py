"""Enumerate the layouts of a model on a number of GPUs that the config accepts, and say why others are refused.

No torch. A layout is a mesh (pp x data-parallel ranks x cp x tp), the parts of a step (micro batch, schedule), the
sharding (HSDP's two degrees, ZeRO stage) and the kept activations (recomputation, sequence parallelism). Of equivalent
layouts one is listed: without pp one schedule, without cp one method, without sharding one ZeRO stage; DDP has one data
axis; segments and intervals of recomputation are the default ones. A rank has at most 4 virtual stages, or any number
that cuts the blocks evenly.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, Literal, NamedTuple, TypeVar, get_args

from torchllm.config import (
    SCHEDULES,
    Compile,
    Config,
    Float8,
    Model,
    Optimizer,
    Parallel,
    PipelineSchedule,
    Recompute,
    TrainedParameters,
    Training,
)
from torchllm.config.schema import RecomputeMode
from torchllm.facts.flops import ALL_TRAINED
from torchllm.facts.parts.registry import mixer
from torchllm.tools.config.axis_problems import micro_batch_problems, window_reaches_too_far
from torchllm.tools.config.cut_blocks import cut_rows
from torchllm.tools.config.degrees import BLOCK_MODES, has_rank_without_rows, obstacle_to_compiled_blocks
from torchllm.tools.config.float8_sizes import FLOAT8_MULTIPLE, takes_float8_tokens, unfit_for_float8
from torchllm.tools.planner.case import Case
from torchllm.tools.planner.cluster import Hardware
from torchllm.tools.planner.compute import Kernels, kernel_of_attention
from torchllm.tools.planner.experts import IMBALANCE
from torchllm.tools.planner.frozen_weights import with_frozen_weights
from torchllm.tools.planner.optimizer_states import with_optimizer_states
from torchllm.tools.planner.parameters import different_views
from torchllm.tools.planner.software import TORCHLLM, Software

C = TypeVar("C", bound=Config)
ContextMethod = Literal["ring", "ulysses"]
MODES: tuple[RecomputeMode, ...] = get_args(RecomputeMode)
RECOMPUTE = {mode: Recompute(mode=mode) for mode in MODES}
OFFLOADED = {mode: Recompute(mode=mode, offload=True) for mode in MODES}
UNEVEN_STAGES = 4
"""largest number of virtual stages that need not divide the blocks evenly"""


class Layout(NamedTuple):
    """One way to run the model; the fields are named as in the config."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    schedule: PipelineSchedule = "1F1B"
    virtual_stages: int = 0
    micro_batch_size: int = 1
    zero_stage: int = 3
    recompute: RecomputeMode = "none"
    sequence_parallel: bool = False
    cp_method: ContextMethod = "ring"
    ep: int = 1
    regather: bool = False

    @property
    def data_ranks(self) -> int:
        """Ranks that read different sequences."""
        return self.dp_replicate * self.dp_shard

    def text(self) -> str:
        """Return the layout in one line; degrees of 1 and defaults are omitted."""
        parts = []
        for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp"):
            degree = getattr(self, axis)
            if degree > 1:
                parts.append(f"{axis} {degree}")
        if not parts:
            parts.append("one rank")
        if self.pp > 1:
            stages = f" x {self.virtual_stages}" if self.virtual_stages > 1 else ""
            parts.append(f"{self.schedule}{stages}")
        parts.append(f"micro batch {self.micro_batch_size}")
        if self.data_ranks * self.cp > 1:
            parts.append(f"zero {self.zero_stage}")
        if self.ep > 1:
            parts.append(f"ep {self.ep}")
        if self.cp > 1:
            parts.append(self.cp_method)
        if self.sequence_parallel:
            parts.append("sp")
        if self.regather:
            parts.append("regather")
        if self.recompute != "none":
            parts.append(f"recompute {self.recompute}")
        return ", ".join(parts)


def layout_of(config: Config) -> Layout:
    """Return the layout of a config whose degrees are resolved."""
    parallel = config.parallel
    keys = [key for key in Layout._fields if hasattr(parallel, key)]
    values = {key: getattr(parallel, key) for key in keys} | {"zero_stage": parallel.zero}
    return Layout(**values, micro_batch_size=config.training.micro_batch_size, recompute=config.recompute.mode)


def kernels_of(model: Model, compile: Compile, software: Software, hardware: Hardware) -> Kernels:
    """Return the kernels that a torchllm run computes with; a GPU has one for RMSNorm, compiled or not.

    It has none for weights that are added to 1.
    """
    compiled = compile.block is True
    attention = kernel_of_attention(model, software)
    fused_norm = (hardware.is_gpu and not model.offsets_norms) or compile.norm or compiled
    return Kernels(attention, fused_norm, compiled, compiled_loss=compile.loss is True, graphs=compile.graphs)


class DegreeMesh(NamedTuple):
    """The degrees of a layout, with one degree for both data-parallel axes."""

    pp: int
    data: int
    cp: int
    tp: int


class ShardingDegrees(NamedTuple):
    """How a mesh shares weights, gradients and optimizer; the fields are named as in the config."""

    dp_replicate: int
    dp_shard: int
    zero_stage: int
    ep: int = 1


@dataclass(frozen=True)
class Job:
    """The question to the planner: a model, a batch, machines, and the keys that are already set."""

    model: Model
    training: Training
    """sequence_length, global_batch_size and loss_chunk count; the micro batch is searched"""
    hardware: Hardware
    gpus: int
    compile: Compile | None = None
    """where it is "auto", the blocks are compiled if the layout allows it; None: whatever the layout allows"""
    float8: Float8 = field(default_factory=Float8)
    """rules layouts out; products are costed in bfloat16"""
    trained: TrainedParameters = ALL_TRAINED
    optimizer: Optimizer = field(default_factory=Optimizer)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """fields of `Layout` that the run sets; all others are searched"""
    most: Mapping[str, int] = field(default_factory=dict)
    """the largest value of some fields of `Layout` that are searched"""
    imbalance: float = IMBALANCE
    """with experts: rows of the busiest rank's experts, divided by the average over ranks"""
    of_all_layouts: Mapping[str, Any] = field(default_factory=dict)
    """keys of [parallel] that no `Layout` has, such as `expert_chunks`; others have their defaults"""
    offloads_inputs: bool = False
    """recompute.offload, of layouts that recompute whole blocks"""
    recompute_k: int = 0
    """recompute.k, of layouts that recompute segments, or one block in k"""

    @cached_property
    def software(self) -> Software:
        """torchllm, with the constants of the cluster file."""
        software = replace(TORCHLLM, constants=self.hardware.constants)
        software = with_optimizer_states(software, self.model, self.training, self.optimizer)
        return with_frozen_weights(software, self.model, self.trained)

    def allowed(self, key: str, values: list[Any]) -> list[Any]:
        """Return the `values` that agree with `fixed` and `most`."""
        values = [value for value in values if self.fixed.get(key, value) == value]
        return [value for value in values if value <= self.most[key]] if key in self.most else values

    def compile_of(self, layout: Layout) -> Compile:
        """Return the parts that torch.compile compiles in this layout: whole blocks, or smaller parts."""
        return self._compiled[_can_compile_blocks(layout.pp, layout.schedule, layout.cp, layout.recompute)]

    @property
    def _must_compile_blocks(self) -> bool:
        """Whether a layout whose blocks torch cannot compile is out of the question."""
        return self.compile is not None and self.compile.block is True

    @cached_property
    def _compiled(self) -> tuple[Compile, Compile]:
        """The compiled parts if blocks cannot be compiled, and if they can."""
        on_gpu = self.hardware.is_gpu  # a CPU needs a compiler, which may not be there
        if self.compile is None:
            norm = on_gpu and self.model.features.norm == "rms"
            return Compile(norm, block=False, loss=on_gpu), Compile(block=on_gpu, loss=on_gpu)
        block, loss = self.compile.block, self.compile.loss
        if block == "auto":
            block = on_gpu
        if loss == "auto":
            loss = on_gpu
        compiled = replace(self.compile, block=block, loss=loss)
        return replace(compiled, block=False), compiled

    @cached_property
    def _training_of(self) -> Callable[[int], Training]:
        """A cached function: micro batch size -> [training]."""
        return cache(lambda size: replace(self.training, micro_batch_size=size))

    def case(self, layout: Layout) -> Case:
        """Return what `predict` takes."""
        return Case(
            self.model,
            self._training_of(layout.micro_batch_size),
            self.parallel(layout),
            self.recompute(layout),
            kernels_of(self.model, self.compile_of(layout), self.software, self.hardware),
            self.hardware,
            self.software,
            self.trained,
            self.optimizer,
            self.imbalance,
        )

    def recompute(self, layout: Layout) -> Recompute:
        """Return [recompute] with this layout."""
        has_effect = self.offloads_inputs and layout.recompute in ("full", "segment")
        recompute = OFFLOADED[layout.recompute] if has_effect else RECOMPUTE[layout.recompute]
        if self.recompute_k and layout.recompute in ("segment", "every_k"):
            return replace(recompute, k=self.recompute_k)
        return recompute

    @cached_property
    def _others(self) -> Parallel:
        """[parallel] with the keys of all layouts."""
        return Parallel(**self.of_all_layouts)

    def parallel(self, layout: Layout, base: Parallel | None = None) -> Parallel:
        """Return [parallel] with this layout; keys that the job does not have either are taken from `base`."""
        values = layout._asdict()
        del values["micro_batch_size"], values["recompute"]
        values["scatter_gather"] = self.training.sequence_length // layout.cp % layout.tp == 0
        return replace(replace(base, **self.of_all_layouts) if base else self._others, **values)

    def config(self, base: C, layout: Layout) -> C:
        """Return a run's config with this layout; other keys are taken from `base`."""
        return replace(
            base,
            model=self.model,
            training=self._training_of(layout.micro_batch_size),
            optimizer=self.optimizer,
            parallel=self.parallel(layout, base.parallel),
            recompute=self.recompute(layout),
            compile=self.compile_of(layout),
        )

    @cached_property
    def meshes(self) -> list[DegreeMesh]:
        """All factorizations of the GPUs that agree with `fixed`."""
        meshes = []
        for tp in self.allowed("tp", divisors(self.gpus)):
            outside_tp = self.gpus // tp
            for cp in self.allowed("cp", divisors(outside_tp)):
                outside_cp = outside_tp // cp
                for pp in self.allowed("pp", divisors(outside_cp)):
                    meshes.append(DegreeMesh(pp, outside_cp // pp, cp, tp))
        return meshes

    def refusal(self, mesh: DegreeMesh) -> str:
        """Return why the mesh has no valid layout, as `tools.config.checks` would say; empty if it has some."""
        model, tp = self.model, mesh.tp
        for view in different_views(model):
            for name, size in {**mixer(view).heads(view), "ffn": view.ffn}.items():
                if size % tp:
                    return f"tp does not divide model.{name} = {size}"
            if self.float8.is_on and (width := next(unfit_for_float8(view, tp), "")):
                return f"model.{width} is no multiple of {FLOAT8_MULTIPLE}, which float8 products need"
        if not self._takes_vocabulary(mesh):
            return f"tp does not divide model.vocab = {model.vocab}"
        if mesh.pp > 1 and self.compile is not None and self.compile.graphs:
            return "compile.graphs captures no pipeline"
        if mesh.pp > model.layers:
            return f"pp exceeds model.layers = {model.layers}"
        batch = self.training.global_batch_size
        if batch % mesh.data:
            return f"the data-parallel ranks do not divide the batch of {batch} sequences"
        lacking = [view.mixer for view in different_views(model) if not mixer(view).context]
        if mesh.cp > 1 and lacking:
            return f"blocks with model.mixer = {lacking[0]!r} cannot share a sequence with other ranks"
        if not self.context_methods(mesh):
            return f"cp divides neither the sequence of {self.training.sequence_length} tokens nor the heads"
        if self._has_blocks and not self.shardings(mesh):
            return 'tp or dp_shard cuts blocks of optimizer.state_dtype = "int8", or keys that the run sets rule it out'
        has_pieces = next(self.pieces(mesh), None) is not None
        if not has_pieces or not self.shardings(mesh) or not self.sequence_parallel(mesh):
            return "the batch has too few micro batches for any schedule, or the keys that the run sets rule it out"
        return ""

    @property
    def _has_blocks(self) -> bool:
        """Whether moments have blocks that no layout may cut."""
        return self.optimizer.state_dtype == "int8"

    def _takes_vocabulary(self, mesh: DegreeMesh) -> bool:
        """Return whether tp can cut the vocabulary: each rank has a row, and FSDP on more than 2 ranks equal parts."""
        vocab, tp = self.model.vocab_rows, mesh.tp
        if vocab % tp == 0:
            return True
        return mesh.data * mesh.cp <= 2 and not has_rank_without_rows(vocab, tp)

    def context_methods(self, mesh: DegreeMesh) -> list[ContextMethod]:
        """Return the methods of context parallelism that the mesh allows."""
        length, cp = self.training.sequence_length, mesh.cp
        if cp == 1:
            return [self.fixed.get("cp_method", "ring")]
        methods = []
        views = different_views(self.model)
        has_long_window = any(window_reaches_too_far(view, length, cp) for view in views)
        has_ring = not any(view.attention in ("flash", "flex") for view in views)
        shared_heads = [list(mixer(view).heads(view).values())[-1] // mesh.tp for view in views]
        if length % (2 * cp) == 0 and has_ring and not has_long_window:
            methods.append("ring")
        if length % cp == 0 and not any(heads % cp for heads in shared_heads):
            methods.append("ulysses")
        return self.allowed("cp_method", methods)

    def sequence_parallel(self, mesh: DegreeMesh) -> list[bool]:
        """Return the values of sequence_parallel that the mesh allows: off, and on if tp can cut the sequence."""
        values = [False]
        if mesh.tp > 1 and self._cuts_sequence(mesh):
            values.append(True)
        return self.allowed("sequence_parallel", values)

    def _cuts_sequence(self, mesh: DegreeMesh) -> bool:
        """Return whether tp divides the part of a sequence that a cp rank has."""
        length = self.training.sequence_length // mesh.cp
        return length % mesh.tp == 0

    def regather(self, layout: Layout) -> list[bool]:
        """Return the values of regather: kept inputs first, and gathered ones where a layout keeps any."""
        if not layout.sequence_parallel or layout.recompute in ("full", "segment"):
            return [bool(self.fixed.get("regather", False))]
        return self.allowed("regather", [False, True])

    def pieces(self, mesh: DegreeMesh) -> Iterator[int]:
        """Yield the micro batch sizes that leave a schedule enough micro batches."""
        sequences = self.training.global_batch_size // mesh.data
        for size in self.allowed("micro_batch_size", divisors(sequences)):
            tokens = size * self.training.sequence_length // mesh.cp
            if self.float8.is_on and not takes_float8_tokens(self.float8, tokens):
                continue
            if self.schedules(mesh, size):
                yield size

    def needs_context_parallelism(self, mesh: DegreeMesh, micro_batch_size: int) -> bool:
        """Return whether no layout with fewer cp ranks gives each rank the same work; True if the run restricts that.

        Let n > 1 divide both cp and the micro batch. With cp / n ranks, 1 / n of the sequences in a micro batch and n
        times the data ranks, a rank has the same number of tokens and shares its weights with the same number of ranks,
        but sends less over cp, or nothing.
        """
        if {"cp", "dp_shard", "micro_batch_size"} & (self.fixed.keys() | self.most.keys()):
            return True
        return math.gcd(mesh.cp, micro_batch_size) == 1

    def schedules(self, mesh: DegreeMesh, micro_batch_size: int) -> list[tuple[PipelineSchedule, int]]:
        """Return the possible schedules, each with a number of virtual stages."""
        micro_batches = self.training.global_batch_size // (micro_batch_size * mesh.data)
        return self._schedules(mesh.pp, micro_batches)

    @cached_property
    def _schedules(self) -> Callable[[int, int], list[tuple[PipelineSchedule, int]]]:
        """A cached function: pipeline ranks, micro batches -> schedules."""
        return cache(self._schedules_of)

    def _schedules_of(self, pp: int, micro_batches: int) -> list[tuple[PipelineSchedule, int]]:
        """Return the possible schedules of `pp` ranks."""
        split = self._others.split
        if pp == 1:
            if split:
                return []
            return [(self.fixed.get("schedule", "1F1B"), self.fixed.get("virtual_stages", 0))]
        schedules: list[tuple[PipelineSchedule, int]] = []
        for name in self.allowed("schedule", list(SCHEDULES)):
            if self._takes_schedule(name, pp, micro_batches):
                stages = self.allowed("virtual_stages", self._virtual_stages(name, pp))
                schedules += [(name, number) for number in stages if len(split) in (0, pp * number)]
        return schedules

    def _takes_schedule(self, name: PipelineSchedule, pp: int, micro_batches: int) -> bool:
        """Return whether a schedule can run these micro batches, with the kernels that the run sets."""
        if SCHEDULES[name].splits_backward and (self._must_compile_blocks or self.float8.is_on):
            return False
        return not any(micro_batch_problems(Parallel(pp=pp, schedule=name), micro_batches))

    def _virtual_stages(self, name: PipelineSchedule, pp: int) -> list[int]:
        """Return the possible numbers of stages per rank."""
        layers, kind = self.model.layers, SCHEDULES[name]
        fewest = 1 if name == "InterleavedZeroBubble" else kind.default_stages
        limit = int(min(kind.most_stages, layers // pp))
        numbers = range(fewest, limit + 1)
        return [number for number in numbers if number <= UNEVEN_STAGES or layers % (pp * number) == 0]

    @cached_property
    def shardings(self) -> Callable[[DegreeMesh], list[ShardingDegrees]]:
        """A cached function: mesh -> the possible ways to share weights, gradients and optimizer, experts too."""
        return cache(self._shardings_of)

    def _shardings_of(self, mesh: DegreeMesh) -> list[ShardingDegrees]:
        """Return the possible ways to share weights, gradients, optimizer and experts on a mesh."""
        shardings = []
        for shard in self.allowed("dp_shard", divisors(mesh.data)):
            replicate = mesh.data // shard
            if not self.allowed("dp_replicate", [replicate]):
                continue
            for stage in self._zero_stages(mesh, replicate, shard):
                for ep in self.expert_degrees(mesh, shard, stage):
                    if not (self._has_blocks and cut_rows(self.model, mesh.tp, ep, shard * mesh.cp)):
                        shardings.append(ShardingDegrees(replicate, shard, stage, ep))
        return shardings

    def _zero_stages(self, mesh: DegreeMesh, dp_replicate: int, dp_shard: int) -> list[int]:
        """Return the possible ZeRO stages of a split of the data-parallel ranks."""
        if mesh.data * mesh.cp == 1:  # nothing is shared, whatever the stage
            return [self.fixed.get("zero_stage", 3)]
        if dp_shard * mesh.cp == 1:  # DDP is written with dp_shard
            return []
        stages = self.allowed("zero_stage", [0, 1, 2, 3])
        if mesh.pp > 1 and 1 in stages and 2 in stages:  # torch's stages reduce once per step: 2 is 1
            stages.remove(2)
        if dp_replicate > 1 and 0 in stages:
            stages.remove(0)
        return stages

    def expert_degrees(self, mesh: DegreeMesh, dp_shard: int, zero_stage: int) -> list[int]:
        """Return the possible degrees of expert parallelism, as `tools.config.checks` accepts them."""
        model = self.model
        if not model.experts:
            return self.allowed("ep", [1])
        borrowed = dp_shard * mesh.cp * mesh.tp
        degrees = divisors(math.gcd(model.experts, borrowed))
        shared_width = model.shared_experts * model.expert_width
        if zero_stage == 0 or shared_width % mesh.tp or not self._cuts_sequence(mesh):
            degrees = [1]
        if model.expert_width % mesh.tp:  # without ep tp cuts each expert
            degrees = [ep for ep in degrees if ep > 1]
        return self.allowed("ep", degrees)

    def modes(self, mesh: DegreeMesh) -> list[RecomputeMode]:
        """Return the possible modes of recomputation."""
        modes = self.allowed("recompute", list(MODES))
        if mesh.cp > 1 and self._must_compile_blocks:
            return [mode for mode in modes if mode not in BLOCK_MODES]
        return modes

    def accepts(self, layout: Layout) -> bool:
        """Return whether the layout is one of those enumerated here."""
        mesh = DegreeMesh(layout.pp, layout.data_ranks, layout.cp, layout.tp)
        if mesh not in self.meshes or self.refusal(mesh) or layout.micro_batch_size not in self.pieces(mesh):
            return False
        schedule = layout.schedule, layout.virtual_stages
        sharding = ShardingDegrees(layout.dp_replicate, layout.dp_shard, layout.zero_stage, layout.ep)
        return (
            schedule in self.schedules(mesh, layout.micro_batch_size)
            and sharding in self.shardings(mesh)
            and layout.cp_method in self.context_methods(mesh)
            and layout.sequence_parallel in self.sequence_parallel(mesh)
            and layout.recompute in self.modes(mesh)
            and layout.regather in self.regather(layout)
        )

    def count(self, mesh: DegreeMesh) -> int:
        """Return the number of layouts of a mesh that is not refused."""
        schedules = sum(len(self.schedules(mesh, size)) for size in self.pieces(mesh))
        shardings, modes = len(self.shardings(mesh)), len(self.modes(mesh))
        return schedules * shardings * modes * len(self.context_methods(mesh)) * len(self.sequence_parallel(mesh))


@cache
def _can_compile_blocks(pp: int, schedule: PipelineSchedule, cp: int, mode: RecomputeMode) -> bool:
    return obstacle_to_compiled_blocks(pp, schedule, cp, mode) is None


def divisors(number: int) -> list[int]:
    """Return the divisors of a positive number, ascending."""
    up_to_root = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    beyond_root = [number // divisor for divisor in reversed(up_to_root) if divisor * divisor != number]
    return up_to_root + beyond_root
