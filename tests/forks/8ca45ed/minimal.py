"""Trains on one device: the whole of training in one file. Read this first.

    python recipes/minimal.py train_configs/debug.toml [--section.key=value ...]

It ignores [parallel], [recompute], [compile], [checkpoint] and [evaluate]. recipes/pretrain.py makes the same calls in
the same order, sharded over ranks, and trains the same model (tested).
"""

import sys

from torchllm.config import Config, load_config

if __name__ == "__main__":
    CONFIG = load_config(sys.argv[1:], one_device=True)

import time

import torch

from torchllm.data.loader import DataRanks, build_loader
from torchllm.models.decoder import build_model
from torchllm.models.head import IGNORED
from torchllm.models.lora import apply_lora
from torchllm.optim.expert_balance import ExpertBalance
from torchllm.optim.grad_norm import clip, grad_norm
from torchllm.optim.optimizer import apply_if_finite, build_optimizer
from torchllm.optim.schedule import LearningRate
from torchllm.parallel.initialize import initialize
from torchllm.runtime.error_report import report_errors
from torchllm.runtime.process import choose_device, compute_dtype


def main(config: Config) -> list[float]:
    """Train, and return the loss of every step in nats per target token."""
    report_errors()
    device = choose_device(config.run.device, local_rank=0)
    dtype = compute_dtype(config.training, device)
    with torch.device("meta"):
        model = build_model(config.model, config.training.loss_chunk, config.training.z_loss)
    apply_lora(model, config.lora, torch.float32)
    initialize([model], config.model, device, config.run.seed)

    data = build_loader(config.data, config.training, config.model, config.run.seed, DataRanks())
    optimizer = build_optimizer([model], config.optimizer)
    balance = ExpertBalance([model], config.training)
    learning_rate = LearningRate(config.schedule, config.optimizer.learning_rate, config.training.steps)

    losses = []
    for step in range(1, config.training.steps + 1):
        started = time.perf_counter()
        batches = data.next_step().unpack(device)
        targets = sum(int((batch.labels != IGNORED).sum()) for batch in batches)
        loss = torch.zeros((), device=device)
        for batch in batches:
            with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                loss_sum = model(batch.tokens, batch.positions, batch.document_ids, batch.labels, batch.document_limit)
            share = loss_sum / targets  # of the mean over all target tokens of the step
            share.backward()
            loss += share.detach()
        norm = grad_norm([model], device)
        clip([model], norm, config.training.max_grad_norm)
        finite = torch.isfinite(norm)
        balance.finish_step(finite)
        apply_if_finite(optimizer, learning_rate(step), finite)
        optimizer.zero_grad()
        losses.append(loss.item())
        print(f"step {step}  loss {losses[-1]:.4f}  {time.perf_counter() - started:.3f} s", flush=True)
    data.close()
    return losses


if __name__ == "__main__":
    main(CONFIG)
