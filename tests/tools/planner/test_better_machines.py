"""A better machine makes no layout slower: layouts at random of shipped models, on their machine and eight better ones.

By default 150 layouts; `pytest -m exhaustive tests/tools/planner/test_better_machines.py` takes 10,000.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import pytest

from tests.tools.planner.test_comms import cluster
from torchllm.config import Training
from torchllm.tools.planner.cluster import AttentionRates, Hardware, Link
from torchllm.tools.planner.predict import predict
from torchllm.tools.planner.search.layouts import Job, Layout
from torchllm.tools.planner.search.question import read_model
from torchllm.tools.planner.simulate import StageTimes
from torchllm.tools.planner.stage import KernelCounts, paced_by_host

MODELS = (
    *("llama3_1b", "llama3_8b", "llama3_70b", "llama3_405b", "gpt_7.5b", "gemma2_9b", "qwen3_14b"),
    *("mixtral_8x7b", "qwen3_30b_a3b", "qwen3_235b_a22b", "gpt_oss_20b", "moonlight_16b_a3b", "olmo_hybrid_7b"),
)
CLUSTERS = ("dgx_a100", "mosaic_a100_40gb", "dgx_h100", "hgx_h200", "hgx_b200", "gb200_nvl72", "aws_p5_h100", "mi300x")
GPUS = (8, 16, 24, 64, 72, 96, 128, 144, 256, 512)
LENGTHS = (1024, 2048, 4096, 8192, 32768, 131072)
ROUNDING = 1e-9
"""relative rounding error of a step"""
HIDDEN = 1e-3
"""by how much a step may be longer: a rank that waits anyway has a shorter backward to hide its reduction behind"""
FASTER = 1.3


def faster_links(hardware: Hardware, first: int, last: int, **factors: float) -> Hardware:
    """Return a machine whose links from `first` to before `last` have some figures times a factor."""

    def better(link: Link) -> Link:
        return replace(link, **{key: getattr(link, key) * factor for key, factor in factors.items()})

    links = list(hardware.links)
    links[first:last] = map(better, links[first:last])
    return replace(hardware, links=tuple(links))


def inner_links(hardware: Hardware) -> int:
    """Return the number of links that join a node, or a rack, at the rate of the innermost one."""
    return sum(link.gpus <= hardware.domain for link in hardware.links)


def faster_gpu(hardware: Hardware) -> Hardware:
    rates = {key: FASTER * value for key, value in vars(hardware.attention).items()}
    faster = replace(hardware, achievable=FASTER * hardware.achievable, attention=AttentionRates(**rates))
    return replace(faster, memory_bandwidth=FASTER * hardware.memory_bandwidth)


def larger_rack(hardware: Hardware) -> Hardware:
    """Return the machine with twice the GPUs on the fastest link, if more links join racks than one."""
    index = inner_links(hardware) - 1
    outer = hardware.links[index + 1 :]
    rack = replace(hardware.links[index], gpus=2 * hardware.domain)
    outer = tuple(link for link in outer if link.gpus > rack.gpus)
    if not outer or index == 0:  # a larger node is another machine, with other cards
        return hardware
    return replace(hardware, links=(*hardware.links[:index], rack, *outer))


BETTER: dict[str, Callable[[Hardware], Hardware]] = {
    "products": lambda hardware: replace(hardware, achievable=FASTER * hardware.achievable),
    "memory bandwidth": lambda hardware: replace(hardware, memory_bandwidth=FASTER * hardware.memory_bandwidth),
    "whole GPU": faster_gpu,
    "memory": lambda hardware: replace(hardware, memory=FASTER * hardware.memory),
    "NVLink": lambda hardware: faster_links(hardware, 0, inner_links(hardware), bandwidth=FASTER),
    "network": lambda hardware: faster_links(hardware, inner_links(hardware), 99, bandwidth=FASTER),
    "latency": lambda hardware: faster_links(hardware, 0, 99, latency=1 / FASTER),
    "rack": larger_rack,
}
"""eight machines that are better than another one"""


@cache
def random_job(seed: int) -> Job | None:
    """Return a job of a shipped model on a shipped cluster; None if it has no layout."""
    draw = random.Random(seed)
    model = read_model(draw.choice(MODELS)).config.model
    training = Training(global_batch_size=draw.choice([32, 64, 144, 512]), sequence_length=draw.choice(LENGTHS))
    job = Job(model, training, cluster(draw.choice(CLUSTERS)), draw.choice(GPUS))
    return job if any(not job.refusal(mesh) for mesh in job.meshes) else None


def random_layouts(seed: int, count: int) -> Iterator[tuple[Job, Layout]]:
    """Yield layouts that the config accepts, ten of a job."""
    draw = random.Random(seed)
    while count:
        job = random_job(draw.randrange(10**9))
        if job is None:
            continue
        meshes = [mesh for mesh in job.meshes if not job.refusal(mesh)]
        for _ in range(min(10, count)):
            mesh = draw.choice(meshes)
            size = draw.choice(list(job.pieces(mesh)))
            schedule, virtual_stages = draw.choice(job.schedules(mesh, size))
            sharding = draw.choice(job.shardings(mesh))
            layout = Layout(
                pp=mesh.pp,
                dp_replicate=sharding.dp_replicate,
                dp_shard=sharding.dp_shard,
                cp=mesh.cp,
                tp=mesh.tp,
                schedule=schedule,
                virtual_stages=virtual_stages,
                micro_batch_size=size,
                zero_stage=sharding.zero_stage,
                recompute=draw.choice(job.modes(mesh)),
                sequence_parallel=draw.choice(job.sequence_parallel(mesh)),
                cp_method=draw.choice(job.context_methods(mesh)),
                ep=sharding.ep,
            )
            count -= 1
            yield job, layout._replace(regather=draw.choice(job.regather(layout)))


def slower(job: Job, layout: Layout, by: float = ROUNDING) -> Iterator[str]:
    """Yield on which better machines a layout is slower. by: least share of a step that counts."""
    step = predict(job.case(layout)).step
    for name, better in BETTER.items():
        hardware = better(job.hardware)
        if hardware == job.hardware:
            continue
        change = predict(replace(job, hardware=hardware).case(layout)).step / step - 1
        if change > by:
            yield f"{name}: {change:+.2%}, {layout.text()} on {job.gpus} {job.hardware.gpu}, {job.model.layers} blocks"


def test_the_eight_machines_are_better() -> None:
    assert len(BETTER) == 8
    rack = cluster("gb200_nvl72")
    assert larger_rack(rack).domain == 144
    assert larger_rack(cluster("dgx_h100")) == cluster("dgx_h100")


def test_the_host_paces_a_whole_backward_where_it_is_one_pass() -> None:
    """With a floor of each part, a faster gradient of weights would leave the inputs' FSDP messages longer."""
    times, kernels = StageTimes(1.0, 3.0, 1.0), KernelCounts(0.0, 2.0, 2.0)
    assert paced_by_host(times, kernels, host=1.0, splits=False) == times
    assert paced_by_host(times, kernels, host=2.0, splits=False) == StageTimes(1.0, 7.0, 1.0)
    assert paced_by_host(times, kernels, host=1.0, splits=True) == StageTimes(1.0, 3.0, 2.0)


def test_a_better_machine_makes_no_layout_slower() -> None:
    assert [line for job, layout in random_layouts(0, 150) for line in slower(job, layout)] == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(1, 21))
def test_a_better_machine_makes_none_of_ten_thousand_layouts_clearly_slower(seed: int) -> None:
    assert [line for job, layout in random_layouts(seed, 500) for line in slower(job, layout, by=HIDDEN)] == []
