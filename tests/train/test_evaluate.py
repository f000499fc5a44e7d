"""Validation loss and bits per byte: the token-weighted mean over all ranks and batches, and nothing left behind."""

import math
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.parity import CPU, Settings, Trainer, rows_of, step_batch, tiny
from tests.workers import run
from torchllm.config import Config
from torchllm.config.errors import UserError
from torchllm.data.batch import Batch
from torchllm.models.decoder import Decoder, build_model
from torchllm.optim.grad_norm import gradients
from torchllm.parallel.forward_backward import OneStage
from torchllm.parallel.initialize import initialize
from torchllm.train.evaluate import evaluate

SMALL: Settings = {"model.layers": 2, "data.document_mask": True}
LAYOUTS: dict[str, Settings] = {
    "fsdp2, last block freed": {"parallel.dp_shard": 2, "parallel.keep_last_block": False},
    "tp2+sp": {"parallel.tp": 2, "parallel.sequence_parallel": True},
    "pp2, zero bubble": {"parallel.pp": 2, "parallel.schedule": "ZBVZeroBubble", "model.layers": 4},
    "cp2, chunks, z-loss": {"parallel.cp": 2, "training.loss_chunk": 5, "training.z_loss": 1e-3},
}
"""the lattice compares the validation loss of the others"""


def plain(config: Config) -> Decoder:
    with torch.device("meta"):
        model = build_model(config.model)
    initialize([model], config.model, CPU, config.run.seed)
    return model


BYTES = torch.arange(96) % 5
"""bytes of each id; every fifth is a special token"""


def with_bytes(batch: Batch) -> Batch:
    return batch._replace(label_bytes=BYTES[batch.labels.clamp(min=0)].where(batch.labels != -100, 0))


def expected_loss(config: Config) -> list[float]:
    """The loss and the bits per byte, in float64, token by token."""
    batch = step_batch(config, 1, ragged=True)
    with torch.no_grad():
        logits = plain(config)(batch.tokens, batch.positions, batch.document_ids).double()
    labels = batch.labels.flatten().tolist()
    losses, bits, size = [], [], 0
    for row, label in zip(logits.flatten(0, 1), labels, strict=True):
        if label != -100:
            log_probabilities = row.log_softmax(0)
            losses.append(-float(log_probabilities[label]))
            size += int(BYTES[label])
            if BYTES[label]:
                bits.append(losses[-1] / math.log(2))
    return [math.fsum(losses) / len(losses), math.fsum(bits) / size]


def test_one_process_takes_the_mean_over_tokens_not_over_batches() -> None:
    config = tiny(SMALL)
    batch = step_batch(config, 1, ragged=True)
    batches = [rows_of(batch, slice(index, index + 1)) for index in range(len(batch.tokens))]
    assert (batches[0].labels == -100).all()  # a batch without any target
    model = plain(config)
    loss = evaluate(OneStage([model], config.parallel), map(with_bytes, batches), CPU)
    assert [loss, loss.bits_per_byte] == pytest.approx(expected_loss(config), rel=1e-6)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_no_batch_is_an_error_of_the_recipe() -> None:
    with pytest.raises(UserError, match="no batch"):
        evaluate(OneStage([], tiny({}).parallel), [], CPU)


def test_each_source_has_its_loss() -> None:
    config = tiny(SMALL)
    batch = step_batch(config, 1, ragged=True)
    rows = [with_bytes(rows_of(batch, slice(index, index + 1))) for index in range(len(batch.tokens))]
    last = len(rows) - 1  # the first has no target
    named = [row._replace(source="ab"[index == last]) for index, row in enumerate(rows)]
    one_stage = OneStage([plain(config)], config.parallel)
    loss = evaluate(one_stage, named, CPU)
    for name, own in (("a", rows[:last]), ("b", rows[last:])):
        alone = evaluate(one_stage, own, CPU)
        of_source = loss.by_source[name]
        assert [of_source, of_source.bits_per_byte] == pytest.approx([alone, alone.bits_per_byte], rel=1e-12)
        assert not alone.by_source
    assert [loss, loss.bits_per_byte] == pytest.approx(expected_loss(config), rel=1e-6)


def test_a_uniform_model_over_bytes_has_8_bits_per_byte() -> None:
    config = tiny({**SMALL, "model.vocab": 256})
    batch = step_batch(config, 1, ragged=True)
    model = plain(config)
    assert model.lm_head is not None
    torch.nn.init.zeros_(model.lm_head.weight)
    one_stage = OneStage([model], config.parallel)
    bytes_of_labels = (batch.labels != -100).int()
    loss = evaluate(one_stage, [batch._replace(label_bytes=bytes_of_labels)], CPU)
    assert loss.bits_per_byte == pytest.approx(8.0, rel=1e-6)  # float32
    assert evaluate(one_stage, [batch], CPU).bits_per_byte is None  # its bytes are unknown
    assert evaluate(one_stage, [batch._replace(label_bytes=0 * bytes_of_labels)], CPU).bits_per_byte is None


class KnownLosses:
    """A ForwardBackward whose loss sum of a batch is the number that is its only token."""

    stages: Sequence[Decoder] = ()

    def __call__(self, batches: Sequence[Batch], scale: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def loss_sum(self, batch: Batch) -> torch.Tensor:
        return batch.tokens.sum().float()


def test_losses_and_tokens_are_summed_in_float64() -> None:
    """float32 knows no odd numbers over 2^24: added to one, a loss of 1 would be lost."""
    losses = [2**24, *[1] * 100]
    label = torch.zeros(1, 1, dtype=torch.int64)
    batches = [Batch(torch.full((1, 1), loss), label, torch.zeros_like(label), None) for loss in losses]
    assert evaluate(KnownLosses(), batches, CPU) == sum(losses) / len(losses)


def evaluate_layout(settings: Settings) -> list[float | None]:
    """Return the loss and the bits per byte on this rank, which trains on as if it had not been evaluated."""
    trainer = Trainer(tiny({**SMALL, **settings}))
    stage, batches = trainer.stages[0], trainer.batches(1, ragged=True)

    def gradients_of_a_step() -> list[bytes]:
        stage.zero_grad()
        trainer.forward_backward(batches, torch.tensor(1e-2))
        return [gradient.to_local().numpy().tobytes() for gradient in gradients([stage])]

    expected = gradients_of_a_step()
    loss = evaluate(trainer.forward_backward, map(with_bytes, batches), CPU, trainer.mesh)
    # what FSDP gathers in a forward without a backward is no parameter
    assert all(isinstance(parameter, DTensor) for parameter in stage.parameters()), settings
    assert gradients_of_a_step() == expected != [], settings
    return [loss, loss.bits_per_byte]


def evaluate_layouts(layouts: dict[str, Settings]) -> dict[str, list[float | None]]:
    losses = {name: evaluate_layout(settings) for name, settings in layouts.items()}
    dist.barrier()
    return losses


def check_evaluations(ranks: int, layouts: dict[str, Settings]) -> None:
    expected = {name: expected_loss(tiny({**SMALL, **settings})) for name, settings in layouts.items()}
    for evaluated in run(evaluate_layouts, ranks, layouts):
        for name, figures in expected.items():
            assert evaluated[name] == pytest.approx(figures, rel=1e-6), name


def test_a_layout_evaluates_the_same_model_and_trains_on() -> None:
    check_evaluations(2, LAYOUTS)


def test_pipelines_beside_each_other_evaluate_the_same_model() -> None:
    """The ranks of a pipeline have other numbers in the job than in their group."""
    check_evaluations(4, {"fsdp": {**LAYOUTS["pp2, zero bubble"], "parallel.dp_shard": 2}})


def evaluate_in_bfloat16(settings: Settings) -> float:
    trainer = Trainer(tiny({**SMALL, **settings}), torch.bfloat16)
    return evaluate(trainer.forward_backward, trainer.batches(1, ragged=True), CPU, trainer.mesh)


def test_a_pipeline_in_bfloat16_evaluates_as_one_rank_does() -> None:
    """To the bit: what one stage sends is what the next block would have got."""
    (expected,) = run(evaluate_in_bfloat16, 1, {})
    assert run(evaluate_in_bfloat16, 2, {"parallel.pp": 2}) == [expected] * 2
