"""Context parallelism trains the same model; tests of what travels with the tokens, is sent and is recomputed."""

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import tests.parity
import torchllm.parallel.context
import torchllm.parallel.ring
from tests.parallel.test_compile import TRACED, train_compiled
from tests.parity import CPU, Settings, Trained, build, check, compare, my_batches, reference, step_batch, tiny, train
from tests.parity import world_size as ranks_of
from tests.sampling import combinations
from tests.workers import run
from torchllm.config import Model
from torchllm.data.batch import Batch
from torchllm.data.packing import WHOLE_SEQUENCE, SequencePieces
from torchllm.models.attention import ScaledDotProductAttention
from torchllm.models.decoder import build_model
from torchllm.optim.optimizer import build_optimizer
from torchllm.optim.schedule import LearningRate
from torchllm.parallel.attention_kernels import CudaKernels, PartialAttention
from torchllm.parallel.context import UlyssesAttention, apply_context_parallel, sequence_pieces
from torchllm.parallel.mesh import build_mesh
from torchllm.parallel.pipeline import OneStage
from torchllm.parallel.ring import RingAttention
from torchllm.train.evaluate import evaluate
from torchllm.train.step import TrainStep

RING2: Settings = {"parallel.cp": 2, "training.micro_batch_size": 2}
ULYSSES2: Settings = {**RING2, "parallel.cp_method": "ulysses"}
METHODS = {"ring": RING2, "ulysses": ULYSSES2}
DOCUMENTS: Settings = {"data.document_mask": True}
GPT: Settings = {"model.family": "gpt", "model.kv_heads": 0, "model.tied_embeddings": True}
SP2: Settings = {"parallel.tp": 2, "parallel.sequence_parallel": True}
HSDP: Settings = {"parallel.dp_replicate": 2, "parallel.dp_shard": 2}

LAYOUTS: dict[str, Settings] = {  # the lattice has the others
    "4 documents": {"parallel.cp": 4, **DOCUMENTS},
    "2 gpt": {**GPT, **DOCUMENTS},
    "2 eager": {"model.attention": "eager"},
    "2 x tp+sp documents": {**SP2, **DOCUMENTS},
    "2 x pp": {"parallel.pp": 2, "parallel.schedule": "ZBVZeroBubble", **DOCUMENTS},
    "2 x hsdp documents": {**HSDP, **DOCUMENTS},
}


@pytest.mark.parametrize(("layout", "method"), combinations(LAYOUTS, METHODS))
def test_layout_trains_the_same_model(layout: Settings, method: Settings) -> None:
    check({**method, **layout}, ragged=True)


def test_the_kernel_of_a_gpu_is_checked_in_the_type_of_the_run() -> None:
    """This machine has no GPU: a mesh of its device type is enough for what happens before the first step."""
    config = tiny({"model.kv_heads": 2})
    with torch.device("meta"):
        stage = build_model(config.model)
    mesh = mock.Mock(device_type="cuda")
    with mock.patch.object(torchllm.parallel.context, "check_kernel") as check_kernel:
        apply_context_parallel(stage, mesh, "ring", torch.bfloat16)
    (call,) = check_kernel.call_args_list
    kernel, device, groups, width, dtype = call.args
    assert isinstance(kernel, CudaKernels)
    assert (device.type, groups, width, dtype) == ("cuda", 8 // 2, 64 // 8, torch.bfloat16)
    rings = [module for module in stage.modules() if isinstance(module, RingAttention)]
    assert [ring.kernel for ring in rings] == [kernel] * 4


def test_eight_ranks_in_a_ring() -> None:
    """Pieces of two tokens, fewer key-value heads than ranks."""
    check({"parallel.cp": 8, **DOCUMENTS, "model.layers": 2, "training.micro_batch_size": 8})


MODES = ("full", "segment", "every_k", "ffn", "selective", "selective_half")


@pytest.mark.parametrize(("method", "mode"), combinations(METHODS, {mode: mode for mode in MODES}))
def test_recompute_modes(method: Settings, mode: str) -> None:
    check({**method, **DOCUMENTS, "model.layers": 2, "recompute.mode": mode})


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(RING2, id="ring"),
        pytest.param({**RING2, **SP2, "recompute.mode": "segment"}, id="ring x tp+sp", marks=pytest.mark.every_run),
        pytest.param({**ULYSSES2, **DOCUMENTS}, id="ulysses"),
    ],
)
def test_compiled_blocks(settings: Settings) -> None:
    """The graphs break at the core: the code before it and the code after it are compiled."""
    settings = {**settings, "model.layers": 2, "compile.block": True}
    trained, graphs, breaks = run(train_compiled, ranks_of(tiny(settings)), settings, TRACED)[0]
    compare(trained, reference(settings))
    assert graphs >= 4
    assert breaks > 0


@pytest.mark.parametrize("mode", ["full", "selective", "selective_half"])
def test_why_compiled_blocks_refuse_a_recomputation_as_one(mode: str) -> None:
    """The model is right, but nothing is compiled, so the config refuses it. Once torch can, remove the refusal."""
    settings = {**ULYSSES2, "model.layers": 1, "compile.block": True, "recompute.mode": mode}
    trained, graphs, _ = run(train_compiled, 2, settings, TRACED)[0]
    compare(trained, reference(settings))
    assert graphs == 0


class RankStep(NamedTuple):
    """What one rank saw and counted in an evaluation and a step."""

    batches: list[Batch]
    """the rank's part of the micro batches"""
    tokens: int
    pairs: int
    validation_loss: float
    loss: float


def evaluate_and_step(method: str, documents: bool) -> RankStep:
    config = tiny({"parallel.cp": dist.get_world_size(), "parallel.cp_method": method, "data.document_mask": documents})
    mesh, stages = build(config)
    recorded: list[Batch] = []
    optimizer = build_optimizer(stages, config.optimizer)
    forward_backward = OneStage(stages, config.parallel)

    def record(batches: Any, scale: Tensor) -> Tensor:
        recorded.extend(batches)
        return forward_backward(batches, scale)

    rate = LearningRate(config.schedule, 1e-3, 10)
    batches = my_batches(config, mesh, 1, ragged=True)
    validation_loss = evaluate(forward_backward, batches, CPU, mesh)
    step = TrainStep(stages, record, optimizer, rate, mesh, config.training, CPU)
    result = step(1, batches)
    return RankStep(recorded, int(result.tokens), int(result.pairs), validation_loss, float(result.loss))


PIECES = {"ring": [[0, 7], [1, 6], [2, 5], [3, 4]], "ulysses": [[0, 1], [2, 3], [4, 5], [6, 7]]}  # eighths, of 4 ranks


@pytest.mark.parametrize(
    ("method", "documents"),
    combinations({name: name for name in METHODS}, {"documents": True, "no documents": False}),
)
def test_everything_of_a_token_travels_with_it_and_counts_once(method: str, documents: bool) -> None:
    whole = step_batch(tiny({"data.document_mask": documents}), 1, ragged=True)
    steps = run(evaluate_and_step, 4, method, documents)
    for rank, step in enumerate(steps):
        assert len(step.batches) == 8
        for row, batch in enumerate(step.batches):
            check_pieces(batch, whole, row, PIECES[method][rank])
        assert step.tokens == (whole.labels != -100).sum()
        assert step.pairs == (whole.positions + 1).sum()
        assert step.validation_loss == pytest.approx(step.loss, rel=1e-6)
        assert step.validation_loss == steps[0].validation_loss


def check_pieces(batch: Batch, whole: Batch, row: int, eighths: list[int]) -> None:
    """Assert that a batch of one sequence holds these eighths of sequence `row` of the whole batch."""
    for part, expected in zip(batch, whole, strict=True):
        assert (part is None) == (expected is None)
        if isinstance(part, Tensor) and isinstance(expected, Tensor):
            pieces = expected[row].chunk(8)
            assert torch.equal(part[0], torch.cat([pieces[index] for index in eighths]))


def test_one_rank_has_the_whole_sequence() -> None:
    assert run(pieces_of_one_rank, 1) == [WHOLE_SEQUENCE]


def pieces_of_one_rank() -> SequencePieces:
    return sequence_pieces(build_mesh(tiny({}).parallel, CPU))


class Sends(TorchDispatchMode):
    """Records the bytes that a rank sends over cp, collective by collective."""

    def __init__(self) -> None:
        super().__init__()
        self.ring: list[int] = []
        self.all_to_all: list[float] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() == "c10d::send":
            self.ring.append(args[0][0].nbytes)
        elif func.name() == "_c10d_functional::all_to_all_single":
            ranks = len(args[0])
            self.all_to_all.append(args[0].nbytes * (ranks - 1) / ranks)
        return func(*args, **(kwargs or {}))


def sends(settings: Settings) -> tuple[list[float], list[float]]:
    """Return the bytes sent in the forward and in the backward of one micro batch."""
    config = tiny(settings)
    mesh, (stage,) = build(config)
    batch = my_batches(config, mesh, 1, ragged=False)[0]
    with Sends() as forward:
        loss = stage(batch.tokens, batch.positions, batch.document_ids, batch.labels)
    with Sends() as backward:
        loss.backward()
    assert not (forward.ring and forward.all_to_all)
    return forward.ring + forward.all_to_all, backward.ring + backward.all_to_all


def test_bytes_of_ulysses() -> None:
    """(n - 1) / n of q, k and v, then of the output; the same backward. B 2, S 32, H 8, K 4, Q 8, float32."""
    for ranks in (2, 4):
        bytes_per_head = 2 * 32 // ranks * 8 * 4
        sent_per_head = bytes_per_head * (ranks - 1) / ranks
        q_k_v, out = (8 + 2 * 4) * sent_per_head, 8 * sent_per_head
        for forward, backward in run(sends, ranks, {**ULYSSES2, "parallel.cp": ranks, "model.layers": 2}):
            assert forward == [q_k_v, out, q_k_v, out]
            assert backward == [out, q_k_v, out, q_k_v]


@pytest.mark.parametrize("method", METHODS)
def test_selective_recomputation_sends_nothing_again(method: str) -> None:
    """`full` sends a whole forward again: all ranks recompute the same blocks in the same order."""

    def sends_of(mode: str) -> list[Any]:
        return run(sends, 2, {**METHODS[method], "recompute.mode": mode, "model.layers": 2})

    plain = sends_of("none")
    assert sends_of("selective") == plain
    assert sends_of("selective_half") == plain
    for (forward, backward), (full_forward, full_backward) in zip(plain, sends_of("full"), strict=True):
        assert full_forward == forward
        assert sum(full_backward) == sum(backward) + sum(forward)


def test_attention_cores_are_replaced_and_ulysses_keeps_the_models() -> None:
    assert run(cores, 2) == [None, None]


def cores() -> None:
    mesh = init_device_mesh("cpu", (2,))
    with torch.device("meta"):
        stages = [build_model(Model(layers=2)) for _ in range(2)]
    apply_context_parallel(stages[0], mesh, "ring", torch.float32)
    apply_context_parallel(stages[1], mesh, "ulysses", torch.float32)
    for ring, ulysses in zip(stages[0].layers.values(), stages[1].layers.values(), strict=True):
        assert isinstance(ring.self_attn.core, RingAttention)
        assert isinstance(ulysses.self_attn.core, UlyssesAttention)
        assert isinstance(ulysses.self_attn.core.core, ScaledDotProductAttention)
    core = mock.Mock(mask=lambda document_ids: "its mask")  # of a fork: not None, even without documents
    assert UlyssesAttention(mesh, core).mask(None) == "its mask"


# Defects put in on purpose: parity must fail with each.


def _replaced(target: Any, name: str, change: Callable[[Any], Any]) -> Any:
    """Replace an attribute by what `change` makes of it."""
    return mock.patch.object(target, name, change(getattr(target, name)))


def _with_part(field: str, cut: Callable[[Tensor], Tensor]) -> Any:
    """Cut one field of every batch differently."""

    def change(part_of_sequence: Any) -> Any:
        def wrong_part(batch: Batch, mesh: Any) -> Batch:
            return part_of_sequence(batch, mesh)._replace(**{field: cut(getattr(batch, field))})

        return wrong_part

    return _replaced(tests.parity, "part_of_sequence", change)


def positions_counted_from_zero_on_every_rank() -> Any:
    return _with_part("positions", lambda x: x.chunk(2, dim=1)[0])


def labels_of_contiguous_pieces() -> Any:
    return _with_part("labels", lambda x: x.chunk(2, dim=1)[dist.get_rank()])


def blocks_averaged() -> Any:
    """Blocks are merged without their log-sum-exp."""

    def average(into: PartialAttention, part: PartialAttention) -> None:
        into.out.add_(part.out).div_(2)
        into.lse.copy_(torch.logaddexp(into.lse, part.lse))

    return _replaced(torchllm.parallel.ring, "merge", lambda merge: average)


def lse_of_the_first_block_kept() -> Any:
    """Output and loss are right, but the backward takes probabilities that do not sum to one."""

    def change(merge: Any) -> Any:
        def merge_without_lse(into: PartialAttention, part: PartialAttention) -> None:
            merge(PartialAttention(into.out, into.lse.clone()), part)

        return merge_without_lse

    return _replaced(torchllm.parallel.ring, "merge", change)


def gradients_of_keys_and_values_left_where_they_are() -> Any:
    """The gradients that a rank computes of another rank's keys and values are lost."""

    def change(ring_backward: Any) -> Any:
        def backward(*args: Any) -> Any:
            waits: list[Any] = []  # over two ranks: of the keys and values, then of their gradients

            class LosesGradients(torchllm.parallel.ring.Exchange):
                def wait(self) -> Tensor:
                    waits.append(self)
                    received = super().wait()
                    return received if len(waits) == 1 else torch.zeros_like(received)

            with mock.patch.object(torchllm.parallel.ring, "Exchange", LosesGradients):
                return ring_backward(*args)

        return backward

    return _replaced(torchllm.parallel.ring, "ring_backward", change)


def later_keys_seen() -> Any:
    """Queries see all keys of an earlier rank, those of its late piece too."""

    def change(init: Any) -> Any:
        def init_with_all_keys(self: Any, ring: Any, number: int, length: int) -> None:
            init(self, ring, number, length)
            self.keys = slice(0, length)

        return init_with_all_keys

    return _replaced(torchllm.parallel.ring.RingStep, "__init__", change)


@contextlib.contextmanager
def documents_of_this_rank_for_all() -> Iterator[None]:
    """Every rank takes its own document ids for those of the other ranks."""

    def repeat(x: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
        return [x] * dist.get_world_size(group)

    with (
        mock.patch.object(torchllm.parallel.ring, "gather_from_ranks", repeat),
        mock.patch.object(torchllm.parallel.context, "gather_from_ranks", repeat),
    ):
        yield


def gradient_not_sent_back() -> Any:
    """Ulysses: the gradients of heads stay on the rank that computed them."""
    unsent = staticmethod(lambda ctx, gradient: (gradient, None))
    return mock.patch.object(torchllm.parallel.context._AllToAll, "backward", unsent)


def heads_in_the_wrong_order() -> Any:
    """Ulysses: a rank gets its neighbour's heads; forward and backward agree with each other."""

    def change(all_to_all: Any) -> Any:
        return lambda x, group: all_to_all(x, group).flip(0)

    return _replaced(torchllm.parallel.context, "all_to_all", change)


GRADIENT = "step 1.*gradient differs by"
MUTATIONS: list[tuple[Callable[[], Any], Settings]] = [
    (positions_counted_from_zero_on_every_rank, RING2),
    (positions_counted_from_zero_on_every_rank, ULYSSES2),
    (labels_of_contiguous_pieces, RING2),
    (blocks_averaged, RING2),
    (lse_of_the_first_block_kept, RING2),
    (gradients_of_keys_and_values_left_where_they_are, RING2),
    (later_keys_seen, RING2),
    (documents_of_this_rank_for_all, {**RING2, **DOCUMENTS}),
    (documents_of_this_rank_for_all, {**ULYSSES2, **DOCUMENTS}),
    (gradient_not_sent_back, ULYSSES2),
    (heads_in_the_wrong_order, ULYSSES2),
]


def train_mutated(index: int) -> Trained | None:
    mutation, settings = MUTATIONS[index]
    with mutation():
        return train({**settings, "model.layers": 2})


@pytest.mark.parametrize("index", range(len(MUTATIONS)), ids=lambda i: f"{MUTATIONS[i][0].__name__}-{i}")
def test_parity_fails_with(index: int) -> None:
    trained = run(train_mutated, 2, index)[0]
    with pytest.raises(AssertionError) as caught:
        compare(trained, reference({**MUTATIONS[index][1], "model.layers": 2}))
    assert re.search(GRADIENT, str(caught.value)), caught.value
