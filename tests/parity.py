"""Trains a tiny model under a layout and in one plain process, and compares them parameter by parameter.

The reference shares only the model's code and its initial weights with the library: no FSDP, no mesh, its own
normalisation, norm, clipping and torch's plain optimizer.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.workers import run
from torchllm import config as c
from torchllm.config import Config
from torchllm.data.batch import Batch
from torchllm.models.decoder import Decoder, build_model
from torchllm.optim.grad_norm import gradients
from torchllm.optim.optimizer import build_optimizer
from torchllm.optim.schedule import LearningRate
from torchllm.parallel.context import sequence_pieces
from torchllm.parallel.initialize import initialize
from torchllm.parallel.mesh import Mesh, build_mesh
from torchllm.parallel.parallelize import parallelize
from torchllm.parallel.pipeline import build_forward_backward
from torchllm.runtime.torch_compat import local_region
from torchllm.spec.parameters import canonical_name, rule_of
from torchllm.train.step import TrainStep

STEPS = 3
CPU = torch.device("cpu")
Settings = dict[str, Any]
"""dotted keys and values over the tiny config: {"parallel.tp": 2}"""

GRADIENT_TOLERANCE = 1e-5
"""of the parameter's largest gradient: the worst seen over correct layouts is 2e-6 (sums in another order)"""


def tiny(settings: Settings) -> Config:
    """The config of the tests: 4 blocks, 8 heads, 4 of them for keys and values, global batch 8."""
    config = Config(
        model=c.Model(layers=4, hidden=64, heads=8, kv_heads=4, ffn=96, vocab=96, max_sequence_length=64),
        training=c.Training(steps=STEPS, global_batch_size=8, sequence_length=32, max_grad_norm=0.5),
        optimizer=c.Optimizer(learning_rate=2e-3, epsilon=1e-3),
        parallel=c.Parallel(dp_shard=1),
    )
    return with_settings(config, settings)


def with_settings(config: Config, settings: Settings) -> Config:
    """Return the config with some keys changed."""
    values_of_section: dict[str, Settings] = {}
    for key, value in settings.items():
        section, name = key.split(".")
        values_of_section.setdefault(section, {})[name] = value
    sections: dict[str, Any] = {}
    for section, values in values_of_section.items():
        sections[section] = dataclasses.replace(getattr(config, section), **values)
    return dataclasses.replace(config, **sections)


def world_size(config: Config) -> int:
    """Return the number of ranks of a config's layout."""
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
    if not config.data.document_mask:
        return Batch(tokens, labels, position, None)
    border = torch.randint(1, length, (sequences, 1), generator=generator)
    position_in_document = torch.where(position < border, position, position - border)
    return Batch(tokens, labels, position_in_document, (position >= border).long())


class Trained(dict[str, Any]):
    """Results of a training: losses, norms (per step), gradients (per step, by name), parameters (by name).

    numpy arrays and floats only, so that ranks can send it.
    """


@functools.lru_cache(maxsize=4)
def _reference(key: str, config: Config, ragged: bool) -> Trained:
    """Train in one plain process. key: tells configs apart for the cache."""
    model = build_model(config.model)
    initialize([model], config.model, CPU, config.run.seed)
    parameters: dict[str, Any] = {canonical_name(name): parameter for name, parameter in model.named_parameters()}
    optimizer = _plain_optimizer(parameters, config.optimizer)
    rate = LearningRate(config.schedule, config.optimizer.learning_rate, config.training.steps)
    trained = Trained(losses=[], norms=[], gradients=[])
    for step in range(1, STEPS + 1):
        batch = step_batch(config, step, ragged)
        count = int((batch.labels != -100).sum())
        loss = model(batch.tokens, batch.positions, batch.document_ids, batch.labels) / count
        loss.backward()
        step_gradients = {name: parameter.grad for name, parameter in parameters.items()}
        norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in step_gradients.values()))
        trained["losses"].append(loss.item())
        trained["norms"].append(norm)
        trained["gradients"].append(_copies(step_gradients))
        for gradient in step_gradients.values():
            gradient.mul_(min(1.0, config.training.max_grad_norm / norm))
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.step()
        optimizer.zero_grad()
    trained["parameters"] = _copies(parameters)
    return trained


def _plain_optimizer(parameters: dict[str, Any], config: c.Optimizer) -> torch.optim.Optimizer:
    """Return torch's own optimizer."""
    decayed, undecayed = [], []
    for name, parameter in parameters.items():
        group = decayed if rule_of(name).decayed else undecayed
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
    plain: Settings = {}
    for key, value in settings.items():
        if not key.startswith(("parallel.", "recompute.", "compile.")):
            plain[key] = value
    plain |= {"training.loss_chunk": 0, "training.micro_batch_size": 1}
    return _reference(repr(sorted(plain.items())), tiny(plain), ragged)


def build(config: Config, dtype: torch.dtype = torch.float32) -> tuple[Mesh, list[Decoder]]:
    """Return, on every rank of a layout, the mesh and the parallelized, initialised stages."""
    mesh = build_mesh(config.parallel, CPU)
    with torch.device("meta"):
        model = build_model(config.model, config.training.loss_chunk)
    length = config.training.sequence_length
    stages = parallelize(model, mesh, config.parallel, config.recompute, config.compile, dtype, length)
    initialize(stages, config.model, CPU, config.run.seed)
    return mesh, stages


def rows_of(batch: Batch, rows: slice) -> Batch:
    """Return some sequences of a batch."""
    documents = None if batch.document_ids is None else batch.document_ids[rows]
    return Batch(batch.tokens[rows], batch.labels[rows], batch.positions[rows], documents)


def part_of_sequence(batch: Batch, mesh: Mesh) -> Batch:
    """Return this rank's pieces of the sequences of a batch."""
    pieces = sequence_pieces(mesh)

    def part(x: Tensor) -> Tensor:
        chunks = x.chunk(pieces.total, dim=1)
        return torch.cat([chunks[index] for index in pieces.indices], dim=1)

    documents = None if batch.document_ids is None else part(batch.document_ids)
    return Batch(part(batch.tokens), part(batch.labels), part(batch.positions), documents)


def my_batches(config: Config, mesh: Mesh, step: int, ragged: bool) -> list[Batch]:
    """Return this rank's micro batches of a step."""
    batch = step_batch(config, step, ragged)
    size = config.training.micro_batch_size
    batches = []
    for first in range(mesh.data_rank * size, len(batch.tokens), mesh.data_size * size):
        rows = slice(first, first + size)
        batches.append(part_of_sequence(rows_of(batch, rows), mesh))
    return batches


def train(settings: Settings, ragged: bool = False) -> Trained | None:
    """Take three steps with the library, on every rank of a layout; returns the whole tensors on rank 0 alone."""
    config = tiny(settings)
    mesh, stages = build(config)
    optimizer = build_optimizer(stages, config.optimizer)
    trained = Trained(losses=[], norms=[], gradients=[])
    forward_backward = build_forward_backward(stages, mesh, config.parallel, config.training, torch.float32)

    def record_gradients(batches: Any, scale: Tensor) -> Tensor:
        loss = forward_backward(batches, scale)
        trained["gradients"].append(of_all_stages(stages, lambda parameter: parameter.grad))
        return loss

    rate = LearningRate(config.schedule, config.optimizer.learning_rate, config.training.steps)
    train_step = TrainStep(stages, record_gradients, optimizer, rate, mesh, config.training, CPU)
    for step in range(1, STEPS + 1):
        result = train_step(step, my_batches(config, mesh, step, ragged))
        trained["losses"].append(result.loss.item())
        trained["norms"].append(result.grad_norm.item())
    trained["parameters"] = of_all_stages(stages, lambda parameter: parameter)
    assert all(gradient is None for gradient in gradients(stages))
    return trained if torch.distributed.get_rank() == 0 else None


class Part(NamedTuple):
    """The part of one tensor that one rank holds."""

    name: str
    shape: tuple[int, ...]
    """of the whole tensor"""
    offset: tuple[int, ...]
    """where the part begins"""
    values: np.ndarray

    @property
    def region(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + size) for start, size in zip(self.offset, self.values.shape, strict=True))


def of_all_stages(stages: Sequence[Decoder], get: Callable[[Tensor], Any]) -> dict[str, np.ndarray]:
    """Return a tensor of every parameter of the whole model, by canonical name. get: the tensor of a parameter.

    Asserts that every element is on some rank, and that ranks which hold the same element agree, as must both copies of
    a tied embedding.
    """
    tensors: list[tuple[str, Any]] = []
    for stage in stages:
        for name, parameter in stage.named_parameters():
            tensors.append((canonical_name(name), get(parameter)))
    missing = [name for name, tensor in tensors if tensor is None]
    assert not missing, f"nothing there: {missing}"
    # One exchange of every rank's parts: a gather of each tensor by torch costs as much as a step.
    parts = [_part(name, tensor.detach()) for name, tensor in tensors]
    parts_of_ranks: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(parts_of_ranks, parts)
    whole_tensors: dict[str, np.ndarray] = {}
    filled: dict[str, np.ndarray] = {}
    for part in itertools.chain(*parts_of_ranks):
        if part.name not in filled:
            whole_tensors[part.name] = np.empty(part.shape, dtype=part.values.dtype)
            filled[part.name] = np.zeros(part.shape, dtype=bool)
        values = whole_tensors[part.name][part.region]
        is_filled = filled[part.name][part.region]
        assert np.array_equal(values[is_filled], part.values[is_filled], equal_nan=True), f"{part.name}: ranks differ"
        values[...] = part.values
        is_filled[...] = True
    for name, is_filled in filled.items():
        assert is_filled.all(), f"{name}: {(~is_filled).sum()} elements are nowhere"
    return whole_tensors


def _part(name: str, tensor: Tensor) -> Part:
    """Return this rank's part of a tensor."""
    _, offset = local_region(tensor)
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return Part(name, tuple(tensor.shape), offset, local.numpy())


def whole(tensor: Tensor) -> np.ndarray:
    """Return the full tensor, gathered from all ranks if it is a DTensor."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.numpy().copy()


def compare(trained: Trained, expected: Trained) -> float:
    """Assert that two trainings are the same; returns the worst relative gradient error."""
    worst = 0.0
    steps = zip(trained["gradients"], expected["gradients"], strict=True)
    for step, (of_step, expected_of_step) in enumerate(steps, start=1):
        assert of_step.keys() == expected_of_step.keys(), of_step.keys() ^ expected_of_step.keys()
        for name, expected_gradient in expected_of_step.items():
            error = np.abs(of_step[name] - expected_gradient).max()
            largest = np.abs(expected_gradient).max()
            head_norm = name.replace("k_proj.bias", "k_norm.weight")
            if name.endswith("k_proj.bias") and head_norm not in expected_of_step:
                # It shifts every score of a query alike: zero in theory, rounding in practice.
                assert max(np.abs(of_step[name]).max(), largest) <= 1e-8, (step, name, largest)
                continue
            assert error <= GRADIENT_TOLERANCE * largest, (
                f"step {step}, {name}: gradient differs by {error:.1e} of {largest:.1e}"
            )
            worst = max(worst, float(error / largest))
    np.testing.assert_allclose(trained["losses"], expected["losses"], rtol=1e-6)
    # The norm is float64 over float32 gradients, each good to about 1e-6.
    np.testing.assert_allclose(trained["norms"], expected["norms"], rtol=GRADIENT_TOLERANCE)
    for name, expected_parameter in expected["parameters"].items():
        # Three updates of at most the learning rate 2e-3 each, of gradients good to 1e-5: with epsilon 1e-3 AdamW
        # does not amplify rounding. float32 itself is good to 6e-8 near the norms' 1.
        np.testing.assert_allclose(trained["parameters"][name], expected_parameter, atol=6e-7, err_msg=name)
    return worst


def check(settings: Settings, ragged: bool = False) -> float:
    """Train under a layout and compare with one process; returns the worst relative gradient error."""
    trained = run(train, world_size(tiny(settings)), settings, ragged)[0]
    return compare(trained, reference(settings, ragged))
