"""The words about a search agree with what was predicted."""

import re
from dataclasses import replace
from functools import cache

import pytest

from tests.tools.planner.search.test_search import LARGE, SMALL, make_job
from tests.tools.planner.test_comms import cluster
from torchllm.tools.planner.predict import predict
from torchllm.tools.planner.search.explain import (
    divides_nowhere,
    fits_nowhere,
    layout_figures,
    misses,
    ranking_table,
    rejections,
    terms,
    why,
)
from torchllm.tools.planner.search.layouts import Job, Layout
from torchllm.tools.planner.search.search import Found, Ranked, search


@cache
def large_job() -> Job:
    """Return the job that most of these tests speak of."""
    return make_job(LARGE, gpus=16, batch=32, length=2048)


@cache
def outcome() -> Found:
    """Return what a search of it finds."""
    return search(large_job())


def winner() -> Ranked:
    """Return its fastest layout."""
    return outcome().best[0]


def first_count(line: str) -> int:
    return int(line.split()[0].replace(",", ""))


def test_figures_agree_with_each_other() -> None:
    figures = layout_figures(large_job(), winner(), 1e12)
    tokens = 32 * 2048
    tokens_per_second = figures["tokens_per_second"]
    assert tokens_per_second == pytest.approx(tokens / figures["step_seconds"])
    hours = 1e12 / tokens_per_second / 3600
    assert figures["gpu_hours"] == pytest.approx(16 * hours)
    assert figures["gpu_hours"] == pytest.approx(16 * 24 * figures["days"])
    assert figures["petaflops"] == pytest.approx(figures["mfu"] * 16 * 0.312)
    assert sum(figures["terms"].values()) == pytest.approx(figures["step_seconds"])
    assert sum(figures["memory"].values()) == pytest.approx(figures["memory_gib"])
    assert "days" not in layout_figures(large_job(), winner())


LONGER = re.compile(r"^With micro batch size (\d+) instead of \d+, a step takes ([\d.]+)% longer")


def test_the_reasons_name_layouts_that_are_slower_or_do_not_fit() -> None:
    """What is compared is predicted anew from the words."""
    sentence, *comparisons = why(large_job(), winner())
    assert re.match(r"Matmul takes \d+% of a step, ", sentence)
    assert len(comparisons) > 1
    for line in comparisons:
        assert "takes" in line or "GiB more than a GPU has" in line
        if "micro batch size" in line and "longer" in line:
            size, longer = LONGER.match(line).groups()
            layout = winner().layout._replace(micro_batch_size=int(size))
            changed = predict(large_job().case(layout))
            slower = changed.step / winner().prediction.step - 1
            assert 100 * slower == pytest.approx(float(longer), abs=0.06)


def test_every_layout_and_every_mesh_is_accounted_for() -> None:
    layouts = meshes = 0
    for line in rejections(outcome()):
        if "layout" in line:
            layouts += first_count(line)
        if "mesh" in line:
            meshes += first_count(line)
    assert layouts + len(outcome().best) == outcome().layouts
    refused = [mesh for mesh in large_job().meshes if large_job().refusal(mesh)]
    assert meshes == len(refused)


def test_pipeline_stages_are_traded_for_data_ranks_too() -> None:
    layout = Layout(pp=4, dp_replicate=1, dp_shard=4, cp=1, tp=1, zero_stage=1)
    pipeline = Ranked(layout, predict(large_job().case(layout)))
    text = " ".join(why(large_job(), pipeline))
    assert "pp 2 instead of 4 and data ranks 8 instead of 4" in text


def test_chunks_of_tokens_are_compared_where_experts_are_sent() -> None:
    """They are no part of a search, and their price is in the words of its winner."""
    job = make_job(replace(SMALL, experts=8, top_k=2, expert_ffn=768), gpus=16, batch=64, length=4096)
    layout = Layout(pp=1, dp_replicate=1, dp_shard=16, cp=1, tp=1, ep=8, zero_stage=1)
    one, two = (replace(job, of_all_layouts={"expert_chunks": chunks}) for chunks in (1, 2))
    steps = [predict(chunked.case(layout)).step for chunked in (one, two)]
    *_, sentence = why(job, Ranked(layout, predict(one.case(layout))))
    assert sentence.startswith("With parallel.expert_chunks 2 instead of 1, a step ")
    assert f"{abs(steps[1] / steps[0] - 1):.1%} {'longer' if steps[1] > steps[0] else 'faster'}" in sentence
    for other, of_all in ((layout, two), (layout._replace(ep=1), one)):
        assert "expert_chunks" not in " ".join(why(of_all, Ranked(other, predict(of_all.case(other)))))


def test_columns_stand_under_their_titles_and_terms_are_largest_first() -> None:
    heading, line, *rest = ranking_table(large_job(), outcome().best, 1e12)
    assert 1 + len(rest) == 2 * len(outcome().best)
    figures = layout_figures(large_job(), winner(), 1e12)
    shown = {
        "step s": f"{figures['step_seconds']:.4g}",
        "HFU": f"{figures['hfu']:.1%}",
        "tokens/s": f"{figures['tokens_per_second']:,.0f}",
        "PFLOP/s": f"{figures['petaflops']:.4g}",
        "GPU-hours": f"{figures['gpu_hours']:,.0f}",
    }
    for title, value in shown.items():
        end = heading.index(f" {title} ") + len(f" {title}")
        assert line[:end].endswith(value), title
    assert line.index(winner().layout.text()) == heading.index("layout")
    heading, line, *_ = ranking_table(large_job(), outcome().best)
    assert "GPU-hours" not in heading
    assert line.index(winner().layout.text()) == heading.index("layout")
    seconds = [float(number) for number in re.findall(r" ([\d.e+-]+) s", terms(winner().prediction))]
    assert seconds == sorted(seconds, reverse=True)


def test_near_misses_name_what_is_missing() -> None:
    job = make_job(LARGE, batch=16, length=4096, hardware=cluster(memory=40e9))
    found = search(job)
    assert found.misses
    for line, miss in zip(misses(job, found), found.misses, strict=True):
        assert f"{miss.over / 2**30:.1f} GiB more than the 37.3 GiB of a GPU" in line


def test_where_nothing_fits_or_divides_what_would_do_is_named() -> None:
    """By the message: as many GPUs and no half of them, so long sequences and no longer ones."""
    few = {"pp": 1, "cp": 1}
    job = make_job(LARGE, gpus=4, batch=16, length=4096, hardware=cluster(memory=22e9), fixed=few)
    message = fits_nowhere(job, search(job))
    gpus = int(re.search(r"it would fit on (\d+) GPUs", message)[1])
    assert search(replace(job, gpus=gpus)).best
    assert not search(replace(job, gpus=gpus // 2)).best
    assert "; the closest, " in message

    job = make_job(LARGE, gpus=2, batch=4, length=65536, fixed=few)
    length = int(re.search(r" or with sequences of (\d+) tokens$", fits_nowhere(job, search(job)))[1])
    for tokens, fits in ((length, True), (2 * length, False)):
        shorter = replace(job, training=replace(job.training, sequence_length=tokens))
        assert bool(search(shorter).best) == fits

    job = make_job(SMALL, gpus=11, batch=16)
    message = divides_nowhere(job, search(job))
    assert message.startswith("no valid layout on 11 GPUs: ")
    assert search(replace(job, gpus=int(re.search(r"; (\d+) GPUs would work$", message)[1]))).best
