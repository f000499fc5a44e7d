"""The frameworks whose measurements are published: facts of each, and a speed that `evidence.fit` gives. No torch."""

from dataclasses import replace

from torchllm.spec.software import Constants, Software

MEGATRON = Software(
    "megatron",
    gradients=4.0,
    states=12.0,
    fsdp=False,
    temporary_gradients=0.0,  # products add to the gradient in place
    logits_backward=8.0,  # the softmax becomes its gradient in place
    # core/tensor_parallel/cross_entropy.py: float32 copy (6), maximum (4), difference (8), target (4), exponential (8)
    loss_forward=30.0,
    loss_backward=16.0,  # a copy of the softmax (8), in place times the gradient (8)
    waits_for_sends=True,  # megatron/p2p_communication.py waits for its requests
    keeps_gathered=False,
    recomputes_attention_only=True,
    fused_elementwise=True,
    dropout=True,
    attention="fused_softmax",
    fused_norm=True,
    default_zero_stage=0,
)
_FACTS = {
    "megatron-2021": replace(MEGATRON, gradients=2.0, constants=Constants(speed=0.945)),
    "megatron-2022": replace(MEGATRON, overlaps_tensor_parallel=True),
    "megatron-zero-bubble-2023": replace(
        MEGATRON,
        default_vocab=32000,  # sentencepiece, as its sample data set
        peaks_allocated=True,
        constants=Constants(speed=0.927),
    ),
    "megatron-deepspeed-2023": replace(
        MEGATRON,
        reduced=2.0,  # 16-bit gradients, reduced as they are
        constants=Constants(speed=0.981),
    ),
    "aleph-alpha-megatron-2023": replace(
        MEGATRON,
        dropout=False,
        fused_elementwise=False,
        whole_logits=True,
        keeps_gathered=True,  # its norms gather, its products keep what they read (Aleph-Alpha/scaling, core/nn)
        loss_forward=14.0,
        loss_backward=14.0,
        logits_forward=12.0,  # torch's own loss, of logits that the pipeline's last stage keeps as its result
        logits_backward=14.0,
        fused_scores=5.0,  # as with dropout, though Llama has none: the boundary of what ran out of memory says so
        gradients=2.0,
        reduced=4.0,  # core/optimizer/allreduce.py: buckets in float32, all to all ranks, after the last backward
        all_reduces=True,
        gate_apart=True,  # core/nn/mlp.py: two column-parallel products, each with its all-reduce
        default_zero_stage=1,
        attention="flash2",
        constants=Constants(speed=0.94),
    ),
    "nanotron-2025": replace(
        MEGATRON,
        dropout=False,
        fused_elementwise=False,
        attention="flash2",
        default_sequence_parallel=True,  # its benchmark's tp_mode is REDUCE_SCATTER, and gathered inputs are kept
        keeps_gathered=True,
        temporary_gradients=2.0,
        # optim/gradient_accumulator.py, distributed.py: buckets of DistributedDataParallel, or what ZeRO-1's
        # reduce_scatter is flattened in; parallel/tensor_parallel/functional.py: float32 logits, their softmax in place
        gradient_copies=2.0,
        overlaps_reduction=True,
        logits_forward=8.0,
        constants=Constants(speed=0.985, allocator=1.06),
    ),
    "llm-foundry-2023": Software(
        "llm-foundry",
        attention="flash1",
        fused_norm=True,
        kept_logits=2.0,  # its fused_crossentropy, of 16-bit logits, whose gradient takes their place
        logits_forward=2.0,
        logits_backward=4.0,
        loss_forward=4.0,  # the same: it reads them once for the loss, and once more to replace them
        loss_backward=4.0,
        constants=Constants(speed=0.992),
    ),
    "torchtitan": Software(
        "torchtitan",
        attention="flash2",
        keeps_every_other=True,
        default_sequence_parallel=True,  # models/llama3/infra/parallelize.py: norms are SequenceParallel in every plan
        constants=Constants(speed=0.988),
    ),
    "deepspeed-zero3-2021": replace(
        MEGATRON, gradients=2.0, one_card=True, default_zero_stage=3, constants=Constants(speed=0.945)
    ),
    # github.com/NVIDIA/Megatron-LM, megatron/core, as its own tests and scripts run it. Its
    # distributed optimizer is ZeRO 1 with float32 main gradients, which products add to in place; gradients are
    # reduced while the backward computes (overlap_grad_reduce); kernels of Transformer Engine; no dropout; sequence
    # parallelism where there is tp; "selective" recomputes the core of attention. Its logs have allocated bytes.
    "megatron-core": replace(
        MEGATRON,
        dropout=False,
        attention="flash3",
        default_zero_stage=1,
        default_sequence_parallel=True,
        overlaps_tensor_parallel=True,
        overlaps_reduction=True,
        peaks_allocated=True,
    ),
    # NeMo's and Megatron-Bridge's recipes for performance run it with gradients of 16 bits, which are summed, reduced
    # and kept as such: grad_sync_dtype: bf16 (github.com/NVIDIA/dgxc-benchmarking v24.11.1, llama3.1/*.yaml),
    # grad_reduce_in_fp32 = False (github.com/NVIDIA/NeMo, scripts/performance)
    "nemo": replace(
        MEGATRON,
        gradients=2.0,
        dropout=False,
        attention="flash3",
        default_zero_stage=1,
        default_sequence_parallel=True,
        overlaps_tensor_parallel=True,
        overlaps_reduction=True,
        peaks_allocated=True,
    ),
    # github.com/KempnerInstitute/KempnerForge at 5666d0d: FSDP2 of 16-bit weights, whose AdamW has 16-bit moments and
    # no float32 copy (benchmarks/mfu_scaling); norms of a shard of the sequence and a loss of gathered logits
    # (distributed/tensor_parallel.py)
    "kempnerforge": Software(
        "kempnerforge",
        gradients=2.0,
        states=6.0,
        shards=2.0,
        attention="flash2",
        default_sequence_parallel=True,
        whole_logits=True,
        peaks_allocated=True,  # metrics/memory.py: peak_gb is torch.cuda.max_memory_allocated
        constants=Constants(speed=0.987),
    ),
    # github.com/foundation-model-stack/fms-fsdp: FSDP1, bfSixteen policy (16-bit gathers and reductions of float32
    # shards), torch's SDPA
    "fms-fsdp": Software("fms-fsdp", attention="flash2", default_vocab=32000, constants=Constants(speed=1.059)),
    # github.com/InternLM/InternEvo at c628a8c8: 16-bit weights and gradients on every rank, float32 states sharded over
    # some or all data ranks (zero1), Megatron's tensor parallelism with whole sequences, fused norms, no dropout
    "internevo": replace(
        MEGATRON,
        dropout=False,
        fused_elementwise=False,
        gradients=2.0,
        temporary_gradients=2.0,
        keeps_gathered=True,
        attention="flash2",
        overlaps_reduction=True,  # configs/7B_sft.py: overlap_sync_grad
        default_zero_stage=1,
        default_vocab=103168,
        constants=Constants(speed=0.921),
    ),
    # github.com/PrimeIntellect-ai/prime-rl at 559b44772: FSDP2 of float32 shards, gathered in 16 bits and reduced in
    # float32; whole blocks are recomputed
    "prime-rl": Software("prime-rl", attention="flash2"),
    "torchllm": Software(overlaps_reduction=True, saves_collectives=True),
}
STACKS = {name: replace(software, name=name) for name, software in _FACTS.items()}


OTHER_NAMES = {
    "megatron-lm": "megatron-core",
    "megatron-lm-2024": "megatron-core",
    "megatron-bridge": "nemo",
    "nemo-megatron": "nemo",
    "kempnerforge-2026": "kempnerforge",
    "fms-fsdp-2024": "fms-fsdp",
    "prime-rl (fsdp2)": "prime-rl",
}
"""names of stacks in tables, in small letters, and what they are here"""
KINDS = {
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
    for word, known in KINDS.items():
        if word in plain:
            assumed.append(f"stack {name!r} is unknown: as {known}")
            return STACKS[known]
    raise ValueError(f"stack {name!r} is unknown (known: {', '.join(STACKS)})")
