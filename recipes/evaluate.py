"""Prints the validation loss of a checkpoint, on one device or sharded over several ranks; or evaluates it on tasks.

    python recipes/evaluate.py RUN_FOLDER/config.toml [--evaluate.sequences=1000] [--checkpoint.resume=STEP_FOLDER]
    python -P -m torchllm.tools.launch.launch --nproc-per-node=8 recipes/evaluate.py RUN_FOLDER/config.toml \\
        --parallel.dp_shard=8

    python recipes/evaluate.py RUN_FOLDER/config.toml --evaluate.tasks=arc_easy,FOLDER

With `evaluate.tasks` lm-evaluation-harness (extra lm-eval) evaluates the model; values go to RUN_FOLDER/evaluations and
to TensorBoard.

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
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from torchllm.checkpoint.manifest import Manifest
from torchllm.checkpoint.state import WEIGHTS
from torchllm.data.tokenizer import load_tokenizer
from torchllm.models.decoder import Decoder
from torchllm.parallel.forward_backward import ForwardBackward
from torchllm.parallel.mesh import Mesh
from torchllm.recipe import (
    DataRanks,
    OneStage,
    Runtime,
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
from torchllm.tools.hub.weights import AVERAGED_WEIGHTS
from torchllm.tools.watch.tasks import Tasks, values_of, write_points, write_task_results
from torchllm.tools.watch.text_ranks import TextRanks
from torchllm.train.evaluate import HeldOutLoss

log = logging.getLogger("torchllm")


class LoadedModel(NamedTuple):
    """This rank's part of a checkpoint's model; without a mesh all of it."""

    stages: Sequence[Decoder]
    device: torch.device
    manifest: Manifest
    mesh: Mesh | None


def restore_model(config: Config, runtime: Runtime | None = None) -> LoadedModel:
    """Return the model of a checkpoint: in the layout of [parallel], or, without a runtime, on one device."""
    device = choose_device(config.run.device, local_rank=0) if runtime is None else runtime.device
    dtype = compute_dtype(config.training, device)
    with torch.device("meta"):
        model = build_model(config.model, config.training.loss_chunk)
    add_low_rank_updates(model, config, dtype)
    cast_parameters(model, dtype)
    stages, mesh, group = [model], None, None
    if runtime is not None:
        mesh, group, length = build_mesh(config.parallel, device), runtime.host_group, config.training.sequence_length
        stages = parallelize(model, mesh, config.parallel, config.recompute, config.compile, Float8(), dtype, length)
    materialize(stages, device)
    prefix = AVERAGED_WEIGHTS if config.evaluate.ema else WEIGHTS
    return LoadedModel(stages, device, load_weights_of_run(config, stages, group=group, prefix=prefix), mesh)


def main(config: Config, runtime: Runtime | None = None) -> HeldOutLoss:
    """Print and return the mean loss over the held-out sequences, in nats per target token.

    runtime: all ranks compute it, each with its part of the weights and sequences; None: this process alone.
    """
    stages, device, manifest, mesh = restore_model(config, runtime)
    ranks = DataRanks()
    forward_backward: ForwardBackward = OneStage(stages, config.parallel)
    if runtime is not None and mesh is not None:
        ranks = DataRanks(
            mesh.data_rank,
            mesh.data_size,
            prepares=runtime.local_rank == 0,
            gather_texts=runtime.gather_texts,
            preparing_rank=runtime.first_rank_on_node,
            pieces=sequence_pieces(mesh),
        )
        dtype = compute_dtype(config.training, device)
        forward_backward = build_forward_backward(stages, mesh, config.parallel, config.training, dtype)
    data = build_loader(config.data, config.training, config.model, config.run.seed, ranks, config.finetune)
    log_evaluation(manifest, data.validation_sequences(config.evaluate.sequences))
    loss = evaluate(forward_backward, data.validation_batches(config.evaluate.sequences, device), device, mesh)
    if runtime is None or runtime.is_main:
        print_loss(manifest.step, loss)
    return loss


def evaluate_tasks(config: Config, runtime: Runtime | None = None) -> Path | None:
    """Evaluate the model on `evaluate.tasks`, print the results, and return the file with them; None on other ranks.

    runtime: as of `main`.
    """
    stages, device, manifest, mesh = restore_model(config, runtime)
    ranks = TextRanks(stages, config, device, mesh, None if runtime is None else runtime.host_group)
    if runtime is not None and not runtime.is_main:
        ranks.serve()
        return None
    log.info("step %d: evaluating on %s", manifest.step, ", ".join(config.evaluate.tasks))
    with ranks.lead():
        tokenizer = load_tokenizer(config.data.tokenizer)
        results = Tasks(config.evaluate).evaluate(ranks, tokenizer)
    path = write_task_results(Path(config.run.folder), manifest.step, results)
    write_points(Path(config.run.folder), manifest.step, results)
    for value in values_of(results):
        print(f"step {manifest.step}  {value.task}  {value.metric} {value.value:.4f}")
    return path


def log_evaluation(manifest: Manifest, sequences: int) -> None:
    """Log the checkpoint to evaluate, and whether the run was trained on other data."""
    log.info("step %d: evaluating %d held-out sequences", manifest.step, sequences)
    if "data.sources" in manifest.record.get("replaced", ()):
        log.warning("the run was trained on data of its recipe's own: these sequences are of data.sources")


def print_loss(step: int, loss: HeldOutLoss) -> None:
    """Print the loss, its perplexity and, where there is text, its bits per byte; also for each source."""
    print(f"step {step}  validation loss {_describe(loss)}")
    for name, of_source in loss.by_source.items():
        print(f"  {name}: {_describe(of_source)}")


def _describe(loss: HeldOutLoss) -> str:
    bits = "" if loss.bits_per_byte is None else f"  {loss.bits_per_byte:.4f} bits/byte"
    return f"{loss:.4f} nats/token  perplexity {math.exp(loss):.3f}{bits}"


if __name__ == "__main__":
    RUNTIME = None
    if ALONE:
        report_errors()
    else:
        RUNTIME = start_runtime(CONFIG.run, [CONFIG], reads_only=True)
    with signs_of_life("evaluate"):
        (evaluate_tasks if CONFIG.evaluate.tasks else main)(CONFIG, RUNTIME)
    if RUNTIME is not None:
        RUNTIME.close()
