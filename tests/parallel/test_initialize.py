"""Initial weights: the same bits in every layout, good random numbers, and nothing made that is not held."""

import itertools
import math
import random
from dataclasses import replace
from typing import Any, NamedTuple

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
from torchllm.parallel.initialize import _hash, fill, initialize, key_of, normal
from torchllm.parallel.mesh import build_mesh
from torchllm.parallel.parallelize import parallelize

CPU = torch.device("cpu")
# Odd sizes: no dimension divides evenly by the degrees where it need not.
ODD = Model(layers=2, hidden=36, heads=4, kv_heads=2, head_dim=10, ffn=50, vocab=97, max_sequence_length=33)
FEW_ROWS = replace(ODD, kv_heads=1, head_dim=2)  # k and v have 2 rows: over 4 ranks some hold none
TIED_GPT = replace(ODD, family="gpt", tied_embeddings=True)
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
# names decide: tests/facts/test_parameters.py wraps blocks in all ways
WRAPPED = [(Recompute("full"), Compile(block=True)), (Recompute("ffn"), Compile(norm=True, loss=True))]


def plain(model: Model, seed: int = 7) -> dict[str, Tensor]:
    """One process, nothing parallel: every parameter by name."""
    with torch.device("meta"):
        decoder = build_model(model)
    initialize([decoder], model, CPU, seed)
    return {name: parameter.detach() for name, parameter in decoder.named_parameters()}


def sharded(layout: Layout, recompute: Recompute, compile: Compile, mesh: Any) -> Decoder:
    with torch.device("meta"):
        decoder = build_model(layout.model)
    stages = parallelize(decoder, mesh, layout.parallel, recompute, compile, Float8(), torch.float32, 32)
    initialize(stages, layout.model, CPU, seed=7)
    return stages[0]


def parameters_of(stage: Decoder) -> dict[str, Any]:
    return {canonical_name(name): parameter.detach() for name, parameter in stage.named_parameters()}


def local_bits(stage: Decoder) -> dict[str, bytes]:
    contents = {}
    for name, parameter in parameters_of(stage).items():
        local = parameter.to_local()
        contents[name] = local.numpy().tobytes()
    return contents


def whole_parameters(stage: Decoder) -> dict[str, np.ndarray]:
    return {name: parameter.full_tensor().numpy() for name, parameter in parameters_of(stage).items()}


def start_everywhere(layouts: dict[str, Layout]) -> dict[str, dict[str, np.ndarray]] | None:
    """Every layout's whole tensors (on rank 0), after checking this rank's shards with blocks wrapped in two ways.

    A shard is filled 100 numbers at a time.
    """
    torch.compiler.reset()
    torchllm.parallel.initialize._ELEMENTS_IN_CACHE = 100
    started = {}
    for name, layout in layouts.items():
        mesh = build_mesh(layout.parallel, CPU)
        stage = sharded(layout, Recompute(), Compile(), mesh)
        bits = local_bits(stage)
        started[name] = whole_parameters(stage)
        for recompute, compile in WRAPPED if mesh.world.size() == 2 else []:
            stage = sharded(layout, recompute, compile, mesh)
            assert local_bits(stage) == bits, (name, recompute, compile)
    return started if torch.distributed.get_rank() == 0 else None


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
            assert np.isfinite(started[parameter]).all()


class RandomNumbers(NamedTuple):
    """How many random numbers there are of one model."""

    drawn: int
    """by this rank"""
    local: int
    """in this rank's shards"""
    whole: int
    """in the whole model"""


def count_random_numbers() -> RandomNumbers:
    drawn = 0

    def counting(index: Tensor, key: int) -> Tensor:
        nonlocal drawn
        drawn += index.numel()
        return normal(index, key)

    layout = LAYOUTS[4]["fsdp2xtp2"]
    mesh = build_mesh(layout.parallel, CPU)
    torchllm.parallel.initialize.normal = counting
    try:
        stage = sharded(layout, Recompute(), Compile(), mesh)
    finally:
        torchllm.parallel.initialize.normal = normal
    local = 0
    whole = 0
    for name, parameter in parameters_of(stage).items():
        if rule_of(name).start in ("normal", "residual"):
            local += parameter.to_local().numel()
            whole += parameter.numel()
    return RandomNumbers(drawn, local, whole)


def test_a_rank_makes_only_its_shard() -> None:
    counts_of_ranks = run(count_random_numbers, 4)
    total = 0
    for counts in counts_of_ranks:
        assert counts.drawn == counts.local
        total += counts.drawn
    assert total == counts_of_ranks[0].whole


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


def splitmix64(seed: int) -> Any:
    """Steele, Lea, Flood 2014, figure 17, in Python's unbounded integers."""
    mask = 2**64 - 1
    state = seed & mask
    while True:
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        yield z ^ (z >> 31)


def test_hash_is_splitmix64_also_where_its_state_wraps_around_64_bits() -> None:
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]  # its first outputs for 1234567
    assert list(itertools.islice(splitmix64(1234567), 3)) == published
    for key in (1234567, 0, -1, 2**63 - 1, key_of(0, "norm.weight")):
        expected = [number >> 11 for number in itertools.islice(splitmix64(key), 100)]
        assert _hash(torch.arange(1, 101), key).tolist() == expected
    drawn = 2**40  # a trillion parameters in
    further = splitmix64(3 + drawn * 0x9E3779B97F4A7C15)
    assert _hash(torch.tensor([drawn + 1, drawn + 2]), 3).tolist() == [next(further) >> 11, next(further) >> 11]


def test_a_number_does_not_depend_on_its_place_in_the_buffer() -> None:
    index = torch.arange(100_003)
    expected = normal(index, 5)
    backwards = normal(index.flip(0), 5)
    assert torch.equal(backwards.flip(0), expected)
    generator = torch.Generator().manual_seed(0)
    shuffled = torch.randperm(len(index), generator=generator)
    assert torch.equal(normal(index[shuffled], 5), expected[shuffled])
    draw = random.Random(0)
    for _ in range(200):
        first = draw.randrange(len(index))
        length = draw.choice([1, 2, 3, 5, 8, 17, 1000])
        part = slice(first, first + length)
        assert torch.equal(normal(index[part].clone(), 5), expected[part])


def first_numbers(count: int, key: int) -> Tensor:
    """The numbers of `count` elements by the formula as it stood first (commit 8ca45ed), all at once, in numpy."""
    z = np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key % 2**64)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = (z ^ (z >> np.uint64(31))) >> np.uint64(11)
    tail = 0.5 * math.erfc(3.0 / math.sqrt(2.0))
    uniform = (torch.from_numpy(z.astype(np.float64)) + 0.5) * 2.0**-53
    return torch.special.ndtri(tail + uniform * (1.0 - 2.0 * tail))


def test_bits_are_those_of_the_first_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole parameters; `test_layouts_start_bitwise_equal` compares the shards with them."""
    for model, at_a_time in ((ODD, 100), (TIED_GPT, 1 << 16)):
        monkeypatch.setattr(torchllm.parallel.initialize, "_ELEMENTS_IN_CACHE", at_a_time)
        for name, value in plain(model).items():
            start = rule_of(name).start
            if start in ("ones", "zeros"):
                assert torch.equal(value, torch.full_like(value, start == "ones")), name
                continue
            std = model.initial_std / (math.sqrt(2 * model.layers) if start == "residual" else 1.0)
            expected = (first_numbers(value.numel(), key_of(7, name)) * std).float()
            assert torch.equal(value.flatten(), expected), name


def test_keys_are_those_of_the_first_version() -> None:
    assert (key_of(7, "norm.weight"), key_of(8, "norm.weight")) == (2580432156499654688, 1989731788108351751)


def test_seed_and_name_decide_and_the_rest_of_the_model_does_not() -> None:
    first = plain(ODD, 7)
    same = plain(ODD, 7)
    other_seed = plain(ODD, 8)
    one_more_layer = replace(ODD, layers=ODD.layers + 1)
    deeper = plain(one_more_layer)
    for name, value in first.items():
        assert torch.equal(value, same[name])
        if rule_of(name).start == "normal":
            assert not torch.equal(value, other_seed[name]), name
            assert torch.equal(value, deeper[name]), name  # (residual ones are scaled by the depth)


def test_filling_a_parameter_without_a_row_is_an_error() -> None:
    with pytest.raises(KeyError, match="mystery"):
        fill(torch.empty(3), "mystery.weight", ODD, 0)
