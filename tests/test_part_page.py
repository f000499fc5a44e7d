"""The mixer of docs/add_a_part.md: the page's file is LFM2's, and trains the same model in every layout."""

import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests import workers
from tests.test_docs import ROOT
from tests.tools.planner.test_predict import case
from torchllm.config import Kinds, Model
from torchllm.facts.flops import block_flops, parameter_count
from torchllm.facts.parts.costs import RankShare
from torchllm.facts.parts.registry import ADDED_PARAMETERS, MIXERS_OF_FORKS
from torchllm.models.decoder import build_model
from torchllm.tools.continue_texts import caching
from torchllm.tools.front.resolve import load_model, load_sizes
from torchllm.tools.planner.predict import predict
from torchllm.tools.proof.layouts import Settings
from torchllm.tools.proof.prove import ProofOptions, Prover
from torchllm.tools.proof.recipe import MODULE, import_fork

PAGE = (ROOT / "docs/add_a_part.md").read_text()
(CODE,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
(TOML,) = re.findall(r"```toml\n(.*?)```", PAGE, re.S)
DOCUMENTS = "--data.document_mask=true"
MODEL = Model(
    layers=3,
    hidden=16,
    heads=4,
    ffn=24,
    vocab=31,
    pattern=("full", "full", "conv"),
    kinds=Kinds({"full": {}, "conv": {"mixer": "short_conv"}}),
)
RING: Settings = {"parallel.cp": 2, "parallel.cp_method": "ring"}
ULYSSES: Settings = {"parallel.cp": 2, "parallel.cp_method": "ulysses"}
SP: Settings = {"parallel.tp": 2, "parallel.sequence_parallel": True}
FULL: Settings = {"recompute.mode": "full"}


@pytest.fixture(scope="module")
def fork(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the page's file, with its config and the recipe that it imports."""
    folder = tmp_path_factory.mktemp("fork")
    shutil.copy(ROOT / "recipes/pretrain.py", folder)
    (folder / "conv.toml").write_text(TOML)
    file = folder / "short_conv.py"
    file.write_text(CODE)
    return file


@pytest.fixture(scope="module")
def module(fork: Path) -> Iterator[ModuleType]:
    """Return the imported file, and forget it at the end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path])
        patch.delitem(sys.modules, MODULE, raising=False)
        yield import_fork(fork)
        for table in (MIXERS_OF_FORKS, ADDED_PARAMETERS):
            table.clear()


@pytest.mark.quick
def test_it_is_short() -> None:
    assert len(CODE.splitlines()) <= 120


def prover_of(fork: Path) -> Prover:
    config = load_sizes([str(fork.parent / "conv.toml"), DOCUMENTS])
    folder = fork.parent / f"proof of {fork.stem}"
    folder.mkdir()
    return Prover(fork, config, ProofOptions(4, "float32", 0, seed=0), folder, workers.POOL)


@pytest.fixture(scope="module")
def prover(fork: Path, module: ModuleType) -> Prover:
    return prover_of(fork)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(SP, id="sp", marks=pytest.mark.exhaustive),
        pytest.param(RING, id="ring"),
        pytest.param({"parallel.pp": 2, **FULL}, id="pp, recomputed"),
        pytest.param({**SP, **RING}, id="sp, ring", marks=pytest.mark.exhaustive),
        pytest.param({"parallel.tp": 2, **ULYSSES}, id="tp, ulysses", marks=pytest.mark.exhaustive),
        pytest.param({"parallel.pp": 2, **RING}, id="pp, ring", marks=pytest.mark.exhaustive),
        pytest.param({"parallel.tp": 2, "parallel.pp": 2}, id="tp, pp", marks=pytest.mark.exhaustive),
        pytest.param({**RING, "recompute.mode": "selective"}, id="ring, selective", marks=pytest.mark.exhaustive),
    ],
)
def test_a_layout_trains_the_same_model_with_documents(layout: Settings, prover: Prover) -> None:
    asked = prover.layout_like(layout)
    assert asked.items() >= layout.items()
    assert prover.space.config(asked).data.document_mask
    result = prover.prove(asked)
    assert result.is_right, result.agreement.findings


@pytest.mark.exhaustive
def test_it_is_resumed_in_another_layout(prover: Prover) -> None:
    result = prover.prove_resumed()
    assert result.is_right, result.agreement.findings


@pytest.mark.exhaustive
def test_a_fused_projection_that_is_cut_by_rows_is_found(fork: Path, module: ModuleType) -> None:
    right = ".unflatten(-1, (-1, 3)).unbind(-1)"
    assert CODE.count(right) == 1
    wrong = fork.parent / "chunk.py"
    wrong.write_text(CODE.replace(right, ".chunk(3, dim=-1)"))
    prover = prover_of(wrong)
    result = prover.prove(prover.layout_like({"parallel.tp": 2}))
    assert result.agreement.findings


def short_conv(module: ModuleType, width: int) -> Any:
    """Return the page's mixer in float64 with random weights."""
    mixer = module.ShortConv(Model(hidden=width)).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.normal_(std=0.5, generator=generator)
    return mixer


def test_it_is_a_gated_causal_convolution(module: ModuleType) -> None:
    mixer = short_conv(module, 8)
    x = torch.randn(2, 9, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    b, c, value = (x @ mixer.in_proj.weight[index::3].T for index in range(3))
    channels = torch.nn.functional.pad((b * value).mT, (2, 0))
    convolved = torch.nn.functional.conv1d(channels, mixer.taps.weight.unsqueeze(1), groups=8).mT
    torch.testing.assert_close(mixer(x, None, None), (c * convolved) @ mixer.out_proj.weight.T, rtol=0, atol=1e-13)


@pytest.mark.exhaustive  # importing transformers takes seconds
def test_it_is_the_operator_of_lfm2(module: ModuleType) -> None:
    """Of transformers, whose rows of in_proj are those of b, of c, then of x."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

    width, mixer = 8, short_conv(module, 8)
    config = transformers.Lfm2Config(hidden_size=width, layer_types=["conv"], num_hidden_layers=1, conv_L_cache=3)
    published = Lfm2ShortConv(config, 0).double()
    with torch.no_grad():
        published.in_proj.weight.copy_(mixer.in_proj.weight.unflatten(0, (width, 3)).transpose(0, 1).flatten(0, 1))
        published.conv.weight.copy_(mixer.taps.weight.unsqueeze(1))
        published.out_proj.weight.copy_(mixer.out_proj.weight)
    x = torch.randn(2, 9, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(mixer(x, None, None), published(x), rtol=0, atol=1e-13)


def test_documents_are_computed_apart(module: ModuleType) -> None:
    mixer = short_conv(module, 8)
    x = torch.randn(1, 9, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ids = torch.tensor([[0, 0, 0, 0, 1, 2, 2, 2, 2]])
    apart = torch.cat([mixer(x[:, begin:end], None, None) for begin, end in ((0, 4), (4, 5), (5, 9))], dim=1)
    torch.testing.assert_close(mixer(x, None, mixer.core.mask(ids)), apart, rtol=0, atol=1e-14)


@pytest.mark.usefixtures("module")
def test_its_size_and_flops_are_counted() -> None:
    attention, conv, taps = 4 * 16 * 16, 4 * 16 * 16, 3 * 16
    plain = replace(MODEL, pattern=(), kinds=Kinds())
    assert parameter_count(MODEL) - parameter_count(plain) == conv + taps - attention
    assert block_flops(MODEL, 2, 32) == 2 * (conv + 3 * 16 * 24) + 2 * taps


def test_its_costs_are_what_autograd_keeps_and_the_planner_takes(module: ModuleType) -> None:
    mixer = short_conv(module, 16).bfloat16()
    x = torch.randn(1, 64, 16, dtype=torch.bfloat16, requires_grad=True)
    others = {tensor.untyped_storage().data_ptr() for tensor in (x, *mixer.parameters())}
    kept: dict[tuple[int, int], int] = {}

    def note(saved: torch.Tensor) -> torch.Tensor:
        place = saved.untyped_storage().data_ptr()
        if place not in others:
            kept[place, saved.storage_offset()] = saved.nbytes
        return saved

    with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
        out = mixer(x, None, None)  # which keeps what is noted
    costs_of = MIXERS_OF_FORKS["short_conv"].costs
    assert costs_of is not None
    costs = costs_of(MODEL.of_kind("conv"), RankShare(tp=1, spread=1, length=64))
    assert sum(kept.values()) == 64 * (2 * (costs.inputs + costs.results) + costs.kept), out.shape
    assert predict(case(model=replace(MODEL, vocab=64))).step > 0


@pytest.mark.usefixtures("module")
def test_generation_with_a_cache_is_the_whole_computation() -> None:
    """The second text has a token less, behind padding that the convolution must not see."""
    model = build_model(MODEL).double()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(31, (2, 12), generator=generator)
    positions = (torch.arange(12) - torch.tensor([[0], [1]])).clamp(min=0)
    is_padding = torch.arange(12) < torch.tensor([[0], [1]])
    documents = (~is_padding).long()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5, generator=generator)
        expected = model(tokens, positions, documents)
        with caching(model, room=12, padding=is_padding[:, :3]):
            for begin, end in ((0, 3), *((i, i + 1) for i in range(3, 12))):
                ids = documents[:, :3] if begin == 0 else None
                logits = model(tokens[:, begin:end], positions[:, begin:end], ids)
                torch.testing.assert_close(logits[:, 0], expected[:, end - 1], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("recipe", ["", "short_conv.py"])
def test_commands_import_the_fork_of_recipe_for_its_mixers(
    recipe: str, fork: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without it one line says so, whatever command it is."""
    for name, value in (("MIXERS_OF_FORKS", {}), ("ADDED_PARAMETERS", {})):
        for place in ("torchllm.facts.parts.registry", "torchllm.facts.parts.added"):
            monkeypatch.setattr(f"{place}.{name}", value)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    monkeypatch.setenv("RECIPE", str(fork.parent / recipe) if recipe else "")
    monkeypatch.chdir(fork.parent)
    with pytest.raises(SystemExit):
        load_model(["conv.toml"])
    error = capsys.readouterr().err
    if recipe:
        assert "holds no checkpoint" in error
        assert "mixer" not in error
        assert load_sizes(["conv.toml"]).model.of_block(2).mixer == "short_conv"
        return
    assert re.search(r"^conv.toml:\d+: model.kinds.conv.mixer: 'short_conv' is none of attention, .*RECIPE", error)
    with pytest.raises(SystemExit):
        load_sizes(["conv.toml", "--model.mixer=atention"])
    assert re.search(r"^--model.mixer: 'atention' is none of attention, ", capsys.readouterr().err, re.M)
