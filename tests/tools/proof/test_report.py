"""What `torchllm prove` says of its results."""

from unittest.mock import patch

import pytest

from torchllm.config import Config
from torchllm.tools.proof import report as of_proof
from torchllm.tools.proof.axes import AFTER_GRADIENTS, RESUMED, TECHNIQUES
from torchllm.tools.proof.compare import Agreement
from torchllm.tools.proof.layouts import AXES, with_settings
from torchllm.tools.proof.prove import ProofOptions, ProvenLayout
from torchllm.tools.proof.report import ProofReport

UPDATE = "step 1, {}: differs by 1.0e-03 afterwards, {} times its bound: the update is wrong, not the gradient"
GRADIENT = "step 1, {}: gradient differs by {}, over 1.0e-05"
SMALLEST = with_settings(Config(), {"parallel.dp_shard": 1})


def layout(name: str, finding: str = "", error: float = 1e-6, bound: float = 1e-5, refusal: str = "") -> ProvenLayout:
    """Return what came of a technique alone, or of a run that was resumed."""
    (technique,) = (one for one in (*TECHNIQUES, RESUMED) if one.name == name)
    settings = {**dict.fromkeys(AXES, 1), **(technique.settings if technique is not RESUMED else {})}
    agreement = Agreement("lm_head.weight", error, [finding] if finding else [], bound=bound, refusal=refusal)
    return ProvenLayout(settings, with_settings(SMALLEST, settings), agreement, 1.0, technique)


def report(*results: ProvenLayout, ranks: int = 4, layouts: int | None = None, dtype: str = "float32") -> list[str]:
    """Return the lines of a proof, without breaks in its paragraphs."""
    said = ProofReport(ProofOptions(ranks, dtype, layouts, seed=0))
    with patch.object(of_proof, "WIDTH", 1000):
        return "\n".join([*map(said.add, results), said.summary()]).splitlines()


def test_sentences_are_broken_into_lines_that_fit() -> None:
    said = ProofReport(ProofOptions(4, "float32", None, seed=0))
    text = said.add(layout("tp=2", GRADIENT.format("layers.0.self_attn.q_proj.weight", "5.5e-01") + " (and 38 others)"))
    assert max(map(len, f"{text}\n{said.summary()}".splitlines())) <= 88
    assert text.splitlines()[1].startswith("    wrong: step 1, layers.0.self_attn.q_proj.weight: gradient")


def test_a_fault_is_one_sentence_and_then_the_layouts_that_share_it() -> None:
    tp, sharded = layout("tp=2", GRADIENT.format("a", 0.5)), layout("dp_shard=2")
    with_tp = layout("tp=2 sequence_parallel=True", GRADIENT.format("b", 0.6))
    lines = report(sharded, tp, with_tp)
    assert lines[2] == "    wrong: step 1, a: gradient differs by 0.5, over 1.0e-05"
    assert lines[4] == "    wrong, as tp=2"
    assert lines[5] == (
        "3 layouts of up to 4 ranks in float32: 2 wrong, the others train the model that one process trains, "
        "worst gradient error 1.0e-06"
    )
    assert lines[6] == "wrong as tp=2: tp=2 sequence_parallel=True"
    (hint,) = lines[7:]
    assert hint.startswith("tp=2: each rank has some of the heads")


def test_wrong_updates_point_at_the_optimizer() -> None:
    """Not at the loss and the model, of which the techniques alone would speak."""
    sharded, tp = layout("dp_shard=2", UPDATE.format("a", 9.9)), layout("tp=2", UPDATE.format("b", 3333.0))
    assert report(sharded, tp)[-2:] == ["wrong as dp_shard=2: tp=2", AFTER_GRADIENTS]
    assert "use the DTensor, not to_local()" in AFTER_GRADIENTS
    norm = layout("pp=2", "step 1: gradient norm differs: 0.5 instead of 1")
    assert report(norm)[-1] == AFTER_GRADIENTS
    both = report(sharded, layout("cp=2 cp_method=ring", GRADIENT.format("a", 0.5)))
    assert both[-2].startswith("cp=2 cp_method=ring: each rank has two pieces")
    assert both[-1] == AFTER_GRADIENTS
    assert report(layout(RESUMED.name, UPDATE.format("a", 2.0)))[-1].startswith(
        "checkpoint.resume=auto: a run that goes on"
    )


@pytest.mark.parametrize("name", ["dp_shard=2 tp=2", "dp_shard=2 cp=2 cp_method=ring", "dp_shard=2 pp=2", "tp=2 pp=2"])
def test_two_axes_that_are_wrong_together_may_lack_a_sum(name: str) -> None:
    hint = report(layout(name, GRADIENT.format("a", 0.5)))[-1]
    for cause in ("a rank among all ranks", "an exchange over all ranks", "a norm or a count that is missing"):
        assert cause in hint


def test_a_refused_layout_is_neither_right_nor_wrong() -> None:
    lines = report(layout("tp=2"), layout("cp=2 cp_method=ring", error=0.0, refusal="no window in a ring of 2"))
    assert lines[1].split() == ["-", "1.0", "lm_head.weight", "cp=2", "cp_method=ring"]
    assert lines[2] == "    refused: no window in a ring of 2"
    assert lines[3].endswith(
        "1 refused, the others train the model that one process trains, worst gradient error 1.0e-06"
    )


def test_a_bound_that_follows_one_process_is_said_to() -> None:
    lines = report(layout("tp=2", error=0.01, bound=0.02), layout("pp=2", error=0.6, bound=0.8), dtype="bfloat16")
    assert lines[2].startswith("    too noisy to compare: by one process's own error a gradient may differ by 8.0e-01")
    assert lines[3].endswith(
        "1 too noisy to compare, the others train the model that one process trains, worst gradient error 1.0e-02 "
        "(allowed were 2.0e-02: 1.4 times one process's own error)"
    )


def test_what_takes_more_ranks_is_named() -> None:
    pairs = "dp_shard=2 tp=2; dp_shard=2 cp=2 cp_method=ring; dp_shard=2 pp=2; tp=2 pp=2"
    assert report(layout("tp=2"), ranks=2)[-1] == (
        "not seen with --ranks=2: a mistake in two axes at once, such as data by a rank among all ranks. "
        f"--ranks=4 tries {pairs}"
    )
    assert "--ranks=4 tries dp_replicate=2; dp_shard=2; tp=2; " in report(layout("loss_chunk=20"), ranks=1)[-1]
    assert report(layout("tp=2"), ranks=4)[-1].startswith("1 layout of up to 4 ranks")


def test_a_number_that_ends_the_techniques_is_said_to() -> None:
    assert report(layout("tp=2"), layouts=1)[-1] == (
        "--layouts=1 ends with tp=2. Not seen: a mistake in two axes at once, as in dp_shard=2 tp=2; "
        "dp_shard=2 cp=2 cp_method=ring; dp_shard=2 pp=2; tp=2 pp=2. --layouts=0 tries each technique alone"
    )
    assert report(layout("tp=2"), layouts=1, ranks=2)[-1] == (
        "--layouts=1 ends with tp=2. --layouts=0 tries each technique alone"
    )
    assert report(layout(RESUMED.name), layouts=1)[-1].startswith("1 layout of")
    assert report(layout("tp=2"), layouts=2)[-1].startswith("1 layout of")
