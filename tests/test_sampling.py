"""Samples have every value of every axis, and what they lack runs by command."""

from typing import Any

import pytest

from tests.sampling import combinations, one_part, part_of, part_of_commit, sampled


def is_in_sample(case: Any) -> bool:
    return not getattr(case, "marks", ())


def test_the_sample_of_combinations_has_every_value_and_none_is_lost() -> None:
    axes = {"a": 1, "b": 2}, {"x": 10, "y": 20, "z": 30}
    cases = combinations(*axes)
    assert [case.values for case in cases] == [(i, j) for i in (1, 2) for j in (10, 20, 30)]
    assert [case.id for case in cases if is_in_sample(case)] == ["a-x", "a-z", "b-y"]
    assert {mark.name for case in cases for mark in case.marks} == {"every_run"}


def test_names_outside_the_sample_run_by_command() -> None:
    plain, by_command = sampled(["first", "second"], ["first"])
    assert plain == "first"
    assert by_command.values == ("second",)
    assert [mark.name for mark in by_command.marks] == ["every_run"]


def test_a_sample_names_cases_that_exist() -> None:
    with pytest.raises(ValueError, match=r"no such case: \['third'\]"):
        sampled(["first", "second"], ["first", "third"])


def test_commits_share_the_parts() -> None:
    assert {part_of_commit(f"{number:040x}", 16) for number in range(100, 120)} == set(range(16))
    assert part_of_commit("", 16) == 0


def test_a_part_is_every_second_case() -> None:
    assert list(part_of("abcde", 2)) in (["a", "c", "e"], ["b", "d"])


def test_a_part_is_every_third_case_and_the_others_run_by_command() -> None:
    cases = one_part(list("abcdefg"), 3)
    assert [case.values for case in cases] == [(letter,) for letter in "abcdefg"]
    in_part = [index for index, case in enumerate(cases) if is_in_sample(case)]
    assert in_part == list(range(in_part[0], 7, 3))
    assert in_part[0] < 3
