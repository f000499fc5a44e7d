"""Pretraining: the reference loop, from one laptop core to ten thousand GPUs.

    ./run_train.sh CONFIG.toml [--section.key=value ...]            starts it on every rank
    python recipes/pretrain.py --help                               every key

To change it, copy this file, edit it, and start the copy: RECIPE=recipes/mine.py ./run_train.sh CONFIG.toml
"""

import sys

from torchllm.recipe import Config, load_configs, log_config_changes, write_config

if __name__ == "__main__":  # before torch is imported: a wrong config is an error in half a second
    CONFIGS = load_configs(sys.argv[1:])

from dataclasses import asdict

import torch

from torchllm.recipe import (
    Checkpointer,
    DataRanks,
    LearningRate,
    Monitor,
    Runtime,
    TrainStep,
    WeightAverage,
    add_low_rank_updates,
    build_forward_backward,
    build_loader,
    build_mesh,
    build_model,
    build_optimizer,
    compute_dtype,
    due,
    evaluate,
    initial_weights,
    initialize,
    log_attention_kernel,
    parallelize,
    read_health,
    sequence_pieces,
    start_runtime,
    supervise,
)


def train(config: Config, runtime: Runtime, monitor: Monitor) -> None:
    """Train to the last step, or until the run is asked to stop; the run folder then has a checkpoint of that step."""
    device = runtime.device
    dtype = compute_dtype(config.training, device)
    length = config.training.sequence_length

    mesh = build_mesh(config.parallel, device)
    with torch.device("meta"):
        model = build_model(
            config.model, config.training.loss_chunk, config.training.z_loss, config.training.weights_dtype
        )
    add_low_rank_updates(model, config, dtype)  # no-op by default
    stages = parallelize(model, mesh, config.parallel, config.recompute, config.compile, config.float8, dtype, length)
    initialize(stages, config.model, device, config.run.seed)  # after sharding: a rank makes only its shards
    log_attention_kernel(config.model, config.parallel, length, config.data.document_mask, dtype, device)

    data = build_loader(
        config.data,
        config.training,
        config.model,
        config.run.seed,
        DataRanks(
            mesh.data_rank,
            mesh.data_size,
            prepares=runtime.local_rank == 0,
            gather_texts=runtime.gather_texts,
            preparing_rank=runtime.first_rank_on_node,
            pieces=sequence_pieces(mesh),
        ),
    )
    if config.evaluate.interval:  # an error now, not at the first evaluation, if nothing is held out
        data.validation_sequences(config.evaluate.sequences)

    optimizer = build_optimizer(stages, config.optimizer)
    average = WeightAverage(stages, config.optimizer.ema_decay, config.optimizer.ema_offload)
    average.follow(optimizer)
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
        check_owner=runtime.check_owner,
        evaluates=config.evaluate.interval > 0,
        initial=initial_weights(config),
        extra_state=average.tensors | step.expert_balance.tensors,
    )
    data.on_damage = checkpoints.mark_damaged_data
    start = 0
    restored = checkpoints.resume()
    if restored is not None:
        start = restored.step
        log_config_changes(restored.record, config, learning_rate=learning_rate, step=start)
        data.load_state(restored.data, restored.record)
    average.restart(checkpoints.missing_extra_state)  # for a run that started without one
    if runtime.is_main:
        write_config(config, runtime.folder / "config.toml")  # now that the resume is accepted

    monitor.begin(config, mesh, stages, data, start)
    stopping = False
    n = start
    for n in range(start + 1, config.training.steps + 1):
        with monitor.step(n):
            with monitor.data_wait():
                packed = data.next_step()
            result = step(n, packed.unpack(device))

            validation_loss = None
            if due(n, config.evaluate.interval, config.training.steps):
                with monitor.pause("evaluate"), average.in_place_of_weights(config.evaluate.ema):
                    held_out = data.validation_batches(config.evaluate.sequences, device)
                    validation_loss = evaluate(forward_backward, held_out, device, mesh)

            # Agreed by all ranks: one that stopped alone would leave the others waiting.
            stopping = runtime.should_stop(checkpoints.failed)
            last = stopping or n == config.training.steps

            if monitor.log(n, result, validation_loss, force=last):
                health = read_health(config.training, n, result, validation_loss)
                checkpoints.judge(health)  # this step may prove earlier ones, or mark them as suspect
                health.check()

            saving = last or runtime.should_save or due(n, config.checkpoint.interval, config.training.steps)
            if saving:
                with monitor.pause("checkpoint"):
                    checkpoints.save(n, data.state())

        runtime.collect_garbage(n, saving)
        if last or (saving and monitor.wants_change(n)):
            break

    with monitor.pause("checkpoint"):  # waits for a background save
        checkpoints.close()
    if stopping:
        runtime.mark_stopped(n)
    monitor.end()
    data.close()


def main(config: Config, *candidates: Config) -> None:
    """Train, or dry-run. candidates: other layouts, to be measured with `config` first (`parallel.layout = "tune"`)."""
    if config.run.dry_run:
        from torchllm.recipe import dry_run

        dry_run(config)
        return
    runtime = start_runtime(config.run, [config, *candidates])
    supervise(train, [config, *candidates], runtime)  # train, and again if the run changes its own config
    runtime.close()


if __name__ == "__main__":
    main(*CONFIGS)
