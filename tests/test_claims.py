"""Absolute promises of the pages are listed with the tests that hold them, and the commands of BENCHMARKS.md are valid.

If `test_absolute_promises_are_listed` names your sentence, make it smaller, or add it to PROMISES with a test that
fails when the promise is broken. Only the words of ABSOLUTE are looked for, outside of blocks of code and headings.
"""

import ast
import importlib.util
import os
import re
import shlex
from pathlib import Path

import pytest

from evidence.benchmark import NAMES
from recipes.benchmark.settings import read_arguments

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.quick

ABSOLUTE = re.compile(
    r"(?<!\d: )"  # "0: never" is what a value means
    r"\b(never|always|exact(ly)?|bitwise|in silence|(any|every|all) layouts?|bit (by|for) bit|to the (bit|byte))\b",
    re.IGNORECASE,
)

SAME_RUN = "tests/recipes/test_pretrain.py::test_resumed_on_the_same_layout_it_is_the_same_run"
KILLED = "tests/faults/test_restarts.py::test_a_run_whose_rank_was_killed_is_the_same_run_when_it_goes_on"
NOT_FINITE = "tests/train/test_step.py::test_a_step_that_is_not_finite_on_one_rank_is_applied_on_none"
DRY_RUN = "tests/tools/dry_run/test_reality.py::test_what_is_traced_is_what_eight_ranks_hold_and_send"
PROVEN = "tests/checkpoint/test_checkpointer.py::test_the_newest_checkpoint_that_ten_finite_steps_have_followed_stays"
SAME_STEP = "tests/optim/test_muon.py::test_from_the_same_gradients_a_layout_takes_the_same_step_to_the_bit"
TEXT_FILE = "tests/tools/prepare/test_build.py::test_memory_does_not_grow_with_a_text_file"
HELD_OUT = "tests/tools/prepare/test_build.py::test_the_same_text_is_in_the_same_split_whatever_its_source"
NO_WAIT = "tests/hollow/test_launches.py::test_a_step_never_waits_for_the_gpu"
SAME_AS_EXACT = "tests/parallel/test_optimistic.py::test_it_trains_the_same_bits"
UPCYCLED = "tests/tools/hub/test_upcycle.py::test_each_expert_is_the_dense_layer_and_noise_to_the_bit"
NEW_FOLDER = "tests/tools/hub/test_hf_writer.py::test_a_folder_appears_whole_or_not_at_all"
REQUEUED = "tests/slurm/test_slurm.py::test_a_requeued_job_goes_on"

PROMISES = {
    "README.md": {"bitwise on the same one": SAME_RUN, "On CPUs its figure is exact to the byte": DRY_RUN},
    "docs/checkpoints.md": {
        "the newest proven one is never deleted": PROVEN,
        "a resumed run is bitwise equal": SAME_RUN,
    },
    "docs/clusters.md": {"with an undisturbed run, bit by bit": KILLED},
    "docs/configure.md": {"the step is the same in every layout, to the bit": SAME_STEP},
    "docs/data.md": {"A text file is never in memory as a whole": TEXT_FILE},
    "docs/hollow_gpu.md": {"the host never waits for the GPU during a step": NO_WAIT},
    "docs/mixture_of_experts.md": {
        "Every layout starts from the same bytes": UPCYCLED,
        "the exact dispatch: bit for bit in float32 and bfloat16 on a CPU": SAME_AS_EXACT,
        "the exact dispatch": SAME_AS_EXACT,
    },
    "docs/reliability.md": {
        "validation of every step, bit by bit": KILLED,
        "every step bit by bit as in a run without a fault": REQUEUED,
    },
    "docs/settings.md": {
        'expert_dispatch = "exact" (one of "exact", "optimistic") with ep: exact:': SAME_AS_EXACT,
        "a CPU run is bitwise repeatable": SAME_RUN,
        "held out for evaluation and never trained on": HELD_OUT,
        "is not finite is never applied": NOT_FINITE,
    },
    "docs/watch.md": {"is not finite is never applied": NOT_FINITE},
    "recipes/export.py": {"an existing folder is never written to": NEW_FOLDER},
}
"""page -> words of the promise -> the test that fails when it is broken"""


def pages() -> dict[str, str]:
    """Return as one line what is read of a file: the prose of a page, comments of a config, the help of a recipe."""
    found = {}
    for file in [ROOT / "README.md", ROOT / "BENCHMARKS.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = file.read_text(encoding="utf-8")
        if file.name != "settings.md":  # all of it is a block
            text = re.sub(r"^```.*?^```$|^#+ [^\n]*$", "", text, flags=re.MULTILINE | re.DOTALL)
        found[str(file.relative_to(ROOT))] = " ".join(text.split())
    for file in sorted((ROOT / "train_configs").rglob("*.toml")):
        comments = re.findall(r"#(.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
        found[str(file.relative_to(ROOT))] = " ".join(" ".join(comments).split())
    for file in sorted((ROOT / "recipes").glob("*.py")):
        help_text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
        found[str(file.relative_to(ROOT))] = " ".join(help_text.split())
    return found


def unlisted(text: str, listed: list[str]) -> list[str]:
    """Return the absolute words of a text that are in none of the listed promises, with their surroundings."""
    spans = [match.span() for words in listed for match in re.finditer(re.escape(words), text)]
    found = []
    for match in ABSOLUTE.finditer(text):
        if not any(start <= match.start() and match.end() <= end for start, end in spans):
            found.append(text[max(match.start() - 50, 0) : match.end() + 30])
    return found


def test_absolute_promises_are_listed() -> None:
    read = pages()
    assert len(read) > 80
    new = {page: unlisted(text, list(PROMISES.get(page, ()))) for page, text in read.items()}
    assert {page: found for page, found in new.items() if found} == {}
    gone = [words for page, listed in PROMISES.items() for words in listed if words not in read[page]]
    assert gone == []


@pytest.mark.parametrize("held_by", sorted({test for listed in PROMISES.values() for test in listed.values()}))
def test_the_tests_that_hold_promises_exist(held_by: str) -> None:
    file, _, name = held_by.partition("::")
    assert f"\ndef {name}(" in (ROOT / file).read_text(encoding="utf-8")


def benchmark_commands() -> list[str]:
    """Return the commands of the third column of BENCHMARKS.md."""
    rows = re.findall(r"^\| (?!what|---)(.*) \|$", (ROOT / "BENCHMARKS.md").read_text(encoding="utf-8"), re.MULTILINE)
    return [command for row in rows for command in re.findall(r"`([^`]+)`", row.split(" | ")[2])]


@pytest.mark.parametrize("command", benchmark_commands())
def test_commands_of_benchmarks_are_accepted_as_printed(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [word for word in shlex.split(command) if not re.match("[A-Z_]+=", word)]
    program, arguments = words[0], words[1:]
    is_script = (ROOT / program).is_file() and os.access(ROOT / program, os.X_OK)
    assert is_script or program in {"python", "torchrun", "pytest"}
    files = [word for word in arguments if "/" in word and not word.startswith("-")]
    assert all((ROOT / file).exists() for file in files)
    if "-m" in arguments and program == "python":
        assert importlib.util.find_spec(arguments[1])
    ranks = re.search(r"--nproc-per-node=(\d+)", command)
    monkeypatch.setenv("WORLD_SIZE", ranks[1] if ranks else "1")
    if "evidence/benchmark" in arguments:
        read_arguments(arguments[arguments.index("evidence/benchmark") + 1 :], NAMES)
    if "recipes/benchmark" in arguments:
        read_arguments(arguments[arguments.index("recipes/benchmark") + 1 :])
