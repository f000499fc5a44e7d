"""How far two trainings may be apart, and what is said of those that are farther."""

from dataclasses import replace

import numpy as np
import pytest

from torchllm.tools.proof.compare import FLOAT32, Agreement, bfloat16_bounds, compare_trainings, float32_bounds
from torchllm.tools.proof.gather import FloatArray, HeldPart, put_together
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
    bounds = FLOAT32._replace(gradient=0.5, median=0.5)  # step 2 is just within them
    agreement = compare_trainings(trained, expected, bounds)
    assert (agreement.parameter, agreement.error) == ("c", 8.0)
    assert agreement.findings[0].startswith("step 3, c: ")


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


@pytest.mark.parametrize("changed", ["gradients", "weights"])
def test_a_number_that_is_none_stays_the_worst(changed: str) -> None:
    """A NaN compares with nothing: it must not give its place to the next parameter."""
    expected = Trained(gradients=[{name: array(1.0) for name in "abc"}], weights=[{name: array(1.0) for name in "abc"}])
    trained = replace(expected, **{changed: [{"a": array(1.0), "b": array(np.nan), "c": array(1.0)}]})
    (finding, *_) = compare_trainings(trained, expected, FLOAT32).findings
    assert finding.startswith("step 1, b: ")
    assert "differs by nan" in finding


def test_ranks_that_differ_by_no_number_are_said_to() -> None:
    parts = []
    for number in (0.0, np.nan, 1.0):
        parts.append(HeldPart("a", (2,), (0,), array(number, 0.0)))
    (finding,) = put_together(parts).findings
    assert finding.message == "ranks differ by nan"


def small_error(size: float) -> Trained:
    """Return one process whose gradient of `w` is off by a share."""
    return replace(EXPECTED, gradients=[{"w": array(1.0 + size)}])


EXACT = small_error(0.0)


def test_a_gradient_of_zero_bounds_nothing() -> None:
    """As that of a low-rank update's A is, while B is zero."""
    exact = replace(EXACT, gradients=[{"w": array(1.0), "lora_A": array(0.0)}])
    own = replace(EXACT, gradients=[{"w": array(1.01), "lora_A": array(0.0)}])
    bounds = bfloat16_bounds(own, exact)
    assert (bounds.gradient, bounds.median) == (pytest.approx(0.014, rel=1e-3), pytest.approx(0.007, rel=1e-3))
    assert compare_trainings(exact, exact, bounds).verdict == "right"
    noise = replace(exact, gradients=[{"w": array(1.0), "lora_A": array(1e-9)}])
    assert compare_trainings(noise, exact, bounds).verdict == "wrong"
    assert compare_trainings(noise, exact, bfloat16_bounds(noise, exact)).verdict == "too noisy to compare"


@pytest.mark.parametrize(
    ("own_error", "error", "verdict"),
    [(0.1, 0.13, "right"), (0.1, 0.15, "wrong"), (0.4, 0.5, "too noisy to compare"), (0.4, 0.6, "wrong")],
)
def test_a_bound_by_which_half_of_a_gradient_passes_shows_nothing(own_error: float, error: float, verdict: str) -> None:
    agreement = compare_trainings(small_error(error), EXACT, bfloat16_bounds(small_error(own_error), EXACT))
    assert agreement.verdict == verdict
    said = {
        "right": "",
        "wrong": ", 1.4 times one process's own error",
        "too noisy to compare": "one that is halved passes",
    }
    assert said[verdict] in agreement.reason


def test_a_validation_loss_after_an_update_by_noise_is_not_compared() -> None:
    trained, exact = (replace(EXACT, validation_losses={1: loss}) for loss in (2.5, 2.0))
    for own_error, verdict in ((0.1, "wrong"), (0.4, "too noisy to compare")):
        assert compare_trainings(trained, exact, bfloat16_bounds(small_error(own_error), exact)).verdict == verdict


def test_a_wrong_norm_is_named_before_the_update_that_it_clips() -> None:
    wrong = replace(EXPECTED, norms=[0.5, 1.0], weights=[{"w": array(0.6, 0.5, 0.5)}, EXPECTED.weights[1]])
    agreement = compare_trainings(wrong, EXPECTED, FLOAT32)
    assert agreement.findings[0] == "step 1: gradient norm differs: 0.5 instead of 1"
    assert agreement.findings[1].endswith("the update is wrong, not the gradient")
    assert agreement.is_after_gradients


def test_layouts_share_a_fault_whatever_its_figures() -> None:
    sentences = [
        "step 1, layers.0.mlp.up_proj.weight: gradient differs by 5.5e-01, over 1.0e-05 (and 38 others)",
        "step 2, lm_head.weight: gradient differs by inf, over 1.0e-05",
        "step 2, lm_head.weight: gradient differs by 0.1, over 1.0e-05; no gradient of the steps before does",
        "step 1, a: differs by 1.0e-03 afterwards, 3.0 times its bound: the update is wrong, not the gradient",
        "RuntimeError: The size of tensor a (4) must match the size of tensor b (8)",
        "RuntimeError: The size of tensor a (2) must match the size of tensor b (4)",
    ]
    faults = [Agreement("", 0.0, [sentence]).fault for sentence in sentences]
    assert faults[0] == faults[1] == "step #: gradient differs by #, over #"
    assert faults[4] == faults[5]
    assert len(set(faults)) == 4
