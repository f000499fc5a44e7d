"""A step of every layout on a GPU: the host never waits for it, and it launches no more than the table says."""

import pytest

from tests.hollow.launches import TOLERANCE, Report, read_table, row
from tests.hollow.layouts import CONTEXT, layouts

pytestmark = pytest.mark.timeout(1800)  # the first test measures all layouts


@pytest.mark.parametrize("layout", layouts())
def test_a_step_never_waits_for_the_gpu(layout: str, reports: dict[str, Report]) -> None:
    report = reports[layout]
    assert "error" not in report, report["error"]
    assert report["syncs"] == {}


@pytest.mark.parametrize("layout", layouts())
def test_a_step_launches_what_the_table_says(layout: str, reports: dict[str, Report]) -> None:
    report = reports[layout]
    assert "error" not in report, report["error"]
    expected = read_table()[layout]
    for column, number in row(report).items():
        allowed = expected[column] * TOLERANCE
        assert number <= allowed, (
            f"{column}: {number}, {expected[column]} in the table; python -m tests.hollow.launches "
            f'--only="{layout}" --kernels names them, --write writes the table'
        )


@pytest.mark.parametrize("layout", [name for name in layouts() if "compile" in name])
def test_a_compiled_block_is_one_graph_and_is_compiled_once(layout: str, reports: dict[str, Report]) -> None:
    report = reports[layout]
    assert "error" not in report, report["error"]
    if not any(method in layout for method in CONTEXT):  # its core stays outside the graphs: parallel/context.py
        assert report["graph_breaks"] == 0
    assert report["compilations"] == 0  # in the third step
