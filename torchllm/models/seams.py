"""The seams of a model: the attributes of its modules that a technique exchanges at run time.

A module calls these attributes instead of computing directly, so that a technique changes how, not where. Every
exchange of an attribute that is not in SEAMS, or by another file, fails tests/test_architecture.py. A fork may exchange
them, too, after `parallelize`: it then wraps the current value, as `compile.py` does.
"""

from typing import NamedTuple


class Seam(NamedTuple):
    """An attribute that is exchanged."""

    attribute: str
    of: str
    """class that has it"""
    exchanged_by: tuple[str, ...]
    """files, most in torchllm/parallel, in the order of the exchanges: a later one wraps the earlier ones"""


SEAMS = (
    Seam("forward", "nn.Embedding", ("tensor.py",)),
    Seam("forward", "nn.Linear", ("weight_gradients.py",)),
    Seam("forward", "Block", ("regather.py",)),
    Seam(
        "gather",
        "a module whose input tp gathers",
        ("tensor.py", "tensor_experts.py", "latent_attention.py", "regather.py"),
    ),
    Seam("kernel", "RMSNorm", ("tensor.py", "compile.py", "fused_norm.py")),
    Seam("merge", "RingAttention", ("compile.py",)),
    Seam("core", "Mixer", ("context.py", "delta_sequence.py", "short_reach.py", "continue_texts.py")),
    Seam("attend", "Block", ("recompute.py", "compile.py")),
    Seam("run_blocks", "Decoder", ("recompute.py",)),
    Seam("host", "OffloadedInputs", ("trace.py",)),
    Seam("is_graphed", "Decoder", ("parallelize.py",)),
    Seam("padded_chunks", "Decoder", ("optimistic.py",)),
    Seam("cross_entropy", "Head", ("tensor.py", "compile.py", "fsdp.py", "compiled_loss.py", "text_ranks.py")),
    Seam("project", "Head", ("weight_gradients.py",)),
    Seam("for_own_heads", "LatentAttention", ("latent_attention.py",)),
    Seam("local", "Head", ("tensor.py",)),
    Seam("local", "Router", ("tensor_experts.py",)),
    Seam("local", "Experts", ("expert.py", "tensor_experts.py")),
    Seam("local", "a fork's module", ("added_parameters.py",)),
    Seam("repeats", "Router", ("tensor_experts.py",)),
    Seam("choose", "Router", ("compile.py",)),
    Seam("summarize", "Router", ("compile.py",)),
    Seam("gated", "Experts", ("compile.py",)),
    Seam("gated", "SwiGLU", ("compile.py",)),
    Seam("dispatch", "RoutedExperts", ("expert.py", "optimistic.py")),
    Seam("chunks", "RoutedExperts", ("expert.py",)),
    Seam("splits", "ExchangeDispatch", ("trace.py",)),
    Seam("read", "Capacities", ("trace.py",)),
    Seam("own_tokens", "RoutedExperts", ("tensor_experts.py",)),
    Seam("hidden_states", "RoutedExperts", ("tensor_experts.py",)),
    Seam("combine", "RoutedExperts", ("compile.py",)),
    Seam("all_tokens", "SharedExperts", ("tensor_experts.py",)),
    Seam("for_own_features", "SharedExperts", ("tensor_experts.py",)),
    Seam("add_update", "UpdatedLinear", ("tensor.py",)),
)
