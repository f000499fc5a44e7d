"""Prints the validation loss of a checkpoint, on one device.

    python recipes/evaluate.py RUN_FOLDER/config.toml [--evaluate.sequences=1000] [--checkpoint.resume=STEP_FOLDER]

The newest checkpoint of the run folder that verifies is used, unless another is named.
"""

import sys

from torchllm.config import Config, load_config

if __name__ == "__main__":
    CONFIG = load_config(sys.argv[1:], one_device=True)

import math

import torch

from torchllm.checkpoint.checkpointer import load_newest_weights
from torchllm.data.loader import DataRanks, build_loader
from torchllm.models.decoder import build_model
from torchllm.parallel.initialize import materialize
from torchllm.parallel.pipeline import OneStage
from torchllm.runtime.process import choose_device, compute_dtype, report_errors
from torchllm.train.evaluate import evaluate


def main(config: Config) -> float:
    """Print and return the mean loss over the held-out sequences, in nats per target token."""
    report_errors()
    device = choose_device(config.run.device, local_rank=0)
    dtype = compute_dtype(config.training, device)
    with torch.device("meta"):
        model = build_model(config.model)
    model.to(dtype)
    materialize([model], device)
    manifest = load_newest_weights(config.run.folder, config.checkpoint.resume, model, cast=True)
    data = build_loader(config.data, config.training, config.model, config.run.seed, DataRanks())
    held_out = data.validation_batches(config.evaluate.sequences)
    loss = evaluate(OneStage([model], config.parallel), held_out, device)
    print(f"step {manifest.step}  validation loss {loss:.4f} nats/token  perplexity {math.exp(loss):.3f}")
    return loss


if __name__ == "__main__":
    main(CONFIG)
