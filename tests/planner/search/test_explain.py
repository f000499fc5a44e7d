"""What is said of a search is what was predicted."""

import re
from dataclasses import replace

import pytest

from tests.planner.search.test_search import LARGE, SMALL, cluster, make_job
from torchllm.planner.predict import predict
from torchllm.planner.search.explain import (
    divides_nowhere,
    fits_nowhere,
    layout_figures,
    misses,
    ranking_table,
    rejections,
    scaling,
    terms,
    why,
)
from torchllm.planner.search.layouts import Layout
from torchllm.planner.search.price import Purchase
from torchllm.planner.search.search import Ranked, search

JOB = make_job(LARGE, gpus=16, batch=32, length=2048)
FOUND = search(JOB)


def test_figures_agree_with_each_other() -> None:
    of = layout_figures(JOB, FOUND.best[0], Purchase(1e12))
    tokens = 32 * 2048
    assert of["tokens_per_second"] == pytest.approx(tokens / of["step_seconds"])
    assert of["days"] * 24 * 16 == pytest.approx(of["gpu_hours"])
    assert of["gpu_hours"] == pytest.approx(1e12 / of["tokens_per_second"] / 3600 * 16)
    assert of["petaflops"] == pytest.approx(of["mfu"] * 16 * 0.312)
    assert sum(of["terms"].values()) == pytest.approx(of["step_seconds"])
    assert sum(of["memory"].values()) == pytest.approx(of["memory_gib"])
    assert "days" not in layout_figures(JOB, FOUND.best[0])


def test_a_table_has_two_lines_a_layout_and_the_terms_largest_first() -> None:
    lines = list(ranking_table(JOB, FOUND.best, Purchase(1e12)))
    assert len(lines) == 1 + 2 * len(FOUND.best)
    assert lines[1].startswith(" 1.")
    assert FOUND.best[0].layout.text() in lines[1]
    seconds = [float(found) for found in re.findall(r" ([\d.e+-]+) s", terms(FOUND.best[0].prediction))]
    assert seconds == sorted(seconds, reverse=True)
    assert "GPU-hours" in lines[0]


def test_scaling_is_against_the_smallest() -> None:
    twice = replace(JOB, gpus=32)
    lines = list(scaling([(twice, search(twice).best[0]), (JOB, FOUND.best[0])]))
    assert [line.split()[0] for line in lines] == ["GPUs", "16", "32"]
    assert "100.0%" in lines[1]


def test_the_reasons_name_layouts_that_are_slower_or_do_not_fit() -> None:
    """What is compared is predicted anew from the words."""
    said = why(JOB, FOUND.best[0])
    assert re.match(r"Matmul takes \d+% of a step, ", said[0])
    assert len(said) > 2
    winner = FOUND.best[0]
    changed = 0
    for line in said[1:]:
        for micro, longer in re.findall(
            r"^With micro batch size (\d+) instead of \d+, a step takes ([\d.]+)% longer", line
        ):
            other = predict(JOB.case(winner.layout._replace(micro_batch_size=int(micro))))
            assert 100 * (other.step / winner.prediction.step - 1) == pytest.approx(float(longer), abs=0.06)
            changed += 1
        assert "takes" in line or "GiB more than a GPU has" in line
    assert changed == sum("micro batch size" in line and "longer" in line for line in said)


def test_near_misses_name_what_is_missing() -> None:
    of = make_job(LARGE, batch=16, length=4096, hardware=cluster(memory=40e9))
    found = search(of)
    lines = list(misses(of, found))
    assert lines
    for line, miss in zip(lines, found.misses, strict=True):
        assert f"{miss.over / 2**30:.1f} GiB more than the 37.3 GiB of a GPU" in line


def test_every_layout_and_every_mesh_is_accounted_for() -> None:
    lines = list(rejections(FOUND))
    layouts = [int(line.split()[0].replace(",", "")) for line in lines if "layout" in line]
    assert sum(layouts) + len(FOUND.best) == FOUND.layouts
    meshes = sum(int(line.split()[0].replace(",", "")) for line in lines if "mesh" in line)
    assert meshes == sum(bool(JOB.refusal(mesh)) for mesh in JOB.meshes)


def test_fits_nowhere_says_what_would_do() -> None:
    of = make_job(LARGE, gpus=4, batch=64, length=4096, hardware=cluster(memory=22e9))
    said = fits_nowhere(of, search(of))
    gpus = int(re.search(r"it would fit on (\d+) GPUs", said)[1])
    assert search(replace(of, gpus=gpus)).best
    assert not search(replace(of, gpus=gpus // 2)).best
    assert "; the closest, " in said


def test_a_number_that_divides_nowhere_names_one_that_does() -> None:
    of = make_job(SMALL, gpus=11, batch=16)
    said = divides_nowhere(of, search(of))
    assert said.startswith("no valid layout on 11 GPUs: ")
    assert search(replace(of, gpus=int(re.search(r"; (\d+) GPUs would work$", said)[1]))).best
    alone = divides_nowhere(make_job(SMALL, gpus=2, batch=1), search(make_job(SMALL, gpus=2, batch=1)))
    assert alone.endswith("; 1 GPU would work")


def test_pipeline_stages_are_traded_for_data_ranks_too() -> None:
    layout = Layout(pp=4, dp_replicate=1, dp_shard=4, cp=1, tp=1, zero_stage=1)
    sentences = why(JOB, Ranked(layout, predict(JOB.case(layout))))
    assert any("pp 2 instead of 4 and data ranks 8 instead of 4" in sentence for sentence in sentences)
