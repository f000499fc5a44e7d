"""Initial weights: the same bits in every layout, good random numbers, and nothing made that is not held."""

import math
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import torchllm.parallel.initialize
from tests.workers import run
from torchllm.config import Compile, Float8, Model, Parallel, Recompute
from torchllm.facts.parameters import canonical_name, rule_of
from torchllm.models.decoder import Decoder, build_model
from torchllm.parallel.initialize import fill, hashed, initialize, key_of, normal
from torchllm.parallel.mesh import build_mesh
from torchllm.parallel.parallelize import parallelize
from torchllm.parallel.recurrences import decay, time_step

CPU = torch.device("cpu")
# Odd sizes: no dimension divides evenly by the degrees where it need not.
ODD = Model(layers=2, hidden=36, heads=4, kv_heads=2, head_dim=10, ffn=50, vocab=97, max_sequence_length=33)
FEW_ROWS = replace(ODD, kv_heads=1, head_dim=2)  # k and v have 2 rows: over 4 ranks some hold none
TIED_GPT = replace(ODD, family="gpt", tied_embeddings=True)
OFFSET = replace(ODD, norm_position="both", norm_offset=True, qk_norm="width")
SPARSE = replace(ODD, experts=4, top_k=2, shared_experts=1)


class Layout(NamedTuple):
    model: Model
    parallel: Parallel


LAYOUTS: dict[int, dict[str, Layout]] = {
    2: {
        "fsdp2": Layout(ODD, Parallel(dp_shard=2)),
        "tp2+sp-gpt-tied": Layout(TIED_GPT, Parallel(dp_shard=1, tp=2, sequence_parallel=True)),
    },
    4: {
        "fsdp4-few-rows": Layout(FEW_ROWS, Parallel(dp_shard=4)),
        "zero0": Layout(ODD, Parallel(dp_shard=4, zero_stage=0)),
        "fsdp2xtp2": Layout(ODD, Parallel(dp_shard=2, tp=2)),
        "hsdp2x2": Layout(ODD, Parallel(dp_replicate=2, dp_shard=2)),
        "experts4": Layout(SPARSE, Parallel(dp_shard=4, ep=4)),
        "experts2xtp2": Layout(SPARSE, Parallel(dp_shard=2, tp=2, ep=2)),
    },
}


def plain(model: Model, seed: int = 7) -> dict[str, Tensor]:
    """One process, nothing parallel: every parameter by name."""
    with torch.device("meta"):
        decoder = build_model(model)
    initialize([decoder], model, CPU, seed)
    return {name: parameter.detach() for name, parameter in decoder.named_parameters()}


def sharded(layout: Layout) -> Decoder:
    mesh = build_mesh(layout.parallel, CPU)
    with torch.device("meta"):
        decoder = build_model(layout.model)
    stages = parallelize(decoder, mesh, layout.parallel, Recompute(), Compile(), Float8(), torch.float32, 32)
    initialize(stages, layout.model, CPU, seed=7)
    return stages[0]


def parameters_of(stage: Decoder) -> dict[str, Any]:
    return {canonical_name(name): parameter.detach() for name, parameter in stage.named_parameters()}


def start_everywhere(layouts: dict[str, Layout]) -> dict[str, dict[str, np.ndarray]]:
    """Return every layout's whole tensors. A shard is filled 100 numbers at a time."""
    torchllm.parallel.initialize._ELEMENTS_IN_CACHE = 100
    started = {}
    for name, layout in layouts.items():
        parameters = parameters_of(sharded(layout))
        started[name] = {parameter: value.full_tensor().numpy() for parameter, value in parameters.items()}
    return started


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_layouts_start_bitwise_equal(ranks: int) -> None:
    layouts = LAYOUTS[ranks]
    started_on_rank_0 = run(start_everywhere, ranks, layouts)[0]
    for name, layout in layouts.items():
        started = started_on_rank_0[name]
        expected = plain(layout.model)
        assert started.keys() == expected.keys()
        for parameter, value in expected.items():
            assert np.array_equal(started[parameter], value.numpy()), (name, parameter)


def test_a_norm_starts_as_one_that_only_normalizes() -> None:
    for model, expected in ((ODD, 1.0), (OFFSET, 0.0)):
        norms = {name: value for name, value in plain(model).items() if "norm" in name}
        assert len(norms) == (5 if model is ODD else 13)
        assert all((value == expected).all() for value in norms.values())


def count_random_numbers() -> tuple[int, int]:
    """Return how many random numbers this rank has drawn, of how many of the whole model."""
    with mock.patch.object(torchllm.parallel.initialize, "normal", wraps=normal) as drawn:
        stage = sharded(LAYOUTS[4]["fsdp2xtp2"])
    is_random = {name: rule_of(name).start in ("normal", "residual") for name in parameters_of(stage)}
    parameters = [parameter for name, parameter in parameters_of(stage).items() if is_random[name]]
    count = sum(call.args[0].numel() for call in drawn.call_args_list)
    assert count == sum(parameter.to_local().numel() for parameter in parameters)
    return count, sum(parameter.numel() for parameter in parameters)


def test_a_buffer_starts_as_declared() -> None:
    model = Model(layers=1, hidden=16, heads=2, norm_position="both", block_scale=True, experts=2, router_bias=True)
    with torch.device("meta"):
        decoder = build_model(model)
    initialize([decoder], model, torch.device("cpu"), seed=0)
    values = {name: buffer.unique().item() for name, buffer in decoder.named_buffers()}
    assert values == {"layers.0.layer_scalar": 1.0, "layers.0.mlp.routed.router.bias": 0.0}


def test_a_rank_makes_only_its_shard() -> None:
    drawn, whole = zip(*run(count_random_numbers, 4), strict=True)
    assert sum(drawn) == whole[0]


def fill_matrices_that_are_cut_along(dimension: int) -> Tensor:
    """Return a parameter of three matrices that is filled on two ranks, gathered."""
    mesh = init_device_mesh("cpu", (2,))
    parameter = distribute_tensor(torch.zeros(3, 5, 7), mesh, [Shard(dimension)])
    fill(parameter, "embed_tokens.weight", ODD, seed=7)
    return parameter.full_tensor()


@pytest.mark.parametrize("dimension", [0, 2])
def test_a_parameter_of_several_matrices_may_be_cut_along_any_dimension(dimension: int) -> None:
    whole = torch.zeros(3, 5, 7)
    fill(whole, "embed_tokens.weight", ODD, seed=7)
    for gathered in run(fill_matrices_that_are_cut_along, 2, dimension):
        assert torch.equal(gathered, whole)


def first_hash(first: int, count: int, key: int) -> np.ndarray:
    """SplitMix64 (Steele, Lea, Flood 2014, figure 17) of some elements, as it was first (commit 8ca45ed), in numpy."""
    z = np.arange(first, first + count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key % 2**64)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def test_hash_is_splitmix64_also_where_its_state_wraps_around_64_bits() -> None:
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]  # its first outputs for 1234567
    assert first_hash(1, 3, 1234567).tolist() == published
    for first, key in ((1, 1234567), (1, -1), (1, 2**63 - 1), (2**40, 3)):  # a trillion parameters in
        expected = (first_hash(first, 100, key) >> np.uint64(11)).tolist()
        assert hashed(torch.arange(first, first + 100), key).tolist() == expected
    # keys of the first version
    assert (key_of(7, "norm.weight"), key_of(8, "norm.weight")) == (2580432156499654688, 1989731788108351751)


def first_numbers(count: int, key: int) -> Tensor:
    """The numbers of `count` elements as they were first, all at once."""
    z = first_hash(0, count, key) >> np.uint64(11)
    tail = 0.5 * math.erfc(3.0 / math.sqrt(2.0))
    uniform = (torch.from_numpy(z.astype(np.float64)) + 0.5) * 2.0**-53
    return torch.special.ndtri(tail + uniform * (1.0 - 2.0 * tail))


def test_bits_are_those_of_the_first_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole parameters; `test_layouts_start_bitwise_equal` compares the shards with them."""
    for model, seed, at_a_time in ((ODD, 7, 100), (TIED_GPT, 8, 1 << 16)):
        monkeypatch.setattr(torchllm.parallel.initialize, "_ELEMENTS_IN_CACHE", at_a_time)
        for name, value in plain(model, seed).items():
            start = rule_of(name).start
            if start in ("identity", "zeros"):
                assert torch.equal(value, torch.full_like(value, start == "identity")), name
                continue
            std = model.initial_std / (math.sqrt(2 * model.layers) if start == "residual" else 1.0)
            expected = (first_numbers(value.numel(), key_of(seed, name)) * std).float()
            assert torch.equal(value.flatten(), expected), name


def test_recurrences_start_with_the_decays_of_mamba() -> None:
    """A from 0 to 16, uniform; the step from 0.001 to 0.1, its logarithm uniform: quarters of both are equally full."""
    index, key = torch.arange(4_000), key_of(7, "A_log")
    of_a = decay(index, key).exp()
    assert torch.histc(of_a, 4, min=0.0, max=16.0).tolist() == pytest.approx([1_000] * 4, abs=120)
    steps = torch.nn.functional.softplus(time_step(index, key_of(7, "dt_bias"))).log()
    in_quarters = torch.histc(steps, 4, min=math.log(0.001), max=math.log(0.1))
    assert in_quarters.tolist() == pytest.approx([1_000] * 4, abs=120)  # 4 deviations of a quarter's count
    parameter = torch.empty(8)
    fill(parameter, "layers.0.self_attn.of_heads.A_log", ODD, 7)
    assert torch.equal(parameter, decay(index[:8], key_of(7, "layers.0.self_attn.of_heads.A_log")).float())
