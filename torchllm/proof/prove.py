"""Train a small copy of a config under many layouts with its recipe, and compare each with one process."""

import pickle
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from torchllm.config import Config
from torchllm.config.errors import UserError
from torchllm.proof.axes import TECHNIQUES, Technique
from torchllm.proof.compare import (
    FLOAT32,
    Agreement,
    ErrorBounds,
    bfloat16_bounds,
    compare_trainings,
    float8_bounds,
)
from torchllm.proof.forced_routing import LEAST_GAP, Choices, RouterUse
from torchllm.proof.layouts import (
    AXES,
    BALANCED,
    MICRO_BATCH,
    OPTIONS,
    PARALLEL,
    RECOMPUTE,
    SPLIT,
    LayoutSpace,
    Settings,
    degrees,
    describe_layout,
    with_settings,
)
from torchllm.proof.pool import Pool, WorkerFailed
from torchllm.proof.recipe import import_recipe
from torchllm.proof.record import NO_CHOICES, Trained, record_training
from torchllm.proof.sample import covering
from torchllm.proof.shrink import one_process, shrink, write_documents

FLOAT32_STEPS = 3
BFLOAT16_STEPS = 1
"""after it the weights of two layouts differ by their rounding, and with them the next gradients"""


SEEDS = 30
"""that are tried for one with which the choices of experts do not hang on last digits"""


class ProofOptions(NamedTuple):
    """What is proven."""

    ranks: int
    """a layout has so many at most"""
    dtype: str
    """float32 or bfloat16"""
    layouts: int | None
    """how many layouts are drawn besides the techniques alone; None: until every pair of settings has occurred"""
    seed: int
    """of the draw, the weights and the data"""


class ProvenLayout(NamedTuple):
    """What came of one layout."""

    layout: Settings
    config: Config
    agreement: Agreement
    seconds: float
    technique: Technique | None
    """that the layout has alone"""

    @property
    def is_right(self) -> bool:
        """Whether it trains the same model as one process."""
        return not self.agreement.findings

    @property
    def name(self) -> str:
        """The layout in one line."""
        words = describe_layout({key: value for key, value in self.layout.items() if value != PLAIN.get(key)})
        return words or "one process"


PLAIN: Settings = {
    **dict.fromkeys(AXES, 1),
    "parallel.sequence_parallel": False,
    "parallel.scatter_gather": True,
    "parallel.zero_stage": 3,
    "parallel.ep": 1,
    "parallel.keep_last_block": True,
    "parallel.prefetch": 1,
    SPLIT: BALANCED,
    "recompute.mode": "none",
    "recompute.k": 0,
    "training.loss_chunk": 0,
}
"""values that a technique alone has, and that need not be printed"""


def prove(
    recipe: Path, config: Config, options: ProofOptions, pool: Pool, kept: Collection[str] = ()
) -> Iterator[ProvenLayout]:
    """Train small copies of a config with a recipe, and yield what came of each layout as soon as it is known.

    First come the techniques alone, then layouts in which every pair of settings occurs. kept: dotted keys of the
    config that stay as they are. UserError if the recipe fails in one process.
    """
    with tempfile.TemporaryDirectory(prefix="torchllm-prove-") as folder:
        prover = Prover(recipe, config, options, Path(folder), pool, kept)
        for technique in TECHNIQUES:
            layout = prover.layout_with(technique)
            if layout is not None:
                yield prover.prove(layout, technique)
        for layout in prover.draw(options.layouts):
            yield prover.prove(layout)


class Prover:
    """Trains the layouts of one small config, and compares them with one process."""

    def __init__(
        self,
        recipe: Path,
        config: Config,
        options: ProofOptions,
        folder: Path,
        pool: Pool,
        kept: Collection[str] = (),
    ) -> None:
        """Shrink the config. folder: an empty one, for the documents and the run."""
        write_documents(folder, options.seed)
        self.recipe, self.pool, self.seed = recipe, pool, options.seed
        self.is_bfloat16 = options.dtype == "bfloat16"
        self.steps = BFLOAT16_STEPS if self.is_bfloat16 else FLOAT32_STEPS
        fixed = {"training.dtype": options.dtype, "run.seed": options.seed}
        if not self.is_bfloat16:  # in float32 the layout is proven; float8 is a rounding of bfloat16
            fixed["float8.recipe"] = "none"
        self.base = with_settings(shrink(config, options.ranks, self.steps, folder, kept), fixed)
        batch = self.base.training.global_batch_size
        sizes = tuple(size for size in range(batch, 0, -1) if batch % size == 0)
        drawn_options = {key: values for key, values in {**OPTIONS, MICRO_BATCH: sizes}.items() if key not in kept}
        combined = {**degrees(options.ranks), **PARALLEL, **RECOMPUTE}
        self.space = LayoutSpace(self.base, combined, drawn_options, options.ranks)
        self.layouts = self.space.census().layouts
        self.proven: list[Settings] = []
        self.trained_alone: dict[Config, Trained] = {}

    def layout_with(self, technique: Technique) -> Settings | None:
        """Return the smallest valid layout with a technique alone; None if the config allows none."""
        asked = {key: value for key, value in technique.settings.items() if key not in self.space.options}
        for layout in self.layouts:
            expected = {**PLAIN, **asked}
            if any(layout.get(key, value) != value for key, value in expected.items()):
                continue
            if not asked.keys() <= layout.keys():
                continue
            for size in (technique.settings.get(MICRO_BATCH), *self.space.options.get(MICRO_BATCH, ())):
                sized = layout | technique.settings | ({} if size is None else {MICRO_BATCH: size})
                if self.space.is_valid(sized) and technique.is_used(self.space.config(sized)):
                    return sized
        return None

    def draw(self, count: int | None) -> list[Settings]:
        """Draw layouts: with those that are proven already they have every pair of settings, if count is None."""
        if count == 0:
            return []
        return covering(self.space, self.layouts, self.seed, self.proven)[:count]

    def prove(self, layout: Settings, technique: Technique | None = None) -> ProvenLayout:
        """Train a layout and compare it with one process."""
        started = time.monotonic()
        self.proven.append(layout)
        config = self.decided(self.space.config(layout))
        expected = self.expected(one_process(config))
        bounds = self.bounds(config, expected)
        try:
            choices = expected.choices if self.is_bfloat16 else NO_CHOICES
            agreement = compare_trainings(self.train(config, choices), expected, bounds)
        except WorkerFailed as error:
            agreement = Agreement("", float("nan"), [last_line(str(error))])
        return ProvenLayout(layout, config, agreement, time.monotonic() - started, technique)

    def decided(self, config: Config) -> Config:
        """Return the config with the next seed with which no token of one process is about to choose another expert.

        In bfloat16 choices are forced, and any seed will do. UserError if there is none.
        """
        if self.is_bfloat16:
            return config
        for seed in range(self.seed, self.seed + SEEDS):
            seeded = with_settings(config, {"run.seed": seed})
            if self.expected(one_process(seeded)).smallest_gap >= LEAST_GAP:
                return seeded
        raise UserError(
            f"--dtype: in float32 a token is about to choose another expert with each of {SEEDS} seeds: take bfloat16, "
            "in which tokens go to the experts of one process"
        )

    def expected(self, config: Config) -> Trained:
        """Return what one process computes in float32."""
        return self.train_alone(with_settings(config, {"training.dtype": "float32", "float8.recipe": "none"}))

    def bounds(self, config: Config, expected: Trained) -> ErrorBounds:
        """Return how far a layout may be from one process."""
        if not self.is_bfloat16:
            return FLOAT32
        own = self.train_alone(one_process(config, config.training.micro_batch_size), expected.choices)
        if config.float8.is_on:
            return float8_bounds(own, expected)
        return bfloat16_bounds(own, expected)

    def train_alone(self, config: Config, choices: Mapping[RouterUse, Choices] = NO_CHOICES) -> Trained:
        """Train in one process, once for each config. UserError if that fails."""
        if config not in self.trained_alone:
            try:
                self.trained_alone[config] = self.train(config, choices)
            except WorkerFailed as error:
                text = f"{self.recipe} fails in one process, on the small copy of the config:"
                raise UserError(f"{text}\n{error}") from error
        return self.trained_alone[config]

    def train(self, config: Config, choices: Mapping[RouterUse, Choices]) -> Trained:
        """Take the steps on the ranks of a layout, with choices of experts. WorkerFailed if that fails."""
        ranks, pickled = config.parallel.ranks, pickle.dumps(config)
        trained: Trained = self.pool.run(train_on_rank, ranks, str(self.recipe), pickled, self.steps, choices)[0]
        return trained


def train_on_rank(
    recipe: str, pickled_config: bytes, steps: int, choices: Mapping[RouterUse, Choices] = NO_CHOICES
) -> Trained | None:
    """Train a config with a recipe on this rank.

    pickled_config: the class of a fork's config can be found when its recipe has been imported, not before. choices: of
    experts, see `record_training`.
    """
    train = import_recipe(Path(recipe)).train
    return record_training(train, pickle.loads(pickled_config), steps, choices)


def last_line(text: str) -> str:
    """Return the last line of a traceback: the error."""
    return text.strip().splitlines()[-1]


def culprits(results: list[ProvenLayout]) -> list[Technique]:
    """Return the techniques that make layouts wrong: those that are wrong alone, else all of a wrong layout."""
    wrong = [result for result in results if not result.is_right]
    alone = [result.technique for result in wrong if result.technique is not None]
    if alone:  # of tp, and tp with sequence parallelism, the first says enough
        return [one for one in alone if not any(other.settings.items() < one.settings.items() for other in alone)]
    found: dict[str, Technique] = {}
    for result in wrong[:1]:
        for technique in TECHNIQUES:
            if technique.is_used(result.config):
                found[technique.name] = technique
    return list(found.values())
