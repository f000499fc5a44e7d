"""The decoder, built from the features of its model (`config.Features`): Llama, GPT, Qwen.

It is plain PyTorch and knows nothing of ranks. Parallelism relies on these: blocks are in a ModuleDict keyed by their
global index, a pipeline stage may lack either end, positions and document ids are inputs, and some parts are
replaceable (attention core, norm kernel, cross entropy, `run_blocks`).
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from torchllm.config import Config, Model
from torchllm.config.applied_keys import applied
from torchllm.config.errors import UserError
from torchllm.facts.parts.part import found
from torchllm.facts.parts.registry import around, feed_forward, mixer
from torchllm.models.head import Head
from torchllm.models.layers import Rotary, build_norm, rotary_angles
from torchllm.models.mixer import Mixer


class Block(nn.Module):
    """Adds attention and the feed-forward layer, each with a norm before it, to the residual stream."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.input_layernorm = build_norm(model)
        self.self_attn = found(mixer(model).build)(model)
        self.post_attention_layernorm = build_norm(model)
        self.mlp = found(feed_forward(model).build)(model)
        self.multiplier = model.residual_multiplier
        """factor of the results that are added to the residual stream"""

    def forward(self, x: Tensor, rotary: Rotary | None, mask: Any) -> Tensor:
        """Run the block on the residual stream: x (B, S, D) -> (B, S, D). mask: as the attention core made it."""
        x, inner = self.attend(x, rotary, mask)
        return torch.add(x, self.mlp(inner), alpha=self.multiplier)

    def attend(self, x: Tensor, rotary: Rotary | None, mask: Any) -> tuple[Tensor, Tensor]:
        """Return the residual stream after attention, and the input of the feed-forward layer: (B, S, D) each.

        Replaceable: in a block with experts this is the part that can be compiled, and recomputed, as one.
        """
        x = torch.add(x, self.self_attn(self.input_layernorm(x), rotary, mask), alpha=self.multiplier)
        return x, self.post_attention_layernorm(x)


BLOCKS = {
    "before": "torchllm.models.decoder:Block",
    "after": "torchllm.models.norms_after:NormAfterBlock",
    "both": "torchllm.models.norms_after:NormsAroundBlock",
    "scaled": "torchllm.models.norms_after:ScaledBlock",
}
"""class of the blocks, by `Model.block_form`; a run imports its own"""


def build_block(model: Model, index: int) -> nn.Module:
    """Return a block with uninitialized weights, of its kind and as `model.block` says."""
    view = model.of_block(index)
    of_class = found(BLOCKS[view.block_form])
    if outer := around(view):
        of_class = found(outer.build)(of_class)
    block: nn.Module = of_class(view)
    if model.block:
        from torchllm.facts.block_kinds import changed_block  # of no use to other models

        block = changed_block(block, model, index)
        windows = [module.core.window for module in block.modules() if isinstance(module, Mixer)]
        if model.attention in ("eager", "flex") and set(windows) - {model.window}:
            raise UserError(
                f"model.attention: {model.attention} has one mask for all blocks, and block {index} another window: "
                'use "sdpa"'
            )
    return block


class BlockInputs(NamedTuple):
    """Inputs of a block that are the same for all blocks of its kind."""

    rotary: Rotary | None
    """None: no rotary positions"""
    mask: Any
    """as the attention core made it"""


def run_blocks(blocks: Iterable[tuple[nn.Module, Sequence[Any]]], x: Tensor) -> Tensor:
    """Run the blocks one after the other: x (B, S, D) -> (B, S, D)."""
    for block, inputs in blocks:
        x = block(x, *inputs)
    return x


class Decoder(nn.Module):
    """Embedding, blocks, norm and head. A pipeline stage has some of the blocks and may lack either of the ends."""

    def __init__(self, model: Model, loss_chunk: int, z_loss: float) -> None:
        super().__init__()
        self.model = model
        self.embeds = True
        """whether the input is tokens; False on a pipeline stage that receives hidden states (the last stage of a tied
        model still has `embed_tokens`, as the head's weight)"""
        self.embed_tokens: nn.Module | None = nn.Embedding(model.vocab_rows, model.hidden)
        self.embed_positions: nn.Module | None = None
        if model.features.learned_positions:
            self.embed_positions = nn.Embedding(model.max_sequence_length, model.hidden)
        self.embed_norm: nn.Module | None = build_norm(model) if model.features.normed_embeddings else None
        self.layers = nn.ModuleDict({str(index): build_block(model, index) for index in range(model.blocks)})
        self.norm: nn.Module | None = build_norm(model)
        self.lm_head: Head | None = Head(model, loss_chunk, z_loss)
        self.run_blocks: Callable[..., Tensor] = run_blocks
        self.is_graphed = False
        """whether a step's forward and backward are one CUDA graph: `parallel/graphs.py`"""
        self.padded_chunks = 0
        """chunks of tokens of a sparse block that are sent in padded buffers: `parallel/optimistic.py`; 0: none"""
        self.tie_embeddings()

    def tie_embeddings(self) -> None:
        """Make the head use the embedding's parameter if the model says so.

        FOOTGUN: `parallelize_module` and `to_empty` replace parameters, which unties them silently; call this after.
        """
        if self.model.tied_embeddings and self.embed_tokens is not None and self.lm_head is not None:
            self.lm_head.weight = self.embed_tokens.weight  # type: ignore[assignment]  # nn.Module's attributes have no one type

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        document_ids: Tensor | None = None,
        labels: Tensor | None = None,
        document_limit: int = 0,
        ahead: Tensor | None = None,
    ) -> Tensor:
        """Return the sum of the loss, (); without labels logits (B, S, V); without a head hidden states (B, S, D).

        x: tokens (B, S), or hidden states (B, S, D) on a stage without the embedding. positions, document_ids, labels:
        (B, S). document_ids None: a token sees all tokens before it. document_limit: `Batch.document_limit`. ahead:
        `Batch.ahead`, for `multi_token.py`.
        """
        if self.embeds and self.embed_tokens is not None:
            x = self.begin(self.embed(x), positions)
        inputs = self.inputs_of_blocks(positions, document_ids, document_limit)
        x = self.run_blocks(list(zip(self.layers.values(), inputs, strict=True)), x)
        if self.norm is None or self.lm_head is None:
            return x
        return self.lm_head(self.norm(x), labels)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the embeddings of tokens: (B, S) -> (B, S, D)."""
        assert self.embed_tokens is not None
        x: Tensor = self.embed_tokens(tokens)
        if self.model.embedding_multiplier != 1:
            x = x * x.new_full((), self.model.embedding_multiplier)  # which rounds it, as published models do
        return x

    def begin(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return the input of the first block, given the embeddings (B, S, D)."""
        if self.embed_positions is not None:
            x = x + self.embed_positions(positions)
        if self.embed_norm is not None:
            x = self.embed_norm(x)
        if self.model.experts and torch.is_grad_enabled() and not x.requires_grad:
            x = x.detach().requires_grad_()  # with frozen embeddings: routers count tokens in their backward pass
        return x

    def inputs_of_blocks(
        self, positions: Tensor, document_ids: Tensor | None, document_limit: int
    ) -> list[BlockInputs]:
        """Return the inputs of each block: blocks share the angles of a rotary setting, and the mask of a kernel
        and a window.

        positions, document_ids: (B, S).
        """
        angles: dict[tuple[Any, ...], Rotary | None] = {(): None}
        masks: dict[tuple[str, str, int], Any] = {}
        of_kinds: dict[str, BlockInputs] = {}
        kinds = [self.model.kind_of(int(index)) for index in self.layers]
        for kind, (index, block) in zip(kinds, self.layers.items(), strict=True):
            if kind in of_kinds:
                continue
            view = self.model.of_block(int(index))
            if view.rotary_settings not in angles:
                angles[view.rotary_settings] = rotary_angles(view, positions)
            seen = view.mixer, view.attention, view.window
            if seen not in masks:
                core = core_of(block if kind else self.layers)  # a fork's first block may have another attention
                masks[seen] = mask_of(core, positions, document_ids, document_limit)
            of_kinds[kind] = BlockInputs(angles[view.rotary_settings], masks[seen])
        return [of_kinds[kind] for kind in kinds]


def core_of(blocks: nn.Module) -> Any:
    """Return the core of a block's mixer, or of the first of several blocks."""
    return next(module for module in blocks.modules() if isinstance(module, Mixer)).core


def mask_of(core: Any, positions: Tensor, document_ids: Tensor | None, document_limit: int) -> Any:
    """Return the mask of the blocks with this core. positions, document_ids: (B, S)."""
    mask = core.mask(document_ids, document_limit)
    if mask is not None or not getattr(core, "shares_causal_mask", False):  # a fork's core need not say
        return mask
    from torchllm.models.block_mask import causal_block_mask  # else each compiled block makes one

    return causal_block_mask(positions.shape[1], positions.device, core.window)


def build_model(
    model: Model,
    loss_chunk: int = 0,
    z_loss: float = 0.0,
    weights_dtype: Literal["float32", "bfloat16"] = "float32",
) -> Decoder:
    """Return the decoder with uninitialized weights; under `torch.device("meta")` it takes no memory.

    loss_chunk: number of tokens whose logits exist at a time; 0: all of a micro batch. z_loss: weight of the squared
    log-sum-exp of the logits in the gradients; 0: none. weights_dtype: bfloat16 excludes routers, see
    `cast_parameters`.
    """
    applied("training.loss_chunk", loss_chunk)
    applied("training.z_loss", z_loss)
    applied("training.weights_dtype", weights_dtype)
    applied("model.pattern", model.pattern)
    applied("model.mixer", model.mixer)
    applied("model.kinds", model.kinds)
    applied("model.mtp_depth", model.mtp_depth)
    outer = around(model.of_block(model.blocks - 1))
    of_class = found(outer.decoder) if outer else Decoder
    decoder: Decoder = of_class(model, loss_chunk, z_loss)
    if weights_dtype == "bfloat16":
        found("torchllm.models.cast:cast_parameters")(decoder, torch.bfloat16)  # of no use to other runs
    if model.frozen:
        from torchllm.models.frozen import freeze  # of no use to other runs

        freeze(decoder, model)
    return decoder


def add_low_rank_updates(model: Decoder, config: Config, dtype: torch.dtype) -> None:
    """Freeze a model and add the low-rank updates that the config trains instead, in place; by default do nothing.

    Call it on the plain model, before it is cut into stages. dtype: of the computation and of the frozen weights.
    """
    applied("lora", config.lora)
    if config.lora.is_on:
        from torchllm.models.lora import apply_lora  # of no use to most runs

        apply_lora(model, config.lora, dtype)
