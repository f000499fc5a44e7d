"""What the literature recommends comes out of the planner: nothing of it is put in.

Hagemann et al. 2023 (arXiv 2311.05610) on their stack, 64 A100; Narayanan et al. 2021 (arXiv 2104.04473) on theirs,
64 to 3,072 A100; and what Stanford CS231n's lecture on large-scale training says of FSDP, HSDP and context parallelism,
on torchllm. docs/references.md lists them.
"""

from dataclasses import replace
from itertools import product

import pytest

from recipes.plan import read_hardware, read_model
from torchllm.config import Parallel, Recompute, Training
from torchllm.planner.case import Case
from torchllm.planner.compute import Kernels
from torchllm.planner.evidence.stacks import STACKS
from torchllm.planner.predict import Prediction, predict
from torchllm.planner.search.layouts import Job, Layout
from torchllm.planner.search.search import search

DGX = read_hardware("dgx_a100")
HAGEMANN = [("llama_13b", 2048), ("llama_13b", 8192), ("llama_30b", 2048), ("llama_30b", 8192), ("llama_65b", 2048)]


def hagemann(model: str, length: int, sequence_parallel: bool = False) -> dict[Layout, Prediction]:
    """Return what fits of the sweeps of Hagemann et al.: FlashAttention 2, fused RMSNorm, ZeRO-1, 1F1B, 4M tokens."""
    predictions = {}
    config = read_model(model).config
    kernels = Kernels("flash2", fused_norm=True)
    software = STACKS["aleph-alpha-megatron-2023"]
    for tp, pp, size, mode in product((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8), ("none", "full")):
        training = Training(micro_batch_size=size, global_batch_size=2048 * 2048 // length, sequence_length=length)
        dp = 64 // tp // pp
        parallel = Parallel(pp=pp, dp_shard=dp, tp=tp, sequence_parallel=sequence_parallel and tp > 1, zero_stage=1)
        prediction = predict(Case(config.model, training, parallel, Recompute(mode), kernels, DGX, software))
        if prediction.fits:
            layout = Layout(pp, 1, dp, 1, tp, micro_batch_size=size, recompute=mode)
            predictions[layout] = prediction
    return predictions


def fastest(predictions: dict[Layout, Prediction], **settings: object) -> Layout:
    """Return the fastest layout of those with these settings."""
    candidates = []
    for layout in predictions:
        if all(getattr(layout, key) == value for key, value in settings.items()):
            candidates.append(layout)
    return min(candidates, key=lambda layout: predictions[layout].step)


@pytest.mark.parametrize(("model", "length"), HAGEMANN)
def test_micro_batch_1(model: str, length: int) -> None:
    """Or a larger one is predicted less than 3 % faster: of 13B on pp 2 a micro batch of 2 is."""
    predictions = hagemann(model, length, sequence_parallel=True)
    one_sequence = fastest(predictions, micro_batch_size=1)
    assert predictions[one_sequence].step < 1.03 * predictions[fastest(predictions)].step


@pytest.mark.parametrize(("model", "length"), HAGEMANN)
def test_model_parallelism_before_checkpointing(model: str, length: int) -> None:
    predictions = hagemann(model, length)
    without = fastest(predictions, recompute="none")
    checkpointed = fastest(predictions, recompute="full")
    assert predictions[without].step < 0.95 * predictions[checkpointed].step
    assert without.tp * without.pp >= checkpointed.tp * checkpointed.pp


def test_larger_micro_batches_only_when_parallelism_cannot_shrink() -> None:
    """Where nothing is split a larger micro batch is best; where it would cost more splitting it is not."""
    config = read_model("llama3_8b").config
    small = Job(replace(config.model, layers=8), Training(global_batch_size=512, sequence_length=2048), DGX, 64)
    alone = search(small, 1).best[0].layout
    assert (alone.pp, alone.tp, alone.cp) == (1, 1, 1)
    assert alone.micro_batch_size > 1
    predictions = hagemann("llama_65b", 2048, sequence_parallel=True)
    narrow, wide = fastest(predictions, micro_batch_size=1), fastest(predictions, micro_batch_size=4)
    assert wide.tp * wide.pp > narrow.tp * narrow.pp
    assert predictions[wide].step > predictions[narrow].step


def test_sequence_parallelism_beyond_30b_or_2k() -> None:
    gains = {}
    for model, length in HAGEMANN:
        without, shared = hagemann(model, length), hagemann(model, length, sequence_parallel=True)
        gains[model, length] = 1 - shared[fastest(shared)].step / without[fastest(without)].step
    assert gains["llama_13b", 2048] == 0  # its best layout has no tp
    assert min(gains["llama_65b", 2048], gains["llama_13b", 8192], gains["llama_30b", 8192]) > 0.01


def narayanan(pp: int, tp: int, batch: int, size: int = 1, gpus: int = 64, v: int = 1, **sizes: int) -> Prediction:
    """Return a layout of Narayanan et al.: Megatron's fused softmax, full recomputation, DDP, 2,048 tokens."""
    model = replace(read_model("gpt_145b").config.model, ffn=4 * sizes["hidden"], vocab=51200, **sizes)
    training = Training(micro_batch_size=size, global_batch_size=batch, sequence_length=2048)
    schedule = "Interleaved1F1B" if v > 1 else "1F1B"
    dp = gpus // pp // tp
    parallel = Parallel(pp=pp, tp=tp, dp_shard=dp, zero_stage=0, schedule=schedule, virtual_stages=v)
    kernels = Kernels("fused_softmax", fused_norm=True)
    return predict(Case(model, training, parallel, Recompute("full"), kernels, DGX, STACKS["megatron-2021"]))


def test_tensor_parallel_up_to_the_node_then_pipeline() -> None:
    """Figure 13: 162 billion parameters on 64 GPUs, 8 a node."""
    step = {}
    for tp in (2, 4, 8, 16, 32):
        step[tp] = narayanan(64 // tp, tp, 32, layers=32, hidden=20480, heads=128).step
    assert min(step, key=lambda tp: step[tp]) == 8
    assert step[32] > 1.2 * step[8]
    assert step[2] > 1.2 * step[8]


def test_interleaving_and_less_of_it_with_larger_batches() -> None:
    """Figure 12: 175 billion parameters on 96 GPUs."""
    gains = []
    for batch in (12, 24, 60):
        plain = narayanan(12, 8, batch, gpus=96, layers=96, hidden=12288, heads=96)
        interleaved = narayanan(12, 8, batch, gpus=96, v=2, layers=96, hidden=12288, heads=96)
        gains.append(plain.step / interleaved.step - 1)
    assert gains == sorted(gains, reverse=True)
    assert gains[0] > 0.10 > gains[-1] > 0


def test_the_best_micro_batch_depends_on_the_problem() -> None:
    """Figure 16: 91 billion parameters on 64 GPUs, (tp, pp) = (8, 8)."""
    best = {}
    for batch in (128, 512):
        steps = {}
        for size in (1, 2, 4, 8):
            steps[size] = narayanan(8, 8, batch, size, layers=32, hidden=15360, heads=128).step
        best[batch] = min(steps, key=lambda size: steps[size])
        assert best[batch] not in (1, 8)
    assert best[128] < best[512]


def test_fewer_model_parallel_ranks_and_more_data_parallel() -> None:
    """Figures 14 and 15: 5.9 billion parameters on 64 GPUs."""
    for axis in ("pp", "tp"):
        steps = []
        for degree in (2, 4, 8, 16, 32):
            degrees = {"pp": 1, "tp": 1, axis: degree}
            steps.append(narayanan(**degrees, batch=512, layers=32, hidden=3840, heads=32).step)
        assert steps == sorted(steps)


def test_shards_stay_in_the_node_once_there_are_many() -> None:
    """HSDP, its shards on the 8 GPUs of a node, against FSDP over 256, zero_stage 3."""
    config = read_model("llama3_8b").config
    training = Training(global_batch_size=512, sequence_length=4096)
    job = Job(config.model, training, read_hardware("dgx_h100"), 256)
    hsdp = predict(job.case(Layout(pp=1, dp_replicate=32, dp_shard=8, cp=1, tp=1)))
    fsdp = predict(job.case(Layout(pp=1, dp_replicate=1, dp_shard=256, cp=1, tp=1)))
    assert hsdp.step < fsdp.step


@pytest.mark.parametrize(("model", "gpus"), [("llama_65b", 64), ("llama3_70b", 128), ("gpt_145b", 128)])
def test_the_axis_that_sends_most_stays_in_the_node(model: str, gpus: int) -> None:
    config = read_model(model).config
    training = Training(global_batch_size=512, sequence_length=2048)
    best = search(Job(config.model, training, DGX, gpus), 10).best
    assert all(ranked.layout.tp <= 8 for ranked in best)


@pytest.mark.parametrize(
    ("model", "length", "batch", "takes_cp"),
    [
        ("llama3_8b", 2048, 512, False),
        ("llama3_8b", 8192, 128, False),
        ("llama3_70b", 2048, 512, False),
        ("llama3_8b", 131072, 32, True),
        ("llama3_70b", 131072, 32, True),
    ],
)
def test_context_parallelism_when_activations_are_the_limit_not_weights(
    model: str, length: int, batch: int, takes_cp: bool
) -> None:
    config = read_model(model).config
    training = Training(global_batch_size=batch, sequence_length=length)
    job = Job(config.model, training, read_hardware("dgx_h100"), 64)
    assert (search(job, 1).best[0].layout.cp > 1) == takes_cp
