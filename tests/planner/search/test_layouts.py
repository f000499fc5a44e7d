"""Layouts to configs and back."""

from dataclasses import replace

from tests.planner.test_comms import dgx_a100
from tests.spec.test_model_sizes import load
from torchllm.config import Config, Model, Training
from torchllm.config.checks import problems
from torchllm.planner.search.layouts import DegreeMesh, Job, Layout, kernels_of, layout_of
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


def test_ep_divides_the_experts_and_the_ranks_that_it_borrows() -> None:
    """8 experts on 2 shards x cp 2 x tp 4: as the config accepts them; none where weights are whole."""
    model = replace(load("mixtral_8x7b"), layers=4)
    job = job_of_experts(model)
    mesh = DegreeMesh(pp=1, data=2, cp=2, tp=4)
    assert job.expert_degrees(mesh, dp_shard=2, zero_stage=3) == [1, 2, 4, 8]
    assert job.expert_degrees(mesh, dp_shard=1, zero_stage=1) == [1, 2, 4, 8]
    assert job.expert_degrees(DegreeMesh(1, 16, 1, 1), dp_shard=4, zero_stage=2) == [1, 2, 4]
    assert job.expert_degrees(mesh, dp_shard=2, zero_stage=0) == [1]
    for sharding in job.shardings(mesh):
        layout = Layout(pp=1, cp=2, tp=4, sequence_parallel=True, **sharding._asdict())
        assert not problems(job.config(Config(), layout), 16), layout


def job_of_experts(model: Model) -> Job:
    return Job(model, Training(sequence_length=4096, global_batch_size=64), dgx_a100(), 16)
