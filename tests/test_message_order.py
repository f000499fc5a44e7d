"""No layout hangs because its ranks send in different orders, and such orders are found."""

import functools
import itertools

import pytest

from tests.message_order import Batch, Message, OfRank, Player, check, chosen_layouts, messages_of, resolve

LARGE = {
    "16 ranks": ("--parallel.pp=2", "--parallel.cp=2", "--parallel.tp=2", "--parallel.dp_shard=2"),
    "64 ranks": (
        *("--parallel.pp=4", "--parallel.schedule=Interleaved1F1B", "--parallel.tp=2", "--parallel.dp_shard=4"),
        *("--parallel.dp_replicate=2", "--model.layers=8", "--training.global_batch_size=64"),
    ),
}
PARTS = 68
layouts = functools.cache(chosen_layouts)


def collective(*ranks: int) -> Batch:
    return (Message(ranks, "all_reduce", ("float32[8]",)),)


def send(to: int) -> Message:
    return Message((0, 1), "send", ("float32[8]",), to)


def receive(source: int) -> Message:
    return Message((0, 1), "recv_", ("float32[8]",), source)


def test_a_circle_of_three_groups_is_found() -> None:
    """Each pair agrees on its own messages, and all wait."""
    orders = [[(0, 1), (0, 2)], [(1, 2), (0, 1)], [(0, 2), (1, 2)]]
    stuck = Player([[collective(*ranks) for ranks in order] for order in orders]).play()
    assert len(stuck) == 3


def test_two_ranks_that_both_send_first_hang_unless_they_also_receive_in_that_batch() -> None:
    assert Player([[(send(1), receive(1))], [(send(0), receive(0))]]).play() == []
    stuck = Player([[(send(1),), (receive(1),)], [(send(0),), (receive(0),)]]).play()
    assert stuck[0] == "rank 0 waits in its message 0: send of float32[8] with rank 1"


def test_a_second_step_repeats_the_first_or_not() -> None:
    """If it does not, both steps of each rank are traced."""
    built, *step = (collective(*ranks) for ranks in ((0, 1, 2), (0, 1), (1, 2)))
    assert OfRank([built, *step], step).repeats
    assert not OfRank([built, *step], step[::-1]).repeats
    assert not OfRank([built, *step], []).repeats


def test_two_swapped_messages_of_one_rank_are_found() -> None:
    """On the last rank of FSDP with tensor parallelism. A swap between groups need not hang: see the circle."""
    settings = ("--parallel.tp=2", "--parallel.dp_shard=2", "--model.layers=2", "--training.global_batch_size=4")
    batches = messages_of(resolve(["train_configs/debug.toml", *settings]))
    assert Player(batches).play() == []
    mine = batches[-1]
    pairs = itertools.pairwise(mine)
    at = next(at for at, ((first,), (second,)) in enumerate(pairs) if first.ranks == second.ranks and first != second)
    mine[at], mine[at + 1] = mine[at + 1], mine[at]
    (difference,) = Player(batches).play()
    assert "rank 3 has" in difference or "and rank 3 has" in difference


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(PARTS))
def test_no_layout_hangs(part: int) -> None:
    """`python -m tests.message_order` traces the other half, too."""
    names = sorted(layouts())[part::PARTS]
    assert {name: findings for name in names if (findings := check(layouts()[name]).findings)} == {}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", LARGE)
def test_no_large_layout_hangs(name: str) -> None:
    assert check(resolve(["train_configs/debug.toml", *LARGE[name]])).findings == []
