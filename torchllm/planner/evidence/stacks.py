"""The frameworks whose measurements are published: facts of each, and the constants fitted to them. No torch."""

from dataclasses import replace

from torchllm.spec.software import Constants, Software

MEGATRON = Software(
    "megatron",
    gradients=4.0,
    states=12.0,
    fsdp=False,
    temporary_gradients=0.0,  # products add to the gradient in place
    logits_backward=8.0,  # the softmax becomes its gradient in place
    keeps_gathered=False,
    recomputes_attention_only=True,
    fused_elementwise=True,
    dropout=True,
    attention="fused_softmax",
    fused_norm=True,
    default_zero_stage=0,
)
STACKS = {
    "megatron-2021": replace(
        MEGATRON, gradients=2.0, constants=Constants(launch=2.3e-5, traffic=1.3, wait=3e-6, flush=0.0)
    ),
    "megatron-2022": replace(
        MEGATRON,
        overlaps_tensor_parallel=True,
        constants=Constants(launch=1e-6, traffic=0.4, exposed=0.0, wait=2e-5, flush=0.0),
    ),
    "megatron-zero-bubble-2023": replace(
        MEGATRON,
        default_vocab=32000,  # sentencepiece, as its sample data set
        peaks_allocated=True,
        constants=Constants(launch=6e-6, traffic=1.2, wait=5e-4, flush=0.0),
    ),
    "megatron-deepspeed-2023": replace(
        MEGATRON, constants=Constants(launch=2.7e-6, traffic=1.2, wait=7.5e-6, flush=0.0)
    ),
    "aleph-alpha-megatron-2023": replace(
        MEGATRON,
        dropout=False,
        fused_elementwise=False,
        whole_logits=True,
        keeps_gathered=True,  # its norms gather, its products keep what they read (Aleph-Alpha/scaling, core/nn)
        logits_forward=12.0,  # torch's own loss, of logits that the pipeline's last stage keeps as its result
        logits_backward=14.0,
        fused_scores=5.0,  # as with dropout, though Llama has none: the boundary of what ran out of memory says so
        gradients=2.0,
        default_zero_stage=1,
        attention="flash2",
        constants=Constants(launch=3.6e-6, traffic=1.2, wait=3.4e-4, flush=1.5),
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
        logits_forward=8.0,
        constants=Constants(launch=1.6e-5, traffic=0.8, wait=4e-4, allocator=1.06),
    ),
    "llm-foundry-2023": Software(
        "llm-foundry",
        attention="flash1",
        fused_norm=True,
        kept_logits=2.0,  # its fused_crossentropy, of 16-bit logits, whose gradient takes their place
        logits_forward=2.0,
        logits_backward=4.0,
        constants=Constants(launch=1e-6, traffic=0.55, exposed=0.8),
    ),
    "torchtitan": Software("torchtitan", attention="flash2", keeps_every_other=True),
    "deepspeed-zero3-2021": replace(
        MEGATRON, gradients=2.0, one_card=True, default_zero_stage=3, constants=Constants(launch=2.3e-5, traffic=1.3)
    ),
    "torchllm": Software(overlaps_reduction=True, saves_collectives=True),
}


def stack_of(name: str, assumed: list[str]) -> Software:
    """Return a framework by name. If it is unknown, return the closest of its kind and say so in `assumed`."""
    if name in STACKS:
        return STACKS[name]
    kind = next((known for known in ("megatron", "nanotron", "llm-foundry", "torchtitan") if known in name.lower()), "")
    known = {"megatron": "megatron-2022", "llm-foundry": "llm-foundry-2023", "nanotron": "nanotron-2025"}.get(
        kind, "torchtitan"
    )
    assumed.append(f"stack {name!r} is unknown: as {known}")
    return STACKS[known]
