"""Prints the validation loss of a checkpoint, on one device or sharded over several ranks; or evaluates it on tasks.

    python recipes/evaluate.py RUN_FOLDER/config.toml [--evaluate.sequences=1000] [--checkpoint.resume=STEP_FOLDER]
    python -P -m torchllm.tools.launch.launch --nproc-per-node=8 recipes/evaluate.py RUN_FOLDER/config.toml \\
        --parallel.dp_shard=8

    python recipes/evaluate.py RUN_FOLDER/config.toml --evaluate.tasks=arc_easy,FOLDER

With `evaluate.tasks` lm-evaluation-harness (extra lm-eval) evaluates the model, on one device; values go to
RUN_FOLDER/evaluations and to TensorBoard.

The newest checkpoint of the run folder that verifies is used, unless another is named; with --evaluate.ema=true the
moving average of the weights in it. On several ranks [parallel] works as in training, and its layout may differ from
the layout that wrote the checkpoint.
"""

import os
import sys

from torchllm.config import Float8
from torchllm.recipe import Config, load_run
from torchllm.tools.front.preflight import inspect_evaluation

if __name__ == "__main__":
    ALONE = int(os.environ.get("WORLD_SIZE", 1)) == 1
    CONFIG = load_run(sys.argv[1:], one_device=ALONE, inspect=inspect_evaluation)

import logging
import math
from dataclasses import replace
from pathlib import Path

import torch

from torchllm.checkpoint.manifest import Manifest
from torchllm.checkpoint.state import WEIGHTS
from torchllm.recipe import (
    DataRanks,
    OneStage,
    add_low_rank_updates,
    build_forward_backward,
    build_loader,
    build_mesh,
    build_model,
    cast_parameters,
    choose_device,
    compute_dtype,
    evaluate,
    load_weights_of_run,
    materialize,
    parallelize,
    report_errors,
    sequence_pieces,
    start_runtime,
)
from torchllm.runtime.signs_of_life import signs_of_life
from torchllm.tools.generate.language_model import language_model
from torchllm.tools.hub.weights import AVERAGED_WEIGHTS
from torchllm.tools.watch.tasks import run_tasks, values_of, write_task_results
from torchllm.train.evaluate import HeldOutLoss

log = logging.getLogger("torchllm")


def main(config: Config) -> HeldOutLoss:
    """Print and return the mean loss over the held-out sequences, in nats per target token."""
    report_errors()
    device = choose_device(config.run.device, local_rank=0)
    with torch.device("meta"):
        model = build_model(config.model)
    dtype = compute_dtype(config.training, device)
    add_low_rank_updates(model, config, dtype)
    cast_parameters(model, dtype)
    materialize([model], device)
    prefix = AVERAGED_WEIGHTS if config.evaluate.ema else WEIGHTS
    manifest = load_weights_of_run(config, [model], prefix=prefix)
    data = build_loader(config.data, config.training, config.model, config.run.seed, DataRanks(), config.finetune)
    data.keep_sources_of(manifest.data)
    log_evaluation(manifest, data.validation_sequences(config.evaluate.sequences))
    held_out = data.validation_batches(config.evaluate.sequences, device)
    loss = evaluate(OneStage([model], config.parallel), held_out, device)
    print_loss(manifest.step, loss)
    return loss


def evaluate_sharded(config: Config) -> HeldOutLoss:
    """Print and return the same mean loss, computed by all ranks, each with its part of the weights and sequences."""
    runtime = start_runtime(config.run, [config], reads_only=True)
    device = runtime.device
    dtype = compute_dtype(config.training, device)
    mesh = build_mesh(config.parallel, device)
    with torch.device("meta"):
        model = build_model(config.model, config.training.loss_chunk)
    add_low_rank_updates(model, config, dtype)
    cast_parameters(model, dtype)
    length = config.training.sequence_length
    stages = parallelize(model, mesh, config.parallel, config.recompute, config.compile, Float8(), dtype, length)
    materialize(stages, device)
    prefix = AVERAGED_WEIGHTS if config.evaluate.ema else WEIGHTS
    manifest = load_weights_of_run(config, stages, group=runtime.host_group, prefix=prefix)
    ranks = DataRanks(
        mesh.data_rank,
        mesh.data_size,
        prepares=runtime.local_rank == 0,
        gather_texts=runtime.gather_texts,
        preparing_rank=runtime.first_rank_on_node,
        pieces=sequence_pieces(mesh),
    )
    data = build_loader(config.data, config.training, config.model, config.run.seed, ranks, config.finetune)
    data.keep_sources_of(manifest.data)
    log_evaluation(manifest, data.validation_sequences(config.evaluate.sequences))
    held_out = data.validation_batches(config.evaluate.sequences, device)
    forward_backward = build_forward_backward(stages, mesh, config.parallel, config.training, dtype)
    loss = evaluate(forward_backward, held_out, device, mesh)
    if runtime.is_main:
        print_loss(manifest.step, loss)
    runtime.close()
    return loss


def evaluate_tasks(config: Config) -> Path:
    """Evaluate the model on `evaluate.tasks`, print the results, and return the file with them."""
    report_errors()
    run_folder = Path(config.run.folder)
    model = language_model(replace(config, generate=replace(config.generate, ema=config.evaluate.ema)))
    assert model.manifest is not None  # of a run
    step = model.manifest.step
    log.info("step %d: evaluating on %s", step, ", ".join(config.evaluate.tasks))
    from torchllm.tools.generate.harness_model import HarnessModel  # imports the harness

    results = run_tasks(HarnessModel(model, config.training.micro_batch_size), config.evaluate.tasks)
    path = write_task_results(run_folder, step, results)
    for value in values_of(results):
        print(f"step {step}  {value.task}  {value.metric} {value.value:.4f}")
    return path


def log_evaluation(manifest: Manifest, sequences: int) -> None:
    """Log the checkpoint to evaluate, and whether the run was trained on other data."""
    log.info("step %d: evaluating %d held-out sequences", manifest.step, sequences)
    if "data.sources" in manifest.record.get("replaced", ()):
        log.warning("the run was trained on data of its recipe's own: these sequences are of data.sources")


def print_loss(step: int, loss: HeldOutLoss) -> None:
    """Print the loss, its perplexity and, where there is text, its bits per byte; and those of each source."""
    print(f"step {step}  validation loss {_describe(loss)}")
    for name, of_source in loss.by_source.items():
        print(f"  {name}: {_describe(of_source)}")


def _describe(loss: HeldOutLoss) -> str:
    bits = "" if loss.bits_per_byte is None else f"  {loss.bits_per_byte:.4f} bits/byte"
    return f"{loss:.4f} nats/token  perplexity {math.exp(loss):.3f}{bits}"


if __name__ == "__main__":
    with signs_of_life("evaluate"):
        if CONFIG.evaluate.tasks:
            evaluate_tasks(CONFIG)
        elif ALONE:
            main(CONFIG)
        else:
            evaluate_sharded(CONFIG)
