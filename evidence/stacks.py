"""The frameworks whose measurements are published: facts of each, and a fitted speed. No torch.

A framework is a class of facts, one per line: its differences from its base class, in the end from
torchllm. `STACKS` has them by name, with the fitted constants.
"""

from dataclasses import dataclass, replace

from torchllm.tools.planner.software import TORCHLLM, AttentionKernel, Constants, Software


@dataclass(frozen=True)
class Megatron(Software):
    """github.com/NVIDIA/Megatron-LM before its core became a library: common to all its versions."""

    gradients: float = 4.0
    states: float = 12.0
    fsdp: bool = False
    temporary_gradients: float = 0.0  # products add to the gradient in place
    ring_gradients: float = 2.0
    logits_backward: float = 8.0  # the softmax becomes its gradient in place
    # core/tensor_parallel/cross_entropy.py: float32 copy (6), maximum (4), difference (8), target (4), exponential (8)
    loss_forward: float = 30.0
    loss_backward: float = 16.0  # a copy of the softmax (8), in place times the gradient (8)
    waits_for_sends: bool = True  # megatron/p2p_communication.py waits for its requests
    keeps_gathered: bool = False
    recomputes_attention_only: bool = True
    fused_elementwise: bool = True
    dropout: bool = True
    attention: AttentionKernel = "fused_softmax"
    fused_norm: bool = True
    default_zero_stage: int = 0


@dataclass(frozen=True)
class Megatron2021(Megatron):
    """The version of Narayanan et al., arXiv 2104.04473."""

    gradients: float = 2.0


@dataclass(frozen=True)
class Megatron2022(Megatron):
    """The version of Korthikanti et al., arXiv 2205.05198."""

    overlaps_tensor_parallel: bool = True


@dataclass(frozen=True)
class MegatronZeroBubble(Megatron):
    """The version of Qi et al., arXiv 2401.10241."""

    default_vocab: int = 32000  # sentencepiece, as its sample data set
    peaks_allocated: bool = True


@dataclass(frozen=True)
class MegatronDeepSpeed(Megatron):
    """Megatron's model under DeepSpeed's engine."""

    reduced: float = 2.0  # 16-bit gradients, reduced as they are


@dataclass(frozen=True)
class DeepSpeedZero3(Megatron):
    """Megatron's model under ZeRO 3."""

    gradients: float = 2.0
    one_card: bool = True
    default_zero_stage: int = 3


@dataclass(frozen=True)
class AlephAlpha(Megatron):
    """github.com/Aleph-Alpha/scaling, as Hagemann et al. measured it."""

    attention: AttentionKernel = "flash2"
    dropout: bool = False
    fused_elementwise: bool = False
    plain_norm: tuple[float, float] = (80.0, 60.0)  # fitted to its rows with and without a kernel for norms
    fused_scores: float = 5.0  # as with dropout, though Llama has none: fitted to the rows that ran out of memory
    keeps_gathered: bool = True  # its norms gather, its products keep their inputs (core/nn)
    gate_apart: bool = True  # core/nn/mlp.py: two column-parallel products, each with its all-reduce
    # torch's own loss, of logits that the pipeline's last stage keeps as its result
    whole_logits: bool = True
    loss_forward: float = 14.0
    loss_backward: float = 14.0
    logits_forward: float = 12.0
    logits_backward: float = 14.0
    # core/optimizer/allreduce.py: buckets in float32, all to all ranks, after the last backward
    gradients: float = 2.0
    reduced: float = 4.0
    all_reduces: bool = True
    default_zero_stage: int = 1


@dataclass(frozen=True)
class Nanotron(Megatron):
    """github.com/huggingface/nanotron, as the Ultra-Scale Playbook ran it."""

    attention: AttentionKernel = "flash2"
    dropout: bool = False
    fused_elementwise: bool = False
    default_sequence_parallel: bool = True  # its benchmark's tp_mode is REDUCE_SCATTER
    keeps_gathered: bool = True
    temporary_gradients: float = 2.0
    # optim/gradient_accumulator.py, distributed.py: buckets of DistributedDataParallel, or the flat buffer of ZeRO-1's
    # reduce_scatter
    gradient_copies: float = 2.0
    overlaps_reduction: bool = True
    logits_forward: float = 8.0  # parallel/tensor_parallel/functional.py: float32 logits, their softmax in place


@dataclass(frozen=True)
class LlmFoundry(Software):
    """github.com/mosaicml/llm-foundry."""

    reduced: float = 2.0  # mixed_precision: PURE
    overlaps_reduction: bool = True  # torch's FSDP reduces over replicas while the backward computes
    attention: AttentionKernel = "flash1"
    fused_norm: bool = True
    # its fused_crossentropy, of 16-bit logits, whose gradient takes their place
    kept_logits: float = 2.0
    logits_forward: float = 2.0
    logits_backward: float = 4.0
    loss_forward: float = 4.0  # it reads them once for the loss,
    loss_backward: float = 4.0  # and once more to replace them


@dataclass(frozen=True)
class Torchtitan(Software):
    """github.com/pytorch/torchtitan."""

    overlaps_reduction: bool = True
    attention: AttentionKernel = "flash2"
    keeps_every_other: bool = True
    default_sequence_parallel: bool = True  # models/llama3/infra/parallelize.py: SequenceParallel in every plan


@dataclass(frozen=True)
class Automodel(Software):
    """github.com/NVIDIA-NeMo/Automodel: FSDP2, not the Megatron-Core of NeMo.

    Kernels as in examples/benchmark/configs/*_te_deepep.yaml: Transformer Engine's attention and norms, experts by
    DeepEP, whose kernels put rows in order.
    """

    overlaps_reduction: bool = True
    attention: AttentionKernel = "flash3"
    fused_norm: bool = True
    fuses_permutations: bool = True
    sends_tokens_once: bool = True


@dataclass(frozen=True)
class MegatronCore(Megatron):
    """github.com/NVIDIA/Megatron-LM, megatron/core, as its own tests and scripts run it.

    Its distributed optimizer is ZeRO 1 with float32 main gradients, which products add to in place. Its kernels are
    Transformer Engine's, "selective" recomputes the core of attention, and its logs have allocated bytes.
    """

    dropout: bool = False
    attention: AttentionKernel = "flash3"
    default_zero_stage: int = 1
    default_sequence_parallel: bool = True  # where there is tp
    overlaps_tensor_parallel: bool = True
    overlaps_reduction: bool = True  # overlap_grad_reduce
    overlaps_gather: bool = True  # overlap_param_gather
    peaks_allocated: bool = True
    fuses_permutations: bool = True  # moe_permute_fusion, of Transformer Engine


@dataclass(frozen=True)
class Nemo(MegatronCore):
    """NeMo and Megatron-Bridge: their recipes for performance run Megatron-Core in this way.

    moe_permute_fusion is on there too (github.com/NVIDIA-NeMo/Megatron-Bridge, src/megatron/bridge/recipes).
    """

    # Gradients of 16 bits are summed, reduced and kept as such: grad_sync_dtype: bf16 (llama3.1/*.yaml of
    # github.com/NVIDIA/dgxc-benchmarking v24.11.1), grad_reduce_in_fp32 = False (github.com/NVIDIA/NeMo,
    # scripts/performance).
    gradients: float = 2.0
    overlaps_products: bool = True  # ub_tp_comm_overlap: True, in the same files


@dataclass(frozen=True)
class KempnerForge(Software):
    """github.com/KempnerInstitute/KempnerForge at 5666d0d.

    FSDP2 of 16-bit weights, whose AdamW has 16-bit moments and no float32 copy (benchmarks/mfu_scaling).
    """

    reduced: float = 4.0
    overlaps_reduction: bool = True
    gradients: float = 2.0
    states: float = 6.0
    shards: float = 2.0
    peaks_allocated: bool = True  # metrics/memory.py: peak_gb is torch.cuda.max_memory_allocated
    attention: AttentionKernel = "flash2"
    # distributed/tensor_parallel.py: norms of a shard of the sequence and a loss of gathered logits
    default_sequence_parallel: bool = True
    whole_logits: bool = True


@dataclass(frozen=True)
class FmsFsdp(Software):
    """github.com/foundation-model-stack/fms-fsdp.

    FSDP1, bfSixteen policy (16-bit gathers and reductions of float32 shards), torch's SDPA.
    """

    reduced: float = 2.0
    overlaps_reduction: bool = True
    attention: AttentionKernel = "flash2"
    default_vocab: int = 32000


@dataclass(frozen=True)
class InternEvo(Megatron):
    """github.com/InternLM/InternEvo at c628a8c8.

    16-bit weights and gradients on every rank, float32 states sharded over some or all data ranks (zero1), Megatron's
    tensor parallelism with whole sequences, fused norms, no dropout.
    """

    dropout: bool = False
    fused_elementwise: bool = False
    gradients: float = 2.0
    temporary_gradients: float = 2.0
    keeps_gathered: bool = True
    attention: AttentionKernel = "flash2"
    overlaps_reduction: bool = True  # configs/7B_sft.py: overlap_sync_grad
    default_zero_stage: int = 1
    default_vocab: int = 103168


@dataclass(frozen=True)
class PrimeRl(Software):
    """github.com/PrimeIntellect-ai/prime-rl at 559b44772.

    FSDP2 of float32 shards, gathered in 16 bits and reduced in float32; whole blocks are recomputed.
    """

    overlaps_reduction: bool = True
    attention: AttentionKernel = "flash2"


FACTS: dict[str, Software] = {
    "megatron-2021": Megatron2021(),
    "megatron-2022": Megatron2022(),
    "megatron-zero-bubble-2023": MegatronZeroBubble(),
    "megatron-deepspeed-2023": MegatronDeepSpeed(),
    "aleph-alpha-megatron-2023": AlephAlpha(),
    "nanotron-2025": Nanotron(),
    "llm-foundry-2023": LlmFoundry(),
    "torchtitan": Torchtitan(),
    "deepspeed-zero3-2021": DeepSpeedZero3(),
    "megatron-core": MegatronCore(),
    "nemo": Nemo(),
    "kempnerforge": KempnerForge(),
    "fms-fsdp": FmsFsdp(),
    "internevo": InternEvo(),
    "prime-rl": PrimeRl(),
    "automodel": Automodel(),
    "torchllm": TORCHLLM,
}
SPEEDS = {
    "megatron-2021": 0.945,
    "megatron-zero-bubble-2023": 0.935,
    "megatron-deepspeed-2023": 0.982,
    "aleph-alpha-megatron-2023": 0.942,
    "nanotron-2025": 1.005,
    "llm-foundry-2023": 0.999,
    "torchtitan": 0.98,
    "deepspeed-zero3-2021": 0.945,
    "megatron-core": 0.976,
    "nemo": 0.976,
    "kempnerforge": 0.978,
    "fms-fsdp": 1.057,
    "internevo": 0.932,
    "prime-rl": 0.923,
}
"""`Constants.speed` of the frameworks whose rows `python -m evidence fit` takes"""
ALLOCATORS = {"nanotron-2025": 1.06}
"""`Constants.allocator` of the frameworks that differ from the default"""


def _stack(name: str, facts: Software) -> Software:
    """Return a framework with its name and its fitted constants."""
    constants = Constants()
    if name in SPEEDS:
        constants = replace(constants, speed=SPEEDS[name])
    if name in ALLOCATORS:
        constants = replace(constants, allocator=ALLOCATORS[name])
    values = {**vars(facts), "name": name, "constants": constants}
    return Software(**values)


STACKS = {name: _stack(name, facts) for name, facts in FACTS.items()}
"""frameworks by the names that tables of measurements have for them"""


OTHER_NAMES = {
    "megatron-lm": "megatron-core",
    "megatron-lm-2024": "megatron-core",
    "megatron-bridge": "nemo",
    "nemo-megatron": "nemo",
    "kempnerforge-2026": "kempnerforge",
    "fms-fsdp-2024": "fms-fsdp",
    "prime-rl (fsdp2)": "prime-rl",
}
"""lower-case names of stacks in tables, and their names here"""
KINDS = {
    "automodel": "automodel",  # before "nemo", which its name has too
    "nanotron": "nanotron-2025",
    "llm-foundry": "llm-foundry-2023",
    "torchtitan": "torchtitan",
    "kempnerforge": "kempnerforge",
    "fms-fsdp": "fms-fsdp",
    "internevo": "internevo",
    "prime-rl": "prime-rl",
    "megatron-deepspeed": "megatron-deepspeed-2023",
    "nemo": "nemo",
    "megatron": "megatron-core",
}
"""words in the name of another version of a stack, and the one that it is read as; the first that fits counts"""


def is_known(name: str) -> bool:
    """Return whether a stack is one of `STACKS`, not another version of one."""
    return OTHER_NAMES.get(name.lower(), name.lower()) in STACKS


def stack_of(name: str, assumed: list[str]) -> Software:
    """Return a framework by name. Another version of one is read as it, which is said in `assumed`.

    ValueError if nothing is known of it: frameworks differ by more than a factor of two.
    """
    plain = name.lower()
    plain = OTHER_NAMES.get(plain, plain)
    if plain in STACKS:
        return STACKS[plain]
    for word, stack in KINDS.items():
        if word in plain:
            assumed.append(f"stack {name!r} is unknown: as {stack}")
            return STACKS[stack]
    raise ValueError(f"stack {name!r} is unknown (known: {', '.join(STACKS)})")
