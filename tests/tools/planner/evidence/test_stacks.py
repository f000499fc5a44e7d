"""Frameworks by the names that tables have for them; one of which nothing is known is refused."""

import pytest

from torchllm.tools.planner.evidence.stacks import KINDS, OTHER_NAMES, STACKS, stack_of

OTHER_VERSIONS = {
    "torchtitan-2030": "torchtitan",
    "Megatron-DeepSpeed": "megatron-deepspeed-2023",
    "NeMo 3": "nemo",
    "Megatron 9": "megatron-core",
}
"""names in tables, and the stacks that they are taken for"""


def test_another_version_of_a_stack_is_said() -> None:
    for name in OTHER_VERSIONS:
        stack = OTHER_VERSIONS[name]
        assumed: list[str] = []
        assert stack_of(name, assumed) == STACKS[stack], name
        assert assumed == [f"stack {name!r} is unknown: as {stack}"], name


def test_an_unknown_stack_is_refused() -> None:
    for name in ["", "Abacus"]:
        with pytest.raises(ValueError, match="is unknown"):
            stack_of(name, [])


def test_every_name_is_one_of_a_stack() -> None:
    assert set(OTHER_NAMES.values()) <= set(STACKS)
    assert set(KINDS.values()) <= set(STACKS)
    for name in [*STACKS, *OTHER_NAMES, *KINDS]:
        assert name == name.lower()
