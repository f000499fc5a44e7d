"""Files of train_configs/models: what the planner says a forward keeps is what the model's own code keeps.

By default one file of each set of features, at night every file.

The planner counts activations by formula, the dry run by running the model on fake tensors. A layer that the formulas
do not know (an extra norm, another feed-forward) shows here as a difference of one block or of one end of the model,
before it makes a plan wrong by the same share.
"""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor

from tests.facts import test_model_sizes
from tests.facts.test_model_sizes import FOLDER, features
from torchllm.config import Model, Parallel, Recompute, Training
from torchllm.models.decoder import Decoder, build_model
from torchllm.runtime.torch_compat import FakeTensorMode
from torchllm.tools.dry_run.memory import saved_by_forwards
from torchllm.tools.dry_run.tracker import Tracker
from torchllm.tools.planner.activations import block_activations
from torchllm.tools.planner.compute import Kernels, Piece
from torchllm.tools.planner.parameters import ShardedParameters, StageSize
from torchllm.tools.planner.rank import BlockMemory, LogitBytes, Rank
from torchllm.tools.planner.software import TORCHLLM
from torchllm.tools.planner.stage_memory import stage_memory

TOLERANCE = 0.03
"""the largest difference today is 2.6 %: plain attention on fewer key-value heads than query heads"""
LENGTH = 2048
FILES = sorted(path.stem for path in Path(FOLDER).glob("*.toml"))
WITH_SCORES = ["gpt_1.7b", "llama3_8b", "qwen3_0.6b", "qwen3_30b_a3b", "gemma2_9b", "gpt_oss_20b"]
"""of either family, with fewer key-value heads, with norms of queries and keys, with experts, with a soft cap"""
FIRST, MIDDLE, LAST = StageSize((0,), True, False), StageSize((0,), False, False), StageSize((0,), False, True)
"""pipeline stages of one block: with the embedding, without either end, with the head and the loss"""


def load(name: str) -> Model:
    """Return the model of a file; of blocks of several kinds, the one whose blocks are all like the last."""
    model = test_model_sizes.load(name)
    view = model.of_block(model.layers - 1)
    return replace(view, attention="sdpa", score_softcap=0.0) if view.attention == "flex" else view


ONE_OF_EACH = list({features(load(name)): name for name in reversed(FILES)}.values())
"""the first file with the same features"""


def test_a_norm_without_weight_keeps_less_than_others() -> None:
    """Of Gemma 4's blocks with a window, whose values are 0.8 of their hidden states."""
    view = test_model_sizes.load("gemma4_31b").of_block(0)
    assert planned_bytes(view, MIDDLE) == pytest.approx(traced_bytes(view, MIDDLE), rel=0.002)


def build_stage(model: Model, stage: StageSize) -> Decoder:
    """Return one block with the ends that a stage has, in bfloat16, without memory."""
    with torch.device("meta"):
        decoder = build_model(replace(model, layers=1, dense_layers=0, tied_embeddings=False)).bfloat16()
    if not stage.first:
        decoder.embed_tokens = None
        decoder.embed_positions = None
    if not stage.last:
        decoder.norm = None
        decoder.lm_head = None
    return decoder


@functools.cache
def traced_bytes(model: Model, stage: StageSize) -> int:
    """Return what the forward pass of one sequence leaves for its backward, and its result: bytes, by the dry run."""
    decoder = build_stage(model, stage)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        decoder.to_empty(device="cpu")
        tokens = torch.zeros(1, LENGTH, dtype=torch.int64)
        tracker = Tracker(fake, {})
        with tracker:
            tracker.claim(decoder.parameters(), "parameters")
            tracker.claim([tokens], "inputs")
            tracker.mark("begin")
            tracker.begin_forward()
            result = run_stage(decoder, tokens)
            tracker.end_forward()
            tracker.mark("tail")
            (saved,) = saved_by_forwards(tracker)
            assert result.requires_grad  # until here the result holds all that its backward needs
    return saved


def run_stage(decoder: Decoder, tokens: Tensor) -> Tensor:
    """Run a stage on tokens, or on hidden states that nothing holds but what the stage keeps of them."""
    if decoder.embed_tokens is not None:
        return decoder(tokens, tokens, None, tokens)
    narrow = torch.zeros(1, LENGTH, 1, dtype=torch.bfloat16, requires_grad=True)
    hidden = narrow.expand(-1, -1, decoder.model.hidden).clone()  # no leaf, which autograd would hold
    return decoder(hidden, tokens, None, tokens)


def kernels_of(model: Model) -> Kernels:
    return Kernels("eager" if model.attention == "eager" else "flash2")


def planned_bytes(model: Model, stage: StageSize) -> float:
    """Return the same by the planner's formulas."""
    model = replace(model, dense_layers=0)
    parallel, training = Parallel(dp_shard=1), Training(sequence_length=LENGTH)
    piece = Piece(sequences=1, tokens=LENGTH, keys=LENGTH, tp=1, spread=1)
    nothing = ShardedParameters(0.0, 0.0)
    block = BlockMemory(block_activations(model, piece, kernels_of(model), TORCHLLM), unit=nothing, experts=nothing)
    rank = Rank(
        model,
        training,
        parallel,
        Recompute(),
        TORCHLLM,
        piece,
        blocks=(block,),
        zero=0,
        micro_batches=1,
        logit_bytes=LogitBytes.of(model, kernels_of(model), TORCHLLM, tp=1),
        stages=(stage,),
        of_size={stage: nothing},
        table=0.0,
    )
    memory = stage_memory(rank, stage, ())
    return memory.held + memory.logits


@pytest.mark.parametrize(
    ("attention", "names"),
    [("sdpa", ONE_OF_EACH), ("eager", WITH_SCORES), pytest.param("sdpa", FILES, marks=pytest.mark.exhaustive)],
)
def test_blocks_keep_what_is_planned(attention: Literal["sdpa", "eager"], names: list[str]) -> None:
    for name in names:
        model = replace(load(name), attention=attention)
        if name == "gemma2_9b" and attention == "eager":
            model = replace(model, score_softcap=50.0)
        assert planned_bytes(model, MIDDLE) == pytest.approx(traced_bytes(model, MIDDLE), rel=TOLERANCE), name


@pytest.mark.parametrize("names", [ONE_OF_EACH, pytest.param(FILES, marks=pytest.mark.exhaustive)], ids=len)
def test_the_ends_keep_what_is_planned(names: list[str]) -> None:
    """The embedding with one block after it; the last norm, the head and the loss alone."""
    for name in names:
        model = load(name)
        assert planned_bytes(model, FIRST) == pytest.approx(traced_bytes(model, FIRST), rel=TOLERANCE), name
        planned_head = planned_bytes(model, LAST) - planned_bytes(model, MIDDLE)
        traced_head = traced_bytes(model, LAST) - traced_bytes(model, MIDDLE)
        assert planned_head == pytest.approx(traced_head, rel=TOLERANCE), name


def test_a_layer_that_the_planner_does_not_know_shows() -> None:
    model = load("qwen3_0.6b")
    without = planned_bytes(replace(model, qk_norm="none"), MIDDLE)
    assert without < (1 - 4 * TOLERANCE) * traced_bytes(model, MIDDLE)
