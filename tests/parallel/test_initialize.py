"""Initial weights: the same bits in every layout, good random numbers, and nothing made that is not held."""

import itertools
import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import torchllm.parallel.initialize
from tests.workers import run
from torchllm.config import Compile, Model, Parallel, Recompute
from torchllm.models.decoder import Decoder, build_model
from torchllm.parallel.initialize import _hash, fill, initialize, key_of, normal
from torchllm.parallel.mesh import build_mesh
from torchllm.parallel.parallelize import parallelize
from torchllm.spec.parameters import canonical_name, rule_of

CPU = torch.device("cpu")
# Odd sizes: no dimension divides evenly by the degrees where it need not.
ODD = Model(layers=2, hidden=36, heads=4, kv_heads=2, head_dim=10, ffn=50, vocab=97, max_sequence_length=33)
FEW_ROWS = replace(ODD, kv_heads=1, head_dim=2)  # k and v have 2 rows: over 4 ranks some hold none
TIED_GPT = replace(ODD, family="gpt", tied_embeddings=True)
TP = {"dp_shard": 1, "tp": 2}
Layout = tuple[Model, dict[str, Any]]
LAYOUTS: dict[int, dict[str, Layout]] = {
    2: {
        "fsdp2": (ODD, {"dp_shard": 2}),
        "tp2": (ODD, TP),
        "tp2+sp-gpt-tied": (TIED_GPT, {**TP, "sequence_parallel": True}),
    },
    4: {
        "fsdp4": (ODD, {"dp_shard": 4}),
        "fsdp4-few-rows": (FEW_ROWS, {"dp_shard": 4}),
        "zero2": (ODD, {"dp_shard": 4, "zero_stage": 2}),
        "zero1": (TIED_GPT, {"dp_shard": 4, "zero_stage": 1}),
        "zero0": (ODD, {"dp_shard": 4, "zero_stage": 0}),
        "hsdp2x2": (ODD, {"dp_replicate": 2, "dp_shard": 2}),
        "fsdp2xtp2": (ODD, {"dp_shard": 2, "tp": 2}),
        "fsdp2xtp2+sp-gpt-tied": (TIED_GPT, {"dp_shard": 2, "tp": 2, "sequence_parallel": True}),
    },
}
RECOMPUTE = ["none", "full", "segment", "every_k", "ffn", "selective"]
COMPILE = [Compile(), Compile(norm=True, block=True, loss=True)]  # one by one in test_layout.py: names decide


def plain(model: Model, seed: int = 7) -> dict[str, Tensor]:
    """One process, nothing parallel: every parameter by name."""
    with torch.device("meta"):
        decoder = build_model(model)
    initialize([decoder], model, CPU, seed)
    return {name: parameter.detach() for name, parameter in decoder.named_parameters()}


def sharded(layout: Layout, recompute: str, compile: Compile, mesh: Any) -> Decoder:
    model, degrees = layout
    with torch.device("meta"):
        decoder = build_model(model)
    stages = parallelize(decoder, mesh, Parallel(**degrees), Recompute(mode=recompute), compile, torch.float32, 32)  # type: ignore[arg-type]
    initialize(stages, model, CPU, seed=7)
    return stages[0]


def local_bits(stage: Decoder) -> dict[str, bytes]:
    return {canonical_name(n): p.to_local().detach().numpy().tobytes() for n, p in stage.named_parameters()}  # type: ignore[attr-defined]


def start_everywhere(layouts: dict[str, Layout]) -> dict[str, dict[str, np.ndarray]] | None:
    """Every layout's whole tensors (on rank 0), after checking this rank's shards for every recompute × compile."""
    torch.compiler.reset()
    out = {}
    for name, layout in layouts.items():
        mesh = build_mesh(Parallel(**layout[1]), CPU)
        stage = sharded(layout, "none", Compile(), mesh)
        bits = local_bits(stage)
        # gathered one after the other on all ranks
        out[name] = {canonical_name(n): p.full_tensor().detach().numpy() for n, p in stage.named_parameters()}  # type: ignore[attr-defined]
        for recompute, compile in itertools.product(RECOMPUTE, COMPILE):
            assert local_bits(sharded(layout, recompute, compile, mesh)) == bits, (name, recompute, compile)
    return out if torch.distributed.get_rank() == 0 else None


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_layouts_start_bitwise_equal_for_every_recompute_and_compile(ranks: int) -> None:
    started = run(start_everywhere, ranks, LAYOUTS[ranks])[0]
    for name, (model, _) in LAYOUTS[ranks].items():
        expected = plain(model)
        assert started[name].keys() == expected.keys()
        for parameter, value in expected.items():
            assert np.array_equal(started[name][parameter], value.numpy()), (name, parameter)
            assert np.isfinite(started[name][parameter]).all()


def numbers_made() -> tuple[int, int, int]:
    """Random numbers that this rank made, that it holds, and that the model has."""
    made = 0

    def counting(index: Tensor, key: int) -> Tensor:
        nonlocal made
        made += index.numel()
        return normal(index, key)

    torchllm.parallel.initialize.normal = counting
    try:
        layout = LAYOUTS[4]["fsdp2xtp2"]
        stage = sharded(layout, "none", Compile(), build_mesh(Parallel(**layout[1]), CPU))
    finally:
        torchllm.parallel.initialize.normal = normal
    random_ones = [p for n, p in stage.named_parameters() if rule_of(n).start in ("normal", "residual")]
    return made, sum(p.to_local().numel() for p in random_ones), sum(p.numel() for p in random_ones)  # type: ignore[attr-defined]


def test_a_rank_makes_only_its_shard() -> None:
    by_rank = run(numbers_made, 4)
    assert all(made == held for made, held, _ in by_rank)
    assert sum(made for made, _, _ in by_rank) == by_rank[0][2]


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


@pytest.mark.parametrize("key", [1234567, 0, -1, -(2**63), 2**63 - 1, key_of(0, "norm.weight")])
def test_hash_is_splitmix64(key: int) -> None:
    expected = [number >> 11 for number, _ in zip(splitmix64(key), range(1000), strict=False)]
    assert _hash(torch.arange(1, 1001), key).tolist() == expected
    if key == 1234567:  # published first outputs for this seed
        assert [n >> 11 for n in (6457827717110365317, 3203168211198807973, 9817491932198370423)] == expected[:3]


def test_hash_of_far_indices() -> None:
    """A trillion parameters in: the state wraps around 64 bits."""
    far, mask = 2**40 + 5, 2**64 - 1
    reached = splitmix64((3 + far * 0x9E3779B97F4A7C15) & mask)  # as if `far` numbers had been drawn
    assert _hash(torch.tensor([far + 1, far + 2]), 3).tolist() == [next(reached) >> 11, next(reached) >> 11]


def test_normal_is_the_inverse_distribution_of_the_hash() -> None:
    """Against Python's own inverse normal distribution."""
    from statistics import NormalDist

    tail = NormalDist().cdf(-3.0)
    index = torch.arange(2000)
    for got, bits in zip(normal(index, 11).tolist(), _hash(index, 11).tolist(), strict=True):
        assert got == pytest.approx(NormalDist().inv_cdf(tail + (bits + 0.5) / 2**53 * (1 - 2 * tail)), abs=1e-9)


def test_a_number_does_not_depend_on_its_place_in_the_buffer() -> None:
    index, draw = torch.arange(100_003), random.Random(0)
    expected = normal(index, 5)
    assert torch.equal(normal(index.flip(0), 5).flip(0), expected)
    shuffled = torch.randperm(len(index), generator=torch.Generator().manual_seed(0))
    assert torch.equal(normal(index[shuffled], 5), expected[shuffled])
    for _ in range(200):
        first = draw.randrange(len(index))
        last = min(len(index), first + draw.choice([1, 2, 3, 5, 8, 17, 1000]))
        assert torch.equal(normal(index[first:last].clone(), 5), expected[first:last])


def test_blocks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = plain(ODD)
    for elements in (1, 100, 1000):
        monkeypatch.setattr(torchllm.parallel.initialize, "_ELEMENTS_AT_A_TIME", elements)
        for name, value in plain(ODD).items():
            assert torch.equal(value, expected[name]), (name, elements)


# Statistics. The numbers are fixed, so these bounds, 4 to 5 standard errors wide, either hold for ever or never.
COUNT = 1 << 20
_DENSITY = math.exp(-4.5) / math.sqrt(2 * math.pi)
_INSIDE = math.erf(3 / math.sqrt(2))
VARIANCE = 1 - 6 * _DENSITY / _INSIDE  # of a normal distribution cut at 3 standard deviations
FOURTH = 3 * VARIANCE - 54 * _DENSITY / _INSIDE


def stream(name: str, seed: int = 0) -> Tensor:
    return normal(torch.arange(COUNT), key_of(seed, name))


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack((a, b)))[0, 1])


@pytest.mark.parametrize("name", ["embed_tokens.weight", "layers.0.mlp.up_proj.weight"])
def test_moments_and_distribution(name: str) -> None:
    x = stream(name)
    error = 1 / math.sqrt(COUNT)
    assert x.abs().max() <= 3
    assert x.abs().max() > 2.999  # the cut is where it is said to be
    assert abs(float(x.mean())) < 4 * error
    assert float(x.square().mean()) == pytest.approx(VARIANCE, abs=4 * math.sqrt(FOURTH - VARIANCE**2) * error)
    assert abs(float(x.pow(3).mean())) < 4 * math.sqrt(15) * error
    assert float(x.pow(4).mean()) == pytest.approx(FOURTH, abs=4 * math.sqrt(96) * error)
    # Kolmogorov-Smirnov at 0.1 %: the largest distance from the distribution function
    cumulative = (torch.special.ndtr(x.sort().values) - torch.special.ndtr(torch.tensor(-3.0).double())) / _INSIDE
    expected = (torch.arange(COUNT) + 0.5) / COUNT
    assert float((cumulative - expected).abs().max()) < 1.95 * error


def test_no_correlation_between_elements_parameters_and_seeds() -> None:
    limit = 4.5 / math.sqrt(COUNT)
    x = stream("layers.0.mlp.up_proj.weight")
    for lag in (1, 2, 3, 64, 1000, 4096):  # neighbours in a row, and in a column of that width
        assert abs(correlation(x[:-lag], x[lag:])) < limit, lag
        assert abs(correlation(x[:-lag].abs(), x[lag:].abs())) < limit, lag
    unrelated = [stream("layers.0.mlp.gate_proj.weight"), stream("layers.1.mlp.up_proj.weight")]
    unrelated += [stream("layers.0.mlp.up_proj.weight", seed) for seed in (1, 2, 2**62)]
    for stranger in unrelated:
        assert abs(correlation(x, stranger)) < limit
        assert abs(correlation(x[1:], stranger[:-1])) < limit
        assert not torch.isin(x[:1000], stranger).any()


def test_every_parameter_starts_as_the_table_says() -> None:
    model = replace(ODD, hidden=128, ffn=512, head_dim=32, vocab=1024, initial_std=0.5)
    for name, value in [*plain(model).items(), *plain(replace(model, family="gpt")).items()]:
        start = rule_of(name).start
        if start in ("ones", "zeros"):
            assert torch.equal(value, torch.full_like(value, start == "ones")), name
            continue
        std = 0.5 / math.sqrt(2 * model.layers) if start == "residual" else 0.5
        within = 5 / math.sqrt(2 * value.numel())
        assert float(value.std()) == pytest.approx(std * math.sqrt(VARIANCE), rel=within), name
        assert abs(float(value.mean())) < 5 * std / math.sqrt(value.numel()), name


def test_seed_and_name_decide_and_the_rest_of_the_model_does_not() -> None:
    first, same, other_seed = plain(ODD, 7), plain(ODD, 7), plain(ODD, 8)
    deeper = plain(replace(ODD, layers=ODD.layers + 1))
    for name, value in first.items():
        assert torch.equal(value, same[name])
        if rule_of(name).start == "normal":
            assert not torch.equal(value, other_seed[name]), name
            assert torch.equal(value, deeper[name]), name  # (residual ones are scaled by the depth)


def test_filling_a_parameter_without_a_row_is_an_error() -> None:
    with pytest.raises(KeyError, match="mystery"):
        fill(torch.empty(3), "mystery.weight", ODD, 0)
