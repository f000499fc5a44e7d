"""Every setting of a run, one dataclass per TOML section; `--help` prints the string under each field.

No torch here: the config is checked before torch is imported, on machines that may not have it. `load.py` reads
files and overrides into these classes. A key is one line: its type, with notes on its limits, on the conditions for
its effect (`Needs`) and on the call that applies it (`AppliedBy`); `checks.py` has the checks between keys.

A forked recipe adds a section by subclassing `Config`:

    @dataclass(frozen=True)
    class MyConfig(Config):
        distill: Distill = field(default_factory=Distill)
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, get_args

from torchllm.config.keys import AppliedBy, Bound, IsPath, Needs, OfKinds, Unsupported

# Needs that several keys share, and calls that apply several keys.
EXPERTS = Needs("model.experts over 0")
BALANCED = Needs(f'{EXPERTS.words} and model.balance_loss = "sequence" or "global"')
LLAMA = Needs('model.family = "llama"')
ROTARY = Needs('rotary positions, which model.family = "llama" has')
DELTA = Needs('model.mixer = "gated_delta"')
MTP = Needs("model.mtp_depth over 0")
LATENT = Needs('model.mixer = "latent_attention"')
SCALED = "model.rope_scaling_factor over 1"
LLAMA3 = Needs(f'{SCALED} and model.rope_scaling = "llama3"')
YARN = Needs(f'{SCALED} and model.rope_scaling = "yarn"')
OWN_TEXT = "a source of your own raw text"
ADAMW = Needs('optimizer.name = "adamw" or "muon"')
PIPELINE = Needs("parallel.pp over 1", "idle")
GATHERED = Needs("parallel.pp and parallel.tp over 1, without parallel.sequence_parallel", "idle")
KEEPING = 'a recompute.mode other than "full" or "segment", which keep no input of a product'
REGATHERED = Needs(f"parallel.tp over 1 and parallel.sequence_parallel = true and {KEEPING}", "idle")
SHARDED = "parallel.dp_shard x cp over 1 and parallel.zero_stage"
LORA = "lora.rank over 0"
TASKS = Needs("evaluate.tasks_interval over 0, or recipes/evaluate.py", "elsewhere")
EVALUATED = Needs("evaluate.interval or evaluate.tasks_interval over 0, or recipes/evaluate.py", "elsewhere")
FREE = "that neither model.frozen nor lora.rank freezes"
MATRICES = Needs(f"matrices of blocks {FREE}")
DECAY = "optimizer.weight_decay and a learning rate over 0"
OWN_HEAD = "model.tied_embeddings = false"
BUILD = AppliedBy(
    "build_model(config.model, config.training.loss_chunk, config.training.z_loss, config.training.weights_dtype)"
)
PARALLELIZE = AppliedBy("parallelize(...) with config.recompute, config.compile and config.float8")
INITIAL = AppliedBy("Checkpointer(..., initial=initial_weights(config)) and its resume()")
BALANCE = AppliedBy("ExpertBalance(stages, config.training), which TrainStep has")
HEALTH = AppliedBy("monitor.step(n) and monitor.log(...)")
AVERAGING = AppliedBy(
    "WeightAverage(stages, config.optimizer.ema_decay, config.optimizer.ema_offload), its follow(optimizer), and below "
    "checkpoints.resume() its restart(checkpoints.missing_extra_state)"
)
EVALUATION = AppliedBy("data.validation_sequences(config.evaluate.sequences), and evaluate(...) where it is due")
EPOCHS = AppliedBy("data.steps_of_epochs(config.finetune.epochs), whose steps are trained")

FilePath = Annotated[str, IsPath()]
PathOrName = Annotated[str, IsPath(or_name=True)]
Count = Annotated[int, Bound(at_least=1)]
Natural = Annotated[int, Bound(at_least=0)]
Degree = Count
Positive = Annotated[float, Bound(over=0.0)]
NonNegative = Annotated[float, Bound(at_least=0.0)]
Fraction = Annotated[float, Bound(at_least=0.0, at_most=1.0)]
RecomputeMode = Literal["none", "full", "segment", "every_k", "ffn", "selective", "selective_half"]
Switch = Literal[True, False, "auto"]
"""auto: the best choice for the machine and the layout of a run; False if nothing resolves it"""


@dataclass(frozen=True)
class Run:
    """Folder, seed, device and time limits of the run."""

    folder: FilePath = ""
    """folder of the run (config, metrics, checkpoints); empty: a new one under runs/"""
    seed: Annotated[int, Bound(at_least=0, at_most=2**63 - 1)] = 0
    """seed of the initial weights and of the data order"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where to train; auto: the GPUs if there are any"""
    deterministic: Annotated[bool, AppliedBy("start_runtime(config.run, [config])")] = False
    """use only deterministic kernels (slower on a GPU; a CPU run is bitwise repeatable without it)"""
    lower_ranks: bool = False
    """let run_train.sh start fewer processes, with a message, if all of them cannot share the batch"""
    timeout: Positive = 600.0
    """seconds without progress in a step after which the job is ended, with a message that names the cause"""
    start_timeout: Positive = 1800.0
    """the same during start-up: until all nodes have joined, while data and a checkpoint load, in steps that compile"""
    save_timeout: Positive = 1800.0
    """the same while a checkpoint is saved"""
    restarts: Annotated[int, Bound(at_least=-1)] = -1
    """how often the launchers restart all ranks after one died; each later checkpoint resets the count; -1: 3 under
    Slurm and Kubernetes, else 0"""
    stopped_exit_status: Annotated[int, Bound(at_least=0, at_most=125)] = 0
    """exit status of run_train.sh when the run was asked to stop; over 0 where 0 means that all is done (Kubernetes)"""
    collect_garbage_interval: Natural = 100
    """steps between full garbage collections of Python, on all ranks at the same step; 0: leave it to Python"""
    on_event: str = ""
    """command that is called with an event (hang, restart, nan, end) and the run folder; empty: none"""
    dry_run: Annotated[bool, AppliedBy("dry_run(config) instead of training")] = False
    """do not train: print the memory and the messages of each kind of rank, for any number of ranks"""
    json: Annotated[bool, Needs("run.dry_run = true")] = False
    """with dry_run: print JSON, with sizes in bytes; --json is short for --run.json=true"""


@dataclass(frozen=True)
class Cluster:
    """The machines, as used by the dry run and the planner; training needs no description of them."""

    name: Annotated[str, IsPath(or_name=True, ending=".toml")] = ""
    """a file of train_configs/clusters, such as dgx_h100, or the path of a TOML file; empty: unknown"""


class Features(NamedTuple):
    """Parts of the decoders of one family.

    Code that builds, counts or costs a model asks for a feature, never for the name of a family: a new family is one
    row of `FAMILIES`, and a feature that no other family has is one field here.
    """

    norm: Literal["rms", "layer"]
    """rms: RMSNorm, which may have a weight (`norm_weights`); layer: LayerNorm, which has a weight and a bias"""
    feed_forward: Literal["gated", "gelu", "relu2"]
    """gated: three matrices, down(act(gate(x)) * up(x)), where act is model.activation (SwiGLU); gelu and relu2: two,
    down(gelu(up(x))) and down(relu(up(x))^2)"""
    biases: bool
    """the matrices of attention and of the feed-forward layer have biases, all of them"""
    learned_positions: bool
    """a learned position is added to each token's embedding; False: rotary positions turn q and k (RoPE)"""
    norm_weights: bool = True
    """norms of hidden states, queries and keys have weights"""
    normed_embeddings: bool = False
    """a norm is before the first block"""

    @property
    def gated_ffn(self) -> bool:
        """Whether the feed-forward layer has three matrices, one of them a gate."""
        return self.feed_forward == "gated"


LLAMA_FEATURES = Features(norm="rms", feed_forward="gated", biases=False, learned_positions=False)
FAMILIES = {
    "llama": LLAMA_FEATURES,
    "gpt": Features(norm="layer", feed_forward="gelu", biases=True, learned_positions=True),
    "nanochat": LLAMA_FEATURES._replace(feed_forward="relu2", norm_weights=False, normed_embeddings=True),
}


class Kinds(dict[str, dict[str, Any]]):
    """The tables [model.kinds.NAME], by name. Never changed: it is a part of a frozen dataclass, and hashed with it."""

    def __hash__(self) -> int:  # type: ignore[override]  # a dict has none
        return hash(frozenset((name, frozenset(keys.items())) for name, keys in self.items())) if self else 0


@dataclass(frozen=True)
class Model:
    """Sizes of the decoder."""

    from_hf: Annotated[PathOrName, INITIAL] = ""
    """published model whose sizes and weights a fresh run starts with: a folder with config.json, or an id of the
    Hugging Face Hub, ORG/NAME or ORG/NAME@REVISION; empty: the sizes below, and random weights"""
    family: Literal["llama", "gpt", "nanochat"] = "llama"
    """llama: RMSNorm, RoPE, SwiGLU, no biases; gpt: LayerNorm, learned positions, GELU, biases; nanochat: RMSNorm
    without weights, also of the embeddings, RoPE, squared ReLU without a gate, no biases"""
    layers: Count = 4
    """blocks (L)"""
    pattern: Annotated[tuple[str, ...], BUILD] = ()
    """kinds of the blocks, repeated, e.g. ["local", "local", "global"]; empty: all blocks are as [model] says"""
    kinds: Annotated[Kinds, BUILD] = field(default_factory=Kinds)
    """[model.kinds.NAME]: the keys of [model] that differ in blocks of a kind: of attention, norms, feed-forward layer
    and rotary positions; experts = 0 makes its blocks dense"""
    block: str = ""
    """kind of the blocks, by the name under which a fork registers it; empty: torchllm's"""
    mixer: Annotated[str, BUILD] = "attention"
    """how tokens see others in a block: attention, latent_attention (DeepSeek-V3), gated_delta (a recurrence:
    Qwen3-Next), or the name under which a fork registers its own"""
    hidden: Count = 256
    """width of the residual stream (D)"""
    heads: Count = 8
    """query heads (H)"""
    kv_heads: Natural = 0
    """key and value heads (K), a divisor of heads; 0: equal to heads"""
    head_dim: Natural = 0
    """width of one head (Q), even; 0: hidden / heads"""
    latent_kv_width: Annotated[Natural, LATENT] = 0
    """width of a token's latent; the keys and values of all heads are projected from it (kv_lora_rank)"""
    latent_q_width: Annotated[Natural, LATENT] = 0
    """the same of queries (q_lora_rank); 0: these are projected from the hidden states"""
    latent_norm_epsilon: Annotated[Positive, LATENT] = 1e-6
    """norm_epsilon of the norms of latents"""
    nope_head_dim: Annotated[Natural, LATENT] = 0
    """features of a query or key without positions; the width of a head (Q) is nope_head_dim + rope_head_dim"""
    rope_head_dim: Annotated[Natural, LATENT] = 0
    """features of a query or key, the last ones, that rotary positions turn; in keys they are the same for all heads"""
    v_head_dim: Annotated[Natural, LATENT] = 0
    """width of a head's values"""
    delta_key_heads: Annotated[Natural, DELTA] = 0
    """heads of the queries and keys of gated_delta, a divisor of delta_value_heads; 0: kv_heads"""
    delta_value_heads: Annotated[Natural, DELTA] = 0
    """heads of its values, each with a state of delta_key_dim x delta_value_dim numbers; 0: heads"""
    delta_key_dim: Annotated[Natural, DELTA] = 0
    """width of one of its keys; 0: the width of a head"""
    delta_value_dim: Annotated[Natural, DELTA] = 0
    """width of one of its values; 0: the width of a head"""
    delta_conv: Annotated[int, Bound(at_least=2), DELTA] = 4
    """tokens that the convolution of its queries, keys and values sees, the current one included"""
    delta_norm_epsilon: Annotated[NonNegative, DELTA] = 0.0
    """norm_epsilon of the norm of its results; 0: model.norm_epsilon"""
    delta_negative: Annotated[bool, DELTA] = False
    """let a token negate the state's value for its key, not only forget it: negative eigenvalues (OLMo Hybrid)"""
    ffn: Count = 1024
    """width of the feed-forward layer (F)"""
    experts: Annotated[int, Bound(at_least=0, at_most=2**15 - 1)] = 0
    """experts (E), feed-forward layers of each sparse block; every token uses top_k of them; 0: all blocks are dense"""
    top_k: Annotated[Count, EXPERTS] = 2
    """experts that each token uses (K)"""
    expert_ffn: Annotated[Natural, EXPERTS] = 0
    """width of one expert; 0: ffn"""
    upcycle: Annotated[bool, Needs("model.experts over 0, and model.from_hf or checkpoint.initial"), INITIAL] = False
    """experts start as copies of the feed-forward layer of from_hf or checkpoint.initial, routers at random"""
    upcycle_noise: Annotated[NonNegative, Needs("model.upcycle = true"), INITIAL] = 0.0
    """each expert adds this multiple of its random initial weights to its copy"""
    shared_experts: Annotated[Natural, EXPERTS] = 0
    """experts that every token uses in addition to its top_k; they are one layer, shared_experts times as wide"""
    shared_gate: Annotated[bool, Needs("model.shared_experts over 0")] = False
    """the result of the shared experts is multiplied by the sigmoid of a number per token (Qwen3-Next)"""
    dense_beside: Annotated[bool, Needs(f'{EXPERTS.words} and model.norm_position = "both"')] = False
    """sparse blocks have a dense layer of width ffn next to the experts: both read the residual stream, each between
    two norms, and are added; the router reads it normed and scaled, and each expert has a factor (Gemma 4)"""
    dense_layers: Annotated[Natural, EXPERTS] = 0
    """first blocks that have one feed-forward layer of width ffn instead of experts"""
    router_score: Annotated[Literal["softmax", "sigmoid"], EXPERTS] = "softmax"
    """how the router's logits become the scores that choose and weight experts"""
    router_dtype: Annotated[Literal["float32", "compute"], EXPERTS] = "float32"
    """type of the router's weights and logits; compute: training.dtype, like all other layers, as in transformers'
    Mixtral, Qwen3-MoE and OLMoE; scores are float32 in any case"""
    router_renormalize: Annotated[bool, EXPERTS] = True
    """divide the scores of a token's experts by their sum"""
    router_scale: Annotated[Positive, EXPERTS] = 1.0
    """factor of the weighted sum of a token's experts"""
    router_groups: Annotated[Count, EXPERTS] = 1
    """groups of neighboring experts; a token chooses within its router_top_groups best, by the sum of the two largest
    scores, with the bias, of each (DeepSeek-V3); 1: no groups"""
    router_top_groups: Annotated[Count, Needs("model.router_groups over 1")] = 1
    """groups whose experts a token may choose"""
    router_bias: Annotated[bool, EXPERTS, BALANCE] = False
    """choose experts by score + a bias per expert, which keeps their loads equal; it does not weight their outputs,
    starts at 0 and is not trained by gradients (DeepSeek-V3)"""
    router_bias_rate: Annotated[NonNegative, Needs(f"{EXPERTS.words} and model.router_bias = true"), BALANCE] = 0.001
    """after each step the router's bias of an expert falls by this if it had more tokens than the mean, and rises if it
    had fewer; 0: the bias does not change"""
    expert_biases: Annotated[bool, EXPERTS] = False
    """the matrices of experts have biases, and so have the router's logits, which gradients train (gpt-oss)"""
    balance_loss: Annotated[Literal["none", "sequence", "global"], EXPERTS, BALANCE] = "none"
    """penalty on the router's logits that keeps the experts' loads equal; sequence: within each sequence (DeepSeek-V3);
    global: by the loads of the whole step before, on all ranks"""
    balance_weight: Annotated[Positive, BALANCED] = 0.001
    """factor of the balance_loss"""
    router_z_loss: Annotated[NonNegative, EXPERTS] = 0.0
    """weight of the mean squared log-sum-exp of the router's logits, a penalty that keeps them small; 0: off"""
    vocab: Count = 264
    """rows of the embedding (V); at least the tokenizer's number of tokens"""
    vocab_padding: Natural = 0
    """further rows without a token, which the softmax ignores; from_hf adds some if tp does not divide vocab"""
    tied_embeddings: bool = False
    """use the token embedding as the output projection too"""
    qkv_bias: Annotated[bool, Needs("a model.family whose matrices have no biases yet, as llama")] = False
    """the projections of queries, keys and values have biases, other matrices none (Qwen2)"""
    o_bias: Annotated[bool, Needs("a model.family whose matrices have no biases yet, as llama")] = False
    """the output projection of attention has a bias (gpt-oss)"""
    qk_norm: Literal["none", "head", "width"] = "none"
    """RMSNorm of queries and keys before the rotary positions; head: each head separately, one weight (Q) for all heads
    (Qwen3); width: all heads as one vector, weights (H Q) and (K Q) (OLMo 2)"""
    v_norm: bool = False
    """RMSNorm of each head of the values, without weight (Gemma 4)"""
    keys_as_values: bool = False
    """values are the projections of keys, before norms and rotary positions: there is no v_proj (Gemma 4)"""
    norm_position: Literal["before", "after", "both"] = "before"
    """where a block's norms are; before: of the input of attention and of the feed-forward layer; after: of their
    results, before these are added to the residual stream (OLMo 2); both (Gemma 2)"""
    norm_offset: Annotated[bool, LLAMA] = False
    """weights of RMSNorm are added to 1: they start at 0, and weight decay pulls the sum to 1 (Gemma)"""
    block_scale: Annotated[bool, Needs('model.norm_position = "both"')] = False
    """the output of a block is multiplied by a number, which is 1 or published, and is not trained (Gemma 4)"""
    activation: Annotated[Literal["silu", "gelu_tanh", "clamped_silu"], LLAMA] = "silu"
    """function of the gate in a feed-forward layer, and in an expert; gelu_tanh: the tanh form of GELU (Gemma);
    clamped_silu: x * sigmoid(1.702 x), of x up to 7, and 1 is added to the other factor, from -7 to 7 (gpt-oss)"""
    softmax_scale: NonNegative = 0.0
    """factor of attention's scores before the softmax; 0: 1 / sqrt(head_dim)"""
    score_softcap: NonNegative = 0.0
    """attention's scores s become softcap * tanh(s / softcap), before the mask (Gemma 2); 0: off. Not with "sdpa" """
    attention_gate: Literal["none", "element", "head"] = "none"
    """the results of attention are multiplied by the sigmoid of a projection of its input; element: one number per
    element, from q_proj (Qwen3-Next); head: one number per head, from head_gate"""
    embedding_multiplier: Positive = 1.0
    """factor of the token embeddings, not of a tied head, rounded to training.dtype; Gemma: sqrt(hidden)"""
    residual_multiplier: Positive = 1.0
    """factor of the results of attention and feed-forward layer before they join the residual stream (Granite)"""
    logit_divisor: Positive = 1.0
    """the logits are divided by it (Granite)"""
    logit_softcap: NonNegative = 0.0
    """logits l become softcap * tanh(l / softcap) (Gemma 2); 0: off"""
    window: Annotated[Natural, Needs("a longer training.sequence_length or model.max_sequence_length", "idle")] = 0
    """sliding window of attention: tokens that a token sees, itself included; 0: all before it (Mistral)"""
    sinks: bool = False
    """each query head has a sink: a learned number that joins the denominator of its softmax (gpt-oss)"""
    max_sequence_length: Count = 2048
    """rows of the learned position table (gpt); longest text of generate.py, unless training.sequence_length is more"""
    rope_theta: Annotated[Positive, ROTARY] = 10000.0
    """base of the rotary frequencies"""
    rotary_fraction: Annotated[Fraction, ROTARY] = 1.0
    """share of each head, its first features, that rotary positions turn; the rest has no positions (GLM-4.5: 0.5);
    0: no positions (SmolLM3, in every fourth block)"""
    rope_scaling: Annotated[Literal["linear", "llama3", "yarn"], Needs(SCALED)] = "llama3"
    """how rope_scaling_factor changes the rotary frequencies; linear: all equally; llama3: as Llama 3.1; yarn: YaRN"""
    rope_scaling_factor: Annotated[float, Bound(at_least=1.0), ROTARY] = 1.0
    """scaling of the rotary frequencies: how much longer than rope_original_length; 1: off"""
    rope_original_length: Annotated[Count, Needs(f'{SCALED} and model.rope_scaling = "llama3" or "yarn"')] = 8192
    """llama3, yarn: sequence length before the extension, in tokens"""
    rope_low_frequency_factor: Annotated[Positive, LLAMA3] = 1.0
    """llama3: wavelengths over rope_original_length / this are scaled by the whole factor"""
    rope_high_frequency_factor: Annotated[Positive, LLAMA3] = 4.0
    """llama3: wavelengths under rope_original_length / this are not scaled"""
    rope_beta_fast: Annotated[Positive, YARN] = 32.0
    """yarn: frequencies of more turns than this in rope_original_length are not scaled"""
    rope_beta_slow: Annotated[Positive, YARN] = 1.0
    """yarn: frequencies of fewer turns than this in rope_original_length are scaled by the whole factor"""
    rope_truncate: Annotated[bool, YARN] = True
    """yarn: round the pairs of features between which the scaling rises to whole numbers, outward"""
    rope_attention_factor: Annotated[NonNegative, YARN] = 0.0
    """yarn: queries and keys are multiplied by it; 0: 0.1 ln(rope_scaling_factor) + 1"""
    rope_query_scale: Annotated[NonNegative, YARN] = 0.0
    """yarn: queries are multiplied by 1 + this * ln(1 + floor(position / rope_original_length)) (Ministral 3)"""
    rope_proportional: Annotated[bool, ROTARY] = False
    """angles are computed for whole heads, and rotary_fraction is the share of them, the fastest, that turn: the first
    features of each half of a head (Gemma 4)"""
    rope_interleaved: Annotated[bool, ROTARY] = False
    """rotary positions turn pairs of neighboring features, instead of those that are half of their width apart"""
    norm_epsilon: Positive = 1e-5
    """added to the variance in the normalization layers"""
    initial_std: Positive = 0.02
    """standard deviation of the initial matrices, truncated at three times that; divided by sqrt(2 L) for the matrices
    whose output is added to the residual stream"""
    base_width: Annotated[Natural, AppliedBy("build_optimizer(stages, config.optimizer), or parameter_groups")] = 0
    """hidden of a narrower model whose learning_rate and initial_std hold for this one, too (muP for AdamW); 0: off"""
    mtp_depth: Annotated[Natural, BUILD] = 0
    """multi-token prediction: blocks (D) after the last one, each predicting a token that is one further ahead
    (DeepSeek-V3); they train the model, and generation does not run them; 0: none"""
    mtp_weight: Annotated[Positive, MTP] = 0.3
    """weight of the mean loss of the mtp_depth further tokens; the loss that is printed is of the next token alone"""
    frozen: Annotated[str, BUILD] = ""
    """regular expression of the parameters that are not trained; it must match their whole names, as in Hugging
    Face's Llama without "model.", e.g. 'embed_tokens.*|layers\\.[01]\\..*'; empty: all are trained"""
    attention: Annotated[
        Literal["eager", "sdpa", "flash", "flex"],
        Unsupported("flash4", 'write "flash", which calls flash-attn-4 where it is installed and has kernels'),
    ] = "sdpa"
    """attention kernel; flash needs the package flash-attn or flash-attn-4, flex has no backward on a CPU"""

    def __post_init__(self) -> None:
        object.__setattr__(self, "kinds", Kinds(self.kinds))  # a plain dict has no hash

    @property
    def features(self) -> Features:
        """The features of the model's family."""
        return FAMILIES[self.family]

    def of_block(self, index: int) -> "Model":
        """Return the model whose blocks are all like one of this model, by its index: its view.

        Code of a single block takes a view, and code of the whole model adds up over views.
        """
        if not self.pattern and not self.dense_layers and not self.mtp_depth:
            return self
        is_mtp = index >= self.layers
        return _view(self, self.kind_of(index), has_experts=index >= self.dense_layers, is_mtp=is_mtp)

    def of_kind(self, name: str) -> "Model":
        """Return the model whose blocks are all of one kind; with experts all have them, unless the kind has none."""
        return _view(self, name, has_experts=True, is_mtp=False)

    def kind_of(self, index: int) -> str:
        """Return the name of the kind of a block, by its index; "" if the model has no pattern."""
        return self.pattern[min(index, self.layers - 1) % len(self.pattern)] if self.pattern else ""

    @property
    def blocks(self) -> int:
        """Blocks in all: `layers`, and after them the blocks of multi-token prediction, which are like the last one."""
        return self.layers + self.mtp_depth

    @property
    def predictions(self) -> int:
        """Tokens that each token predicts: the next one, and `mtp_depth` tokens further ahead."""
        return 1 + self.mtp_depth

    @property
    def embeds_at_both_ends(self) -> bool:
        """Whether the last stage of a pipeline has the embedding too: as the head, or for tokens further ahead."""
        return self.tied_embeddings or self.mtp_depth > 0

    @property
    def is_mtp(self) -> bool:
        """Whether a view is of a block of multi-token prediction: it has no other blocks."""
        return self.layers == 0

    @property
    def views(self) -> tuple["Model", ...]:
        """The view of each block, first to last."""
        return tuple(self.of_block(index) for index in range(self.blocks))

    @property
    def sparse_blocks(self) -> tuple[int, ...]:
        """Indices of the blocks with experts."""
        return tuple(index for index, view in enumerate(self.views) if view.experts)

    @property
    def attention_kernels(self) -> set[str]:
        """The values of `attention` that blocks have."""
        return {view.attention for view in self.views}

    @property
    def width_ratio(self) -> float:
        """Width as a multiple of `base_width`'s; 1 without one."""
        return self.hidden / self.base_width if self.base_width else 1.0

    def heads_of_attention(self) -> dict[str, int]:
        """Return the numbers of heads, by key."""
        return {"heads": self.heads, "kv_heads": self.kv}

    def freezes(self, name: str) -> bool:
        """Return whether `frozen` matches the canonical name of a parameter."""
        return self.frozen != "" and re.fullmatch(self.frozen, name) is not None

    @property
    def has_qkv_bias(self) -> bool:
        """Whether the projections of queries, keys and values have biases: alone, or as all matrices do."""
        return self.qkv_bias or self.features.biases

    @property
    def has_o_bias(self) -> bool:
        """Whether the output projection of attention has a bias: alone, or as all matrices do."""
        return self.o_bias or self.features.biases

    def window_within(self, sequence_length: int) -> int:
        """Return the number of tokens that the last token of a sequence sees, itself included."""
        return min(self.window or sequence_length, sequence_length)

    @property
    def query_outputs(self) -> int:
        """Outputs of the projection of queries: all query heads, and their gate if it has a number per element."""
        return self.heads * self.head_width * (2 if self.attention_gate == "element" else 1)

    @property
    def vocab_rows(self) -> int:
        """Rows of embedding and head."""
        return self.vocab + self.vocab_padding

    @property
    def kv(self) -> int:
        """Key and value heads, resolved."""
        return self.kv_heads or self.heads

    @property
    def head_width(self) -> int:
        """Width of one head, resolved."""
        latent = (self.mixer == "latent_attention") * (self.nope_head_dim + self.rope_head_dim)
        return self.head_dim or latent or self.hidden // self.heads

    @property
    def has_rotary_positions(self) -> bool:
        """Whether rotary positions turn queries and keys."""
        return not self.features.learned_positions and self.turned_width > 0

    @property
    def rotary_settings(self) -> tuple[Any, ...]:
        """The values of the keys that decide the angles of rotary positions; empty: there are none."""
        widths = self.turned_width, self.rotary_width
        return (*widths, *[getattr(self, key) for key in ROPE_KEYS]) if self.has_rotary_positions else ()

    @property
    def has_yarn(self) -> bool:
        """Whether YaRN scales the rotary frequencies; without a factor over 1 its other keys have no effect."""
        return self.rope_scaling == "yarn" and self.rope_scaling_factor > 1.0

    @property
    def yarn_attention_factor(self) -> float:
        """YaRN's factor of rotated queries and keys (Peng et al. 2023, arXiv 2309.00071, section 3.4)."""
        return self.rope_attention_factor or 0.1 * math.log(self.rope_scaling_factor) + 1.0

    @property
    def turned_width(self) -> int:
        """Features of a head that rotary positions turn."""
        return self.rope_head_dim if self.mixer == "latent_attention" else int(self.head_width * self.rotary_fraction)

    @property
    def rotary_width(self) -> int:
        """Features of a head that have angles; some of these may be 0."""
        return self.head_width if self.rope_proportional else self.turned_width

    @property
    def block_form(self) -> str:
        """The form of a block: where its norms are, or "scaled"."""
        return "scaled" if self.block_scale and self.norm_position == "both" else self.norm_position

    @property
    def offsets_norms(self) -> bool:
        """Whether the weights of norms are added to 1: `norm_offset`, which other families do not have."""
        return self.norm_offset and self.features.norm == "rms" and self.features.norm_weights

    @property
    def expert_width(self) -> int:
        """Width of one expert, resolved."""
        return self.expert_ffn or self.ffn


ROPE_KEYS = tuple(name for name in Model.__dataclass_fields__ if name.startswith("rope_"))
OPTIONS = (
    *("qkv_bias", "qk_norm", "norm_position", "norm_offset", "activation", "softmax_scale", "score_softcap"),
    *("attention_gate", "embedding_multiplier", "residual_multiplier", "logit_divisor", "logit_softcap"),
    *("sinks", "o_bias", "expert_biases", "v_norm", "keys_as_values", "block_scale", "mtp_depth"),
    "dense_beside",
)
"""keys of [model] for parts that Llama's blocks and ends lack: with their defaults it has none"""
KIND_KEYS = (
    *("window", "mixer", "attention", "heads", "kv_heads", "head_dim", "qk_norm", "qkv_bias", "sinks"),
    *("keys_as_values", "norm_position", "norm_epsilon", "ffn", "experts", "expert_ffn", "rotary_fraction"),
    *ROPE_KEYS,
)
"""keys of [model] that a kind of blocks may have; `experts` is 0 or the model's number"""


@lru_cache(maxsize=1024)
def _view(model: Model, kind: str, has_experts: bool, is_mtp: bool) -> Model:
    """Return `model.of_block` of a block with this kind, "" if the model has none."""
    keys: Mapping[str, Any] = model.kinds.get(kind, {})  # `checks.py` reports a kind without a table
    view = replace(model, pattern=(), kinds=Kinds(), dense_layers=0, mtp_depth=int(is_mtp), **keys)
    if is_mtp:
        view = replace(view, layers=0)
    return view if has_experts and view.experts else without_experts(view)


def without_experts(model: Model) -> Model:
    """Return the model with a dense feed-forward layer in place of experts, in all blocks."""
    of_experts: dict[str, Any] = {
        "experts": 0,
        "shared_experts": 0,
        "shared_gate": False,
        "dense_beside": False,
        "expert_ffn": 0,
        "expert_biases": False,
        "router_bias": False,
    }
    return replace(model, dense_layers=0, **of_experts)


RAW_KINDS = ("stdlib", "text", "jsonl", "parquet", "hub")
"""kinds of sources that are tokenized when the run starts"""
IN_PLACE_KINDS = ("megatron", "llmc", "nanogpt", "mds")
"""kinds of sources that are token files of other programs"""
TABLES = ("jsonl", "parquet", "hub")
"""kinds of sources whose records have keys or columns"""


@dataclass(frozen=True)
class Source:
    """One source of text; several make a mixture."""

    kind: Literal[
        "stdlib",
        "text",
        "jsonl",
        "parquet",
        "hub",
        "tokens",
        "megatron",
        "llmc",
        "nanogpt",
        "mds",
        "synthetic",
    ] = "stdlib"
    """stdlib: Python's own source code; tokens: shards from recipes/prepare.py; megatron, llmc, nanogpt and mds: token
    files of other programs, read in place; synthetic: random tokens"""
    path: Annotated[FilePath, OfKinds(("text", "tokens", *TABLES, *IN_PLACE_KINDS))] = ""
    """file, folder, glob or hub id, depending on kind; a folder is all files in it; texts and tokens also s3://..."""
    text_key: Annotated[str, OfKinds((*TABLES, "mds"))] = "text"
    """key or column with the text, or with token ids (mds: if several columns are arrays)"""
    messages_key: Annotated[str, OfKinds(TABLES)] = ""
    """key or column of conversations, such as "messages"; empty: text"""
    delimiter: Annotated[str, OfKinds(("text",))] = ""
    """between documents of a text file, as "\\n\\n"; empty: a file is one"""
    subset: Annotated[str, OfKinds(("hub",))] = ""
    """configuration of a hub data set; empty: its default"""
    split: Annotated[str, OfKinds(("hub",))] = "train"
    """split of a hub data set"""
    revision: Annotated[str, OfKinds(("hub",))] = ""
    """commit, branch or tag of a hub data set; empty: its newest commit when it is first read"""
    weight: Positive = 1.0
    """share of the sequences, relative to the other sources; a [[data.stage]] may set other shares for training"""
    max_epochs: NonNegative = 0.0
    """passes over the source, then it leaves the mixture; 0: no limit"""


@dataclass(frozen=True)
class MixtureStage:
    """A part of the training with its weights of the sources, its batch size and its length."""

    until: Natural = 0
    """last step of the stage; 0, in the last one: to the end"""
    weights: tuple[NonNegative, ...] = ()
    """share of the training sequences of each source, in the order of data.sources; 0: none; empty: its weight"""
    until_tokens: Natural = 0
    """in place of until: the last step is the first after which the run has read this number of tokens"""
    global_batch_size: Natural = 0
    """sequences in one step; 0: training.global_batch_size"""
    sequence_length: Natural = 0
    """tokens in a sequence; 0: training.sequence_length, which evaluations have in any stage"""


@dataclass(frozen=True)
class Data:
    """The sources, and how they are tokenized, packed and ordered."""

    key_notes: ClassVar = (AppliedBy("build_loader(config.data, ...)", is_replaceable=True),)
    sources: tuple[Source, ...] = (Source(),)
    """one [[data.sources]] table per source"""
    validation: tuple[Source, ...] = ()
    """one [[data.validation]] table per source to evaluate on, all of it, in place of held-out parts of data.sources"""
    tokenizer: Annotated[str, IsPath(names=("bytes",))] = "bytes"
    """bytes, or the path of a Hugging Face tokenizer.json"""
    dtype: Annotated[Literal["", "uint16", "int32", "uint32", "int64"], Needs('a source of kind "nanogpt"')] = ""
    """type of a token id in files without a header (nanogpt)"""
    separator: Annotated[int, Bound(at_least=-1), Needs('a source of kind "nanogpt", "llmc" or "mds"')] = -1
    """id of the token at the end of each document in token files without an index (nanogpt, llmc, mds); -1: the end of
    text of the tokenizer of llm.c's files, and a sample of mds is a document"""
    stage: tuple[MixtureStage, ...] = ()
    """one [[data.stage]] table per part of the training, in order; empty: the weights of the sources throughout"""
    document_mask: bool = False
    """attend only within a document, and count positions from its start"""
    packing: Literal["concatenate", "best_fit"] = "concatenate"
    """how texts become sequences; concatenate: one after another, cut wherever a sequence ends; best_fit: whole, cut
    only if longer than a sequence, with a little padding that is not trained"""
    fim_rate: Fraction = 0.0
    """share of the documents whose middle is trained after the suffix (fill-in-the-middle); 0 with prepared tokens"""
    fim_style: Annotated[Literal["psm", "spm"], Needs("data.fim_rate over 0")] = "psm"
    """fill-in-the-middle: psm: prefix, suffix, middle; spm: suffix, then prefix and middle"""
    fim_tokens: Annotated[tuple[str, ...], Needs("data.fim_rate over 0")] = (
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
    )
    """special tokens of the tokenizer that are put before prefix, suffix and middle"""
    validation_fraction: Annotated[float, Bound(at_least=0.0, at_most=0.5)] = 0.01
    """share of the documents (of few: the last of all tokens) that is held out for evaluation and never trained on"""
    on_bad_record: Annotated[Literal["error", "skip"], Needs(OWN_TEXT, "idle")] = "error"
    """how an unreadable record is handled; error: stop and name it; skip: count and skip it"""
    max_bad_share: Annotated[Fraction, Needs(f'data.on_bad_record = "skip" and {OWN_TEXT}', "idle")] = 0.01
    """with on_bad_record = skip: stop if over 10 records of a file and this share of them are bad, or all; 1: never"""
    workers: Natural = 1
    """processes per rank that prefetch batches; 0: the training process reads them"""
    cache: FilePath = ""
    """folder for tokenized raw sources; empty: torchllm in the user's cache folder"""
    max_raw_mib: Annotated[Positive, Needs("a source of raw text", "idle")] = 256.0
    """raw sources larger than this many MiB are refused: tokenize them once with recipes/prepare.py"""

    @property
    def changes_size(self) -> bool:
        """Return whether a stage sets its batch size or its length."""
        return any(stage.global_batch_size or stage.sequence_length for stage in self.stage)

    def lengths(self, sequence_length: int) -> dict[int, str]:
        """Return the lengths of all sequences, each with the first key that sets it; training.sequence_length first."""
        keys = {sequence_length: "training.sequence_length"}
        for index, stage in enumerate(self.stage):
            if stage.sequence_length:
                keys.setdefault(stage.sequence_length, f"data.stage.{index}.sequence_length")
        return keys

    @property
    def all_sources(self) -> dict[str, Source]:
        """Every source by its key: data.sources.0, and data.validation.0."""
        named = {f"data.sources.{index}": source for index, source in enumerate(self.sources)}
        return named | {f"data.validation.{index}": source for index, source in enumerate(self.validation)}


@dataclass(frozen=True)
class Training:
    """Number of steps, batch sizes, precision and loss."""

    steps: Count = 1000
    """optimizer steps"""
    micro_batch_size: Count = 1
    """sequences in one forward pass of one data-parallel rank"""
    global_batch_size: Count = 8
    """sequences in one step over all ranks; gradient accumulation follows from it and micro_batch_size"""
    sequence_length: Count = 2048
    """tokens in a sequence (S)"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """type of the computation; reductions stay float32; auto: bfloat16 on a GPU, float32 on a CPU"""
    weights_dtype: Annotated[Literal["float32", "bfloat16"], BUILD] = "float32"
    """type of the weights and their gradients; bfloat16: half their memory, and AdamW rounds the weights at random
    without bias; routers stay float32"""
    max_grad_norm: NonNegative = 1.0
    """gradients with a larger global norm are scaled down to this one; 0: never"""
    on_nonfinite: Annotated[Literal["skip", "stop"], HEALTH] = "skip"
    """a step whose loss or gradient is not finite is never applied; skip: go on; stop: end at the next logged step"""
    max_consecutive_nonfinite: Annotated[Count, Needs('training.on_nonfinite = "skip"'), HEALTH] = 10
    """with on_nonfinite = skip: stop after this many such steps in a row"""
    loss_chunk: Annotated[Natural, BUILD] = 0
    """tokens whose logits are in memory at a time; 0: all of a micro batch"""
    z_loss: Annotated[NonNegative, BUILD] = 0.0
    """weight of the mean square of the logits' log-sum-exp in the loss, logged separately; 1e-4 is usual; 0: none"""


@dataclass(frozen=True)
class Optimizer:
    """The optimizer, and how learning rate and weight decay differ by a parameter's role."""

    key_notes: ClassVar = (AppliedBy("build_optimizer(stages, config.optimizer)", is_replaceable=True),)
    name: Annotated[Literal["adamw", "sgd", "muon"], MATRICES] = "adamw"
    """muon: orthogonalized momentum for the matrices of the blocks, adamw for all other parameters"""
    learning_rate: Positive = 3e-4
    """peak learning rate"""
    beta1: Annotated[float, Bound(at_least=0.0, at_most=0.999999), ADAMW] = 0.9
    """adamw, muon's adamw: decay rate of the mean of the gradients"""
    beta2: Annotated[float, Bound(at_least=0.0, at_most=0.999999), ADAMW] = 0.95
    """adamw, muon's adamw: decay rate of the mean of the squared gradients"""
    epsilon: Annotated[Positive, ADAMW] = 1e-8
    """adamw, muon's adamw: added to the square root of the second moment"""
    state_dtype: Annotated[Literal["float32", "bfloat16", "int8"], ADAMW] = "float32"
    """adamw, muon: dtype of the moments, rounded at random without bias; int8: in blocks of 32 with a scale"""
    offload: Annotated[bool, Needs('optimizer.name = "adamw"')] = False
    """adamw: moments and their update on the host: 8 bytes of a GPU less per parameter (4 in bfloat16), longer steps"""
    momentum: Annotated[float, Bound(at_least=0.0, at_most=0.999999), Needs('optimizer.name = "sgd"')] = 0.0
    """sgd: momentum"""
    muon_momentum: Annotated[float, Bound(at_least=0.0, at_most=0.999999), Needs('optimizer.name = "muon"')] = 0.95
    """muon: decay rate of the mean of the gradients of matrices"""
    adjust_lr_fn: Annotated[Literal["original", "match_rms_adamw"], Needs('optimizer.name = "muon"')] = "original"
    """muon: learning rate of a matrix (R, C) as a multiple of learning_rate; original: sqrt(max(1, R / C)), for rates
    such as 0.02; match_rms_adamw: 0.2 sqrt(max(R, C)), for rates and weight decays of adamw"""
    weight_decay: NonNegative = 0.1
    """weight decay of the matrices"""
    embedding_rate: Annotated[NonNegative, Needs(f"embeddings {FREE}")] = 1.0
    """learning rate of the embeddings (tokens, learned positions), as a multiple of learning_rate"""
    embedding_decay: Annotated[NonNegative, Needs(f"{DECAY}, and embeddings {FREE}")] = 1.0
    """weight decay of the token embedding, as a multiple of weight_decay"""
    head_rate: Annotated[NonNegative, Needs(f"{OWN_HEAD}, and a head {FREE}")] = 1.0
    """learning rate of the head, as a multiple of learning_rate; tied to the embedding, it has the embedding's"""
    head_decay: Annotated[NonNegative, Needs(f"{OWN_HEAD}, {DECAY}, and a head {FREE}")] = 1.0
    """weight decay of the head, as a multiple of weight_decay"""
    vector_rate: Annotated[NonNegative, Needs(f"vectors {FREE}")] = 1.0
    """learning rate of norms and biases, as a multiple of learning_rate"""
    vector_decay: Annotated[NonNegative, Needs(f"{DECAY}, and vectors {FREE}")] = 0.0
    """weight decay of norms, biases and learned positions, as a multiple of weight_decay"""
    ema_decay: Annotated[float, Bound(at_least=0.0, at_most=0.9999999), AVERAGING] = 0.0
    """decay per step of an exponential moving average of the weights, saved with them, such as 0.999; 0: none"""
    ema_offload: Annotated[bool, Needs("optimizer.ema_decay over 0"), AVERAGING] = False
    """the average, and its update, on the host: 4 bytes of a GPU less per parameter, longer steps"""

    @property
    def offloads(self) -> bool:
        """Whether moments are on the host: `offload`, which other optimizers than AdamW do not have."""
        return self.offload and self.name == "adamw"

    @property
    def offloads_average(self) -> bool:
        """Whether there is an average, and it is on the host."""
        return self.ema_offload and self.ema_decay > 0


@dataclass(frozen=True)
class Schedule:
    """The learning rate over the steps."""

    key_notes: ClassVar = (AppliedBy("LearningRate(config.schedule, ...)", is_replaceable=True),)
    name: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """shape after the warmup; wsd (warmup, stable, decay): constant, and falling in the last decay_steps"""
    warmup_steps: Natural = 0
    """steps over which the rate rises from 0 to its peak"""
    decay_steps: Annotated[Natural, Needs('schedule.name = "wsd"')] = 0
    """wsd: length of the final decay; 0: a tenth of training.steps"""
    decay: Annotated[Literal["linear", "1-sqrt"], Needs('schedule.name = "wsd"')] = "linear"
    """wsd: shape of the final decay; 1-sqrt falls steeply first: 1 - the square root of the share that is done"""
    final_fraction: Annotated[Fraction, Needs("a schedule.name that is not constant")] = 0.1
    """rate at the last step, as a fraction of the peak"""
    by_tokens: Annotated[bool, Needs("stages of other sizes (data.stage)")] = False
    """the rate follows the tokens before a step, not its number: warmup_steps counts steps of average size"""


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
    """Requirements of a pipeline schedule."""

    default_stages: int
    """stages per rank, unless parallel.virtual_stages is set"""
    most_stages: float
    """the most stages per rank; where it is finite, the only number"""
    splits_backward: bool
    """gradients of inputs and of weights are computed separately"""


AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""degrees of [parallel], outermost axis first"""
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

    layout: Literal["manual", "auto", "tune"] = "manual"
    """auto: the planner sets every key of [parallel], recompute.mode and micro_batch_size that you did not; tune: the
    run measures the planner's best few layouts when it starts, and takes the fastest"""
    pp: Degree = 1
    """ranks among which the blocks are divided (pipeline parallelism)"""
    dp_replicate: Annotated[int, Bound(at_least=-1)] = 1
    """copies of the weights (HSDP: one per node); -1: the ranks divided by the other degrees"""
    dp_shard: Annotated[int, Bound(at_least=-1)] = -1
    """ranks that share a copy of the weights (FSDP); -1: the ranks divided by the other degrees"""
    cp: Degree = 1
    """ranks that share a sequence (context parallelism)"""
    tp: Degree = 1
    """ranks that share each matrix (tensor parallelism)"""
    ep: Annotated[Degree, EXPERTS] = 1
    """with model.experts: ranks that share the experts of each block (expert parallelism); it borrows the innermost
    ranks of dp_shard x cp x tp, so it is no factor of the number of ranks"""
    expert_dispatch: Annotated[
        Literal["exact", "optimistic"], Needs("parallel.ep over 1", "idle"), AppliedBy("TrainStep(...)", True)
    ] = "exact"
    """with ep: exact: the host waits in each sparse block for the number of rows that a rank gets; optimistic: it does
    not, as rows travel in padded buffers; a step where they do not fit runs again without buffers"""
    expert_chunks: Annotated[Count, Needs("parallel.ep over 1", "idle")] = 1
    """with ep: chunks of the tokens of a block, each sent while the experts compute others"""
    sequence_parallel: Annotated[bool, Needs("parallel.tp over 1", "idle")] = False
    """with tp: also split the sequence between the matrices (norms and residuals)"""
    regather: Annotated[bool, REGATHERED] = False
    """with sequence_parallel: keep a rank's part of the inputs of products, and gather it again in the backward"""
    zero_stage: Annotated[int, Bound(at_least=-1, at_most=3), Needs("parallel.dp_shard x cp over 1", "idle")] = -1
    """3: weights are gathered for each use; 2: weights are gathered once per step, gradients reduced after each micro
    batch; 1: both once per step; 0: all weights on every rank (DDP); -1: 3, with pp 2"""
    keep_last_block: Annotated[bool, Needs(f"{SHARDED} = 3", "idle")] = True
    """zero_stage 3: keep the last block's weights between its forward and its backward"""
    prefetch: Annotated[Natural, Needs(f"{SHARDED} over 0", "idle")] = 1
    """blocks whose weights are gathered ahead of the block that computes"""
    schedule: Annotated[PipelineSchedule, PIPELINE] = "1F1B"
    """with pp: order of forwards and backwards; the last three split the backward to fill the bubble"""
    virtual_stages: Annotated[Natural, PIPELINE] = 0
    """with pp: stages per rank; 0: 1 for GPipe and 1F1B, 2 for the others"""
    split: Annotated[tuple[Count, ...], PIPELINE] = ()
    """with pp: blocks of each stage, first to last; empty: balanced by cost, including embedding and head"""
    rebalance: Annotated[bool, PIPELINE] = False
    """with pp: time the stages; if one is 5 % over the mean, split again at the next checkpoint, at most 3 times"""
    scatter_gather: Annotated[bool, GATHERED] = True
    """with pp and tp: each tp rank sends its 1/tp of the hidden states to the next stage, which gathers them"""
    cp_method: Annotated[Literal["ring", "ulysses"], Needs("parallel.cp over 1", "idle")] = "ring"
    """ring: keys and values go round while attention computes; ulysses: an all-to-all gives a rank whole heads"""

    @property
    def ranks(self) -> int:
        """Number of ranks; no degree may be -1."""
        return self.pp * self.data_ranks * self.cp * self.tp

    @property
    def data_ranks(self) -> int:
        """Ranks that read different sequences; no degree may be -1."""
        return self.dp_replicate * self.dp_shard

    @property
    def zero(self) -> int:
        """`zero_stage`, resolved: with pp stage 3 would gather each block's weights for every micro batch."""
        return (2 if self.pp > 1 else 3) if self.zero_stage == -1 else self.zero_stage

    @property
    def stages_per_rank(self) -> int:
        """Pipeline stages per rank, resolved."""
        kind = SCHEDULES.get(self.schedule)  # the planner knows schedules that torch does not have
        return 1 if self.pp == 1 else self.virtual_stages or (kind.default_stages if kind else 1)

    @property
    def stages(self) -> int:
        """Pipeline stages of the whole model."""
        return self.pp * self.stages_per_rank


@dataclass(frozen=True)
class Recompute:
    """Which activations are recomputed in the backward pass instead of kept."""

    key_notes: ClassVar = (PARALLELIZE,)
    mode: RecomputeMode = "none"
    """full: every block; segment: segments of k blocks, keeping each segment's input; every_k: one block in k; ffn:
    the feed-forward layers; selective: all but matrix products and attention; selective_half: all but attention and
    every second matrix product"""
    k: Annotated[Natural, Needs('recompute.mode = "segment" or "every_k"')] = 0
    """segment: blocks per segment, 0: round(sqrt(L)); every_k: recompute one block in k, 0: 2"""
    offload: Annotated[bool, Needs('recompute.mode = "full" or "segment"')] = False
    """the inputs of blocks or segments wait for their recomputation in the host's memory"""


@dataclass(frozen=True)
class Compile:
    """Parts that torch.compile fuses; on a CPU it needs a C++ compiler."""

    key_notes: ClassVar = (PARALLELIZE,)
    norm: Annotated[bool, Needs("RMSNorm (family llama or nanochat): LayerNorm is one kernel already")] = False
    """the norms, each one kernel"""
    block: Switch = "auto"
    """each block (compiled once, as all blocks are equal); auto: on a GPU with a compiler, if the layout allows it"""
    loss: Switch = "auto"
    """the cross entropy; auto: on a GPU with a compiler"""
    graphs: bool = False
    """forward and backward of a step as one CUDA graph, launched at once, for GPUs that wait for their host; its memory
    stays between steps; was captured on a stand-in for a GPU, and not yet replayed on one"""

    @property
    def compiles_anything(self) -> bool:
        """Whether any of them is compiled."""
        return True in (self.norm, self.block, self.loss)


@dataclass(frozen=True)
class Float8:
    """Matrix products of the blocks in float8 (package torchao); weights and their gradients stay float32."""

    key_notes: ClassVar = (PARALLELIZE,)
    recipe: Annotated[
        Literal["none", "rowwise", "rowwise_with_gw_hp", "tensorwise"],
        Unsupported("mxfp8", "MXFP8 needs a GPU with sm_100, such as B200, and cannot be tested without one"),
    ] = "none"
    """rowwise: a scale for each row of a factor; rowwise_with_gw_hp: the same, but gradients of weights in bfloat16;
    tensorwise: one scale per factor, depending on the layout; needs bfloat16 and sm_89 or later; emulated on a CPU"""

    @property
    def is_on(self) -> bool:
        """Whether any product is in float8."""
        return self.recipe != "none"


LoraTarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True)
class Lora:
    """Low-rank updates that are trained in place of the weights, which are frozen (LoRA, arXiv 2106.09685)."""

    key_notes: ClassVar = (AppliedBy("add_low_rank_updates(model, config, dtype), right after build_model"),)
    rank: Natural = 0
    """rows of A and columns of B (r): W x becomes W x + alpha / rank B A x; 0: off, all weights are trained"""
    alpha: Annotated[Positive, Needs(LORA)] = 16.0
    """the updates are multiplied by alpha / rank"""
    targets: Annotated[tuple[LoraTarget, ...], Needs(LORA)] = get_args(LoraTarget)
    """matrices of each block that have an update"""

    @property
    def is_on(self) -> bool:
        """Whether low-rank updates are trained, and nothing else."""
        return self.rank > 0

    @property
    def scale(self) -> float:
        """Factor of the updates."""
        return self.alpha / self.rank


FUNCTION_SECTIONS = ("model", "lora")
"""sections that determine the results of a model with given tensors"""


@dataclass(frozen=True)
class TrainedParameters:
    """The trained parameters: all that `model.frozen` does not match, or added updates instead.

    An update adds B A x to the product W x of a matrix, with a factor A of `rank` rows and B of `rank` columns.
    """

    rank: int = 0
    """of the updates; 0: there are none, and the model's parameters are trained"""
    targets: tuple[str, ...] = ()
    """matrices of each block that have an update, e.g. q_proj"""

    @property
    def only_updates(self) -> bool:
        """Whether all parameters of the model are frozen."""
        return self.rank > 0


@dataclass(frozen=True)
class Checkpoint:
    """When the run is saved, and its initial state."""

    key_notes: ClassVar = (AppliedBy("Checkpointer(config.checkpoint, ...) and its resume()"),)
    interval: Natural = 500
    """steps between checkpoints; 0: only the last step"""
    resume: Annotated[str, IsPath(names=("auto", "none"))] = "auto"
    """auto: the newest verified step of the run folder; none: start fresh; or the path of a step folder"""
    initial: Annotated[FilePath, INITIAL] = ""
    """run folder, or step folder, whose weights a fresh run starts from, without its optimizer, step and data; empty:
    the weights of model.from_hf, or random ones"""
    keep: Annotated[Natural, Needs("checkpoint.interval over 0, or saves on request", "idle")] = 3
    """number of newest verified checkpoints to keep, in addition to the newest that later steps proved good; 0: all"""
    keep_every: Annotated[Natural, Needs("checkpoint.keep and checkpoint.interval over 0")] = 0
    """steps between checkpoints that are kept for good, a multiple of interval; 0: none"""
    remote: str = ""
    """URL of fsspec, as s3://bucket/run: each checkpoint is copied to it in the background, and a run whose folder
    lacks the newest one continues from it; empty: none"""
    asynchronous: Switch = "auto"
    """write in the background while training goes on; needs host memory for a copy of the rank's state; auto: on GPUs,
    if half of the host's available memory holds the copies"""


@dataclass(frozen=True)
class Metrics:
    """Logging, trackers and profiling."""

    log_interval: Count = 10
    """steps between logged steps; only a logged step waits for the device"""
    tensorboard: bool = True
    """write TensorBoard files next to metrics.jsonl"""
    peak_tflops: NonNegative = 0.0
    """peak TFLOP/s of a rank's device, for MFU and HFU; 0: from a GPU's data sheet; a CPU has no MFU"""
    wandb: str = ""
    """project of Weights & Biases that gets the records and the config; empty: none; needs the extra wandb"""
    mlflow: str = ""
    """experiment of MLflow that gets them, on the server of MLFLOW_TRACKING_URI or in the run folder; empty: none;
    needs the extra mlflow"""
    trackio: str = ""
    """project of trackio that gets them; empty: none; needs the extra trackio"""
    breakdown_interval: Natural = 10
    """steps between profiled steps, which say where the time goes and which rank is slow; less often if that would cost
    more than 1 % of the run; 0: none"""
    profile_steps: Annotated[str, Needs("a first step that is not over training.steps")] = ""
    """steps whose trace is written to RUN_FOLDER/profile: 10:13 for 10, 11 and 12; empty: none"""

    @property
    def trackers(self) -> list[str]:
        """The experiment trackers that have a project: names of keys, packages and extras."""
        return [name for name in ("wandb", "mlflow", "trackio") if getattr(self, name)]


@dataclass(frozen=True)
class Evaluate:
    """Loss on the held-out documents, and tasks of lm-evaluation-harness."""

    interval: Annotated[Natural, EVALUATION] = 0
    """steps between evaluations; the last step is evaluated too; 0: never"""
    sequences: Count = 64
    """held-out sequences per evaluation, over all ranks"""
    tasks: Annotated[tuple[PathOrName, ...], TASKS] = ()
    """tasks of lm-evaluation-harness (extra lm-eval): their names, or folders with a YAML file per task"""
    tasks_limit: Annotated[Natural, Needs("evaluate.tasks")] = 0
    """documents of each task: its first ones, as the harness's --limit; 0: all"""
    tasks_interval: Annotated[Natural, Needs("evaluate.tasks")] = 0
    """steps between evaluations of the tasks; the last step is evaluated too; 0: only recipes/evaluate.py does them"""
    ema: Annotated[bool, Needs("optimizer.ema_decay over 0"), EVALUATED] = False
    """evaluate the moving average of the weights (optimizer.ema_decay) instead of the weights"""


@dataclass(frozen=True)
class Generate:
    """Sampling, by recipes/generate.py."""

    after_training: bool = False
    """let run_train.sh print a sample of the last checkpoint"""
    prompt: str = ""
    """text to continue"""
    prompts_file: FilePath = ""
    """file with prompts in the place of generate.prompt, one in each line that is not empty"""
    samples: Count = 1
    """texts to write for each prompt"""
    output: FilePath = ""
    """new file for the texts, a line of JSON each: {"prompt": …, "answer": …}; empty: they are printed"""
    tokens: Count = 200
    """tokens to write, at most"""
    temperature: NonNegative = 0.8
    """sampling temperature; 0: always the likeliest token"""
    top_k: Annotated[Natural, Needs("generate.temperature over 0")] = 50
    """sample from this many likeliest tokens; 0: from all"""
    chat: bool = False
    """a prompt is a user's message, without one a line of the terminal; recipes/finetune.py sets it for its runs"""
    system: str = ""
    """in a chat, the system message of each conversation; empty: none"""
    history: bool = True
    """in a chat an answer follows the messages before; false: each message begins a conversation"""
    ema: Annotated[bool, Needs("optimizer.ema_decay over 0")] = False
    """use the moving average of the weights (optimizer.ema_decay) instead of the weights"""


@dataclass(frozen=True)
class Finetune:
    """How conversations become tokens, and how long recipes/finetune.py trains on them."""

    key_notes: ClassVar = (Needs("RECIPE=recipes/finetune.py", "elsewhere"),)
    chat_template: FilePath = ""
    """file of a Jinja chat template; empty: the template of data.tokenizer (chat_template.jinja or
    tokenizer_config.json in its folder)"""
    epochs: Annotated[NonNegative, EPOCHS] = 0.0
    """recipes/finetune.py: passes over each source; decides training.steps, and the shares of sources without a chosen
    weight; 0: training.steps decides"""


@dataclass(frozen=True)
class Export:
    """The weights of a run as a model for transformers, written by recipes/export.py."""

    key_notes: ClassVar = (Needs("recipes/export.py, after the training", "elsewhere"),)
    folder: FilePath = ""
    """folder of the model, which must not exist yet"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """type of the written weights: each is rounded once, from the float32 weights of the checkpoint"""
    ema: bool = False
    """export the moving average of the weights (optimizer.ema_decay) instead of the weights"""
    average: Count = 1
    """how many checkpoints to average, the newest ones; their mean is computed in float32"""
    adapter: Annotated[bool, Needs(f"{LORA}: without LoRA all weights are trained")] = False
    """with lora.rank over 0: write only the low-rank updates, in peft's format; false: the model with them merged in"""


@dataclass(frozen=True)
class Config:
    """Every section of a run's TOML file."""

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
    float8: Float8 = field(default_factory=Float8)
    lora: Lora = field(default_factory=Lora)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    metrics: Metrics = field(default_factory=Metrics)
    evaluate: Evaluate = field(default_factory=Evaluate)
    generate: Generate = field(default_factory=Generate)
    export: Export = field(default_factory=Export)
    finetune: Finetune = field(default_factory=Finetune)

    @property
    def trained(self) -> TrainedParameters:
        """The trained parameters."""
        return TrainedParameters(self.lora.rank, self.lora.targets) if self.lora.is_on else TrainedParameters()

    @property
    def of_kinds(self) -> dict[str, "Config"]:
        """The config with [model] as each kind of blocks has it, by path ("model.kinds.local"), or else by "model"."""
        model = self.model
        if not model.pattern:
            return {"model": self}
        return {
            f"model.kinds.{kind}": replace(self, model=model.of_kind(kind)) for kind in dict.fromkeys(model.pattern)
        }

    @property
    def trains_all(self) -> bool:
        """Whether all parameters are trained: none are frozen by model.frozen or for low-rank updates."""
        return not self.model.frozen and not self.trained.only_updates

    @property
    def longest_text(self) -> int:
        """Tokens of the longest text that the trained model is for."""
        of_stages = [stage.sequence_length for stage in self.data.stage]
        return max(self.model.max_sequence_length, self.training.sequence_length, *of_stages)


def gradient_accumulation(training: Training, data_ranks: int) -> int:
    """Return the number of micro batches of one step on one of `data_ranks` data-parallel ranks."""
    return training.global_batch_size // (training.micro_batch_size * data_ranks)
