"""Parameters and sizes of pipeline stages."""

from dataclasses import replace

from tests.facts.test_model_sizes import load
from torchllm import config as c
from torchllm.facts.flops import parameter_count
from torchllm.tools.planner.parameters import StageSize, sizes_of_split, stage_parameters


def test_a_whole_model_has_its_parameters() -> None:
    """Stages and tp ranks together hold what `metrics.flops` counts; a tied embedding is on both ends of a pipeline."""
    for name in ["llama3_8b", "gpt_1.7b", "llama_1b"]:
        model = load(name)
        whole = StageSize(model.layers, first=True, last=True)
        parameters = stage_parameters(model, whole, 1, True)
        assert parameters == parameter_count(model), name
        first = StageSize(1, first=True, last=False)
        last = StageSize(model.layers - 1, first=False, last=True)
        of_stages = stage_parameters(model, first, 1, True) + stage_parameters(model, last, 1, True)
        table = model.vocab * model.hidden
        assert of_stages == parameters + model.tied_embeddings * table, name


def test_every_k_counts_the_blocks_of_the_whole_model() -> None:
    """Of stages of 3, 2 and 2 blocks those numbered 0, 2 | 4 | 6 are recomputed: the first, the second, the second."""
    model = replace(load("llama_13b"), layers=7)
    sizes = sizes_of_split(model, (3, 2, 2), c.Recompute(mode="every_k", k=2))
    assert [size.first_recomputed for size in sizes] == [0, 1, 1]
    assert [size.first_recomputed for size in sizes_of_split(model, (3, 2, 2), c.Recompute())] == [0, 0, 0]
