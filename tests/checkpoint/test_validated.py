import pytest

from torchllm.checkpoint.history import Proof

pytestmark = pytest.mark.quick


def proof_after(steps: dict[int, tuple[int, float | None]], evaluates: bool = False, start: int = 0) -> Proof:
    """The proof after these logged steps: (steps skipped so far, validation loss)."""
    proof = Proof(start, evaluates=evaluates)
    for step, (skipped, validation_loss) in steps.items():
        proof.note(step, skipped, validation_loss)
    return proof


def test_steps_that_were_not_applied_prove_nothing() -> None:
    every_second_is_skipped = {step: (step // 2, None) for step in range(1, 25)}
    # Of the steps after 4 ten were applied: 5, 7, ..., 23.
    assert proof_after(every_second_is_skipped).proven_until == 4
    none_is_applied = {step: (step - 20, None) for step in range(21, 1000)}
    assert proof_after({20: (0, None)} | none_is_applied).proven_until == 0
    assert len(proof_after({20: (0, None)} | none_is_applied)._samples) <= 10  # however long that goes on


def test_of_logged_steps_only_it_knows_what_came_after_each() -> None:
    assert proof_after({1: (0, None), 20: (0, None), 25: (0, None)}).proven_until == 1
    assert proof_after({1: (0, None), 20: (0, None), 30: (0, None)}).proven_until == 20


def test_what_is_suspect_begins_after_what_is_good() -> None:
    logged: dict[int, tuple[int, float | None]] = dict.fromkeys(range(1, 31), (0, None))
    proof = proof_after(logged | {4: (0, 1.5)}, evaluates=True)
    assert proof.suspect_since(evaluation=True) == 5
    assert proof.suspect_since(evaluation=False) == 21  # ten finite steps have followed step 20
    assert proof_after({505: (5, None)}, start=500).suspect_since(evaluation=False) == 500  # none that is older
