from dataclasses import replace
from functools import cache
from itertools import accumulate, combinations, pairwise, product
from pathlib import Path

import pytest

from tests.facts.test_flops import forward_flops_per_token
from torchllm.config import SCHEDULES, Kinds, Model, Parallel, PipelineSchedule
from torchllm.facts.flops import block_flops
from torchllm.facts.stages import balanced_split, end_costs, stage_of_rank
from torchllm.tools.config.load import load_config

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]
SMALL_HEAD = Model(layers=10, hidden=64, heads=4, ffn=128, vocab=64)
LARGE_HEAD = Model(layers=10, hidden=64, heads=4, ffn=128, vocab=4000)


SPARSE = Model(layers=10, hidden=64, heads=4, ffn=128, vocab=64, experts=8, top_k=2, expert_ffn=192, shared_experts=1)


def of_kinds(pattern: str, **sizes: int) -> Model:
    """Return a model with a window of 4 tokens in the blocks "w" of a pattern, and none in those that are "f"."""
    kinds = Kinds({kind: {"window": 4 if kind == "w" else 0} for kind in pattern})
    return replace(SMALL_HEAD, pattern=tuple(pattern), kinds=kinds, **sizes)


def every_split(blocks: int, stages: int) -> list[tuple[int, ...]]:
    cuts = [(0, *cut, blocks) for cut in combinations(range(1, blocks), stages - 1)]
    return [tuple(b - a for a, b in pairwise(cut)) for cut in cuts]


@cache
def block_and_end_costs(model: Model, sequence_length: int) -> tuple[list[int], tuple[int, int]]:
    of_blocks = [block_flops(model, layer, sequence_length) for layer in range(model.layers)]
    return of_blocks, end_costs(model, sequence_length)


def stage_costs(model: Model, split: tuple[int, ...], sequence_length: int) -> tuple[int, ...]:
    """Return the operations of one token's forward pass in each stage. split: the blocks of each stage."""
    of_blocks, (first, last) = block_and_end_costs(model, sequence_length)
    costs = [sum(of_blocks[start:end]) for start, end in pairwise(accumulate(split, initial=0))]
    costs[0] += first
    costs[-1] += last
    return tuple(costs)


def costs_of_ranks(model: Model, parallel: Parallel, split: tuple[int, ...], sequence_length: int = 32) -> list[int]:
    costs = stage_costs(model, split, sequence_length)
    return [sum(costs[stage] for stage in stage_of_rank(parallel, rank)) for rank in range(parallel.pp)]


def check_split(model: Model, parallel: Parallel) -> None:
    """Check that no other split has a less busy rank, or as busy a one and is more even."""
    split = balanced_split(model, parallel, 32)
    assert sum(split) == model.layers
    assert min(split) >= 1

    def badness(blocks: tuple[int, ...]) -> tuple[int, int]:
        ranks = costs_of_ranks(model, parallel, blocks)
        return max(ranks), sum(cost**2 for cost in ranks)

    assert badness(split) == min(map(badness, every_split(model.layers, parallel.stages))), (model, parallel)


@pytest.mark.parametrize("model", [SMALL_HEAD, LARGE_HEAD], ids=["small head", "large head"])
def test_no_split_has_a_less_busy_rank_or_is_more_even(model: Model) -> None:
    for pp in (1, 2, 3, 4, 7, 10):
        check_split(model, Parallel(pp=pp))
    for pp in (2, 3, 4, 5):
        check_split(model, Parallel(pp=pp, schedule="Interleaved1F1B"))
        check_split(model, Parallel(pp=pp, schedule="ZBVZeroBubble"))


def test_no_split_of_dense_and_sparse_blocks_is_better() -> None:
    for pp, ffn, dense_layers in product([1, 2, 3, 4, 7, 10], [128, 1024], [1, 2, 3, 7, 9]):
        check_split(replace(SPARSE, ffn=ffn, dense_layers=dense_layers), Parallel(pp=pp))


def test_no_split_of_blocks_of_several_kinds_has_a_less_busy_rank() -> None:
    """Attention over all 2048 tokens is most of the work: a full block costs 13 times as much as one with a window."""
    for pattern, layers in product(["wwwwwf", "wwf", "fw"], [9, 12]):
        model = of_kinds(pattern, layers=layers)
        for parallel in (Parallel(pp=2), Parallel(pp=3), Parallel(pp=4), Parallel(pp=2, schedule="Interleaved1F1B")):
            split = balanced_split(model, parallel, 2048)
            least = min(
                max(costs_of_ranks(model, parallel, each, 2048)) for each in every_split(layers, parallel.stages)
            )
            assert max(costs_of_ranks(model, parallel, split, 2048)) <= 1.02 * least, (pattern, layers, parallel)


def test_the_split_of_30_blocks_is_the_best() -> None:
    """Split as blocks of equal cost the busiest of four ranks would have 7 % more work than it must have."""
    model, parallel = of_kinds("wwwwwf", layers=30), Parallel(pp=4)
    least = min(max(costs_of_ranks(model, parallel, each, 64)) for each in every_split(30, 4))
    assert max(costs_of_ranks(model, parallel, balanced_split(model, parallel, 64), 64)) == least


@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "ZBVZeroBubble"])
def test_ranks_of_several_stages_share_dense_and_sparse_blocks(schedule: PipelineSchedule) -> None:
    """The bound is as found, and holds where no more than six of ten blocks are dense."""
    for pp, ffn, dense_layers in product([2, 3, 4, 5], [128, 1024], range(1, 7)):
        parallel = Parallel(pp=pp, schedule=schedule)
        model = replace(SPARSE, ffn=ffn, dense_layers=dense_layers)
        splits = every_split(model.layers, parallel.stages)
        best = min(max(costs_of_ranks(model, parallel, split)) for split in splits)
        split = balanced_split(model, parallel, 32)
        assert max(costs_of_ranks(model, parallel, split)) <= 1.02 * best, (pp, ffn, dense_layers)


def test_a_head_of_128k_words_weighs_two_blocks_of_an_8b_model() -> None:
    model = load_config([str(ROOT / "train_configs" / "models" / "llama3_8b.toml"), "--parallel.dp_shard=1"]).model
    assert 1.5 < end_costs(model, 8192)[1] / block_flops(model, 0, 8192) < 2.5
    assert balanced_split(model, Parallel(pp=4), 8192) == (8, 8, 9, 7)


def test_405b_is_split_as_its_authors_split_it() -> None:
    """One block less on the first and the last of 16 ranks (arXiv 2407.21783, section 3.3.2)."""
    model = load_config([str(ROOT / "train_configs" / "models" / "llama3_405b.toml"), "--parallel.dp_shard=1"]).model
    assert balanced_split(model, Parallel(pp=16), 8192) == (7, *[8] * 14, 7)


def test_equal_blocks_go_to_later_stages_and_to_ranks_with_less() -> None:
    for parallel, split in (
        (Parallel(pp=4), (2, 3, 3, 2)),
        (Parallel(pp=2, schedule="Interleaved1F1B", virtual_stages=2), (2, 3, 3, 2)),
        (Parallel(pp=2, split=(9, 1)), (9, 1)),
        (Parallel(), (10,)),
    ):
        assert balanced_split(SMALL_HEAD, parallel, 32) == split


@pytest.mark.parametrize("model", [SMALL_HEAD, LARGE_HEAD, SPARSE, replace(SPARSE, dense_layers=4)])
def test_costs_are_those_of_the_whole_model(model: Model) -> None:
    products = forward_flops_per_token(model, 32)
    vectors = model.hidden + 4 * model.hidden + 5 * model.vocab
    assert sum(stage_costs(model, (3, 3, 4), 32)) == products + vectors


def test_ranks_hold_what_torch_expects() -> None:
    from torch.distributed.pipelining._utils import generate_rank_to_stage_mapping

    for schedule, pp in product(SCHEDULES, [1, 2, 4, 8]):
        parallel = Parallel(pp=pp, schedule=schedule)
        style = "v" if schedule in ("ZBVZeroBubble", "DualPipeV") and pp > 1 else "loop"
        theirs = generate_rank_to_stage_mapping(pp, parallel.stages, style)
        assert {rank: list(stage_of_rank(parallel, rank)) for rank in range(pp)} == theirs, schedule


def test_the_blocks_of_multi_token_prediction_are_on_the_last_stage() -> None:
    """Each costs a block and a head there."""
    deep = replace(LARGE_HEAD, mtp_depth=2)
    head = end_costs(LARGE_HEAD, 32)[1] - 4 * LARGE_HEAD.hidden  # without the final norm, which they share
    assert end_costs(deep, 32)[1] - end_costs(LARGE_HEAD, 32)[1] == 2 * (head + block_flops(deep, deep.layers, 32))
    assert end_costs(deep, 32)[0] == end_costs(LARGE_HEAD, 32)[0]
    assert sum(balanced_split(deep, Parallel(pp=2), 32)) == LARGE_HEAD.layers
