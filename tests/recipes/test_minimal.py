import ast
import subprocess
import sys
from pathlib import Path

import pytest

from recipes import minimal
from tests.recipes.warm import alone, pretrain
from tests.test_architecture import imports
from tests.tiny_run import ROOT, STEPS, metrics
from torchllm.config import Config, Data, Model, Run, Source, Training
from torchllm.recipe import HOMES


def test_it_trains_the_same_model_as_pretrain_on_two_ranks(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    losses = minimal.main(alone(trained))
    expected = [record["loss"] for record in metrics(trained)]
    assert len(losses) == STEPS
    assert losses == pytest.approx(expected, rel=1e-6)  # sums of another order, then AdamW: 1e-7 has been seen
    assert losses[-1] < losses[0] - 0.3
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == STEPS
    for n, line in enumerate(lines, 1):
        assert line.startswith(f"step {n}  loss ")


@pytest.mark.exhaustive
def test_it_balances_experts_as_pretrain_does_on_two_ranks_that_share_them(tmp_path: Path) -> None:
    balance = ["--model.balance_loss=global", "--model.balance_weight=0.3", "--model.router_bias=true"]
    experts = ["--model.experts=8", "--model.shared_experts=1", "--model.router_bias_rate=0.02", *balance]
    assert pretrain(2, tmp_path, *experts, "--parallel.ep=2", "--run.seed=1") == ["", ""]
    expected = [record["loss"] for record in metrics(tmp_path)]
    assert minimal.main(alone(tmp_path)) == pytest.approx(expected, rel=1e-6)


def test_weights_in_bfloat16_are_refused_where_they_would_change_the_computation() -> None:
    """On a CPU the computation is in float32 by default."""
    config = Config(
        model=Model(layers=1, hidden=32, heads=2, kv_heads=1, ffn=64, vocab=64),
        data=Data(sources=(Source(kind="synthetic"),)),
        training=Training(steps=1, sequence_length=16, global_batch_size=1, weights_dtype="bfloat16"),
        run=Run(device="cpu"),
    )
    with pytest.raises(SystemExit, match=r"this recipe computes in it, too: set training\.dtype to it"):
        minimal.main(config)


WITHOUT_TOOLS = """
import sys
sys.modules["torchllm.tools"] = None  # an import of a tool fails
from recipes import minimal
from torchllm.config import Config, Data, Model, Run, Source, Training
config = Config(
    model=Model(layers=1, hidden=32, heads=2, kv_heads=1, ffn=64, vocab=64),
    data=Data(sources=(Source(kind="synthetic"),)),
    training=Training(steps=2, sequence_length=16, global_batch_size=2, micro_batch_size=1),
    run=Run(device="cpu"),
)
assert len(minimal.main(config)) == 2
"""


def test_it_trains_without_any_tool() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT_TOOLS], cwd=ROOT, check=True)


def test_it_is_for_reading_and_uses_no_parallelism() -> None:
    source = Path(minimal.__file__)
    names = {name.rpartition(".")[2] for name in imports(source)}
    modules = {HOMES[name] for name in names & HOMES.keys()}
    assert len(modules) > 8
    for module in modules - {"torchllm.parallel.initialize"}:  # which works without ranks
        assert not module.startswith(("torchllm.parallel", "torchllm.checkpoint", "torch.distributed")), module
    assert len(ast.parse(source.read_text()).body) < 25
