"""Metrics of ours over what lm-evaluation-harness has scored."""

import math
from types import SimpleNamespace
from typing import Any

import pytest

from torchllm.tools.watch.tasks import gold_bits_per_byte, right_answers

CHOICE = SimpleNamespace(multiple_input=0)
SCORES = (-3.0, -5.0, -8.0)


def sample_of(target: Any, *continuations: str) -> dict[str, Any]:
    """A document as the harness logs it."""
    return {
        "doc": {},
        "target": target,
        "arguments": [("a context", text) for text in continuations],
        "resps": [[(score, False)] for score, _ in zip(SCORES, continuations, strict=False)],
    }


@pytest.mark.parametrize(
    ("target", "expected"),
    [(1, [(-5.0, 4)]), ("two", [(-5.0, 4)]), ([0, 2], [(-3.0, 4), (-8.0, 6)]), ("four", []), (-100, []), (7, [])],
)
def test_right_answers_are_found_by_number_and_by_text(target: Any, expected: list[tuple[float, int]]) -> None:
    assert right_answers(CHOICE, sample_of(target, " one", " two", " three")) == expected


def test_the_choices_without_context_are_not_the_answer() -> None:
    """Tasks with acc_mutual_info have every continuation twice."""
    assert right_answers(CHOICE, sample_of("two", " one", " two", " two")) == [(-5.0, 4)]


def test_a_task_of_several_contexts_names_the_right_one() -> None:
    task = SimpleNamespace(multiple_input=2, doc_to_text=lambda document: 1)
    assert right_answers(task, sample_of("is big.", " is big.", " is big.")) == [(-5.0, 8)]


def test_a_single_continuation_is_the_answer() -> None:
    assert right_answers(CHOICE, sample_of("any", " für")) == [(-3.0, 5)]  # UTF-8


def test_bits_are_a_mean_over_documents_of_the_cheapest_right_answer() -> None:
    documents = [right_answers(CHOICE, sample_of(target, " one", " two")) for target in (0, [0, 1], "four")]
    assert gold_bits_per_byte(documents) == {"gold_bits_per_byte,none": pytest.approx(3 / 4 / math.log(2))}
    assert gold_bits_per_byte(documents[2:]) == {}
