"""How far two trainings may be apart, and what is said of those that are farther."""

from dataclasses import replace

import numpy as np
import pytest

from torchllm.tools.proof.compare import FLOAT32, bfloat16_bounds, compare_trainings, float32_bounds
from torchllm.tools.proof.gather import FloatArray
from torchllm.tools.proof.record import Trained


def array(*values: float) -> FloatArray:
    return np.array(values, dtype=np.float32)


def training(gradients: list[FloatArray], weights: list[FloatArray]) -> Trained:
    """Of one parameter, `w`."""
    steps = len(gradients)
    return Trained(
        losses=[2.0] * steps,
        norms=[1.0] * steps,
        gradients=[{"w": gradient} for gradient in gradients],
        weights=[{"w": weight} for weight in weights],
    )


EXPECTED = training([array(1.0, 1.0, 1e-6)] * 2, [array(0.5, 0.5, 0.5), array(0.4, 0.4, 0.6)])


def test_equal_trainings_have_no_error() -> None:
    agreement = compare_trainings(EXPECTED, EXPECTED, FLOAT32)
    assert (agreement.error, agreement.findings) == (0.0, [])


def test_a_weight_may_move_as_far_as_other_gradients_move_it() -> None:
    """As AdamW does, whose epsilon is far below a gradient that is rounding."""
    moved = training([array(1.0, 1.0, 1.1e-6)] * 2, [array(0.5, 0.5, 0.5), array(0.4, 0.4, 0.601)])
    nudged = []
    for move in (1e-3, -2e-4):
        nudged.append(training([array(1.0, 1.0, 0.0)] * 2, [array(0.5, 0.5, 0.5), array(0.4, 0.4, 0.6 + move)]))
    assert compare_trainings(moved, EXPECTED, float32_bounds(EXPECTED, nudged)).findings == []
    (finding,) = compare_trainings(moved, EXPECTED, FLOAT32).findings
    assert finding.startswith("step 2, w: differs by 1.0e-03 afterwards")
    assert finding.endswith("the update is wrong, not the gradient")
    farther = training([array(1.0, 1.0, 1e-6)] * 2, [array(0.5, 0.5, 0.5), array(0.401, 0.4, 0.6)])
    assert compare_trainings(farther, EXPECTED, float32_bounds(EXPECTED, nudged)).findings


def test_the_worst_parameter_of_the_first_wrong_step_is_named() -> None:
    gradients: list[dict[str, FloatArray]] = [{name: array(1.0) for name in "abc"}] * 3
    expected = Trained(gradients=gradients, weights=[{}] * 3)
    wrong = {"a": array(1.1), "b": array(1.5), "c": array(1.0)}
    trained = replace(expected, gradients=[gradients[0], wrong, {**wrong, "c": array(9.0)}])
    agreement = compare_trainings(trained, expected, FLOAT32)
    assert (agreement.parameter, agreement.error) == ("b", pytest.approx(0.5))
    text = "step 2, b: gradient differs by 5.0e-01, over 1.0e-05 (and 1 others); no gradient of the steps before does"
    assert agreement.findings[0].startswith(text)


def test_steps_are_those_since_a_resumed_run_began() -> None:
    resumed = replace(EXPECTED.since(1), start=1)
    assert compare_trainings(resumed, EXPECTED, FLOAT32).findings == []
    wrong = replace(resumed, gradients=[{"w": array(2.0, 1.0, 0.0)}])
    assert compare_trainings(wrong, EXPECTED, FLOAT32).findings[0].startswith("step 2, w: gradient differs")


def test_numbers_are_those_of_the_same_step() -> None:
    expected = replace(EXPECTED, losses=[2.0, 3.0], validation_losses={1: 2.5, 2: 2.4})
    resumed = replace(expected.since(1), start=1)
    assert compare_trainings(resumed, expected, FLOAT32).findings == []
    (finding,) = compare_trainings(replace(resumed, losses=[2.0]), expected, FLOAT32).findings
    assert finding == "step 2: loss differs: 2 instead of 3"
    (finding,) = compare_trainings(replace(resumed, validation_losses={}), expected, FLOAT32).findings
    assert finding == "step 2: validation loss differs: nan instead of 2.4"


def test_a_tiny_gradient_is_measured_by_the_largest_one() -> None:
    """That of queries and keys, where a query sees one key only, is zero in theory and rounding in practice."""
    gradients = {"v_proj": array(1.0), "q_proj": array(3e-9)}
    expected = Trained(gradients=[gradients], weights=[{}])
    trained = Trained(gradients=[{**gradients, "q_proj": array(-2e-9)}], weights=[{}])
    assert compare_trainings(trained, expected, FLOAT32).findings
    assert compare_trainings(trained, expected, float32_bounds(expected, ())).findings == []


def test_state_of_a_recipe_is_compared() -> None:
    expected = replace(EXPECTED, extra_state={"average": array(1.0)})
    wrong = replace(EXPECTED, extra_state={"average": array(1.1)})
    (finding,) = compare_trainings(wrong, expected, FLOAT32).findings
    assert finding.startswith("extra state, average: differs by 1.0e-01")
    assert compare_trainings(EXPECTED, expected, FLOAT32).findings == ["extra state, average: nothing there"]


def test_an_expert_with_other_tokens_is_a_finding() -> None:
    expected = replace(EXPECTED, tokens_per_expert=[[[2, 2]], [[3, 1]]])
    routed = replace(EXPECTED, tokens_per_expert=[[[2, 2]], [[1, 3]]])
    (finding,) = compare_trainings(routed, expected, FLOAT32).findings
    assert finding == "step 2: tokens per expert differ: [[1, 3]] instead of [[3, 1]]"


def test_a_loss_in_bfloat16_may_be_as_far_off_as_that_of_one_process() -> None:
    exact, own = replace(EXPECTED), replace(EXPECTED, losses=[2.02, 2.0])
    assert bfloat16_bounds(exact, exact).loss == 1e-3
    assert bfloat16_bounds(own, exact).loss == pytest.approx(1.4e-2)
