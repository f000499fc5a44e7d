"""Python imports this module at the start of every process on the hollow GPU (`bed.environment`)."""

import os

if os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1":
    import torch

    # cuDNN's attention cannot run here. torch's `varlen_attn` prefers it from 2.15 on, whatever the variable says.
    torch.backends.cuda.enable_cudnn_sdp(False)
