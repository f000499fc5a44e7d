"""Run folders with checkpoints of random weights, without a training."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from torchllm.checkpoint.checkpointer import Checkpointer
from torchllm.config import Checkpoint, Config, Model, Parallel, Run, Training, write_config
from torchllm.config.schema import Lora
from torchllm.facts.parameters import canonical_name
from torchllm.models.decoder import Decoder, build_model
from torchllm.models.lora import apply_lora
from torchllm.parallel.initialize import initialize

SIZES: dict[str, Any] = {
    "layers": 2,
    "hidden": 32,
    "heads": 4,
    "ffn": 48,
    "vocab": 264,
    "max_sequence_length": 64,
    "initial_std": 0.2,
}
"""of a tiny model for the tokenizer "bytes", which has 258 ids"""


NO_LORA = Lora()


def save_run(
    folder: Path,
    model: Model,
    steps: tuple[int, ...] = (2,),
    record: dict[str, Any] | None = None,
    fill: Callable[[Decoder], object] | None = None,
    ema_factor: float = 0.0,
    lora: Lora = NO_LORA,
    state: Mapping[str, Any] | None = None,
) -> dict[int, Decoder]:
    """Write the run folder of a model with a checkpoint at each step, and return the saved models by step.

    fill: gives a model its weights, which are random without it. ema_factor: the checkpoints have a moving average too,
    the trained weights times this. lora: with it, the frozen weights are those of the run's seed, or of `fill`.
    state: what the checkpoints say of the data, besides the sequences.
    """
    config = Config(
        run=Run(folder=str(folder)),
        model=model,
        training=Training(steps=max(steps), sequence_length=32, dtype="float32"),
        parallel=Parallel(dp_shard=1),
        lora=lora,
        checkpoint=Checkpoint(interval=1),
    )
    folder.mkdir(parents=True)
    write_config(config, folder / "config.toml")
    saved = {}
    for step in steps:
        with torch.device("meta"):
            decoder = build_model(model)
        apply_lora(decoder, lora, torch.float32)
        initialize([decoder], model, torch.device("cpu"), seed=config.run.seed if lora.is_on else step)
        if fill is not None:
            fill(decoder)
        if fill is None or lora.is_on:
            add_noise(decoder, step)
        trained = {name: parameter for name, parameter in decoder.named_parameters() if parameter.requires_grad}
        named = trained if ema_factor else {}
        checkpoints = Checkpointer(
            replace(config.checkpoint, keep=0),
            folder,
            [decoder],
            torch.optim.SGD(trained.values()),
            record={"config": asdict(config)} | (record or {}),
            extra_state={
                f"ema.{canonical_name(name)}": ema_factor * parameter.detach() for name, parameter in named.items()
            },
        )
        checkpoints.save(step, {"sequences": 8 * step} | dict(state or {}))
        checkpoints.close()
        saved[step] = decoder
    return saved


@torch.no_grad()
def add_noise(decoder: Decoder, seed: int) -> None:
    """Change every weight that is trained: biases and norms must count, too, and with LoRA B is not zero."""
    for parameter in decoder.parameters():
        if parameter.requires_grad:
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))
