"""What the picture of a search says without its text beside it."""

from functools import cache
from typing import TYPE_CHECKING

from tests.tools.planner.search.test_search import LARGE, SMALL, make_job
from torchllm.tools.planner.search.layouts import Job
from torchllm.tools.planner.search.plot import TERMS, draw
from torchllm.tools.planner.search.search import Found, search

if TYPE_CHECKING:  # it takes 0.4 s to import
    from matplotlib.figure import Figure


@cache
def large_job() -> Job:
    return make_job(LARGE, batch=8, length=2048)


@cache
def outcome() -> Found:
    return search(large_job())


def color_of_term(figure: "Figure") -> dict[str, str]:
    from matplotlib.colors import to_hex
    from matplotlib.container import BarContainer

    bars = figure.axes[0]
    return {
        str(bar.get_label()): to_hex(bar[0].get_facecolor()) for bar in bars.containers if isinstance(bar, BarContainer)
    }


def test_a_term_has_one_color_in_all_pictures() -> None:
    of_term: dict[str, str] = {}
    small = make_job(SMALL, gpus=8)
    for planned, found in ((small, search(small)), (large_job(), outcome())):
        colors = color_of_term(draw(planned, found, "title"))
        assert colors.keys() <= set(TERMS)
        assert len(set(colors.values())) == len(colors)
        for term, color in colors.items():
            assert of_term.setdefault(term, color) == color
    assert len(of_term) > 5


def test_it_has_a_title_and_says_what_each_color_and_line_means() -> None:
    from matplotlib.container import ErrorbarContainer

    figure = draw(large_job(), outcome(), "a model on 8 GPUs\n16 sequences")
    assert figure.get_suptitle() == "a model on 8 GPUs\n16 sequences"
    bars, cloud = figure.axes
    for axes in (bars, cloud):
        assert axes.get_xlabel()
        assert axes.get_legend() is not None
    (intervals,) = [drawn for drawn in bars.containers if isinstance(drawn, ErrorbarContainer)]
    [whiskers] = intervals.lines[2]
    best = outcome().best
    for (_, prediction), ((low, _), (high, _)) in zip(best, whiskers.get_segments(), strict=True):
        assert low < prediction.step < high
    assert [text.get_text() for text in cloud.texts] == [str(number) for number in range(1, len(best) + 1)]
    texts = {text.get_text() for text in cloud.get_legend().get_texts()}
    assert "memory of one GPU" in texts
    assert texts & {"fits in memory", "does not fit"}
