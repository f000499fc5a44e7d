"""The frameworks whose measurements are published: facts of each, and the constants fitted to them. No torch."""

import difflib
from dataclasses import replace

from torchllm.planner.software import Constants, Software

MEGATRON = Software(
    "megatron",
    gradients=4.0,
    states=12.0,
    recomputes_attention_only=True,
    fused_elementwise=True,
    dropout=True,
    attention="fused_softmax",
    fused_norm=True,
    default_zero_stage=0,
)
STACKS = {
    "megatron-2021": replace(MEGATRON, gradients=2.0),
    "megatron-2022": MEGATRON,
    "megatron-zero-bubble-2023": replace(MEGATRON, default_vocab=32000),  # sentencepiece, as its sample data set
    "megatron-deepspeed-2023": MEGATRON,
    "aleph-alpha-megatron-2023": replace(
        MEGATRON,
        dropout=False,
        fused_elementwise=False,
        whole_logits=True,
        gradients=2.0,
        default_zero_stage=1,
        attention="flash2",
    ),
    "nanotron-2025": replace(MEGATRON, dropout=False, fused_elementwise=False, attention="flash2"),
    "llm-foundry-2023": Software("llm-foundry", attention="flash1", fused_norm=True),
    "torchtitan": Software("torchtitan", attention="flash2"),
    "deepspeed-zero3-2021": replace(MEGATRON, gradients=2.0, one_card=True, default_zero_stage=3),
    "torchllm": Software(),
}


def stack_of(name: str, assumed: list[str]) -> Software:
    """A framework by name; the closest of its kind, said in `assumed`, where it is not known."""
    if name in STACKS:
        return STACKS[name]
    kind = next((known for known in ("megatron", "nanotron", "llm-foundry", "torchtitan") if known in name.lower()), "")
    known = {"megatron": "megatron-2022", "llm-foundry": "llm-foundry-2023", "nanotron": "nanotron-2025"}.get(
        kind, "torchtitan"
    )
    assumed.append(f"stack {name!r} is not known: as {known}")
    return STACKS[known]
