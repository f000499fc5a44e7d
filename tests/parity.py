"""Trains a tiny model under a layout and in one plain process, and compares them parameter by parameter.

The reference shares only the model's code and its initial weights with the library: no FSDP, no mesh, its own
normalisation, norm, clipping and torch's plain optimizer.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

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
    """A config with some keys changed."""
    sections: dict[str, Settings] = {}
    for key, value in settings.items():
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    changed: Any = {name: dataclasses.replace(getattr(config, name), **keys) for name, keys in sections.items()}
    return dataclasses.replace(config, **changed)


def world_size(config: Config) -> int:
    """Ranks of a config's layout."""
    return config.parallel.ranks


def step_batch(config: Config, step: int, ragged: bool) -> Batch:
    """All sequences of a step: random tokens in two documents; ragged: very unequal numbers of targets a sequence."""
    generator = torch.Generator().manual_seed(step)
    shape = (config.training.global_batch_size, config.training.sequence_length)
    tokens = torch.randint(config.model.vocab, shape, generator=generator)
    labels = torch.randint(config.model.vocab, shape, generator=generator)
    if ragged:
        kept = torch.rand(shape, generator=generator) < torch.linspace(0.0, 1.0, shape[0]).unsqueeze(1)
        labels = labels.masked_fill(~kept, -100)  # the first sequence has no target at all
    position = torch.arange(shape[1]).expand(shape)
    if not config.data.document_mask:
        return Batch(tokens, labels, position, None)
    border = torch.randint(1, shape[1], (shape[0], 1), generator=generator)
    return Batch(
        tokens, labels, torch.where(position < border, position, position - border), (position >= border).long()
    )


class Trained(dict[str, Any]):
    """losses, norms (per step), gradients (per step, by name), parameters (by name); numpy and floats only."""


@functools.lru_cache(maxsize=4)
def _reference(key: str, config: Config, ragged: bool) -> Trained:
    model = build_model(config.model)
    initialize([model], config.model, CPU, config.run.seed)
    named = {canonical_name(name): parameter for name, parameter in model.named_parameters()}
    groups = [
        {"params": [p for n, p in named.items() if rule_of(n).decayed == decayed], "weight_decay": decay}
        for decayed, decay in ((True, config.optimizer.weight_decay), (False, 0.0))
    ]
    o = config.optimizer
    optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW(groups, o.learning_rate, (o.beta1, o.beta2), o.epsilon)
        if o.name == "adamw"
        else torch.optim.SGD(groups, o.learning_rate, o.momentum)
    )
    rate = LearningRate(config.schedule, o.learning_rate, config.training.steps)
    out = Trained(losses=[], norms=[], gradients=[])
    for step in range(1, STEPS + 1):
        batch = step_batch(config, step, ragged)
        count = int((batch.labels != -100).sum())
        loss = model(batch.tokens, batch.positions, batch.document_ids, batch.labels) / count
        loss.backward()
        grads = {name: parameter.grad for name, parameter in named.items()}
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in grads.values()))
        out["losses"].append(loss.item())
        out["norms"].append(norm)
        out["gradients"].append({name: g.numpy().copy() for name, g in grads.items()})
        for parameter in named.values():
            parameter.grad.mul_(min(1.0, config.training.max_grad_norm / norm))
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.step()
        optimizer.zero_grad()
    out["parameters"] = {name: parameter.detach().numpy().copy() for name, parameter in named.items()}
    return out


def reference(settings: Settings, ragged: bool = False) -> Trained:
    """One plain process, the whole batch at once, nothing recomputed, compiled or chunked."""
    kept = {k: v for k, v in settings.items() if k.split(".")[0] not in ("parallel", "recompute", "compile")}
    kept |= {"training.loss_chunk": 0, "training.micro_batch_size": 1}
    config = tiny(kept)
    return _reference(repr(sorted(kept.items())), config, ragged)


def build(config: Config, dtype: torch.dtype = torch.float32) -> tuple[Mesh, list[Decoder]]:
    """On every rank of a layout: the mesh and the parallelized, initialised stages."""
    mesh = build_mesh(config.parallel, CPU)
    with torch.device("meta"):
        model = build_model(config.model, config.training.loss_chunk)
    length = config.training.sequence_length
    stages = parallelize(model, mesh, config.parallel, config.recompute, config.compile, dtype, length)
    initialize(stages, config.model, CPU, config.run.seed)
    return mesh, stages


def my_batches(config: Config, mesh: Mesh, step: int, ragged: bool) -> list[Batch]:
    """This rank's micro batches of a step."""
    batch, size = step_batch(config, step, ragged), config.training.micro_batch_size
    first_ones = range(mesh.data_rank * size, len(batch.tokens), mesh.data_size * size)
    return [Batch(*(x if x is None else x[first : first + size] for x in batch)) for first in first_ones]


def train(settings: Settings, ragged: bool = False) -> Trained | None:
    """On every rank of a layout: three steps with the library; the whole tensors on rank 0, None on the others."""
    config = tiny(settings)
    mesh, stages = build(config)
    optimizer = build_optimizer(stages, config.optimizer)
    out = Trained(losses=[], norms=[], gradients=[])

    plain = build_forward_backward(stages, mesh, config.parallel, config.training, torch.float32)

    def record_gradients(batches: Any, scale: Tensor) -> Tensor:
        loss = plain(batches, scale)
        out["gradients"].append(of_all_stages(stages, lambda parameter: parameter.grad))
        return loss

    rate = LearningRate(config.schedule, config.optimizer.learning_rate, config.training.steps)
    step_fn = TrainStep(stages, record_gradients, optimizer, rate, mesh, config.training, CPU)
    for step in range(1, STEPS + 1):
        result = step_fn(step, my_batches(config, mesh, step, ragged))
        out["losses"].append(result.loss.item())
        out["norms"].append(result.grad_norm.item())
    out["parameters"] = of_all_stages(stages, lambda parameter: parameter)
    assert all(gradient is None for gradient in gradients(stages))
    return out if torch.distributed.get_rank() == 0 else None


def of_all_stages(stages: Sequence[Decoder], get: Callable[[Tensor], Any]) -> dict[str, np.ndarray]:
    """A tensor of every parameter of the whole model, by canonical name; a tied one's copies must be equal."""
    got = [(canonical_name(name), get(parameter)) for stage in stages for name, parameter in stage.named_parameters()]
    missing = [name for name, tensor in got if tensor is None]
    assert not missing, f"nothing there: {missing}"
    # One exchange of what each rank holds: a gather of each tensor by torch costs as much as a step.
    mine = [(name, tuple(tensor.shape), *_held(tensor.detach())) for name, tensor in got]
    of_ranks: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(of_ranks, mine)
    found: dict[str, np.ndarray] = {}
    seen: dict[str, np.ndarray] = {}
    for name, shape, offset, held in itertools.chain(*of_ranks):
        here = tuple(slice(first, first + size) for first, size in zip(offset, held.shape, strict=True))
        known = seen.setdefault(name, np.zeros(shape, dtype=bool))[here]
        values = found.setdefault(name, np.empty(shape, dtype=held.dtype))[here]
        assert np.array_equal(values[known], held[known], equal_nan=True), f"{name}: ranks differ"
        values[...], known[...] = held, True
    for name, known in seen.items():
        assert known.all(), f"{name}: {(~known).sum()} elements are nowhere"
    return found


def _held(tensor: Tensor) -> tuple[tuple[int, ...], np.ndarray]:
    """Where this rank's part of a tensor begins, and the part."""
    _, offset = local_region(tensor)
    return offset, (tensor.to_local() if isinstance(tensor, DTensor) else tensor).numpy()


def whole(tensor: Tensor) -> np.ndarray:
    """The full tensor, gathered from all ranks if it is a DTensor."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).numpy().copy()


def compare(got: Trained, want: Trained) -> float:
    """Assert that two trainings are one; returns the worst relative gradient error."""
    worst = 0.0
    for step, (mine, theirs) in enumerate(zip(got["gradients"], want["gradients"], strict=True)):
        assert mine.keys() == theirs.keys(), mine.keys() ^ theirs.keys()
        for name, expected in theirs.items():
            error, largest = np.abs(mine[name] - expected).max(), np.abs(expected).max()
            head_norm = name.replace("k_proj.bias", "k_norm.weight")
            if name.endswith("k_proj.bias") and head_norm not in theirs:
                # It shifts every score of a query alike: zero in theory, rounding in practice.
                assert max(np.abs(mine[name]).max(), largest) <= 1e-8, (step, name, largest)
                continue
            assert error <= GRADIENT_TOLERANCE * largest, (
                f"step {step + 1}, {name}: gradient differs by {error:.1e} of {largest:.1e}"
            )
            worst = max(worst, float(error / largest))
    np.testing.assert_allclose(got["losses"], want["losses"], rtol=1e-6)
    # the norm is float64 over float32 gradients, each good to 1e-6 or so
    np.testing.assert_allclose(got["norms"], want["norms"], rtol=GRADIENT_TOLERANCE)
    for name, expected in want["parameters"].items():
        # Three updates of at most the learning rate 2e-3 each, of gradients good to 1e-5: with epsilon 1e-3 AdamW
        # does not amplify rounding. float32 itself is good to 6e-8 near the norms' 1.
        np.testing.assert_allclose(got["parameters"][name], expected, atol=6e-7, err_msg=name)
    return worst


def check(settings: Settings, ragged: bool = False) -> float:
    """Train under a layout and compare with one process; returns the worst relative gradient error."""
    got = run(train, world_size(tiny(settings)), settings, ragged)[0]
    return compare(got, reference(settings, ragged))
