import ast
from pathlib import Path

import pytest

from recipes import minimal
from tests.recipes.warm import alone
from tests.test_architecture import imports
from tests.tiny_run import STEPS, metrics


def test_it_trains_the_same_model_as_pretrain_on_two_ranks(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    losses = minimal.main(alone(trained))
    wanted = [record["loss"] for record in metrics(trained)]
    assert len(losses) == STEPS
    assert losses == pytest.approx(wanted, rel=1e-6)  # sums of another order, then AdamW: 1e-7 has been seen
    assert losses[-1] < losses[0] - 0.3
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == [str(n + 1) for n in range(STEPS)]


def test_it_is_for_reading_and_uses_no_parallelism() -> None:
    source = Path(minimal.__file__)
    names = [name for name in imports(source) if name.startswith("torchllm.")]
    assert len(names) > 8
    assert not [name for name in names if name.split(".")[1] in ("parallel", "mesh", "checkpoint")]
    assert not [name for name in imports(source) if name.startswith("torch.distributed")]
    assert len(ast.parse(source.read_text()).body) < 25
