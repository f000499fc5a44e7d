"""Layouts to configs and back."""

from torchllm.config import Config, Model, Training
from torchllm.planner.search.layouts import Job, Layout, kernels_of, layout_of
from torchllm.spec.cluster import read_cluster

MODEL = Model(layers=8, hidden=256, heads=8, ffn=512, vocab=512)


def test_a_layout_is_that_of_the_config_that_has_it() -> None:
    hardware = read_cluster("dgx_a100", [])
    assert hardware is not None
    job = Job(MODEL, Training(global_batch_size=64, sequence_length=512), hardware, 32)
    for layout in (
        Layout(1, 1, 32, 1, 1),
        Layout(2, 2, 2, 1, 4, "Interleaved1F1B", 4, 2, 1, "full", True),
        Layout(1, 4, 2, 4, 1, micro_batch_size=4, zero_stage=2, recompute="selective", cp_method="ulysses"),
    ):
        config = job.config(Config(), layout)
        assert layout_of(config) == layout
        case = job.case(layout)
        assert case.parallel == config.parallel
        assert case.kernels == kernels_of(MODEL, config.compile, job.software, hardware)
