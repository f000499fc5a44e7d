"""The arithmetic of the soak: a leak shows, noise and a first rise do not."""

import random
from pathlib import Path

import pytest

from tests.soak.run import LEAST, LIMITS, growing, last_of_each, slopes_of
from tests.soak.slopes import Sample, Slope, fit_slope


def noisy(growth: float, noise: float, count: int = 240, seed: int = 0) -> list[Sample]:
    """Return `count` samples, 10 steps apart, that grow by `growth` per 1,000 steps, with normal noise."""
    generator = random.Random(seed)
    return [Sample(10 * i, 300_000 + growth * i / 100 + generator.gauss(0, noise)) for i in range(count)]


def test_a_straight_line_is_its_slope() -> None:
    growth, error, steps = fit_slope(noisy(57.0, 0.0))
    assert growth == pytest.approx(57.0)
    assert error == pytest.approx(0.0, abs=1e-6)
    assert steps == 1590  # the last two thirds of 240 samples


def test_a_constant_has_no_slope_and_no_error() -> None:
    slope = fit_slope([Sample(step, 18) for step in range(0, 1000, 10)])
    assert (slope.growth, slope.error) == (0.0, 0.0)
    assert not slope.exceeds(0.0, 0.0)


def test_the_first_third_of_a_run_is_not_looked_at() -> None:
    warming_up = [Sample(10 * i, min(i, 80)) for i in range(240)]
    assert fit_slope(warming_up) == Slope(0.0, 0.0, 1590)


def test_the_error_is_the_spread_of_the_slopes() -> None:
    """Of 200 runs without a leak, by theory, 0.3 % are over 3 errors; with 10 degrees of freedom 1.3 %."""
    slopes = [fit_slope(noisy(0.0, 500.0, seed=seed)) for seed in range(200)]
    mean_square = sum(slope.growth**2 for slope in slopes) / len(slopes)
    mean_error_square = sum(slope.error**2 for slope in slopes) / len(slopes)
    assert mean_square == pytest.approx(mean_error_square, rel=0.3)
    assert sum(slope.exceeds(0.0, 0.0) for slope in slopes) <= 6


def test_noise_that_lasts_counts_once() -> None:
    """Steps up and down that last 10 samples, as an allocator makes them: a fit of single samples would see a slope."""
    generator = random.Random(1)
    levels = [generator.gauss(0, 1000) for _ in range(24)]
    slopes = []
    for shift in range(8):
        levels = levels[shift:] + levels[:shift]
        slopes.append(fit_slope([Sample(10 * i, levels[i // 10]) for i in range(240)]))
    assert not any(slope.exceeds(LIMITS["memory_kib"], 0.0) for slope in slopes)


def test_a_leak_is_found_in_noise() -> None:
    assert fit_slope(noisy(2000.0, 300.0)).exceeds(LIMITS["memory_kib"], LEAST["memory_kib"])
    descriptors = [Sample(step, 44 + 16 * (step // 25)) for step in range(0, 300, 5)]  # 16 per rebuild
    assert fit_slope(descriptors).exceeds(LIMITS["descriptors"], LEAST["descriptors"])


def test_a_steep_slope_over_few_steps_is_a_piece_of_memory() -> None:
    assert Slope(2000.0, 1.0, 600.0).exceeds(limit=200.0, least=1024.0)
    assert not Slope(2000.0, 1.0, 400.0).exceeds(limit=200.0, least=1024.0)


def test_too_few_samples_are_an_error() -> None:
    with pytest.raises(ValueError, match="too few for a slope"):
        fit_slope(noisy(0.0, 0.0, count=20))


def test_growing_names_the_quantities() -> None:
    slopes = {quantity: Slope(0.0, 0.0, 1000.0) for quantity in LIMITS}
    assert growing(slopes) == []
    steep = {"threads": Slope(12.0, 0.5, 1000.0), "groups": Slope(2.0, 1.0, 1000.0)}
    assert growing(slopes | steep) == ["threads"]


def test_a_scenario_overrides_the_common_settings() -> None:
    assert list(last_of_each(["--a=1", "--b=2", "--a=3"])) == ["--a=3", "--b=2"]


def test_notes_of_a_rank_become_slopes(tmp_path: Path) -> None:
    line = '{"step": %d, "memory_kib": %d, "workers_kib": 0, "descriptors": 18, "threads": 7, "groups": 6}\n'
    (tmp_path / "rank_0.jsonl").write_text("".join(line % (10 * i, 1000 + 50 * i) for i in range(60)))
    slopes = slopes_of(tmp_path / "rank_0.jsonl")
    assert slopes["memory_kib"].growth == pytest.approx(5000)
    assert growing(slopes) == ["memory_kib"]
