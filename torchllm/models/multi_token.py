"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): blocks that predict tokens further ahead.

Block k of D (model.mtp_depth) combines the state of each token with the embedding of the token k after it, and predicts
the token k + 1 after it. The first one has the final norm's result as state, and each other one the result of the block
before. Embedding and head are the model's. The loss of block k is ignored where a document begins before its label.

Order of operations and names as in transformers' `MtpModel`.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from torchllm.config import Model
from torchllm.config.errors import UserError
from torchllm.models.decoder import Decoder
from torchllm.models.layers import Rotary, build_norm


class _Predicting(nn.Module):
    """Extends a class of blocks, which comes after it: `predicting`."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.enorm = build_norm(model)
        self.hnorm = build_norm(model)
        self.eh_proj = nn.Linear(2 * model.hidden, model.hidden, bias=False)
        self.post_norm = build_norm(model)

    def forward(self, x: Tensor, rotary: Rotary | None, mask: Any, embeddings: Tensor) -> Tensor:
        """Return the states of the next depth: x, those before, and embeddings of tokens ahead, (B, S, D) each."""
        x = self.eh_proj(torch.cat((self.enorm(embeddings), self.hnorm(x)), dim=-1))
        states: Tensor = self.post_norm(super().forward(x, rotary, mask))
        return states


@cache
def predicting(block: type[nn.Module]) -> type[nn.Module]:
    """Return the class of a block that predicts further tokens, given the class of other blocks."""
    return type(f"Predicting{block.__name__}", (_Predicting, block), {})


class PredictingDecoder(Decoder):
    """A decoder with such blocks on its last stage; a pass without labels does not run them."""

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        document_ids: Tensor | None = None,
        labels: Tensor | None = None,
        document_limit: int = 0,
        ahead: Tensor | None = None,
    ) -> Tensor:
        """Return the same as `Decoder.forward`; the gradients of the loss include all depths."""
        tokens: list[Tensor] = []
        targets: list[Tensor] = []
        if self.lm_head is not None and labels is not None:
            if ahead is None:
                raise UserError(
                    "model.mtp_depth: the batches have no tokens further ahead: set it to 0, or `Batch.ahead`"
                )
            of_depths, of_labels = ahead.unbind(1)
            tokens, targets = list(of_depths.unbind(1)), list(of_labels.unbind(1))
        ids = [x, *tokens] if self.embeds else tokens
        embeddings = [*self.embed(torch.cat(ids)).chunk(len(ids))] if ids else []  # one look-up: FSDP gathers once
        if self.embeds:
            x, *embeddings = embeddings
            x = self.begin(x, positions)
        inputs = self.inputs_of_blocks(positions, document_ids, document_limit)
        blocks = list(zip(self.layers.values(), inputs, strict=True))
        own = sum(int(index) < self.model.layers for index in self.layers)
        x = self.run_blocks(blocks[:own], x)
        if self.norm is None or self.lm_head is None:
            return x
        states = [self.norm(x)]
        for (block, of_block), of_tokens in zip(blocks[own:], embeddings, strict=False):
            states.append(self.run_blocks([(block, (*of_block, of_tokens))], states[-1]))
        if labels is None or not torch.is_grad_enabled():  # an evaluation runs the blocks, since FSDP gathers them
            return self.lm_head(states[0], labels)
        return self.lm_head(torch.cat(states), torch.cat((labels, *targets)), len(targets))
