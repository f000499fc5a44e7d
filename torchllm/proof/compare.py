"""Compare two trainings parameter by parameter: of a layout, and of one process.

In float32 the errors are those of sums in another order. In bfloat16 every product is rounded, on one process too: its
own error, against float32, is the measure of what a layout may add. Single parameters are no measure there: under tp 8,
where the ranks' parts of a product are rounded before they are summed, the error of some is 1.6 times one process's
own, while the largest and the median of all parameters are at most 1.25 times theirs.
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

from torchllm.proof.gather import FloatArray
from torchllm.proof.record import Trained

GRADIENT_ERROR = 1e-5
"""of a parameter's largest gradient: the worst seen over correct layouts is 2e-6"""
LOSS_ERROR = 1e-6
"""relative"""
WEIGHT_ERROR = 6e-7
"""of weights after three steps. Each is at most the learning rate 2e-3, of gradients good to 1e-5: with epsilon 1e-3
AdamW does not amplify rounding. float32 itself is good to 6e-8 near the norms' 1."""
BFLOAT16_GROWTH = 1.3
"""how many times one process's own bfloat16 error that of a layout may be"""
BFLOAT16_LOSS_ERROR = 5e-4
"""relative; the worst seen over correct layouts is 1e-5"""

FLOAT8_LOSS_ERROR = 2e-2
"""relative; the worst seen over correct layouts is 6e-3, of a validation loss after one step"""


def largest_element(values: FloatArray) -> float:
    """Return the largest absolute value."""
    return float(np.abs(values).max())


def root_mean_square(values: FloatArray) -> float:
    """Return the root of the mean of the squares."""
    return float(np.sqrt(np.square(values, dtype=np.float64).mean()))


class ErrorBounds(NamedTuple):
    """How far a training may be from the one that it is compared with."""

    size: Callable[[FloatArray], float]
    """what of an error, and of a gradient, is compared"""
    gradient: float
    """of each parameter's gradient, relative to its size (see `gradient_error`)"""
    median: float
    """of the errors of all parameters of a step"""
    loss: float
    """relative"""
    norm: float
    """of the gradient, relative"""
    weights: float
    """of each weight after the last step"""


FLOAT32 = ErrorBounds(
    largest_element,
    GRADIENT_ERROR,
    median=GRADIENT_ERROR,
    loss=LOSS_ERROR,
    norm=GRADIENT_ERROR,  # it is float64 over float32 gradients, each good to about 1e-6
    weights=WEIGHT_ERROR,
)


def bfloat16_bounds(own: Trained, exact: Trained) -> ErrorBounds:
    """Return how far a layout may be from one process in float32, where it computes in bfloat16.

    own: one process in bfloat16, with the layout's micro batches; exact: in float32, whose error does not count. Both
    in bfloat16 are made to choose the experts of that one (`forced_routing.py`).
    """
    errors = gradient_errors(own.gradients[0], exact.gradients[0], root_mean_square).values()
    worst = BFLOAT16_GROWTH * max(errors)
    return ErrorBounds(
        root_mean_square,
        worst,
        median=BFLOAT16_GROWTH * median(errors),
        loss=BFLOAT16_LOSS_ERROR,
        norm=worst,
        weights=np.inf,
    )


def float8_bounds(own: Trained, exact: Trained) -> ErrorBounds:
    """Return how far a layout may be from one process in float32, where products are in float8; own: with these."""
    return bfloat16_bounds(own, exact)._replace(loss=FLOAT8_LOSS_ERROR)


class Agreement(NamedTuple):
    """How well a training agrees with another one."""

    parameter: str
    """whose gradient has the largest error"""
    error: float
    """of that gradient"""
    findings: list[str]
    """what does not agree; empty: the two are the same model"""


def compare_trainings(trained: Trained, expected: Trained, bounds: ErrorBounds) -> Agreement:
    """Compare two trainings: every gradient, losses, the gradients' norms, the weights after the last step."""
    findings = list(trained.findings)
    if len(trained.losses) != len(expected.losses):
        findings.append(f"{len(trained.losses)} steps were taken, not {len(expected.losses)}")
    worst = ParameterError("", 0.0)
    steps = zip(trained.gradients, expected.gradients, strict=False)
    for step, (gradients, expected_gradients) in enumerate(steps, start=1):
        findings += _findings_of_step(f"step {step}", gradients, expected_gradients, bounds)
        worst_of_step = _worst(gradient_errors(gradients, expected_gradients, bounds.size))
        if not worst_of_step.error <= worst.error:
            worst = worst_of_step
    findings += _differing_numbers("loss", trained.losses, expected.losses, bounds.loss)
    findings += _differing_numbers("gradient norm", trained.norms, expected.norms, bounds.norm)
    losses = trained.validation_losses, expected.validation_losses
    findings += _differing_numbers("validation loss", *losses, bounds.loss)
    findings += _differing_tokens(trained.tokens_per_expert, expected.tokens_per_expert)
    findings += _differing_weights(trained.parameters, expected.parameters, bounds.weights)
    return Agreement(worst.parameter, worst.error, findings)


class ParameterError(NamedTuple):
    """The error of the gradient of one parameter."""

    parameter: str
    error: float


def _worst(errors: Mapping[str, float]) -> ParameterError:
    """Return the parameter with the largest error; one that is not a number is larger than all others."""
    worst = ParameterError("", 0.0)
    for name, error in errors.items():
        if not error <= worst.error:
            worst = ParameterError(name, error)
    return worst


def _findings_of_step(
    step: str, gradients: Mapping[str, FloatArray], expected: Mapping[str, FloatArray], bounds: ErrorBounds
) -> list[str]:
    """Return what is wrong with the gradients of a step, in the order of the model."""
    findings = []
    for name in sorted(gradients.keys() ^ expected.keys()):
        fault = "nothing there" if name in expected else "one process has no gradient of it"
        findings.append(f"{step}, {name}: {fault}")
    errors = gradient_errors(gradients, expected, bounds.size)
    for name, error in errors.items():
        if not error <= bounds.gradient:
            findings.append(f"{step}, {name}: gradient differs by {error:.1e}, over {bounds.gradient:.1e}")
    if errors and not median(errors.values()) <= bounds.median:
        middle = median(errors.values())
        findings.append(f"{step}: the median error of the gradients is {middle:.1e}, over {bounds.median:.1e}")
    return findings


def gradient_errors(
    gradients: Mapping[str, FloatArray], expected: Mapping[str, FloatArray], size: Callable[[FloatArray], float]
) -> dict[str, float]:
    """Return the error of every parameter's gradient that is expected, as `gradient_error` says."""
    return {name: gradient_error(name, gradients[name], expected, size) for name in expected if name in gradients}


def gradient_error(
    name: str, gradient: FloatArray, expected: Mapping[str, FloatArray], size: Callable[[FloatArray], float]
) -> float:
    """Return the size of a gradient's error as a share of the size of the expected gradient.

    A bias of the keys shifts every score of a query alike: its gradient is zero in theory and rounding in practice. Its
    error is a share of the gradient of the keys' matrix, unless a norm follows the keys.
    """
    scale_name = name
    norms = {name.replace("k_proj.bias", f"{norm}.weight") for norm in ("k_norm", "k_width_norm")}
    if name.endswith("k_proj.bias") and norms.isdisjoint(expected):
        scale_name = name.replace("k_proj.bias", "k_proj.weight")
    error = size(gradient - expected[name])
    scale = size(expected[scale_name])
    if error == 0.0:
        return 0.0
    return error / scale if scale else np.inf


def _differing_numbers(name: str, numbers: Sequence[float], expected: Sequence[float], bound: float) -> list[str]:
    """Return a finding for the first step whose number differs by more than `bound`, relative."""
    for step, (number, expected_number) in enumerate(zip(numbers, expected, strict=False), start=1):
        if not abs(number - expected_number) <= bound * abs(expected_number):
            return [f"step {step}: {name} differs: {number:.8g} instead of {expected_number:.8g}"]
    return []


def _differing_tokens(steps: list[list[list[int]]], expected: list[list[list[int]]]) -> list[str]:
    """Return a finding for the first step in which an expert had more or fewer tokens. By step, block and expert."""
    for step, (tokens, expected_tokens) in enumerate(zip(steps, expected, strict=False), start=1):
        if tokens != expected_tokens:
            return [f"step {step}: tokens per expert differ: {tokens} instead of {expected_tokens}"]
    return []


def _differing_weights(
    weights: Mapping[str, FloatArray], expected: Mapping[str, FloatArray], bound: float
) -> list[str]:
    """Return a finding for each parameter of which a weight differs by more than `bound` after the last step."""
    findings = []
    for name, expected_weight in expected.items():
        difference = largest_element(weights[name] - expected_weight) if name in weights else np.inf
        if not difference <= bound:
            findings.append(f"{name}: weights differ by {difference:.1e} after the last step")
    return findings
