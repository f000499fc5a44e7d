import math
from pathlib import Path

import pytest

from recipes import evaluate
from tests.recipes.warm import alone
from tests.tiny_run import metrics
from torchllm.checkpoint.manifest import CheckpointError

FIRST_CHECKPOINT = "--checkpoint.resume={}/checkpoints/step-00000004"


@pytest.mark.parametrize(("step", "overrides"), [(8, []), (4, [FIRST_CHECKPOINT])])
def test_it_is_what_pretrain_logged(
    trained: Path, capsys: pytest.CaptureFixture[str], step: int, overrides: list[str]
) -> None:
    logged = {record["step"]: record.get("validation_loss") for record in metrics(trained)}
    assert logged[8] < logged[4] < math.log(264)
    arguments = [override.format(trained) for override in overrides]
    config = alone(trained, *arguments)
    loss = evaluate.main(config)
    assert loss == pytest.approx(logged[step], rel=1e-6)  # a float64 sum of float32 losses, over 1 rank instead of 2
    perplexity = math.exp(loss)
    line = f"step {step}  validation loss {loss:.4f} nats/token  perplexity {perplexity:.3f}\n"
    assert capsys.readouterr().out == line


def test_it_reads_as_many_sequences_as_asked(trained: Path) -> None:
    one_sequence = alone(trained, "--evaluate.sequences=1")
    forty_sequences = alone(trained, "--evaluate.sequences=40")
    difference = evaluate.main(one_sequence) - evaluate.main(forty_sequences)
    assert abs(difference) > 1e-3


def test_no_checkpoint_is_an_error(trained: Path, tmp_path: Path) -> None:
    empty_folder = alone(trained, f"--run.folder={tmp_path}")
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        evaluate.main(empty_folder)
