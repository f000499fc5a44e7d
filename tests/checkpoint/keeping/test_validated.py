import pytest

from torchllm.checkpoint.keeping.history import NONE, Proof

pytestmark = pytest.mark.quick


def proof_after(steps: dict[int, tuple[int, float | None]], evaluates: bool = False, start: int = 0) -> Proof:
    """The proof after these logged steps: (steps skipped so far, validation loss)."""
    proof = Proof(start, evaluates=evaluates)
    for step, (skipped, validation_loss) in steps.items():
        proof.note(step, skipped, validation_loss)
    return proof


@pytest.mark.parametrize("start", [0, 500])
def test_ten_finite_steps_prove_a_checkpoint(start: int) -> None:
    proof = Proof(start, evaluates=False)
    for step in range(1, 10):
        proof.note(start + step, 0, None)
        assert proof.proven_until == NONE
    for step in range(10, 40):
        proof.note(start + step, 0, None)
        assert proof.proven_until == start + step - 10


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


def test_a_run_with_evaluations_is_proven_by_them_alone() -> None:
    logged: dict[int, tuple[int, float | None]] = dict.fromkeys(range(1, 31), (0, None))
    assert proof_after(logged, evaluates=True).proven_until == NONE
    assert proof_after(logged, evaluates=True).finite_until == 20
    assert proof_after(logged | {24: (0, 1.5)}, evaluates=True).proven_until == 24
    assert proof_after({24: (0, 1.5), 28: (0, float("nan"))}, evaluates=True).proven_until == 24


def test_what_is_suspect_begins_after_what_is_good() -> None:
    logged: dict[int, tuple[int, float | None]] = dict.fromkeys(range(1, 31), (0, None))
    proof = proof_after(logged | {4: (0, 1.5)}, evaluates=True)
    assert proof.suspect_since(evaluation=True) == 5
    assert proof.suspect_since(evaluation=False) == 21  # ten finite steps have followed step 20
    assert proof_after({505: (5, None)}, start=500).suspect_since(evaluation=False) == 500  # none that is older
