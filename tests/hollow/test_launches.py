"""A step of every layout on a GPU: the host never waits for it, and it launches no more than the table says."""

import pytest

from tests.hollow.launches import TOLERANCE, Report, measure, read_table, row
from tests.hollow.layouts import CONTEXT, as_arguments, layouts

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
    without, with_documents = measure(cases).values()
    for report in (without, with_documents):
        assert "error" not in report, report["error"]
        assert report["syncs"] == {}
    assert with_documents["launches"] <= 1.05 * without["launches"]
    assert not [kernel for kernel in with_documents["kernels"] if "fmha" in kernel]
    assert _attention(with_documents) == _attention(without)


def _attention(report: Report) -> int:
    """Return the launches of flash attention in a step."""
    return sum(times for kernel, times in report["kernels"].items() if "pytorch_flash::" in kernel)
