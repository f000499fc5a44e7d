"""How wrong a predicted step may be: a spread that each of its terms has, fitted to steps that were left out. No torch.

The error of a step is log(measured / predicted). Its terms are known unequally well: a matrix product to a few per
cent, the waiting of kernels for each other to a factor. So an error's variance is taken as a sum over sources,

    variance = (factor of the framework)^2 x sum over sources of (share of the step x deviation of the source)^2

where a source is a term of the prediction, or something that concerns the whole step (`WHOLE_STEP`). The table of
deviations is fitted by `evidence/fit_step_errors.py` of a checkout.
"""

import csv
import math
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

from torchllm.tools.planner.case import Case
from torchllm.tools.planner.predict import Prediction

TABLE = Path(__file__).with_name("step_errors.csv")
HEADER = ("left_out", "what", "name", "value")
Knowledge = Literal["fold", "framework"]
"""rows that the constants were not fitted to"""
KNOWLEDGE: tuple[Knowledge, ...] = ("fold", "framework")

EVERY_STEP = "every step"
FLOAT8 = "float8"
EXPERTS = "experts"
RARELY_MEASURED = "a GPU that is rarely measured"
WHOLE_STEP = {EVERY_STEP: 0.03, FLOAT8: 0.2, EXPERTS: 0.5, RARELY_MEASURED: 0.15}
"""sources that are no term of a prediction, and the deviation that each may well have"""
ACROSS_NODES = "tensor parallel across nodes"
LONG_RING = "attention of more than two cp ranks"
PARTS = {ACROSS_NODES: 1.0, LONG_RING: 0.5}
"""sources that are parts of a step which predictions do not know, and the deviation that each may well have"""
PRIOR_OF_TERM = 0.3
"""deviation that a term of a prediction may well have: 30 % of its seconds"""
RARELY_FOLDS = 6
"""folds of a generation of GPUs below which it is rarely measured"""


class StepInterval(NamedTuple):
    """The interval that holds 90 % of the errors of steps like one, as logarithms of measured over predicted."""

    half: float
    deviation: float
    rows: int
    folds: int
    widest: str
    """source that adds most to the variance"""

    @property
    def bounds(self) -> tuple[float, float]:
        """The ends of the interval."""
        return -self.half, self.half


class ErrorModel(NamedTuple):
    """The error model: left-out errors predict the error of another step."""

    deviations: dict[str, float]
    """by source"""
    factors: dict[str, float]
    """by framework"""
    folds_of_gpu: dict[str, int]
    """by generation of GPUs"""
    covering: float
    """half of the interval, in deviations of a step"""
    rows: int
    folds: int

    def interval(self, shares: Mapping[str, float], framework: str, gpu: str) -> StepInterval:
        """Return the interval of a step. shares: as `shares_of`."""
        sources = self.sources(shares, gpu)
        factor = self.factors.get(framework, 1.0)
        parts = {source: (share * self.deviation(source)) ** 2 for source, share in sources.items()}
        deviation = factor * math.sqrt(sum(parts.values()))
        half = self.covering * deviation
        widest = max(parts, key=parts.__getitem__)
        return StepInterval(half, deviation, self.rows, self.folds, widest)

    def sources(self, shares: Mapping[str, float], gpu: str) -> dict[str, float]:
        """Return the shares with one for the GPU, if hardly any fold is of its generation."""
        is_rarely = self.folds_of_gpu.get(gpu, 0) < RARELY_FOLDS
        return {**shares, RARELY_MEASURED: 1.0} if is_rarely else dict(shares)

    def deviation(self, source: str) -> float:
        """Return the deviation of a source; of a term that no row has, its prior."""
        return self.deviations.get(source, prior_deviation(source))


ErrorModels = dict[Knowledge, ErrorModel]
"""by kind of left-out rows"""


def prior_deviation(source: str) -> float:
    """Return the deviation that a source may well have."""
    return (WHOLE_STEP | PARTS).get(source, PRIOR_OF_TERM)


def shares_of(case: Case, prediction: Prediction) -> dict[str, float]:
    """Return the shares of a predicted step by source; the GPU's generation is not judged here."""
    shares = {EVERY_STEP: 1.0}
    for term, seconds in prediction.terms.items():
        if seconds > 0:
            shares[term] = seconds / prediction.step
    if case.parallel.tp > case.hardware.gpus_per_node:
        shares[ACROSS_NODES] = shares.get("tensor parallel", 0.0)
    if case.parallel.cp > 2 and case.parallel.cp_method == "ring":
        shares[LONG_RING] = shares.get("attention", 0.0)
    if case.kernels.float8:
        shares[FLOAT8] = 1.0
    if case.model.experts:
        shares[EXPERTS] = 1.0
    return shares


def generation(gpu: str) -> str:
    """Return the generation of a GPU: "H100" of "H100-SXM5-80GB"."""
    return gpu.split("-")[0]


@lru_cache(maxsize=1)
def read_error_models() -> ErrorModels:
    """Return the table that comes with torchllm."""
    with TABLE.open(newline="") as opened:
        lines = list(csv.DictReader(opened))
    models: ErrorModels = {}
    for knowledge in KNOWLEDGE:
        models[knowledge] = error_model_of([cells for cells in lines if cells["left_out"] == knowledge])
    return models


def error_model_of(lines: Iterable[Mapping[str, str]]) -> ErrorModel:
    """Return the model that some lines of the table have."""
    numbers: dict[str, dict[str, float]] = {}
    for cells in lines:
        of_part = numbers.setdefault(cells["what"], {})
        of_part[cells["name"]] = float(cells["value"])
    folds_of_gpu = {gpu: int(folds) for gpu, folds in numbers["folds_of_gpu"].items()}
    covering = numbers["covering"][""]
    rows = int(numbers["rows"][""])
    folds = int(numbers["folds"][""])
    return ErrorModel(numbers["deviations"], numbers.get("factors", {}), folds_of_gpu, covering, rows, folds)
