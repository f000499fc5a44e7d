"""Compare two trainings parameter by parameter: one of a layout and one of a single process.

In float32 the errors come from the order of summation: small, unless a sum cancels, as it may in the gradients of
queries and keys. So an error over its bound in float32 is checked again in float64 (`prove.py`), where rounding
vanishes and a mistake stays: right layouts agree to 1e-11. One process's own error cannot be the bound: with other
micro batches it was 9e-7 where ring's was 1e-2, and a mistake with micro batches would widen its own bound.

Updates are checked separately from gradients: a weight may differ from one process's by as much as it moves there when
the gradients change by their bound. With its usual epsilon, AdamW lets a gradient that is only rounding noise decide a
weight; SGD does not.

In bfloat16 every product is rounded, on one process too: its own error against float32 sets the bound of a layout's
error. The bound is not per parameter: under tp 8, where the ranks' parts of a product are rounded before they are
summed, some parameters have 1.6 times one process's own error, while the largest and the median error over all
parameters are at most 1.25 times one process's.

Python's `max`, `min` and `median` can lose a NaN: errors go through numpy's, which keep it.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import starmap
from types import MappingProxyType
from typing import Literal, NamedTuple

import numpy as np

from torchllm.tools.proof.gather import FloatArray
from torchllm.tools.proof.record import Trained, scales

GRADIENT_ERROR = 1e-5
"""of a parameter's largest gradient: the worst seen over correct layouts is 2e-6"""
LOSS_ERROR = 1e-6
"""relative"""
WEIGHT_ERROR = 6e-7
"""of weights up to 1, and a share of larger ones: some roundings of float32, which is good to 6e-8 there"""
RESPONSE_GROWTH = 2.0
"""bound of a weight's error, relative to one process's own response to other gradients"""
BFLOAT16_GROWTH = 1.4
"""bound of a layout's bfloat16 error, relative to one process's own"""
NOISE = 0.5
"""largest useful bound of a gradient: one that is halved, by a mean over two ranks in place of a sum, has this error"""
BFLOAT16_LOSS_ERROR = 1e-3
"""relative; where one process's own error is larger, `BFLOAT16_GROWTH` times that"""

FLOAT8_LOSS_ERROR = 2e-2
"""relative; the worst seen over correct layouts is 6e-3, of a validation loss after one step"""


def largest_element(values: FloatArray) -> float:
    """Return the largest absolute value."""
    return float(np.abs(values).max(initial=0.0))


def root_mean_square(values: FloatArray) -> float:
    """Return the root of the mean of the squares."""
    return float(np.sqrt(np.square(values, dtype=np.float64).mean()))


State = Mapping[str, FloatArray]
"""tensors by name"""


class ErrorBounds(NamedTuple):
    """How far a training may be from the one that it is compared with."""

    size: Callable[[FloatArray], float]
    """norm that measures errors and gradients"""
    gradient: float
    """of each parameter's gradient, relative to its size (see `gradient_error`)"""
    median: float
    """of the errors of all parameters of a step"""
    loss: float
    """relative"""
    norm: float
    """of the gradient, relative"""
    weights: float
    """of each weight after a step, if it is at most 1, and a share of larger ones"""
    source: str = ""
    """origin of the gradients' bounds, shown in findings"""
    has_smallest_scale: bool = False
    """whether errors of gradients far smaller than the model's largest one are relative to a share of that one"""
    responses: Sequence[State] = ()
    """per step, how far one process's weights move if its gradients do; added to the bound of the weights"""
    extra_response: State = MappingProxyType({})
    """the same for the recipe's extra state after the last step"""


FLOAT32 = ErrorBounds(
    largest_element,
    GRADIENT_ERROR,
    median=GRADIENT_ERROR,
    loss=LOSS_ERROR,
    norm=GRADIENT_ERROR,  # it is float64 over float32 gradients, each good to about 1e-6
    weights=WEIGHT_ERROR,
)


def bfloat16_bounds(own: Trained, exact: Trained) -> ErrorBounds:
    """Return how far a layout that computes in bfloat16 may be from one process in float32.

    own: one process in bfloat16, with the layout's micro batches; exact: one process in float32, whose error does not
    count. The layout and `own` are forced to choose the experts of `exact` (`forced_routing.py`).
    """
    errors = list(gradient_errors(own.gradients[0], exact.gradients[0], root_mean_square).values())
    worst = BFLOAT16_GROWTH * float(np.max(errors))
    loss_error = BFLOAT16_GROWTH * abs(own.losses[0] / exact.losses[0] - 1)
    return ErrorBounds(
        root_mean_square,
        worst,
        median=BFLOAT16_GROWTH * float(np.median(errors)),
        loss=float(np.maximum(BFLOAT16_LOSS_ERROR, loss_error)),
        norm=worst,
        weights=np.inf,
        source=f", {BFLOAT16_GROWTH} times one process's own error",
    )


def float32_bounds(expected: Trained, nudged: Sequence[Trained]) -> ErrorBounds:
    """Return how far a layout may be from one process. nudged: the same with gradients changed by `GRADIENT_ERROR`.

    Without these no update may amplify rounding.
    """
    bounds = FLOAT32._replace(has_smallest_scale=True)
    if not nudged:
        return bounds
    responses = []
    for step, weights in enumerate(expected.weights):
        responses.append(_response(weights, [other.weights[step] for other in nudged]))
    extra_response = _response(expected.extra_state, [other.extra_state for other in nudged])
    return bounds._replace(responses=responses, extra_response=extra_response)


def _response(state: State, others: Sequence[State]) -> State:
    """Return `RESPONSE_GROWTH` times (each element's largest difference from `others` + the median of all of these).

    The median is for updates such as Muon's, where each element depends on the gradients of all.
    """
    response = {}
    for name, values in state.items():
        largest = np.max([np.abs(other[name] - values) for other in others], axis=0)
        response[name] = RESPONSE_GROWTH * (largest + np.median(largest))
    return response


def float8_bounds(own: Trained, exact: Trained) -> ErrorBounds:
    """Return how far a layout with float8 products may be from one process in float32. own: one process with float8."""
    return bfloat16_bounds(own, exact)._replace(loss=FLOAT8_LOSS_ERROR)


WRONG_UPDATE = "the update is wrong, not the gradient"
NORM = "gradient norm"
Verdict = Literal["right", "wrong", "refused", "too noisy to compare"]


class Agreement(NamedTuple):
    """How well a training agrees with another one."""

    parameter: str
    """parameter whose gradient has the largest error, in the first step with a wrong gradient"""
    error: float
    """of that gradient"""
    findings: list[str]
    """disagreements, the cause first; empty: the two are the same model"""
    rounding: float = 0.0
    """error of a gradient in float32, where the two agree in float64 alone"""
    rounded: str = ""
    """as in `Trained`"""
    bound: float = GRADIENT_ERROR
    """of the errors of gradients"""
    refusal: str = ""
    """why the recipe does not train at all"""

    @property
    def verdict(self) -> Verdict:
        """Whether the two are the same model."""
        if self.findings:
            return "wrong"
        if self.refusal:
            return "refused"
        return "right" if self.bound <= NOISE else "too noisy to compare"

    @property
    def reason(self) -> str:
        """The reason of the verdict in a sentence; empty if it is right."""
        if self.findings:
            return self.findings[0]
        if self.verdict == "too noisy to compare":
            own = f"by one process's own error a gradient may differ by {self.bound:.1e}"
            return f"{own}, and one that is halved passes: compare in float32"
        return self.refusal

    @property
    def fault(self) -> str:
        """The reason without step, tensor and figures, which is equal for layouts with the same fault."""
        text = re.sub(r", [\w.]+(?=:)| \(and \d+ others\)", "", self.reason)
        return re.sub(r"\b(\d[\d.e+-]*|nan|inf)\b", "#", text)

    @property
    def is_after_gradients(self) -> bool:
        """Whether the gradients are right, and their norm or the update is wrong."""
        return any(text in self.reason for text in (WRONG_UPDATE, NORM))


class ParameterError(NamedTuple):
    """The error of one parameter, of its gradient or its weights."""

    parameter: str
    error: float


NO_ERROR = ParameterError("", 0.0)


def compare_trainings(trained: Trained, expected: Trained, bounds: ErrorBounds) -> Agreement:
    """Compare two trainings: gradients and weights of each step, losses, the gradients' norms, the recipe's own state.

    trained: may have resumed another training, and has the steps after that.
    """
    expected = expected.since(trained.start)
    findings = list(trained.findings)
    if len(trained.losses) != len(expected.losses):
        findings.append(f"{len(trained.losses)} steps were taken, not {len(expected.losses)}")
    findings += _differing_step(trained, expected, bounds)
    first = trained.start + 1
    by_step = dict(enumerate(trained.losses, first)), dict(enumerate(expected.losses, first))
    findings += _differing_numbers("loss", *by_step, bounds.loss)
    if bounds.gradient <= NOISE:  # else it follows a noisy update
        losses = trained.validation_losses, expected.validation_losses
        findings += _differing_numbers("validation loss", *losses, bounds.loss)
    findings += _differing_tokens(trained.tokens_per_expert, expected.tokens_per_expert)
    states = trained.extra_state, expected.extra_state
    findings += _differing_state("extra state", *states, bounds.weights, bounds.extra_response)
    worst = NO_ERROR
    for gradients, expected_gradients in zip(trained.gradients, expected.gradients, strict=False):
        errors = gradient_errors(gradients, expected_gradients, bounds.size, bounds.has_smallest_scale)
        worst = _worst(errors, worst)
        if not worst.error <= bounds.gradient:
            break
    rounded = trained.rounded or expected.rounded
    return Agreement(worst.parameter, worst.error, findings, rounded=rounded, bound=bounds.gradient)


def _worst(errors: Mapping[str, float], worst: ParameterError = NO_ERROR) -> ParameterError:
    """Return the largest of `worst` and these errors; one that is not a number is larger than all others."""
    candidates = [worst, *starmap(ParameterError, errors.items())]
    return candidates[int(np.argmax([candidate.error for candidate in candidates]))]


def _differing_step(trained: Trained, expected: Trained, bounds: ErrorBounds) -> list[str]:
    """Return findings for the first step with wrong gradients, gradient norm or weights; [] if there is none."""
    for index, (gradients, expected_gradients) in enumerate(zip(trained.gradients, expected.gradients, strict=False)):
        number = trained.start + index + 1
        findings = _differing_gradients(f"step {number}", gradients, expected_gradients, bounds)
        if findings and index:
            findings[0] += "; no gradient of the steps before does: look at what a step leaves behind for the next one"
        is_right = not findings
        norm, expected_norm = (dict(enumerate(of.norms[index : index + 1], number)) for of in (trained, expected))
        findings += _differing_numbers(NORM, norm, expected_norm, bounds.norm)
        if is_right:  # a wrong norm clips the update wrongly, and comes first
            response = bounds.responses[number - 1] if bounds.responses else {}
            weights = trained.weights[index], expected.weights[index]
            findings += _differing_state(f"step {number}", *weights, bounds.weights, response, f": {WRONG_UPDATE}")
        if findings:
            return findings
    return []


def _differing_gradients(step: str, gradients: State, expected: State, bounds: ErrorBounds) -> list[str]:
    """Return the errors in the gradients of a step; of several wrong parameters, only the worst."""
    findings = _missing(step, gradients, expected)
    errors = gradient_errors(gradients, expected, bounds.size, bounds.has_smallest_scale)
    worst = _worst(errors)
    if not worst.error <= bounds.gradient:
        others = sum(not error <= bounds.gradient for error in errors.values()) - 1
        bound = f"{bounds.gradient:.1e}{bounds.source}"
        text = f"{step}, {worst.parameter}: gradient differs by {worst.error:.1e}, over {bound}"
        findings.append(text + _others(others))
    middle = float(np.median(list(errors.values()))) if errors else 0.0
    if not middle <= bounds.median:
        bound = f"{bounds.median:.1e}{bounds.source}"
        findings.append(f"{step}: the median error of the gradients is {middle:.1e}, over {bound}")
    return findings


def _differing_state(
    when: str, state: State, expected: State, rounding: float, response: State, cause: str = ""
) -> list[str]:
    """Return the errors in weights or other tensors; of several wrong ones, only the one furthest over its bound.

    An element may differ by `rounding`, times the tensor's largest element if that is over 1, plus its `response`.
    cause: ends the finding.
    """
    findings = _missing(when, state, expected)
    excess = {}
    for name, values in expected.items():
        if name in state:
            bound = rounding * max(1.0, largest_element(values)) + response.get(name, np.zeros(()))
            excess[name] = largest_element((state[name] - values) / bound)
    worst = _worst(excess)
    if not worst.error <= 1.0:
        name = worst.parameter
        difference = largest_element(state[name] - expected[name])
        text = f"{when}, {name}: differs by {difference:.1e} afterwards, {worst.error:.1f} times its bound"
        findings.append(text + _others(sum(not ratio <= 1.0 for ratio in excess.values()) - 1) + cause)
    return findings


def _missing(when: str, tensors: State, expected: State) -> list[str]:
    """Return a finding for each tensor that only one of the two trainings has."""
    findings = []
    for name in sorted(tensors.keys() ^ expected.keys()):
        fault = "nothing there" if name in expected else "one process does not have it"
        findings.append(f"{when}, {name}: {fault}")
    return findings


def _others(count: int) -> str:
    """Return the end of a finding: how many other parameters are wrong too."""
    return f" (and {count} others)" if count else ""


def gradient_errors(
    gradients: State, expected: State, size: Callable[[FloatArray], float], has_smallest_scale: bool = False
) -> dict[str, float]:
    """Return the error of every expected gradient, as a share of the size of the parameter's expected gradient.

    A bias of the keys shifts all scores of a query equally: its gradient is zero in theory and rounding in practice.
    Its error is relative to the gradient of the keys' matrix, unless a norm follows the keys.
    """
    sizes = {name: size(gradient) for name, gradient in expected.items()}
    if has_smallest_scale:
        sizes = scales(sizes)
    errors = {}
    for name in expected:
        if name not in gradients:
            continue
        scale_name = name
        norms = {name.replace("k_proj.bias", f"{norm}.weight") for norm in ("k_norm", "k_width_norm")}
        if name.endswith("k_proj.bias") and norms.isdisjoint(expected):
            scale_name = name.replace("k_proj.bias", "k_proj.weight")
        error, scale = size(gradients[name] - expected[name]), sizes[scale_name]
        if scale:
            errors[name] = error / scale
        else:
            errors[name] = np.inf if error else 0.0
    return errors


def _differing_numbers(
    name: str, numbers: Mapping[int, float], expected: Mapping[int, float], bound: float
) -> list[str]:
    """Return a finding for the first step whose number differs by more than `bound`, relative. By step.

    NaN, which differs from every number, stands for one that only one of the two trainings has.
    """
    for step in sorted(numbers.keys() | expected.keys()):
        number, expected_number = numbers.get(step, math.nan), expected.get(step, math.nan)
        if not abs(number - expected_number) <= bound * abs(expected_number):
            return [f"step {step}: {name} differs: {number:.8g} instead of {expected_number:.8g}"]
    return []


def _differing_tokens(steps: list[list[list[int]]], expected: list[list[list[int]]]) -> list[str]:
    """Return a finding for the first step where an expert's tokens differ in number. By step, block and expert."""
    for step, (tokens, expected_tokens) in enumerate(zip(steps, expected, strict=False), start=1):
        if tokens != expected_tokens:
            return [f"step {step}: tokens per expert differ: {tokens} instead of {expected_tokens}"]
    return []
