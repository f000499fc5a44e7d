"""Pretraining: the reference loop, for one laptop core or ten thousand GPUs.

    ./run_train.sh CONFIG.toml [--section.key=value ...]            starts it on every rank
    python recipes/pretrain.py --help                               every key

To change it, copy this file, edit it, and start the copy: RECIPE=recipes/mine.py ./run_train.sh CONFIG.toml
"""

import sys

from torchllm.config import Config, write_config
from torchllm.start import load_configs

if __name__ == "__main__":  # before torch is imported: a wrong config is an error in half a second
    CONFIGS = load_configs(sys.argv[1:])

import logging
from dataclasses import asdict

import torch

from torchllm.adapt.adapter import Adapter
from torchllm.adapt.out_of_memory import explain_out_of_memory
from torchllm.adapt.tune import fastest
from torchllm.checkpoint.checkpointer import Checkpointer
from torchllm.data.cache import cache_root
from torchllm.data.loader import DataRanks, build_loader
from torchllm.dry_run.run import dry_run
from torchllm.metrics.goodput import Goodput
from torchllm.metrics.meter import Meter, peak_flops
from torchllm.metrics.sinks import open_sinks
from torchllm.metrics.trace import Traces, steps_of
from torchllm.metrics.watch import Watch
from torchllm.models.decoder import build_model
from torchllm.optim.optimizer import build_optimizer
from torchllm.optim.schedule import LearningRate
from torchllm.parallel.initialize import initialize
from torchllm.parallel.mesh import build_mesh
from torchllm.parallel.parallelize import parallelize
from torchllm.parallel.pipeline import build_forward_backward
from torchllm.planner.search.auto import planned
from torchllm.runtime.process import Runtime, compute_dtype, start_runtime
from torchllm.spec.cluster import tensor_parallel_warning
from torchllm.train.evaluate import evaluate
from torchllm.train.step import TrainStep, check_finite

log = logging.getLogger("torchllm")


def due(step: int, interval: int) -> bool:
    """Whether something done every `interval` steps is done at this one; 0: never."""
    return interval > 0 and step % interval == 0


def main(config: Config, *others: Config) -> None:
    """Train; on return the run folder holds the last step's checkpoint. others: layouts to be measured against it."""
    runtime = start_runtime(config.run)
    goodput = Goodput(runtime.folder) if runtime.is_main else None
    adapter = Adapter(runtime.folder, runtime.host_group)
    following: Config | None = fastest([config, *others], runtime, cache_root(config.data))
    while following is not None:
        following = train(following, runtime, adapter, goodput)
    if goodput:
        log.info("%s", goodput.summary())
    runtime.close()


def train(config: Config, runtime: Runtime, adapter: Adapter, goodput: Goodput | None) -> Config | None:
    """Train with this config, to the end (None), or to a checkpoint from which to go on with the one returned."""
    device = runtime.device
    if runtime.is_main:
        write_config(config, runtime.folder / "config.toml")

    mesh = build_mesh(config.parallel, device)
    dtype = compute_dtype(config.training, device)
    if slow := tensor_parallel_warning(config, runtime.ranks_on_node, dtype.itemsize):
        log.warning("%s", slow)
    with torch.device("meta"):
        model = build_model(config.model, config.training.loss_chunk)
    length = config.training.sequence_length
    stages = parallelize(model, mesh, config.parallel, config.recompute, config.compile, dtype, length)
    initialize(stages, config.model, device, config.run.seed)  # after sharding: a rank makes only its shards

    data = build_loader(
        config.data,
        config.training,
        config.model,
        config.run.seed,
        DataRanks(mesh.data_rank, mesh.data_size, runtime.local_rank == 0, runtime.gather_texts),
    )
    if data.skipped:
        log.warning("records left out of the data: %s", data.skipped)
    if config.evaluate.interval:  # nothing held out? say so now, not at the first evaluation
        data.validation_sequences(config.evaluate.sequences)

    optimizer = build_optimizer(stages, config.optimizer)
    learning_rate = LearningRate(config.schedule, config.optimizer.learning_rate, config.training.steps)
    forward_backward = build_forward_backward(stages, mesh, config.parallel, config.training, dtype)
    step = TrainStep(stages, forward_backward, optimizer, learning_rate, mesh, config.training, device)

    checkpoints = Checkpointer(
        config.checkpoint,
        runtime.folder,
        stages,
        optimizer,
        host_group=runtime.host_group,
        record={"config": asdict(config)},
    )
    start = 0
    if restored := checkpoints.resume():
        start = restored.step
        data.load_state(restored.data)

    expected = planned(config)
    meter = Meter(
        config.metrics,
        config.model,
        config.recompute,
        config.training,
        device=device,
        world_size=runtime.world_size,
        peak_flops=peak_flops(device, dtype, runtime.ranks_on_node),
        sinks=open_sinks(runtime.folder, config.metrics, steps=config.training.steps, start=start)
        if runtime.is_main
        else [],
        goodput=goodput,
        planned_mfu=expected and expected.mfu,
        sequences=data.state()["sequences"],
    )
    traces = Traces(runtime.folder, steps_of(config.metrics.profile_steps), runtime.rank)
    watch = Watch(config.metrics.breakdown_interval, mesh, runtime.host_group, device, traces, start)
    adapter.begin(config, stages, mesh, device)
    if goodput:
        goodput.begin(start)
    n, stopping, following = start, False, None
    for n in range(start + 1, config.training.steps + 1):
        with watch.step(n), explain_out_of_memory(config, runtime.folder, runtime.rank, device):
            with meter.data_wait():
                batches = data.next_step()
            result = step(n, batches)

            # Agreed by all ranks: one that stopped alone would leave the others waiting.
            stopping = runtime.should_stop(checkpoints.failed)
            last = stopping or n == config.training.steps

            validation_loss = None
            if due(n, config.evaluate.interval) or (config.evaluate.interval and n == config.training.steps):
                with meter.pause("evaluate"):
                    held_out = data.validation_batches(config.evaluate.sequences)
                    validation_loss = evaluate(forward_backward, held_out, device, mesh)

            if meter.log(n, result, validation_loss=validation_loss, force=last):
                check_finite(config.training, n, result)

            if last or due(n, config.checkpoint.interval):
                with meter.pause("checkpoint"):
                    checkpoints.save(n, data.state())
        if watch.latest:
            meter.report(watch.latest)
        adapter.after_step(watch.latest)
        runtime.collect_garbage(n)
        if not last and due(n, config.checkpoint.interval):
            following = adapter.at_checkpoint(n, meter.waited_in_all)
        if stopping or following:
            break

    checkpoints.close()
    if stopping:
        runtime.mark_stopped(n)
    meter.close()
    data.close()
    return following


if __name__ == "__main__":
    dry_run(CONFIGS[0]) if CONFIGS[0].run.dry_run else main(*CONFIGS)
