"""The blocks and the optimizers of docs/fork_a_recipe.md: the page's code trains the same model in every layout."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from textwrap import indent
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from tests import workers
from tests.test_docs import ROOT, code_of_section
from tests.tools.planner.test_model_files import MIDDLE, planned_bytes, traced_bytes
from torchllm.config import Config, Model
from torchllm.config.errors import UserError
from torchllm.facts.block_kinds import _KINDS, AddedParameter, BlockKind, register_block
from torchllm.facts.flops import block_flops, flops_per_token, parameter_count
from torchllm.facts.parameters import rule_of
from torchllm.facts.parts.registry import ADDED_PARAMETERS
from torchllm.models.attention import CORES
from torchllm.models.decoder import build_model
from torchllm.parallel.added_parameters import AddedParameters
from torchllm.parallel.context import apply_context_parallel
from torchllm.tools.config.load import load_config
from torchllm.tools.dry_run.repeats import find_repeats
from torchllm.tools.hub.config_json import NoFamily, family_to_export
from torchllm.tools.planner.parameters import StageSize, stage_parameters
from torchllm.tools.proof.layouts import Settings
from torchllm.tools.proof.prove import ProofOptions, Prover
from torchllm.tools.proof.recipe import find_parts, import_recipe

DEBUG = str(ROOT / "train_configs/debug.toml")
OPTIMIZER = "    optimizer = build_optimizer(stages, config.optimizer)\n"
RATE = "    learning_rate = LearningRate(config.schedule, config.optimizer.learning_rate, config.training.steps)\n"
PLAIN = Model(layers=2, hidden=64, heads=8, kv_heads=4, ffn=96, vocab=96)
GATED = replace(PLAIN, block="gated_attention")
GATE = 64 * 64
"""elements of its projection"""


@pytest.fixture(scope="module", autouse=True)
def _take_back() -> Iterator[None]:
    """Forget what these tests register."""
    kinds, rules = dict(_KINDS), dict(ADDED_PARAMETERS)
    yield
    for table, before in ((_KINDS, kinds), (ADDED_PARAMETERS, rules)):
        table.clear()
        table.update(before)  # type: ignore[arg-type]  # each by its own


def fork(file: Path, changes: dict[str, str]) -> Path:
    text = (ROOT / "recipes/pretrain.py").read_text()
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new, 1)
    file.write_text(text)
    return file


def block_fork(file: Path, changes: dict[str, str]) -> Path:
    """Return the fork with the page's gate and scale. changes: of texts of the page."""
    registration, gate, scale = code_of_section("A block with parameters of its own")
    guard, train = 'if __name__ == "__main__":', "\ndef train("
    for old, new in changes.items():
        assert old in registration + gate
        registration, gate = registration.replace(old, new), gate.replace(old, new)
    return fork(file, {guard: f"{registration}\n\n{guard}", train: f"\n{gate}\n\n{scale}\n\n{train}"})


SCALES = {
    '"gated_attention"': '"gated_and_scaled"',
    "bias=False)\n": "bias=False)\n        self.head_scale = Scale(model.heads * model.head_width)\n"
    "        self.out_scale = Scale(model.hidden)\n",
    "return self.o_proj(out * torch.sigmoid(self.g_proj(x)))": "gate = self.head_scale(torch.sigmoid(self.g_proj(x)))\n"
    "        return self.out_scale(self.o_proj(out * gate))",
    '                role="matrix",\n            ),\n': '                role="matrix",\n            ),\n'
    "            AddedParameter(\n"
    '                name="self_attn.head_scale.weight", shape=lambda m: (m.heads * m.head_width,),\n'
    '                cut="colwise", start="ones", role="vector",\n'
    "            ),\n"
    "            AddedParameter(\n"
    '                name="self_attn.out_scale.weight", shape=lambda m: (m.hidden,),\n'
    '                cut="whole", start="ones", role="vector",\n'
    "            ),\n",
}
"""scales of the heads and of the result, which are other cuts"""


def prover_of(file: Path, folder: Path, *overrides: str) -> Prover:
    config = load_config([DEBUG, *overrides], import_recipe(file).schema, one_device=True)
    folder.mkdir()
    return Prover(file, config, ProofOptions(2, "float32", 0, seed=0), folder, workers.POOL)


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Prover:
    folder = tmp_path_factory.mktemp("scaled")
    file = block_fork(folder / "mine.py", SCALES)
    return prover_of(file, folder / "proof", "--model.block=gated_and_scaled")


LAYOUTS: dict[str, Settings] = {
    "tp": {"parallel.tp": 2},
    "sp": {"parallel.tp": 2, "parallel.sequence_parallel": True},
    "pp": {"parallel.pp": 2},
}


@pytest.mark.exhaustive  # by default they are resumed with tensor parallelism, below
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gate_and_scales_of_a_fork_train_the_same_model(layout: str, scaled: Prover) -> None:
    asked = scaled.layout_like(LAYOUTS[layout])
    assert asked.items() >= LAYOUTS[layout].items()
    result = scaled.prove(asked)
    assert result.is_right, result.agreement.findings


def test_they_are_saved_and_resumed_in_another_layout(scaled: Prover) -> None:
    """Saved on two ranks with sharded weights, resumed on two with tensor parallelism."""
    result = scaled.prove_resumed()
    assert result.is_right, result.agreement.findings


@pytest.fixture
def gated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The page's own fork, as RECIPE names it, and registered by it."""
    file = block_fork(tmp_path / "page.py", {})
    monkeypatch.setenv("RECIPE", str(file))
    find_parts(GATED)
    return file


@pytest.mark.usefixtures("gated")
def test_its_size_flops_and_memory_are_counted() -> None:
    assert parameter_count(GATED) - parameter_count(PLAIN) == 2 * GATE
    assert flops_per_token(GATED, 32) - flops_per_token(PLAIN, 32) == 6 * 2 * GATE
    assert block_flops(GATED, 0, 32) - block_flops(PLAIN, 0, 32) == 2 * GATE
    stage = StageSize((0, 0), first=True, last=True)
    beyond = [stage_parameters(GATED, stage, tp) - stage_parameters(PLAIN, stage, tp) for tp in (1, 2)]
    assert beyond == [2 * GATE, GATE]
    register_block(added("self_attn.extra.weight"))
    normed = replace(PLAIN, block="other")
    assert stage_parameters(normed, stage, 2) - stage_parameters(PLAIN, stage, 2) == 2 * 64
    # The planner's formula is what the dry run sees of the page's code: 4 bytes for each feature of 2048 tokens.
    assert planned_bytes(GATED, MIDDLE) - planned_bytes(PLAIN, MIDDLE) == 4 * 64 * 2048
    assert traced_bytes(GATED, MIDDLE) - traced_bytes(PLAIN, MIDDLE) == 4 * 64 * 2048
    rule = rule_of("layers.1.self_attn.g_proj.weight")
    assert (rule.cut, rule.start, rule.role) == ("colwise", "normal", "matrix")


def test_flops_beyond_matrices_have_no_gradient_in_the_first_blocks_if_frozen() -> None:
    kind = BlockKind(name="costly", build=lambda block, model, index: block, parameters=(), flops=lambda model, s: 1000)
    register_block(kind)
    for frozen, passes in (("", 3 + 3), (r"embed_tokens.*|layers\.0\..*", 1 + 3)):
        plain = replace(PLAIN, frozen=frozen)
        assert flops_per_token(replace(plain, block="costly"), 32) - flops_per_token(plain, 32) == passes * 1000


@pytest.mark.usefixtures("gated")
@pytest.mark.parametrize("other", ["--lora.rank=4", "--model.from_hf=some/model"])
def test_what_it_does_not_combine_with_is_refused(other: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        load_config([DEBUG, "--model.block=gated_attention", other], one_device=True)
    assert refused.value.code == 2
    assert "model.block: 'gated_attention' does not combine with" in capsys.readouterr().err
    with pytest.raises(NoFamily, match=r"cannot have model\.block = 'gated_attention'"):
        family_to_export(GATED)


def test_a_block_that_is_not_registered_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RECIPE", raising=False)
    unknown = replace(PLAIN, block="unknown")
    for use in (find_parts, parameter_count):
        with pytest.raises(UserError, match=r"model.block: 'unknown' is not registered.*RECIPE"):
            use(unknown)


def added(name: str, width: int = 64) -> BlockKind:
    """Return a kind whose attention has a norm of q that is registered under a name, with a width."""

    def build(block: Any, model: Model, index: int) -> Any:
        block.self_attn.extra = nn.LayerNorm(64, bias=False)
        return block

    parameter = AddedParameter(name=name, shape=lambda model: (width,), cut="whole", start="ones", role="vector")
    return BlockKind(name="other", build=build, parameters=(parameter,))


def test_what_cannot_be_registered_is_refused() -> None:
    """Tensor parallelism would take an unknown cut for "whole_summed", and train another model."""
    for name, message in (
        ("self_attn.q_norm.weight", "is a parameter of other blocks"),
        ("self_attn.extra", "needs a module of its own"),
    ):
        with pytest.raises(UserError, match=message):
            register_block(added(name))
    kind = added("self_attn.extra.weight")
    with pytest.raises(UserError, match="needs a name"):
        register_block(replace(kind, name=""))
    (parameter,) = kind.parameters
    wrong: list[tuple[str, Any]] = [("cut", "columnwise"), ("cut", "vocab"), ("start", "normall"), ("role", "norm")]
    for key, value in wrong:
        message = f"block 'other': 'self_attn.extra.weight' has {key} '{value}', not one of "
        with pytest.raises(UserError, match=message):
            register_block(replace(kind, parameters=(replace(parameter, **{key: value}),)))
    for name, width in (("self_attn.extra.weight", 65), ("self_attn.other.weight", 64)):
        register_block(added(name, width))
        with pytest.raises(UserError, match=r"block 'other': self_attn.extra.weight: \(64,\) in the block"):
            build_model(replace(PLAIN, block="other"))


def test_a_module_that_cannot_be_cut_is_refused_by_name() -> None:
    style = AddedParameters("layers.0.self_attn.extra", {"whole"}, sequence_parallel=False)
    with pytest.raises(UserError, match=r"layers.0.self_attn.extra has parameters, but no attribute `local`"):
        style._apply(nn.LayerNorm(4), None)  # type: ignore[arg-type]  # refused before the mesh is asked
    with pytest.raises(UserError, match="cut differently"):
        AddedParameters("layers.0.self_attn.extra", {"whole", "colwise"}, sequence_parallel=False)


def windowed(block: Any, model: Model, index: int) -> Any:
    """Give every second block a window of 16 tokens."""
    block.self_attn.core = CORES[model.attention](replace(model, window=16 * (index % 2)))
    return block


def test_a_window_of_some_blocks_is_refused_where_it_would_be_dropped() -> None:
    """By a ring, and by the kernels whose blocks share a mask."""
    register_block(BlockKind(name="windowed", build=windowed, parameters=()))
    model = replace(PLAIN, block="windowed")
    assert find_repeats(Config(model=replace(PLAIN, layers=12))) is not None
    assert find_repeats(Config(model=replace(model, layers=12))) is None  # the dry run traces each of them
    with pytest.raises(UserError, match=r"model\.attention: eager has one mask for all blocks, and block 1"):
        build_model(replace(model, attention="eager"))
    stage = build_model(model)
    mesh = Mock(device_type="cpu")
    with pytest.raises(UserError, match="a ring would replace the attention core"):
        apply_context_parallel(stage, mesh, "ring", torch.float32, 32)
    apply_context_parallel(build_model(model), mesh, "ulysses", torch.float32, 32)


def optimizer_fork(file: Path, name: str) -> Path:
    """Return the fork with an optimizer of the page, and its schedule: a function, of which nothing is saved."""
    use_radam, lion, use_lion, schedule_free = code_of_section("An optimizer")
    (function,) = code_of_section("A learning-rate schedule")
    use = indent(use_radam, "    ") if name == "RAdam" else use_lion.replace("Lion", name)
    classes = f"\n{lion}\n\n{schedule_free}\n\ndef train("
    return fork(file, {"\ndef train(": classes, OPTIMIZER: use, RATE: function})


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["RAdam", "Lion", "ScheduleFreeSGD"])
def test_an_optimizer_of_the_page_with_its_schedule_trains_the_same_model_and_resumes(
    name: str, tmp_path: Path
) -> None:
    """In the layouts of the test above."""
    prover = prover_of(optimizer_fork(tmp_path / "mine.py", name), tmp_path / "proof")
    result = prover.prove_resumed()
    assert result.is_right, result.agreement.findings


def test_schedule_free_sgd_follows_the_paper() -> None:
    """Defazio et al. 2024, equations 3 to 5, on the loss (w - 1)^2 / 2."""
    names: dict[str, Any] = {"torch": torch}
    exec(code_of_section("An optimizer")[3], names)
    weight = nn.Parameter(torch.tensor([3.0, -2.0], dtype=torch.float64))
    optimizer = names["ScheduleFreeSGD"]([weight], beta=0.9)
    optimizer.param_groups[0]["lr"] = rate = 0.3
    x = z = weight.detach().clone()
    for step in range(1, 6):
        optimizer.train()
        y = 0.1 * z + 0.9 * x
        torch.testing.assert_close(weight.detach(), y, rtol=1e-12, atol=1e-12)
        weight.grad = weight.detach() - 1
        optimizer.step()
        optimizer.eval()
        z = z - rate * (y - 1)
        x = (1 - 1 / step) * x + z / step
        torch.testing.assert_close(weight.detach(), x, rtol=1e-12, atol=1e-12)
