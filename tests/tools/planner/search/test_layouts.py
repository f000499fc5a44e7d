"""Layouts to configs and back."""

from dataclasses import replace

from tests.facts.test_model_sizes import load
from tests.tools.planner.test_comms import dgx_a100
from torchllm.config import Cluster, Config, Model, Training
from torchllm.tools.config.checks import problems
from torchllm.tools.planner.search.layouts import DegreeMesh, Job, Layout, kernels_of, layout_of

MODEL = Model(layers=8, hidden=256, heads=8, ffn=512, vocab=512)
FSDP = Layout(pp=1, dp_replicate=1, dp_shard=32, cp=1, tp=1)
PIPELINE = Layout(2, 2, 2, 1, 4, "Interleaved1F1B", 4, 2, 1, "full", True)
CONTEXT = Layout(1, 4, 2, 4, 1, micro_batch_size=4, zero_stage=2, recompute="selective", cp_method="ulysses")


def test_a_layout_is_that_of_the_config_that_has_it() -> None:
    for layout in [FSDP, PIPELINE, CONTEXT]:
        job = Job(MODEL, Training(global_batch_size=64, sequence_length=512), dgx_a100(), gpus=32)
        base = Config(cluster=Cluster("dgx_a100"))
        config = job.config(base, layout)
        assert layout_of(config) == layout, layout
        assert config.cluster == base.cluster, layout
        case = job.case(layout)
        assert case.parallel == config.parallel, layout
        assert case.kernels == kernels_of(MODEL, config.compile, job.software, job.hardware), layout


def test_ep_divides_the_experts_and_the_ranks_that_it_borrows() -> None:
    """8 experts on 2 shards x cp 2 x tp 4: as the config accepts them; none where weights are whole."""
    job = job_of_experts()
    mesh = DegreeMesh(pp=1, data=2, cp=2, tp=4)
    assert job.expert_degrees(mesh, dp_shard=2, zero_stage=3) == [1, 2, 4, 8]
    assert job.expert_degrees(mesh, dp_shard=1, zero_stage=1) == [1, 2, 4, 8]
    assert job.expert_degrees(mesh, dp_shard=2, zero_stage=0) == [1]
    data_parallel = DegreeMesh(pp=1, data=16, cp=1, tp=1)
    assert job.expert_degrees(data_parallel, dp_shard=4, zero_stage=2) == [1, 2, 4]


def test_the_config_accepts_every_sharding_of_experts() -> None:
    job = job_of_experts()
    mesh = DegreeMesh(pp=1, data=2, cp=2, tp=4)
    for sharding in job.shardings(mesh):
        degrees = sharding._asdict()
        layout = Layout(pp=1, cp=2, tp=4, sequence_parallel=True, **degrees)
        config = job.config(Config(), layout)
        assert not problems(config, 16), layout


def test_shardings_agree_with_the_degrees_that_a_run_sets() -> None:
    job = Job(MODEL, Training(global_batch_size=64, sequence_length=512), dgx_a100(), gpus=16)
    mesh = DegreeMesh(pp=1, data=16, cp=1, tp=1)
    assert {sharding.dp_replicate for sharding in job.shardings(mesh)} == {1, 2, 4, 8}
    for fixed in ({"dp_replicate": 2}, {"dp_shard": 8}):
        shardings = replace(job, fixed=fixed).shardings(mesh)
        assert {(sharding.dp_replicate, sharding.dp_shard) for sharding in shardings} == {(2, 8)}


def test_zero_stages_that_are_the_same_in_a_pipeline_are_one_layout() -> None:
    job = Job(MODEL, Training(global_batch_size=64, sequence_length=512), dgx_a100(), gpus=16)
    for pp, stages in ((1, {0, 1, 2, 3}), (2, {0, 1, 3})):
        shardings = job.shardings(DegreeMesh(pp=pp, data=16 // pp, cp=1, tp=1))
        assert {sharding.zero_stage for sharding in shardings if sharding.dp_replicate == 1} == stages
        assert {sharding.zero_stage for sharding in shardings if sharding.dp_replicate > 1} == stages - {0}


def job_of_experts() -> Job:
    """Return a job of four blocks of Mixtral."""
    model = replace(load("mixtral_8x7b"), layers=4)
    training = Training(sequence_length=4096, global_batch_size=64)
    return Job(model, training, dgx_a100(), gpus=16)
