"""Layouts to configs and back."""

from dataclasses import replace

from tests.tools.planner.test_comms import dgx_a100
from torchllm.config import Cluster, Compile, Config, Model, Parallel, Recompute, Training
from torchllm.tools.planner.predict import predict
from torchllm.tools.planner.search.auto import case_of, job_of
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


def test_a_cuda_graph_has_no_pipeline() -> None:
    graphed = Job(
        MODEL, Training(global_batch_size=64, sequence_length=512), dgx_a100(), gpus=16, compile=Compile(graphs=True)
    )
    assert graphed.refusal(DegreeMesh(pp=2, data=8, cp=1, tp=1)) == "compile.graphs captures no pipeline"
    assert graphed.refusal(DegreeMesh(pp=1, data=16, cp=1, tp=1)) == ""
    assert graphed.case(FSDP._replace(dp_shard=16)).kernels.graphs


def test_keys_of_all_layouts_are_those_of_the_run() -> None:
    training = Training(global_batch_size=64, sequence_length=512)
    parallel = Parallel(dp_shard=4, pp=4, split=(1, 3, 2, 2), keep_last_block=False, prefetch=3)
    config = Config(model=MODEL, training=training, parallel=parallel, recompute=Recompute("every_k", k=3))
    job = job_of(config, 16, (), dgx_a100())
    layout = layout_of(config)
    case = job.case(layout)
    assert (case.parallel.split, case.parallel.prefetch) == ((1, 3, 2, 2), 3)
    assert not case.parallel.keep_last_block
    assert job.config(config, layout).recompute == config.recompute
    assert predict(case) == predict(case_of(job.config(config, layout), dgx_a100()))
    assert set(job._schedules_of(4, 16)) >= {("1F1B", 1), ("GPipe", 1)}
    assert all(pp * stages == 4 for pp in (2, 4) for _, stages in job._schedules_of(pp, 16))
    assert job._schedules_of(1, 16) == []  # nothing is split


def test_shardings_agree_with_the_degrees_that_a_run_sets() -> None:
    job = Job(MODEL, Training(global_batch_size=64, sequence_length=512), dgx_a100(), gpus=16)
    mesh = DegreeMesh(pp=1, data=16, cp=1, tp=1)
    assert {sharding.dp_replicate for sharding in job.shardings(mesh)} == {1, 2, 4, 8}
    for fixed in ({"dp_replicate": 2}, {"dp_shard": 8}):
        shardings = replace(job, fixed=fixed).shardings(mesh)
        assert {(sharding.dp_replicate, sharding.dp_shard) for sharding in shardings} == {(2, 8)}
