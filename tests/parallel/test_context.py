"""Context parallelism trains the same model; tests of what travels with the tokens, is sent and is recomputed."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import torchllm.parallel.context
import torchllm.parallel.ring
from tests.parallel.test_compile import TRACED, train_compiled
from tests.parity import CPU, Settings, Trainer, build, compare, my_batches, reference, step_batch, tiny
from tests.workers import run
from torchllm.config import Model
from torchllm.data.batch import Batch
from torchllm.models.attention import ScaledDotProductAttention
from torchllm.models.attention_kernels import CudaKernels
from torchllm.models.decoder import build_model
from torchllm.parallel.context import UlyssesAttention, apply_context_parallel
from torchllm.parallel.ring import RingAttention
from torchllm.train.evaluate import evaluate

RING2: Settings = {"parallel.cp": 2, "training.micro_batch_size": 2}
ULYSSES2: Settings = {**RING2, "parallel.cp_method": "ulysses"}
METHODS = {"ring": RING2, "ulysses": ULYSSES2}
DOCUMENTS: Settings = {"data.document_mask": True}


def test_the_kernel_of_a_gpu_is_checked_in_the_type_of_the_run() -> None:
    """This machine has no GPU: a mesh of its device type is enough for what happens before the first step."""
    config = tiny({"model.kv_heads": 2})
    with torch.device("meta"):
        stage = build_model(config.model)
    mesh = mock.Mock(device_type="cuda")
    with mock.patch.object(torchllm.parallel.context, "check_kernel") as check_kernel:
        apply_context_parallel(stage, mesh, "ring", torch.bfloat16, 32)
    (call,) = check_kernel.call_args_list
    kernel, device, groups, width, dtype = call.args
    assert isinstance(kernel, CudaKernels)
    assert (device.type, groups, width, dtype) == ("cuda", 8 // 2, 64 // 8, torch.bfloat16)
    rings = [module for module in stage.modules() if isinstance(module, RingAttention)]
    assert [ring.kernel for ring in rings] == [kernel] * 4


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", METHODS)
def test_compiled_blocks(method: str) -> None:
    """The graphs break at the core: the code before it and the code after it are compiled."""
    settings = {**METHODS[method], **DOCUMENTS, "model.layers": 2, "compile.block": True}
    trained, graphs, breaks = run(train_compiled, 2, settings, TRACED)[0]
    compare(trained, reference(settings))
    assert graphs >= 4
    assert breaks > 0


@pytest.mark.exhaustive
def test_why_compiled_blocks_refuse_a_recomputation_as_one() -> None:
    """The model is right, but nothing is compiled, so the config refuses it. Once torch can, remove the refusal."""
    settings = {**ULYSSES2, "model.layers": 1, "compile.block": True, "recompute.mode": "full"}
    trained, graphs, _ = run(train_compiled, 2, settings, TRACED)[0]
    compare(trained, reference(settings))
    assert graphs == 0


def evaluate_and_step(method: str, documents: bool) -> float:
    """Check what this rank of 4 gets of the batches and counts of a step; return its validation loss."""
    trainer = Trainer(tiny({"parallel.cp": 4, "parallel.cp_method": method, "data.document_mask": documents}))
    batches = trainer.batches(1, ragged=True)
    whole = step_batch(trainer.config, 1, ragged=True)
    assert len(batches) == 8
    for row, batch in enumerate(batches):
        check_pieces(batch, whole, row, PIECES[method][dist.get_rank()])
    validation_loss = evaluate(trainer.forward_backward, batches, CPU, trainer.mesh)
    result = trainer.step(1, batches)
    assert result.tokens == (whole.labels != -100).sum()
    assert result.pairs == (whole.positions + 1).sum()
    assert validation_loss == pytest.approx(float(result.loss), rel=1e-6)
    return validation_loss


def check_pieces(batch: Batch, whole: Batch, row: int, eighths: list[int]) -> None:
    """Assert that a batch of one sequence holds these eighths of sequence `row` of the whole batch."""
    for part, expected in zip(batch, whole, strict=True):
        assert (part is None) == (expected is None)
        if isinstance(part, Tensor) and isinstance(expected, Tensor):
            pieces = expected[row].chunk(8)
            assert torch.equal(part[0], torch.cat([pieces[index] for index in eighths]))


PIECES = {"ring": [[0, 7], [1, 6], [2, 5], [3, 4]], "ulysses": [[0, 1], [2, 3], [4, 5], [6, 7]]}  # eighths, of 4 ranks


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


@pytest.mark.parametrize(("method", "documents"), [("ring", True), ("ulysses", False)])
def test_everything_of_a_token_travels_with_it_and_counts_once(method: str, documents: bool) -> None:
    losses = run(evaluate_and_step, 4, method, documents)
    assert losses == losses[:1] * 4


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
    apply_context_parallel(stages[0], mesh, "ring", torch.float32, 32)
    apply_context_parallel(stages[1], mesh, "ulysses", torch.float32, 32)
    for ring, ulysses in zip(stages[0].layers.values(), stages[1].layers.values(), strict=True):
        assert isinstance(ring.self_attn.core, RingAttention)
        assert isinstance(ulysses.self_attn.core, UlyssesAttention)
        assert isinstance(ulysses.self_attn.core.core, ScaledDotProductAttention)
    core = mock.Mock(mask=lambda document_ids: "its mask")  # of a fork: not None, even without documents
    assert UlyssesAttention(mesh, core).mask(None) == "its mask"
