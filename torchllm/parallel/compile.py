"""torch.compile of the norms, the blocks or the loss: fewer passes over memory, the same numbers up to rounding.

Nothing is sharded or sent. Blocks are compiled one by one: they are equal, so one compilation serves all of them and
takes the time of one block however deep the model is. FSDP's hooks stay outside the graphs; the collectives of tensor
parallelism are inside, and so is recomputation, except of whole segments.

FOOTGUN: torch 2.13 on a CPU fails ("expected all tensors_saved_with_vc_check") at compiled blocks that recompute fused
attention under tensor parallelism (modes full and every_k). recompute.mode = "segment" with k = 1 does the same as
`full` and works.
"""

import torch

from torchllm.config import Compile
from torchllm.models.decoder import Decoder
from torchllm.models.layers import RMSNorm


def apply_compile(stage: Decoder, config: Compile) -> None:
    """Compile the parts that the config names, in place. The compilation itself happens in the first step."""
    if config.norm:
        for module in stage.modules():
            if isinstance(module, RMSNorm):
                module.kernel = torch.compile(module.kernel)
    if config.block:
        for name, block in list(stage.layers.items()):
            stage.layers[name] = torch.compile(block)  # type: ignore[assignment]  # an OptimizedModule
    if config.loss and stage.lm_head is not None:
        stage.lm_head.cross_entropy = torch.compile(stage.lm_head.cross_entropy)
