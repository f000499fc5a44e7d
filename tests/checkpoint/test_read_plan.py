"""Which rank reads, sends and receives what; `test_tensors.py` loads on live ranks."""

import itertools
import math
import random
from collections import Counter
from collections.abc import Sequence

import pytest

from tests.growth.checkpoint_index import parts_of_job, pieces_read, shapes_of_run, synthetic_ranks
from torchllm.checkpoint.index import Region
from torchllm.checkpoint.plan import InventoryEntry, JobParts, make_index, region_numbers
from torchllm.checkpoint.read_plan import Message, PackedBox, ReadPlan, plan_reads


def random_regions(generator: random.Random, shape: tuple[int, ...], ranks: int) -> list[Region]:
    """Parts of `ranks` ranks that make a whole tensor: cells of a random grid, each on one rank or more."""
    cuts = [[0, *sorted(generator.sample(range(1, n), generator.randint(0, min(2, n - 1)))), n] for n in shape]
    while math.prod(len(entry) - 1 for entry in cuts) > ranks:
        cuts[generator.randrange(len(cuts))][1:-1] = []
    cells = [Region((), ())]
    for entry in cuts:
        pairs = list(itertools.pairwise(entry))
        cells = [Region((*cell.offset, a), (*cell.size, b - a)) for cell in cells for a, b in pairs]
    of_ranks = cells + [generator.choice(cells) for _ in range(ranks - len(cells))]
    generator.shuffle(of_ranks)
    return of_ranks


def random_job(generator: random.Random, shapes: Sequence[tuple[int, ...]], ranks: int) -> JobParts:
    inventory = [InventoryEntry(f"{number:02}", "float32", shape, 4, number) for number, shape in enumerate(shapes)]
    by_tensor = [random_regions(generator, shape, ranks) for shape in shapes]
    return JobParts([inventory], [0] * ranks, [region_numbers(parts) for parts in zip(*by_tensor, strict=True)])


def part_of(job: JobParts, rank: int, key: str) -> Region:
    shapes = [entry.shape for entry in job.inventories[0]]
    begin = 2 * sum(len(shape) for shape in shapes[: int(key)])
    n = len(shapes[int(key)])
    numbers = job.regions[rank].tolist()
    return Region(tuple(numbers[begin : begin + n]), tuple(numbers[begin + n : begin + 2 * n]))


def elements(region: Region) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(offset, offset + size) for offset, size in zip(*region, strict=True))))


def boxes_of(plan: ReadPlan, round_number: int) -> dict[Message, list[PackedBox]]:
    """The boxes of each message in their order, as its sender or a receiver sees them."""
    round_ = plan.rounds[round_number]
    boxes = [box for read in round_.reads for box in read.sent] + round_.received
    by_message: dict[Message, list[PackedBox]] = {message: [] for message in round_.sizes}
    for box in boxes:
        by_message[box.message].append(box)
    return by_message


def test_each_piece_is_read_once_and_each_part_filled_once() -> None:
    for seed in range(20):
        check_plans(random.Random(seed))


def check_plans(generator: random.Random) -> None:
    """Check the plans of all ranks for a random job that loads what another has saved."""
    shapes = [tuple(generator.randint(1, 5) for _ in range(generator.randint(0, 3))) for _ in range(12)]
    index = make_index(random_job(generator, shapes, generator.choice([1, 4, 7])))
    ranks = generator.choice([1, 3, 8])
    job = random_job(generator, shapes, ranks)
    limit = 400
    plans = [plan_reads(index, job, rank, limit) for rank in range(ranks)]
    readers: Counter[tuple[str, Region]] = Counter()
    filled: list[Counter[tuple[str, tuple[int, ...]]]] = [Counter() for _ in plans]
    for rank, plan in enumerate(plans):
        assert plan.read_bytes.tolist() == plans[0].read_bytes.tolist()
        read = pieces_read(plan)
        assert plan.read_bytes[rank] == sum(4 * math.prod(piece.region.size) for _, piece, _, _ in read)
        for key, piece, needed, boxes_sent in read:
            readers[key, piece.region] += 1
            own = elements(piece.region) & elements(part_of(job, rank, key))
            assert own, "a rank reads only what it needs"
            assert own == elements(needed)
            filled[rank].update((key, element) for element in own)
            assert all(elements(box.region) <= elements(piece.region) for box in boxes_sent)
        for number, round_ in enumerate(plan.rounds):
            for box in round_.received:
                assert box.begin % 16 == 0, "elements of any dtype are aligned"
                filled[rank].update((box.key, element) for element in elements(box.region))
            boxes = boxes_of(plan, number)
            for sender in range(ranks):
                of_sender = boxes_of(plans[sender], number)
                sent = [message for message in of_sender if message.sender == sender and rank in message.receivers]
                assert [message for message in boxes if message.sender == sender != rank] == sent, "in the same order"
                for message in sent:
                    assert boxes[message] == of_sender[message]
                    assert round_.sizes[message] == plans[sender].rounds[number].sizes[message]
            in_one_round = {box.key for of_message in boxes.values() for box in of_message}
            sent_bytes = sum(4 * math.prod(box.region.size) for of_message in boxes.values() for box in of_message)
            assert len(in_one_round) <= 1 or sent_bytes <= limit
    whole = []
    for key, entry in index.tensors.items():
        whole += [(key, entry.grid.piece(number).region) for number in range(len(entry.grid.writers))]
    assert readers == Counter(whole), "each piece by one rank"
    for rank, counts in enumerate(filled):
        needed = [(key, element) for key in index.tensors for element in elements(part_of(job, rank, key))]
        assert counts == Counter(needed), f"rank {rank}"


@pytest.mark.parametrize(
    ("writers", "readers", "copies", "rounds"),
    [(64, 1024, 1, 2), (1024, 64, 1, 1), (1024, 1024, 1, 1), (64, 64, 16, 13)],
)
def test_the_bytes_of_70b_are_read_once_on_other_ranks(writers: int, readers: int, copies: int, rounds: int) -> None:
    """Also evenly, and in rounds whose messages are within the limit of 1 GiB."""
    shapes = shapes_of_run()
    index = make_index(parts_of_job(synthetic_ranks(shapes, writers)))
    plan = plan_reads(index, parts_of_job(synthetic_ranks(shapes, readers, copies)), 0, 1 << 30)
    state = sum(4 * math.prod(shape) for shape in shapes.values())
    assert plan.read_bytes.sum() == state
    assert plan.read_bytes.max() <= 1.1 * state / (readers * copies)
    assert len(plan.rounds) == rounds
    assert max(sum(round_.sizes.values()) for round_ in plan.rounds) <= 2**30
