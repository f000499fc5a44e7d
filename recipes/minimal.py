"""Trains on one device: all of training in one file. Read this first.

    python recipes/minimal.py train_configs/debug.toml [--section.key=value ...]

It has no run folder, ignores [parallel] and keys that change no weight, and refuses other keys that it does not apply.
recipes/pretrain.py makes the same calls in the same order, sharded over ranks, and trains the same model (tested).
"""

import sys

from torchllm.recipe import Config, refuse_unapplied

if __name__ == "__main__":
    from torchllm.recipe import load_config  # a tool; training needs none

    CONFIG = load_config(sys.argv[1:], one_device=True)

import time

import torch

from torchllm.recipe import (
    IGNORED,
    DataRanks,
    ExpertBalance,
    LearningRate,
    add_low_rank_updates,
    apply_if_finite,
    build_loader,
    build_model,
    build_optimizer,
    choose_device,
    clip_grad_norm,
    compute_dtype,
    initialize,
    report_errors,
)


def main(config: Config) -> list[float]:
    """Train, and return the loss of every step in nats per target token."""
    report_errors()
    training = config.training
    device = choose_device(config.run.device, local_rank=0)
    dtype = compute_dtype(training, device)
    if training.weights_dtype == "bfloat16" and dtype != torch.bfloat16:
        sys.exit('training.weights_dtype = "bfloat16": this recipe computes in it, too: set training.dtype to it')
    with torch.device("meta"):
        model = build_model(config.model, training.loss_chunk, training.z_loss, training.weights_dtype)
    add_low_rank_updates(model, config, torch.float32)
    initialize([model], config.model, device, config.run.seed)

    data = build_loader(config.data, training, config.model, config.run.seed, DataRanks())
    optimizer = build_optimizer([model], config.optimizer)
    balance = ExpertBalance([model], training)
    learning_rate = LearningRate(config.schedule, config.optimizer.learning_rate, training.steps)

    if left_out := refuse_unapplied(config, one_device=True):
        print(f"left out by this recipe: {', '.join(left_out)}", file=sys.stderr)
    losses = []
    for step in range(1, training.steps + 1):
        started = time.perf_counter()
        batches = data.next_step().unpack(device)
        balance.begin_step(sum(batch.tokens.numel() for batch in batches))
        targets = sum(int((batch.labels != IGNORED).sum()) for batch in batches)
        loss = torch.zeros((), device=device)
        for batch in batches:
            with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                loss_sum = model(batch.tokens, batch.positions, batch.document_ids, batch.labels, batch.document_limit)
            share = loss_sum / targets  # gradient of the mean over all target tokens of the step
            share.backward()
            loss += share.detach()
        finite = torch.isfinite(clip_grad_norm([model], training.max_grad_norm, device))
        balance.finish_step(finite)
        apply_if_finite(optimizer, learning_rate(step), finite)
        optimizer.zero_grad()
        losses.append(loss.item())
        print(f"step {step}  loss {losses[-1]:.4f}  {time.perf_counter() - started:.3f} s", flush=True)
    data.close()
    return losses


if __name__ == "__main__":
    main(CONFIG)
