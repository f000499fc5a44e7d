"""Another dtype of a model's weights."""

import torch

from torchllm.models.decoder import Decoder


def cast_parameters(model: Decoder, dtype: torch.dtype) -> None:
    """Cast a model to another dtype, in place. Call it before it has weights.

    Routers keep the dtype that they have in training, since it decides the choice of experts: a router's bias is
    float32, and so are its weights unless model.router_dtype says otherwise.
    """
    model.to(dtype)
    if not model.model.experts:
        return
    from torchllm.models.experts import Router

    for module in model.modules():
        if isinstance(module, Router):
            if model.model.router_dtype == "float32":
                module.float()
            elif module.bias is not None:
                module.bias = module.bias.float()
