"""A step of every layout on a GPU: the host never waits for it, and it launches no more than the table says."""

import pytest

from tests.hollow.launches import TOLERANCE, Report, measure_all, read_table, row
from tests.hollow.layouts import COMPILE, CONFIG, CONTEXT, MODEL, SHARDING, as_arguments

pytestmark = pytest.mark.timeout(1800)  # the first test measures all layouts


def test_a_step_never_waits_for_the_gpu(reports: dict[str, Report]) -> None:
    assert {layout: report["syncs"] for layout, report in reports.items() if report["syncs"]} == {}


def test_a_step_launches_what_the_table_says(reports: dict[str, Report]) -> None:
    """`python -m tests.hollow.launches --only=LAYOUT --kernels` names the launches, --write writes the table."""
    table = read_table()
    more = [
        f"{layout}: {column}: {number}, {table[layout][column]} in the table"
        for layout, report in reports.items()
        for column, number in row(report).items()
        if number > table[layout][column] * TOLERANCE
    ]
    assert more == []


def test_a_compiled_block_is_one_graph_and_is_compiled_once(reports: dict[str, Report]) -> None:
    compiled = {layout: report for layout, report in reports.items() if "compile" in layout}
    assert [layout for layout, report in compiled.items() if report["compilations"]] == []  # in the third step
    broken = {layout for layout, report in compiled.items() if report["graph_breaks"]}
    # the core of context parallelism stays outside the graphs: parallel/context.py
    assert [layout for layout in broken if not any(method in layout for method in CONTEXT)] == []


def test_a_compiled_block_of_flex_attention_makes_no_mask() -> None:
    """The lists of blocks are made once, which takes a sort; in each block it was 17 launches, 1,350 of the step."""
    flex = {"model.attention": "flex"}
    (report,) = measure_all(
        {"flex": as_arguments(CONFIG, MODEL, SHARDING["zero 3"], COMPILE["compile"], flex)}
    ).values()
    assert [kernel for kernel in report["kernels"] if "sort" in kernel.lower()] == []
    assert report["launches"] <= 1_078 * TOLERANCE
    assert (report["graph_breaks"], report["compilations"]) == (0, 0)


EAGER_8B = {"compile.block": False, "compile.loss": False, "training.micro_batch_size": 1}
WITHOUT = {"parallel.dp_shard": 8, "training.sequence_length": 8_192, "training.global_batch_size": 8}
WITH = {"parallel.dp_shard": 4, "training.sequence_length": 16_384, "training.global_batch_size": 4}
LONG = {"fsdp": WITHOUT} | {method: WITH | keys for method, keys in CONTEXT.items()}
"""8,192 tokens of Llama 3 8B per rank, one micro batch"""


@pytest.mark.parametrize("layout", LONG)
def test_documents_launch_hardly_more_and_no_other_attention(layout: str) -> None:
    """Flash attention takes documents by their offsets: what is more is made once per forward, not per layer."""
    cases = {}
    for documents in (False, True):
        keys = {"data.document_mask": documents}
        cases[str(documents)] = as_arguments("train_configs/llama3_8b_8gpu.toml", EAGER_8B, LONG[layout], keys)
    without, with_documents = measure_all(cases).values()
    for report in (without, with_documents):
        assert report["syncs"] == {}
    assert with_documents["launches"] <= 1.05 * without["launches"]
    assert not [kernel for kernel in with_documents["kernels"] if "fmha" in kernel]
    assert _attention(with_documents) == _attention(without)


def _attention(report: Report) -> int:
    """Return the launches of flash attention in a step."""
    return sum(times for kernel, times in report["kernels"].items() if "pytorch_flash::" in kernel)
