"""Parameters and sizes of pipeline stages."""

from dataclasses import replace

import pytest

from tests.facts.test_model_sizes import load
from tests.tools.planner.test_predict import case
from torchllm import config as c
from torchllm.config.errors import UserError
from torchllm.facts.flops import parameter_count
from torchllm.facts.parts.attention import PART
from torchllm.facts.parts.registry import MIXERS_OF_FORKS
from torchllm.tools.planner.parameters import different_views, sizes_of_split, stage_parameters, why_not_costed
from torchllm.tools.planner.predict import predict


def test_a_mixer_with_unknown_costs_is_not_planned_as_another(monkeypatch: pytest.MonkeyPatch) -> None:
    of_kinds: dict[str, dict[str, str]] = {"a": {"mixer": "mine"}, "b": {}}
    monkeypatch.setitem(MIXERS_OF_FORKS, "mine", replace(PART, name="mine", costs=None))
    for mixer, kinds in (("mine", {}), ("attention", of_kinds)):
        pattern = tuple(kinds)
        model = c.Model(layers=2, mixer=mixer, pattern=pattern, kinds=c.Kinds(kinds))
        why_not_costed.cache_clear()
        with pytest.raises(UserError, match="the planner does not know what mine costs"):
            case(model=model)
    monkeypatch.setitem(MIXERS_OF_FORKS, "mine", replace(PART, name="mine"))
    why_not_costed.cache_clear()
    assert predict(case(model=c.Model(layers=2, mixer="mine"))) == predict(case(model=c.Model(layers=2)))
    why_not_costed.cache_clear()


def test_stages_hold_all_parameters() -> None:
    """As many as `facts.flops` counts; a tied embedding is on both ends of a pipeline."""
    for name in ["llama3_8b", "gpt_1.7b", "llama3_1b", "qwen3_30b_a3b", "glm4.5_air", "mixtral_8x7b"]:
        model = load(name)
        for split in ((model.layers,), (1, 2, 3, model.layers - 6)):
            sizes = sizes_of_split(model, split, c.Recompute())
            parameters = sum(stage_parameters(model, size, 1) for size in sizes)
            tied = model.vocab * model.hidden if model.tied_embeddings and len(split) > 1 else 0
            assert parameters == parameter_count(model) + tied, name
            assert [view for size in sizes for view in size.views] == [
                different_views(model).index(view) for view in model.views
            ], name


def test_every_k_counts_the_blocks_of_the_whole_model() -> None:
    """Of stages of 3, 2 and 2 blocks those numbered 0, 2 | 4 | 6 are recomputed: the first, the second, the second."""
    model = replace(load("llama_13b"), layers=7)
    sizes = sizes_of_split(model, (3, 2, 2), c.Recompute(mode="every_k", k=2))
    assert [size.first_recomputed for size in sizes] == [0, 1, 1]
    assert [size.first_recomputed for size in sizes_of_split(model, (3, 2, 2), c.Recompute())] == [0, 0, 0]
