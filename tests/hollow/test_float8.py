"""float8 on a GPU: torch's own products of 8 bits, no wait of the host, one graph per compiled block."""

from collections.abc import Mapping

import pytest

from tests.hollow.launches import Report, measure_all
from tests.hollow.layouts import COMPILE, CONFIG, MODEL, as_arguments

pytestmark = pytest.mark.timeout(1200)

FSDP = {"parallel.dp_shard": 2, "training.global_batch_size": 4}  # one micro batch
TENSOR = {"parallel.tp": 2, "parallel.sequence_parallel": True, "training.global_batch_size": 2, "model.ffn": 448}
COMPILED = {**FSDP, **COMPILE["compile"]}
SELECTIVE = {"recompute.mode": "selective"}
HALF = {"recompute.mode": "selective_half"}
LAYOUTS = {
    "fsdp": FSDP,
    "fsdp, selective": {**FSDP, **SELECTIVE},
    "fsdp, selective_half": {**FSDP, **HALF},
    "compiled": COMPILED,
    "compiled, selective": {**COMPILED, **SELECTIVE},
    "compiled, selective_half": {**COMPILED, **HALF},
    "tp": TENSOR,
}
BLOCKS = 4
"""of the debug model"""
LAYERS_PER_BLOCK = 7
"""linear ones"""
COMPUTED_AGAIN = {"fsdp, selective_half": 4, "compiled, selective_half": 3}
"""products per block: q, v and gate; uncompiled also down, whose operation has to run to save its factors"""
PRODUCTS = {"rowwise": 3, "rowwise_with_gw_hp": 2, "tensorwise": 3}
"""in float8, per linear layer"""


@pytest.fixture(scope="module")
def float8_reports() -> Mapping[str, Report]:
    """What a step of each layout did, by recipe."""
    cases = {}
    for layout, settings in LAYOUTS.items():
        for recipe in PRODUCTS:
            cases[f"{recipe}, {layout}"] = as_arguments(CONFIG, MODEL, settings, {"float8.recipe": recipe})
    return measure_all(cases)


def test_a_step_never_waits_for_the_gpu(float8_reports: Mapping[str, Report]) -> None:
    for column in ("syncs", "graph_breaks", "compilations"):  # compilations in the third step
        assert {case: report[column] for case, report in float8_reports.items() if report[column]} == {}, column


def test_only_selective_half_computes_products_again(float8_reports: Mapping[str, Report]) -> None:
    expected = {
        f"{recipe}, {layout}": BLOCKS * (LAYERS_PER_BLOCK * products + COMPUTED_AGAIN.get(layout, 0))
        for layout in LAYOUTS
        for recipe, products in PRODUCTS.items()
    }
    assert {case: report["kernels"]["cublasLtMatmul"] for case, report in float8_reports.items()} == expected
