"""Every setting of a run, one dataclass a TOML section; the string under a field is what `--help` prints.

No torch here: the config is checked before torch is imported, on machines that may not have it. `config_file.py` reads
files and overrides into these classes; `problems()` at the end checks what needs more than one key.

A forked recipe adds a section of its own by subclassing `Config`:

    @dataclass(frozen=True)
    class MyConfig(Config):
        distill: Distill = field(default_factory=Distill)
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple


class Bound(NamedTuple):
    """Limits of a number, checked when it is read."""

    at_least: float = -math.inf
    at_most: float = math.inf
    above: float = -math.inf


Count = Annotated[int, Bound(at_least=1)]
Natural = Annotated[int, Bound(at_least=0)]
Degree = Annotated[int, Bound(at_least=1)]
Positive = Annotated[float, Bound(above=0.0)]
NonNegative = Annotated[float, Bound(at_least=0.0)]
Fraction = Annotated[float, Bound(at_least=0.0, at_most=1.0)]


@dataclass(frozen=True)
class Run:
    """Where the run lives and what it is seeded with."""

    folder: str = ""
    """folder of the run (config, metrics, checkpoints); empty: a new one under runs/"""
    seed: Annotated[int, Bound(at_least=0, at_most=2**63 - 1)] = 0
    """seed of the initial weights and of the data order"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where to train; auto: the GPUs if there are any"""
    deterministic: bool = False
    """use only deterministic kernels (slower on a GPU; a CPU run is bitwise repeatable without it)"""
    lower_ranks: bool = False
    """let run_train.sh start fewer processes, and say so, when the batch does not divide by all of them"""
    timeout: Positive = 600.0
    """seconds a collective may take before the job is ended"""
    collect_garbage_interval: Natural = 100
    """steps between Python garbage collections, on all ranks at the same step; 0: leave it to Python"""
    dry_run: bool = False
    """do not train: print what every kind of rank would hold and send, whatever their number, and end"""
    json: bool = False
    """with dry_run: print it as JSON, sizes in bytes; --json is short for --run.json=true"""


@dataclass(frozen=True)
class Cluster:
    """The machines, for the dry run and the planner; a run on them needs no description."""

    name: str = ""
    """a file of train_configs/clusters (dgx_h100); empty: not known"""


@dataclass(frozen=True)
class Model:
    """Sizes of the decoder."""

    family: Literal["llama", "gpt"] = "llama"
    """llama: RMSNorm, RoPE, SwiGLU, no biases; gpt: LayerNorm, learned positions, GELU, biases"""
    layers: Count = 4
    """blocks (L)"""
    hidden: Count = 256
    """width of the residual stream (D)"""
    heads: Count = 8
    """query heads (H)"""
    kv_heads: Natural = 0
    """key and value heads (K), a divisor of heads; 0: as many as heads"""
    head_dim: Natural = 0
    """width of one head (Q), even; 0: hidden / heads"""
    ffn: Count = 1024
    """width of the feed-forward layer (F)"""
    vocab: Count = 264
    """rows of the embedding (V); at least the tokenizer's number of tokens"""
    tied_embeddings: bool = False
    """use the token embedding as the output projection too"""
    max_sequence_length: Count = 2048
    """rows of the learned position table (gpt); the longest text that generate.py writes"""
    rope_theta: Positive = 10000.0
    """base of the rotary frequencies"""
    rope_scaling_factor: Annotated[float, Bound(at_least=1.0)] = 1.0
    """Llama 3.1 scaling of the rotary frequencies: how much longer than rope_original_length; 1: off"""
    rope_low_frequency_factor: Positive = 1.0
    """Llama 3.1 scaling: wavelengths over rope_original_length / this are scaled in full"""
    rope_high_frequency_factor: Positive = 4.0
    """Llama 3.1 scaling: wavelengths under rope_original_length / this are kept"""
    rope_original_length: Count = 8192
    """Llama 3.1 scaling: sequence length before it was extended, in tokens"""
    norm_epsilon: Positive = 1e-5
    """added to the variance in the norms"""
    initial_std: Positive = 0.02
    """standard deviation of the initial matrices, cut at 3 of it; what adds to the residual stream: / sqrt(2 L)"""
    attention: Literal["eager", "sdpa", "flash", "flex"] = "sdpa"
    """attention kernel; flash needs the flash-attn package, flex has no backward on a CPU"""

    @property
    def kv(self) -> int:
        """Key and value heads, resolved."""
        return self.kv_heads or self.heads

    @property
    def head_width(self) -> int:
        """Width of one head, resolved."""
        return self.head_dim or self.hidden // self.heads


@dataclass(frozen=True)
class Source:
    """One source of text; several make a mixture."""

    kind: Literal["stdlib", "text", "jsonl", "parquet", "hub", "tokens", "synthetic"] = "stdlib"
    """stdlib: the running Python's own source; tokens: shards from recipes/prepare.py; synthetic: random tokens"""
    path: str = ""
    """file, glob, hub id or folder of token shards, as kind asks"""
    text_key: str = "text"
    """key or column that holds the text (jsonl, parquet, hub)"""
    split: str = "train"
    """split of a hub data set"""
    weight: Positive = 1.0
    """share of the training sequences, relative to the other sources"""


@dataclass(frozen=True)
class Data:
    """What is read, how it is tokenized, packed and ordered."""

    sources: tuple[Source, ...] = (Source(),)
    """one [[data.sources]] table a source"""
    tokenizer: str = "bytes"
    """bytes, a tiktoken rank file (Llama 3's tokenizer.model), or a Hugging Face tokenizer.json"""
    pattern: Literal["llama3", "cl100k"] = "llama3"
    """how a tiktoken rank file splits text before merging, and its special tokens"""
    document_mask: bool = False
    """attend within a document only, and count positions from its start"""
    validation_fraction: Annotated[float, Bound(at_least=0.0, at_most=0.5)] = 0.01
    """share of the documents held out for evaluation, never trained on"""
    on_bad_record: Literal["error", "skip"] = "error"
    """a record that cannot be read: stop and name it, or count and skip it"""
    workers: Natural = 1
    """processes a rank that prefetch batches; 0: in the training process"""
    cache: str = ""
    """folder for tokenized raw sources; empty: torchllm under the user's cache folder"""
    max_raw_mib: Positive = 256.0
    """raw sources over this many MiB are refused: tokenize them once with recipes/prepare.py"""


@dataclass(frozen=True)
class Training:
    """What one step is made of, and how many there are."""

    steps: Count = 1000
    """optimizer steps"""
    micro_batch_size: Count = 1
    """sequences in one forward pass of one data-parallel rank"""
    global_batch_size: Count = 8
    """sequences in one step over all ranks; gradient accumulation follows from it"""
    sequence_length: Count = 2048
    """tokens in a sequence (S)"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """type of the computation; weights and reductions stay float32; auto: bfloat16 on a GPU, float32 on a CPU"""
    max_grad_norm: NonNegative = 1.0
    """gradients are scaled down to this global norm; 0: never"""
    on_nonfinite: Literal["skip", "stop"] = "skip"
    """a step with a loss or gradient that is not finite is never applied: go on, or stop at the next logged step"""
    max_consecutive_nonfinite: Count = 10
    """with on_nonfinite = skip: give up after this many such steps in a row"""
    loss_chunk: Natural = 0
    """tokens whose logits exist at a time; 0: all of a micro batch at once"""


@dataclass(frozen=True)
class Optimizer:
    """The optimizer; norms, biases and embeddings of positions are not decayed."""

    name: Literal["adamw", "sgd"] = "adamw"
    """which optimizer"""
    learning_rate: Positive = 3e-4
    """peak learning rate"""
    beta1: Annotated[float, Bound(at_least=0.0, at_most=0.999999)] = 0.9
    """adamw: decay of the mean of the gradients"""
    beta2: Annotated[float, Bound(at_least=0.0, at_most=0.999999)] = 0.95
    """adamw: decay of the mean of their squares"""
    epsilon: Positive = 1e-8
    """adamw: added to the root of the second moment"""
    momentum: Annotated[float, Bound(at_least=0.0, at_most=0.999999)] = 0.0
    """sgd: momentum"""
    weight_decay: NonNegative = 0.1
    """decay of the matrices"""


@dataclass(frozen=True)
class Schedule:
    """The learning rate over the steps."""

    name: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """shape after the warmup; wsd: constant, then linear decay in the last decay_steps"""
    warmup_steps: Natural = 0
    """steps over which the rate rises from 0 to its peak"""
    decay_steps: Natural = 0
    """wsd: length of the final decay; 0: a tenth of training.steps"""
    final_fraction: Fraction = 0.1
    """rate at the last step, as a fraction of the peak"""


PipelineSchedule = Literal[
    "GPipe",
    "1F1B",
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
]


class ScheduleKind(NamedTuple):
    """What a pipeline schedule asks of a layout."""

    default_stages: int
    """stages a rank holds"""
    most_stages: float
    splits_backward: bool
    """gradients of inputs and of weights are computed apart"""


SCHEDULES: dict[str, ScheduleKind] = {
    "GPipe": ScheduleKind(1, 1, False),
    "1F1B": ScheduleKind(1, 1, False),
    "Interleaved1F1B": ScheduleKind(2, math.inf, False),
    "LoopedBFS": ScheduleKind(2, math.inf, False),
    "InterleavedZeroBubble": ScheduleKind(2, math.inf, True),
    "ZBVZeroBubble": ScheduleKind(2, 2, True),
    "DualPipeV": ScheduleKind(2, 2, True),
}


@dataclass(frozen=True)
class Parallel:
    """Degrees of parallelism; their product is the number of ranks."""

    pp: Degree = 1
    """ranks that each hold a part of the blocks (pipeline parallelism)"""
    dp_replicate: Annotated[int, Bound(at_least=-1)] = 1
    """groups that each hold all weights (HSDP: nodes); -1: what the other degrees leave"""
    dp_shard: Annotated[int, Bound(at_least=-1)] = -1
    """ranks that share one copy of the weights (FSDP); -1: what the other degrees leave"""
    cp: Degree = 1
    """ranks that share a sequence (context parallelism)"""
    tp: Degree = 1
    """ranks that share each matrix (tensor parallelism)"""
    sequence_parallel: bool = False
    """with tp: split the sequence between the matrices too (norms, residuals)"""
    zero_stage: Annotated[int, Bound(at_least=0, at_most=3)] = 3
    """3: weights gathered per use; 2: gathered once a step, gradients reduced per micro batch; 1: and gradients once
    a step; 0: weights whole on every rank (DDP)"""
    keep_last_block: bool = True
    """zero_stage 3: do not free the last block's weights between its forward and its backward"""
    prefetch: Natural = 1
    """blocks whose weights are gathered ahead of the one that computes"""
    schedule: PipelineSchedule = "1F1B"
    """order of the pipeline's forwards and backwards; the last three split the backward to fill the bubble"""
    virtual_stages: Natural = 0
    """pipeline stages a rank holds; 0: 1 for GPipe and 1F1B, 2 for the others"""
    split: tuple[Count, ...] = ()
    """blocks of each pipeline stage, first to last; empty: balanced by cost, embedding and head counted in"""
    scatter_gather: bool = True
    """with pp and tp: each tp rank sends its 1/tp of the hidden states to the next stage, which gathers them"""
    cp_method: Literal["ring", "ulysses"] = "ring"
    """ring: keys and values go round while attention computes; ulysses: an all-to-all gives a rank some whole heads"""

    @property
    def stages_per_rank(self) -> int:
        """Pipeline stages of a rank, resolved."""
        return 1 if self.pp == 1 else self.virtual_stages or SCHEDULES[self.schedule].default_stages

    @property
    def stages(self) -> int:
        """Pipeline stages of the whole model."""
        return self.pp * self.stages_per_rank


@dataclass(frozen=True)
class Recompute:
    """Which activations are recomputed in the backward pass instead of kept."""

    mode: Literal["none", "full", "segment", "every_k", "ffn", "selective"] = "none"
    """full: every block; segment: runs of k blocks, only their input kept; every_k: every k-th block; ffn: the
    feed-forward layers; selective: all but matrix products and attention"""
    k: Natural = 0
    """blocks in a segment, or every how many; 0: round(sqrt(L)) for segment, 2 for every_k"""


@dataclass(frozen=True)
class Compile:
    """What torch.compile fuses; each needs a C++ compiler on a CPU."""

    norm: bool = False
    """the norms, each one kernel"""
    block: bool = False
    """each block (one compilation for all, for they are equal)"""
    loss: bool = False
    """the cross entropy"""


@dataclass(frozen=True)
class Checkpoint:
    """When the run is saved and what it starts from."""

    interval: Natural = 500
    """steps between checkpoints; 0: only the last step"""
    resume: str = "auto"
    """auto: the newest verified step of the run folder; none: start fresh; or the path of a step folder"""
    keep: Natural = 3
    """checkpoints kept, newest first, of those that verify; 0: all"""
    asynchronous: bool = False
    """write in the background while training goes on; keeps a copy of this rank's state in host memory"""


@dataclass(frozen=True)
class Metrics:
    """What is written down."""

    log_interval: Count = 10
    """steps between logged steps; only these wait for the device"""
    tensorboard: bool = True
    """write TensorBoard files beside metrics.jsonl"""


@dataclass(frozen=True)
class Evaluate:
    """Loss on the held-out documents."""

    interval: Natural = 0
    """steps between evaluations, the last step included; 0: never"""
    sequences: Count = 64
    """held-out sequences an evaluation reads, over all ranks"""


@dataclass(frozen=True)
class Generate:
    """What recipes/generate.py writes."""

    after_training: bool = False
    """let run_train.sh print a sample of the last checkpoint"""
    prompt: str = ""
    """text to continue"""
    tokens: Count = 200
    """tokens to write"""
    temperature: NonNegative = 0.8
    """0: always the likeliest token"""
    top_k: Natural = 50
    """choose among this many likeliest tokens; 0: among all"""


@dataclass(frozen=True)
class Config:
    """One run."""

    run: Run = field(default_factory=Run)
    cluster: Cluster = field(default_factory=Cluster)
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    training: Training = field(default_factory=Training)
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    parallel: Parallel = field(default_factory=Parallel)
    recompute: Recompute = field(default_factory=Recompute)
    compile: Compile = field(default_factory=Compile)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    metrics: Metrics = field(default_factory=Metrics)
    evaluate: Evaluate = field(default_factory=Evaluate)
    generate: Generate = field(default_factory=Generate)


class Problem(NamedTuple):
    """Something wrong with a config: the key to blame ("parallel.tp") and what is wrong with it and what to do."""

    key: str
    message: str


def resolve_degrees(parallel: Parallel, world_size: int | None) -> tuple[dict[str, int], list[Problem]]:
    """The five degrees with any -1 filled in, outermost axis first.

    `world_size` None: the product of the degrees; then a -1 is a problem.
    """
    degrees = {axis: getattr(parallel, axis) for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp")}
    found = [
        Problem(f"parallel.{axis}", "must be at least 1, or -1 for what the other degrees leave")
        for axis in ("dp_replicate", "dp_shard")
        if degrees[axis] == 0
    ]
    open_axes = [axis for axis, degree in degrees.items() if degree == -1]
    known = math.prod(degree for degree in degrees.values() if degree > 0)
    product = " x ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree > 0)
    if found:
        return degrees, found
    if len(open_axes) == 2:
        found.append(Problem("parallel.dp_replicate", "only one of dp_replicate and dp_shard may be -1"))
    elif open_axes and world_size is None:
        found.append(
            Problem(
                f"parallel.{open_axes[0]}",
                "is -1, but the number of ranks is not known: set NPROC (and NNODES), or give a degree",
            )
        )
    elif open_axes and world_size is not None:
        if world_size % known:
            found.append(
                Problem(f"parallel.{open_axes[0]}", f"is -1, but {world_size} ranks do not divide by {product}")
            )
        else:
            degrees[open_axes[0]] = world_size // known
    elif world_size is not None and known != world_size:
        largest = max((axis for axis in degrees), key=lambda axis: degrees[axis])
        found.append(
            Problem(f"parallel.{largest}", f"{product} = {known} ranks, but there are {world_size}; set one to match")
        )
    return degrees, found


def data_ranks(degrees: dict[str, int]) -> int:
    """Ranks that read different sequences."""
    return degrees["dp_replicate"] * degrees["dp_shard"]


def gradient_accumulation(training: Training, ranks: int) -> int:
    """Micro batches of one step on one of `ranks` data-parallel ranks."""
    return training.global_batch_size // (training.micro_batch_size * ranks)


def problems(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Everything wrong with a config that takes more than one key to see."""
    model, training, parallel = config.model, config.training, config.parallel
    if not model.head_dim and model.hidden % model.heads:
        yield Problem("model.heads", f"{model.heads} heads do not divide hidden {model.hidden}; set model.head_dim")
    if model.heads % model.kv:
        yield Problem("model.kv_heads", f"{model.kv} key-value heads do not divide {model.heads} heads")
    if model.family == "llama" and model.head_width % 2:
        yield Problem("model.head_dim", f"rotary positions need an even head width, not {model.head_width}")
    if model.family == "gpt" and training.sequence_length > model.max_sequence_length:
        yield Problem(
            "training.sequence_length",
            f"{training.sequence_length} is over model.max_sequence_length {model.max_sequence_length}",
        )
    if model.rope_high_frequency_factor <= model.rope_low_frequency_factor:
        yield Problem("model.rope_high_frequency_factor", "must be over model.rope_low_frequency_factor")
    if model.attention == "flash" and config.data.document_mask:
        yield Problem(
            "model.attention", "flash has no document mask here: use sdpa or flex, or data.document_mask = false"
        )
    if config.compile.norm and model.family == "gpt":
        yield Problem("compile.norm", "LayerNorm is one kernel already; this fuses RMSNorm (family llama)")
    yield from _parallel_problems(config, world_size)
    yield from _data_problems(config)
    if config.schedule.warmup_steps > training.steps:
        yield Problem(
            "schedule.warmup_steps", f"{config.schedule.warmup_steps} is over training.steps {training.steps}"
        )
    if config.schedule.name == "wsd" and config.schedule.warmup_steps + config.schedule.decay_steps > training.steps:
        yield Problem("schedule.decay_steps", f"warmup and decay together are over training.steps {training.steps}")
    if config.recompute.k > model.layers:
        yield Problem("recompute.k", f"{config.recompute.k} is over model.layers {model.layers}")
    if config.recompute.k and config.recompute.mode not in ("segment", "every_k"):
        yield Problem("recompute.k", f"does nothing with recompute.mode = {config.recompute.mode!r}")
    if config.evaluate.interval and not config.data.validation_fraction:
        yield Problem("evaluate.interval", "nothing is held out: set data.validation_fraction")
    if config.run.json and not config.run.dry_run:
        yield Problem("run.json", "does nothing without run.dry_run = true")
    if parallel.sequence_parallel and parallel.tp == 1:
        yield Problem("parallel.sequence_parallel", "needs parallel.tp over 1")


def _parallel_problems(config: Config, world_size: int | None) -> Iterator[Problem]:
    model, training, parallel = config.model, config.training, config.parallel
    degrees, found = resolve_degrees(parallel, world_size)
    yield from found
    if parallel.pp > 1:
        yield from _pipeline_problems(config, None if found else data_ranks(degrees))
    if parallel.cp > 1:
        yield from _context_problems(config)
    for key, size in (("heads", model.heads), ("kv_heads", model.kv), ("ffn", model.ffn)):
        if size % parallel.tp:
            yield Problem("parallel.tp", f"{parallel.tp} does not divide model.{key} = {size}")
    if -(-model.vocab // parallel.tp) * (parallel.tp - 1) >= model.vocab:
        yield Problem("parallel.tp", f"{parallel.tp} leaves a rank without a row of model.vocab = {model.vocab}")
    elif not found:
        yield from _vocabulary_problems(model.vocab, parallel, degrees["dp_shard"] * parallel.cp)
    cuts_sequence = parallel.sequence_parallel or (parallel.pp > 1 and parallel.scatter_gather)
    local = training.sequence_length // parallel.cp
    if cuts_sequence and local % parallel.tp and not training.sequence_length % parallel.cp:
        of = f"training.sequence_length = {training.sequence_length}" + (" / cp" if parallel.cp > 1 else "")
        hint = "" if parallel.sequence_parallel else "; or set parallel.scatter_gather = false"
        yield Problem("parallel.tp", f"{parallel.tp} does not divide {of}{hint}")
    if not found:
        per_pass = training.micro_batch_size * data_ranks(degrees)
        if training.global_batch_size % per_pass:
            yield Problem(
                "training.global_batch_size",
                f"{training.global_batch_size} does not divide by micro_batch_size {training.micro_batch_size} x "
                f"{data_ranks(degrees)} data-parallel ranks = {per_pass}",
            )


def _vocabulary_problems(vocab: int, parallel: Parallel, shards: int) -> Iterator[Problem]:
    """What torch asks of rows that tp does not share evenly and FSDP shards further.

    The ranks of tp hold `pieces` of the rows; of each piece FSDP's i-th rank holds the i-th of its pieces. A DTensor
    (torch 2.13) takes it that these i-th pieces are the sum of their rows, cut by tp, and where they are not it
    misplaces rows without an error: in the initial weights, in gathered tensors, in checkpoints.
    """
    if parallel.zero_stage == 0 or vocab % parallel.tp == 0:
        return
    of_tp = [_pieces(rows, shards) for rows in _pieces(vocab, parallel.tp)]
    if any(list(held) != _pieces(sum(held), parallel.tp) for held in zip(*of_tp, strict=True)):
        yield Problem(
            "model.vocab",
            f"torch misplaces rows of {vocab} that tp {parallel.tp} and {shards} FSDP ranks share unevenly: set it to "
            f"{-(-vocab // parallel.tp) * parallel.tp} (rows over the tokenizer's are never used)",
        )


def _pieces(rows: int, ranks: int) -> list[int]:
    """How torch cuts rows: the first pieces are as large as the largest, the last may be smaller or empty."""
    largest = -(-rows // ranks)
    return [max(0, min(largest, rows - largest * rank)) for rank in range(ranks)]


def _pipeline_problems(config: Config, data_parallel: int | None) -> Iterator[Problem]:
    """What pp over 1 asks; `data_parallel`: ranks that read different sequences, None if not known."""
    model, parallel = config.model, config.parallel
    kind, stages = SCHEDULES[parallel.schedule], parallel.stages
    if parallel.stages_per_rank != kind.most_stages < math.inf:
        yield Problem(
            "parallel.virtual_stages",
            f"{parallel.schedule} holds {kind.most_stages} on a rank, not {parallel.stages_per_rank}",
        )
        return
    if stages > model.layers:
        yield Problem("parallel.pp", f"{stages} stages need a block each, but model.layers is {model.layers}")
    if parallel.split and (len(parallel.split) != stages or sum(parallel.split) != model.layers):
        yield Problem(
            "parallel.split",
            f"names {len(parallel.split)} stages of {sum(parallel.split)} blocks in all, but there are {stages} stages "
            f"({parallel.pp} ranks x {parallel.stages_per_rank}) and model.layers is {model.layers}",
        )
    if kind.splits_backward and config.compile.block:
        yield Problem(
            "compile.block",
            f"{parallel.schedule} computes gradients of inputs and weights apart, which a compiled block cannot: "
            "set it to false, or use 1F1B or Interleaved1F1B",
        )
    if data_parallel:
        yield from _micro_batch_problems(config, gradient_accumulation(config.training, data_parallel))


def _micro_batch_problems(config: Config, count: int) -> Iterator[Problem]:
    """What a schedule asks of the number of micro batches a step."""
    parallel = config.parallel
    have = f"{parallel.schedule} on {parallel.pp} pipeline ranks needs"
    remedy = f"a step has {count} (global_batch_size / micro_batch_size / data-parallel ranks)"
    match parallel.schedule:
        case "1F1B" if count < parallel.pp:
            yield Problem("training.global_batch_size", f"{have} at least {parallel.pp} micro batches; {remedy}")
        case "DualPipeV" if count < parallel.stages:
            yield Problem("training.global_batch_size", f"{have} at least {parallel.stages} micro batches; {remedy}")
        case "Interleaved1F1B" | "InterleavedZeroBubble" if count > parallel.pp and count % max(
            1, count // parallel.pp
        ):
            yield Problem(
                "training.global_batch_size",
                f"{have} micro batches that divide into {count // parallel.pp} equal rounds; {remedy}",
            )


def _context_problems(config: Config) -> Iterator[Problem]:
    """What cp over 1 asks."""
    model, parallel, length = config.model, config.parallel, config.training.sequence_length
    pieces = parallel.cp * (2 if parallel.cp_method == "ring" else 1)
    if length % pieces:
        why = " (two pieces a rank, so that causal work is even)" if parallel.cp_method == "ring" else ""
        yield Problem("parallel.cp", f"training.sequence_length = {length} does not divide into {pieces}{why}")
    heads = model.kv // parallel.tp
    if parallel.cp_method == "ulysses" and heads % parallel.cp:
        of = f" (model.kv_heads {model.kv} / tp {parallel.tp})" if parallel.tp > 1 else ""
        yield Problem(
            "parallel.cp",
            f"ulysses gives each rank whole key-value heads, but {heads}{of} do not divide by {parallel.cp} ranks: set "
            f'it to {math.gcd(heads, parallel.cp)}, or use parallel.cp_method = "ring"',
        )
    if model.attention in ("flash", "flex") and parallel.cp_method == "ring":
        yield Problem(
            "model.attention",
            f"{model.attention} cannot be merged block by block in a ring: use sdpa or eager, or "
            'parallel.cp_method = "ulysses"',
        )
    if config.compile.block and config.recompute.mode in ("full", "every_k", "selective"):
        yield Problem(
            "compile.block",
            f"with recompute.mode = {config.recompute.mode!r} and cp, whose attention stays outside the graphs, torch "
            'compiles none of a block: use recompute.mode = "segment" (k = 1 is full) or "ffn"',
        )


def _data_problems(config: Config) -> Iterator[Problem]:
    if not config.data.sources:
        yield Problem("data.sources", "is empty: name at least one [[data.sources]]")
    for index, source in enumerate(config.data.sources):
        needs_path = source.kind not in ("stdlib", "synthetic")
        if needs_path and not source.path:
            yield Problem(f"data.sources.{index}.path", f"a source of kind {source.kind!r} needs a path")
        if not needs_path and source.path:
            yield Problem(f"data.sources.{index}.path", f"does nothing with kind {source.kind!r}")
