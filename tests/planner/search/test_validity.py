"""What is said of a prediction: inside what was validated or not, and whether it will fit or may."""

from dataclasses import replace

import pytest

from tests.planner.test_predict import LLAMA, case
from torchllm.planner.memory import Memory
from torchllm.planner.predict import predict
from torchllm.planner.search.validity import INSIDE, OUTSIDE, judge


def test_an_ordinary_layout_is_inside() -> None:
    layout = case(dp_shard=16)
    found = predict(layout)
    verdict = judge(layout, found)
    assert verdict.range == "inside the validated range"
    assert verdict.seconds == pytest.approx((found.step / (1 + INSIDE), found.step * (1 + INSIDE)))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sequence_length": 131072}, "sequence length 131,072"),
        ({"dp_shard": 4096, "global_batch_size": 4096}, "GPUs 4,096"),
        ({"cp": 2}, "cp"),
        ({"pp": 2, "schedule": "DualPipeV"}, "schedule DualPipeV"),
    ],
)
def test_what_was_never_measured_is_said_and_has_a_wider_interval(changes: dict[str, object], said: str) -> None:
    layout = case(**changes)
    found = predict(layout)
    verdict = judge(layout, found)
    assert verdict.range == f"outside the validated range: {said}"
    assert verdict.seconds[1] == pytest.approx(found.step * (1 + OUTSIDE))


def test_an_unknown_gpu_is_outside() -> None:
    layout = case()
    other = replace(layout, hardware=replace(layout.hardware, gpu="Abacus"))
    assert judge(other, predict(other)).range == "outside the validated range: GPU Abacus"


@pytest.mark.parametrize(("share", "fits"), [(0.5, "fits"), (0.97, "may fit"), (1.01, "does not fit")])
def test_will_fit_and_may_fit_are_different_words(share: float, fits: str) -> None:
    layout = case(model=LLAMA)
    found = predict(layout)._replace(memory=Memory(weights=share * layout.hardware.memory))
    assert judge(layout, found).fits == fits
