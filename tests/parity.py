"""Trains a tiny model under a layout and in one plain process, and compares them parameter by parameter.

The reference shares only the model's code and its initial weights with the library: no FSDP, no mesh, its own
normalization, norm, clipping and torch's plain optimizer.
"""

import dataclasses
import functools
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.workers import run
from torchllm import config as c
from torchllm.checkpoint.checkpointer import Checkpointer
from torchllm.config import Config
from torchllm.data.batch import Batch
from torchllm.facts.parameters import canonical_name, rule_of
from torchllm.models.decoder import Decoder, build_model
from torchllm.models.experts import Router, Routing
from torchllm.models.lora import apply_lora
from torchllm.optim.grad_norm import gradients
from torchllm.optim.optimizer import build_optimizer
from torchllm.optim.schedule import LearningRate
from torchllm.parallel.initialize import fill, initialize
from torchllm.parallel.mesh import Mesh, build_mesh, sequence_pieces
from torchllm.parallel.parallelize import build_forward_backward, parallelize
from torchllm.runtime.device import compute_dtype
from torchllm.runtime.process import Runtime
from torchllm.tools.proof.compare import FLOAT32, Agreement, bfloat16_bounds, compare_trainings
from torchllm.tools.proof.forced_routing import LEAST_GAP, SEEDS, ChoiceRecord, Choices, RouterUse, told_apart
from torchllm.tools.proof.gather import gather_whole
from torchllm.tools.proof.layouts import Settings, with_settings
from torchllm.tools.proof.record import NO_CHOICES, Recording, Trained, record_training
from torchllm.tools.proof.shrink import one_process
from torchllm.train.evaluate import evaluate
from torchllm.train.step import TrainStep

STEPS = 3
CPU = torch.device("cpu")
FEW: Settings = {"training.micro_batch_size": 2, "training.steps": 2}
SHORT: Settings = {**FEW, "model.layers": 2}
"""of cases that run by default: a third of the work of `tiny`, with several blocks, micro batches and steps all the
same"""
MOST_AMPLIFIED = 1e-3
"""largest error that may come from rounding: most mistakes are larger, and are not tried again"""
FLOAT64 = FLOAT32._replace(gradient=1e-9, median=1e-9, loss=1e-9, norm=1e-9, weights=1e-9)
"""float64 rounds by 1e-16, which is amplified at most as much as what is seen in float32: from 6e-8 to 1e-3"""
MOST_CHANCE = 1.5
"""how many times its bound in bfloat16 a gradient's error may be with one seed of three"""
HELD_OUT = 1_000
"""number of the step whose batch is evaluated on"""


def tiny(settings: Settings) -> Config:
    """The config of the tests: 4 blocks, 8 heads, 4 of them for keys and values, global batch 8."""
    config = Config(
        model=c.Model(layers=4, hidden=64, heads=8, kv_heads=4, ffn=96, vocab=96, max_sequence_length=64),
        training=c.Training(steps=STEPS, global_batch_size=8, sequence_length=32, max_grad_norm=0.5),
        optimizer=c.Optimizer(learning_rate=2e-3, epsilon=1e-3),
        parallel=c.Parallel(dp_shard=1),
    )
    return with_settings(config, settings)


def world_size(config: Config) -> int:
    return config.parallel.ranks


def step_batch(config: Config, step: int, ragged: bool) -> Batch:
    """Return all sequences of a step: random tokens, in two documents under data.document_mask.

    ragged: the sequences have very unequal numbers of targets, and the first one has none.
    """
    generator = torch.Generator().manual_seed(step)
    sequences, length = config.training.global_batch_size, config.training.sequence_length
    shape = (sequences, length)
    tokens = torch.randint(config.model.vocab, shape, generator=generator)
    labels = torch.randint(config.model.vocab, shape, generator=generator)
    if ragged:
        share_of_targets = torch.linspace(0.0, 1.0, sequences).unsqueeze(1)
        has_target = torch.rand(shape, generator=generator) < share_of_targets
        labels = labels.masked_fill(~has_target, -100)
    position = torch.arange(length).expand(shape)
    batch = Batch(tokens, labels, position, None)
    if config.data.document_mask:
        border = torch.randint(1, length, (sequences, 1), generator=generator)
        position_in_document = torch.where(position < border, position, position - border)
        batch = Batch(tokens, labels, position_in_document, (position >= border).long())
    if depth := config.model.mtp_depth:
        ahead = torch.randint(config.model.vocab, (sequences, 2, depth, length), generator=generator)
        ahead[:, 1] = ahead[:, 1].where(labels[:, None] != -100, -100)
        batch = batch._replace(ahead=ahead)
    return batch


@functools.lru_cache(maxsize=4)
def _plain_training(config: Config, ragged: bool) -> Trained:
    model = build_model(config.model, z_loss=config.training.z_loss)
    apply_lora(model, config.lora, torch.float32)
    initialize([model], config.model, CPU, config.run.seed)
    fill_updates([model], config)
    weights: dict[str, Any] = {canonical_name(name): parameter for name, parameter in model.named_parameters()}
    parameters = {name: parameter for name, parameter in weights.items() if parameter.requires_grad}
    routers = [module for module in model.modules() if isinstance(module, Router)]
    tokens: dict[Router, list[int]] = {}
    for router in routers:
        router.register_forward_hook(functools.partial(_count_tokens, tokens))
        router.tokens_per_step = config.training.global_batch_size * config.training.sequence_length
        router.last_shares = torch.zeros(config.model.experts)
    optimizer = _plain_optimizer(parameters, config.optimizer)
    rate = LearningRate(config.schedule, config.optimizer.learning_rate, config.training.steps)
    trained = Trained()
    record = ChoiceRecord([model])
    for step in range(1, config.training.steps + 1):
        loss = _plain_loss(model, step_batch(config, step, ragged))
        loss.backward()
        step_gradients = {name: parameter.grad for name, parameter in parameters.items()}
        norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in step_gradients.values()))
        trained.losses.append(loss.item())
        trained.norms.append(norm)
        trained.gradients.append(_copies(step_gradients))
        for gradient in step_gradients.values():
            gradient.mul_(min(1.0, config.training.max_grad_norm / norm))
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.step()
        optimizer.zero_grad()
        for router in routers:
            _move_bias(router, tokens[router], config.model)
            router.last_shares = torch.tensor(tokens[router]) / sum(tokens[router])
        trained.tokens_per_expert.append([tokens[router] for router in routers])
        trained.weights.append(_copies({**weights, **dict(model.named_buffers())}))
    if config.evaluate.interval:
        with torch.no_grad():
            loss = _plain_loss(model, step_batch(config, HELD_OUT, ragged))
        trained.validation_losses[config.training.steps] = loss.item()
    trained.choices, trained.smallest_gap = record.choices(), record.smallest_gap
    return trained


def _count_tokens(tokens: dict[Router, list[int]], router: Router, inputs: object, routing: Routing) -> None:
    """Note how many tokens each expert of a router gets: a forward hook. The batch is the whole step's."""
    tokens[router] = routing.experts.flatten().bincount(minlength=len(router.weight)).tolist()


def _move_bias(router: Router, tokens: list[int], model: c.Model) -> None:
    """Move a router's bias, if it has one, after a step: Wang et al. 2024, algorithm 1."""
    if router.bias is None or not router.weight.requires_grad:
        return
    mean = sum(tokens) / len(tokens)
    for expert, count in enumerate(tokens):
        if count < mean:
            router.bias[expert] += model.router_bias_rate
        elif count > mean:
            router.bias[expert] -= model.router_bias_rate


def decided(config: Config, ragged: bool) -> Config:
    """Return the config with the next seed by whose weights no token is about to choose another expert."""
    for seed in range(config.run.seed, config.run.seed + SEEDS):
        seeded = with_settings(config, {"run.seed": seed})
        if _plain_training(_plain(seeded), ragged).smallest_gap >= LEAST_GAP:
            return seeded
    raise AssertionError(f"no seed of {SEEDS} leaves a gap between the experts that tokens choose and the others")


def _plain_loss(model: Decoder, batch: Batch) -> Tensor:
    count = int((batch.labels != -100).sum())
    return model(batch.tokens, batch.positions, batch.document_ids, batch.labels, 0, batch.ahead) / count


def _plain_optimizer(parameters: dict[str, Any], config: c.Optimizer) -> torch.optim.Optimizer:
    decayed, undecayed = [], []
    for name, parameter in parameters.items():
        group = undecayed if rule_of(name).role in ("position", "vector") else decayed
        group.append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": undecayed, "weight_decay": 0.0},
    ]
    if config.name == "adamw":
        return torch.optim.AdamW(groups, config.learning_rate, (config.beta1, config.beta2), config.epsilon)
    return torch.optim.SGD(groups, config.learning_rate, config.momentum)


def _copies(tensors: dict[str, Any]) -> dict[str, np.ndarray]:
    return {name: tensor.detach().numpy().copy() for name, tensor in tensors.items()}


def reference(settings: Settings, ragged: bool = False) -> Trained:
    """Train in one plain process: the whole batch at once, nothing recomputed, compiled or chunked."""
    return reference_of(tiny(settings), ragged)


def reference_of(config: Config, ragged: bool = False) -> Trained:
    return _plain_training(_plain(config), ragged)


def _plain(config: Config) -> Config:
    """Return the config of one process: the whole batch at once, nothing recomputed, compiled or chunked."""
    training = dataclasses.replace(config.training, loss_chunk=0, micro_batch_size=1)
    return dataclasses.replace(
        config,
        training=training,
        parallel=c.Parallel(dp_shard=1),
        recompute=c.Recompute(),
        compile=c.Compile(),
        float8=c.Float8(),
    )


def build(config: Config, dtype: torch.dtype = torch.float32) -> tuple[Mesh, list[Decoder]]:
    """Return, on every rank of a layout, the mesh and the parallelized, initialized stages."""
    mesh = build_mesh(config.parallel, CPU)
    with torch.device("meta"):
        model = build_model(
            config.model, config.training.loss_chunk, config.training.z_loss, config.training.weights_dtype
        )
    apply_lora(model, config.lora, dtype)
    length = config.training.sequence_length
    stages = parallelize(model, mesh, config.parallel, config.recompute, config.compile, config.float8, dtype, length)
    initialize(stages, config.model, CPU, config.run.seed)
    fill_updates(stages, config)
    return mesh, stages


class Trainer:
    """What a recipe builds on this rank of a layout, but for the data."""

    def __init__(self, config: Config, dtype: torch.dtype = torch.float32) -> None:
        self.config = config
        self.mesh, self.stages = build(config, dtype)
        self.optimizer = build_optimizer(self.stages, config.optimizer)
        self.forward_backward = build_forward_backward(self.stages, self.mesh, config.parallel, config.training, dtype)
        rate = LearningRate(config.schedule, config.optimizer.learning_rate, config.training.steps)
        self.step = TrainStep(self.stages, self.forward_backward, self.optimizer, rate, self.mesh, config.training, CPU)

    def checkpoints(self) -> Checkpointer:
        """Return what saves this run to its folder, and resumes it from there."""
        extra_state = self.step.expert_balance.tensors
        options: dict[str, Any] = {"host_group": dist.group.WORLD, "extra_state": extra_state}
        return Checkpointer(
            self.config.checkpoint, Path(self.config.run.folder), self.stages, self.optimizer, **options
        )

    def resume(self) -> int:
        """Go on from the newest checkpoint of the run's folder; returns its step."""
        manifest = self.checkpoints().resume()
        assert manifest is not None
        return manifest.step

    def batches(self, step: int, ragged: bool = False) -> list[Batch]:
        """Return this rank's micro batches of a step."""
        return my_batches(self.config, self.mesh, step, ragged)


@torch.no_grad()
def fill_updates(stages: list[Decoder], config: Config) -> None:
    """Give the factor B of every low-rank update random numbers: at zero, where it starts, A would have no gradient."""
    for stage in stages:
        for name, parameter in stage.named_parameters():
            if ".lora_B." in name:
                fill(parameter, canonical_name(name).replace("lora_B", "lora_A"), config.model, config.run.seed)


def whole(tensor: Tensor) -> np.ndarray:
    """Return a tensor, gathered. Call it on all ranks that hold a part."""
    gathered = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    if gathered.dtype == torch.bfloat16:  # which numpy lacks
        gathered = gathered.float()
    return gathered.detach().numpy().copy()


def whole_gradients(stages: list[Decoder]) -> dict[str, np.ndarray]:
    """Return the whole gradient of every parameter, on rank 0; {} on the others. Asserts that the ranks agree."""
    whole = gather_whole(stages, lambda parameter: parameter.grad)
    if whole is None:
        return {}
    assert not whole.findings, whole.findings
    return whole.tensors


def rows_of(batch: Batch, rows: slice) -> Batch:
    documents = None if batch.document_ids is None else batch.document_ids[rows]
    ahead = None if batch.ahead is None else batch.ahead[rows]
    return Batch(batch.tokens[rows], batch.labels[rows], batch.positions[rows], documents, ahead=ahead)


def part_of_sequence(batch: Batch, mesh: Mesh) -> Batch:
    """Return this rank's pieces of the sequences of a batch."""
    pieces = sequence_pieces(mesh)

    def part(x: Tensor) -> Tensor:
        chunks = x.chunk(pieces.total, dim=-1)
        return torch.cat([chunks[index] for index in pieces.indices], dim=-1)

    documents = None if batch.document_ids is None else part(batch.document_ids)
    ahead = None if batch.ahead is None else part(batch.ahead)
    return Batch(part(batch.tokens), part(batch.labels), part(batch.positions), documents, ahead=ahead)


def my_batches(config: Config, mesh: Mesh, step: int, ragged: bool) -> list[Batch]:
    """Return this rank's micro batches of a step."""
    batch = step_batch(config, step, ragged)
    size = config.training.micro_batch_size
    batches = []
    for first in range(mesh.data_rank * size, len(batch.tokens), mesh.data_size * size):
        rows = slice(first, first + size)
        batches.append(part_of_sequence(rows_of(batch, rows), mesh))
    return batches


def ragged_recipe(config: Config, runtime: Runtime, monitor: Any) -> None:
    """Train as a recipe would whose sequences have very unequal numbers of targets."""
    _recipe(config, monitor, ragged=True)


def even_recipe(config: Config, runtime: Runtime, monitor: Any) -> None:
    """Train as a recipe would whose tokens all have a target."""
    _recipe(config, monitor, ragged=False)


def _recipe(config: Config, monitor: Any, ragged: bool) -> None:
    """Take the steps of a config on this rank, and evaluate after the last one if the config evaluates at all."""
    trainer = Trainer(config, compute_dtype(config.training, CPU))
    start = trainer.resume() if config.run.folder else 0
    monitor.begin(config, trainer.mesh, trainer.stages, None, start)
    for step in range(start + 1, config.training.steps + 1):
        result = trainer.step(step, trainer.batches(step, ragged))
        validation_loss = None
        if config.evaluate.interval and step == config.training.steps:
            held_out = trainer.batches(HELD_OUT, ragged)
            validation_loss = evaluate(trainer.forward_backward, held_out, CPU, trainer.mesh)
        assert all(gradient is None for gradient in gradients(trainer.stages))
        monitor.log(step, result, validation_loss)


def train(settings: Settings, ragged: bool = False) -> Trained | None:
    """Take three steps with the library, on every rank of a layout; returns the whole tensors on rank 0 alone."""
    return train_config(tiny(settings), ragged)


def train_config(
    config: Config,
    ragged: bool,
    choices: Mapping[RouterUse, Choices] = NO_CHOICES,
    in_float64: bool = False,
) -> Trained | None:
    """Train a config on every rank of its layout; returns the whole tensors on rank 0 alone.

    choices: of experts, which routers are made to take. in_float64: in place of float32.
    """
    recording = Recording(config.training.steps, choices, in_float64=in_float64)
    return record_training(ragged_recipe if ragged else even_recipe, config, recording)


def compare(trained: Trained, expected: Trained) -> float:
    """Assert that two trainings are the same; returns the worst relative gradient error."""
    agreement = compare_trainings(trained, expected, FLOAT32)
    assert not agreement.findings, "\n".join(agreement.findings)
    return agreement.error


def check(settings: Settings, ragged: bool = False) -> float:
    """Train under a layout and compare with one process; returns the worst relative gradient error."""
    return check_config(tiny(settings), ragged)


def check_config(config: Config, ragged: bool) -> float:
    """Train a config on the ranks of its layout and compare with one process; returns the worst gradient error.

    Some models amplify rounding, in one process too. So where an error is small, the layout and one process are trained
    again in float64, as `torchllm prove` does: there a mistake stays, and rounding is seven digits smaller.
    """
    if config.model.experts:
        config = decided(config, ragged)
    trained = run(train_config, world_size(config), config, ragged)[0]
    agreement = compare_trainings(trained, reference_of(config, ragged), FLOAT32)
    if agreement.findings and agreement.error < MOST_AMPLIFIED:
        trained = run(train_config, world_size(config), config, ragged, in_float64=True)[0]
        of_one = run(train_config, 1, _plain(config), ragged, in_float64=True)[0]
        agreement = compare_trainings(trained, of_one, FLOAT64)
    assert not agreement.findings, "\n".join(agreement.findings)
    return agreement.error


def check_resumed(saved: Config, resumed: Config, ragged: bool) -> float:
    """Take the first step in one layout and the others in another one, from its checkpoint, and compare these with one
    process that took all; returns the worst gradient error."""
    if resumed.model.experts:
        resumed = decided(resumed, ragged)
    with tempfile.TemporaryDirectory() as folder:
        settings = {"run.folder": folder, "run.seed": resumed.run.seed}
        run(take_first_step, world_size(saved), with_settings(saved, settings), ragged)
        trained = run(train_config, world_size(resumed), with_settings(resumed, settings), ragged)[0]
    assert trained.start == 1
    return compare(trained, reference_of(resumed, ragged))


def take_first_step(config: Config, ragged: bool) -> None:
    """Take the first step of a config on this rank, and save it."""
    trainer = Trainer(config)
    trainer.step(1, trainer.batches(1, ragged))
    checkpoints = trainer.checkpoints()
    checkpoints.save(1, {})
    checkpoints.close()


def check_bfloat16(config: Config, ragged: bool) -> float:
    """Take one step in bfloat16 and compare with one process's own error; returns the worst gradient error.

    Products are in float8 where the config has them so, in one process too. After one step the weights of two layouts
    differ by their rounding. The error of a gradient of a few numbers is chance: one that is over its bound must be
    within it in the mean of three seeds, where a mistake stays.
    """
    agreements = []
    for _ in range(3):
        config = told_apart(_seeds(config), lambda seeded: _exact_step(seeded, ragged).choices)
        agreements.append(_bfloat16_agreement(config, ragged))
        if agreements[0].error <= agreements[0].bound:
            break
        config = with_settings(config, {"run.seed": config.run.seed + 1})
    errors, bounds = [agreement.error for agreement in agreements], [agreement.bound for agreement in agreements]
    assert np.mean(errors) <= np.mean(bounds), f"{agreements[0].parameter}: errors {errors}, bounds {bounds}"
    return errors[0]


def _seeds(config: Config) -> list[Config]:
    return [with_settings(config, {"run.seed": seed}) for seed in range(config.run.seed, config.run.seed + 8)]


def _exact_step(config: Config, ragged: bool) -> Trained:
    """Return what one process computes in float32 in one step."""
    return reference_of(with_settings(config, {"training.steps": 1}), ragged)


def _bfloat16_agreement(config: Config, ragged: bool) -> Agreement:
    """Compare a step in bfloat16 with one process in float32. Asserts all bounds but the worst gradient's, which may be
    `MOST_CHANCE` times as far off."""
    exact = _exact_step(config, ragged)
    rounded = with_settings(config, {"training.steps": 1, "training.dtype": "bfloat16"})
    own = _own(one_process(rounded, config.training.micro_batch_size), exact, ragged)
    trained = run(train_config, world_size(config), rounded, ragged, own.choices)[0]
    bounds = bfloat16_bounds(own, exact)
    agreement = compare_trainings(trained, exact, bounds._replace(gradient=MOST_CHANCE * bounds.gradient))
    assert agreement.verdict == "right", "\n".join(agreement.findings) or agreement.reason
    return agreement._replace(bound=bounds.gradient)


_OWN: dict[tuple[Config, bool], Trained] = {}


def _own(config: Config, exact: Trained, ragged: bool) -> Trained:
    """Return what one process computes in bfloat16, with the experts of `exact`, which is in float32."""
    key = (config, ragged)
    if key not in _OWN:
        _OWN[key] = run(train_config, 1, config, ragged, exact.choices)[0]
    return _OWN[key]
