"""Train a small copy of a config under many layouts with its recipe, and compare each with one process."""

import itertools
import math
import pickle
import re
import tempfile
import time
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from torchllm.config import Config
from torchllm.config.errors import UserError
from torchllm.tools.config.checks import problems
from torchllm.tools.proof.axes import RESUMED, TECHNIQUES, Technique
from torchllm.tools.proof.compare import (
    GRADIENT_ERROR,
    Agreement,
    ErrorBounds,
    Verdict,
    bfloat16_bounds,
    compare_trainings,
    float8_bounds,
    float32_bounds,
)
from torchllm.tools.proof.forced_routing import LEAST_GAP, SEEDS, told_apart
from torchllm.tools.proof.layouts import (
    AXES,
    BALANCED,
    MICRO_BATCH,
    OPTIONS,
    OPTIONS_OF_EXPERTS,
    PARALLEL,
    RECOMPUTE,
    SPLIT,
    LayoutSpace,
    Settings,
    degrees,
    describe_layout,
    ranks_of,
    short_name,
    with_settings,
)
from torchllm.tools.proof.pool import Pool, WorkerFailed
from torchllm.tools.proof.recipe import import_recipe
from torchllm.tools.proof.record import LayoutRefused, Recording, Trained, record_training
from torchllm.tools.proof.sample import covering
from torchllm.tools.proof.shrink import one_process, shrink, write_documents

FLOAT32_STEPS = 3
SAVED_STEP = 2
"""after which a run is saved in one layout, to be resumed in another"""
NOT_RESUMED = "train() saves no checkpoint, or resumes none (--checkpoint.resume=none leaves this trial out)"
ONE_PROCESS, SAVED, RESUMES = "one process", ", saved; ", ", resumed"
"""parts of the names of layouts"""
BFLOAT16_STEPS = 1
"""after it the weights of two layouts differ by their rounding, and with them the next gradients"""


BFLOAT16_SEEDS = 8
"""number of seeds tried for one where tokens can be told apart"""


class ProofOptions(NamedTuple):
    """Options of a proof."""

    ranks: int
    """largest number of ranks of a layout"""
    dtype: str
    """float32 or bfloat16"""
    layouts: int | None
    """how many are trained, the techniques alone first; 0: these; None: until every pair of settings has occurred"""
    seed: int
    """of the draw, the weights and the data"""
    only: str = ""
    """name of the one layout that is trained"""


class ProvenLayout(NamedTuple):
    """The result of one layout."""

    layout: Settings
    config: Config
    agreement: Agreement
    seconds: float
    technique: Technique | None
    """the only technique of the layout, if it was chosen for that"""
    saved: Settings | None = None
    """the layout of the run that this one resumes"""

    @property
    def verdict(self) -> Verdict:
        """The result of the comparison with one process."""
        return self.agreement.verdict

    @property
    def is_right(self) -> bool:
        """Whether it trains the same model as one process."""
        return self.verdict == "right"

    @property
    def is_alone(self) -> bool:
        """Whether it is one process."""
        return self.config.parallel.ranks == 1

    @property
    def name(self) -> str:
        """The layout in one line."""
        name = name_of(self.layout)
        return name if self.saved is None else f"{name_of(self.saved)}{SAVED}{name}{RESUMES}"


PLAIN: Settings = {
    **dict.fromkeys(AXES, 1),
    "parallel.sequence_parallel": False,
    "parallel.scatter_gather": True,
    "parallel.zero_stage": 3,
    "parallel.ep": 1,
    "parallel.expert_dispatch": "exact",
    "parallel.expert_chunks": 1,
    "parallel.keep_last_block": True,
    "parallel.prefetch": 1,
    "parallel.regather": False,
    SPLIT: BALANCED,
    "recompute.mode": "none",
    "recompute.k": 0,
    "training.loss_chunk": 0,
}
"""values of the other settings where a technique is alone; they need not be printed"""


def name_of(layout: Settings) -> str:
    """Return a layout in one line."""
    words = describe_layout({key: value for key, value in layout.items() if value != PLAIN.get(key)})
    return words or ONE_PROCESS


def prove(
    recipe: Path, config: Config, options: ProofOptions, pool: Pool, kept: Collection[str] = ()
) -> Iterator[ProvenLayout]:
    """Train small copies of a config with a recipe, and yield the result of each layout as soon as it is known.

    kept: dotted keys of the config that stay as they are. UserError if the recipe fails in one process, or no
    layout has the requested name.
    """
    with tempfile.TemporaryDirectory(prefix="torchllm-prove-") as folder:
        prover = Prover(recipe, config, options, Path(folder), pool, kept)
        if options.only:
            yield prover.prove_named(options.only)
        else:
            yield from itertools.islice(prover.prove_all(draws=options.layouts != 0), options.layouts or None)


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
        """Shrink the config. folder: empty; it gets the documents and the run."""
        write_documents(folder, options.seed)
        self.recipe, self.pool, self.seed, self.folder, self.kept = recipe, pool, options.seed, folder, kept
        self.is_bfloat16 = options.dtype == "bfloat16"
        self.steps = BFLOAT16_STEPS if self.is_bfloat16 else FLOAT32_STEPS
        fixed = {"training.dtype": options.dtype, "training.weights_dtype": "float32", "run.seed": options.seed}
        if not self.is_bfloat16:  # in float32 the layout is proven; float8 is a rounding of bfloat16
            fixed["float8.recipe"] = "none"
        self.base = with_settings(shrink(config, options.ranks, self.steps, folder, kept), fixed)
        batch = self.base.training.global_batch_size
        sizes = tuple(size for size in range(batch, 0, -1) if batch % size == 0)
        # In bfloat16 choices are forced for recorded tokens; a step that must be repeated may not have these.
        of_experts = OPTIONS_OF_EXPERTS if config.model.experts and not self.is_bfloat16 else {}
        options_of_layouts = {**OPTIONS, **of_experts, MICRO_BATCH: sizes}
        drawn_options = {key: values for key, values in options_of_layouts.items() if key not in kept}
        recompute = {key: values for key, values in RECOMPUTE.items() if key not in kept}
        combined = {**degrees(options.ranks), **PARALLEL, **recompute}
        self.space = LayoutSpace(self.base, combined, drawn_options, options.ranks)
        self.layouts = self.space.valid_layouts()
        if not self.layouts:
            alone = replace(self.base, parallel=one_process(self.base).parallel)
            reasons = problems(one_process(self.base), 1) or problems(alone, 1)
            raise UserError("\n".join(f"{reason.key}: {reason.message} (small copy)" for reason in reasons))
        self.proven: list[Settings] = []
        self.refused: list[Settings] = []
        self.trained_alone: dict[tuple[Config, float, bool], Trained] = {}

    def prove_all(self, draws: bool) -> Iterator[ProvenLayout]:
        """Yield the results of the techniques alone, of a resumed run, and if `draws` of drawn layouts.

        Techniques of one process come first: if it does not agree with itself, nothing else is tried.
        """
        agrees_with_itself, none_wrong = True, True
        for technique in TECHNIQUES:
            layout = self.layout_with(technique)
            if layout is None:
                continue
            if ranks_of(layout) > 1 and not agrees_with_itself:
                return
            result = self.prove(layout, technique)
            none_wrong &= result.verdict != "wrong"
            agrees_with_itself &= result.verdict != "wrong" or ranks_of(layout) > 1
            yield result
        if not agrees_with_itself:
            return
        # A resumed run tells nothing about a layout that may be wrong by itself.
        if none_wrong and not self.why_not_resumed:
            yield self.prove_resumed()
        if draws:
            for layout in covering(self.space, self.layouts, self.seed, self.proven):
                yield self.prove(layout)

    @property
    def why_not_resumed(self) -> str:
        """Why no run is resumed; "" if one is."""
        if self.is_bfloat16:
            return "a resumed run is compared in float32"
        return "checkpoint.resume is given" if "checkpoint.resume" in self.kept else ""

    def prove_named(self, name: str) -> ProvenLayout:
        """Train the layout of a name, as it is printed (`ProvenLayout.name`). UserError if there is none."""
        first, comma, resumed = name.partition(SAVED)
        layout = self.layout_named(first)
        if not comma:
            return self.prove(layout)
        if self.why_not_resumed:
            raise UserError(f"--only: {name}: {self.why_not_resumed}")
        return self._prove_resumed(layout, self.layout_named(resumed.removesuffix(RESUMES)))

    def layout_with(self, technique: Technique) -> Settings | None:
        """Return the smallest valid layout with a technique alone; None if the config allows none."""
        if any(key in self.kept and not key.startswith("parallel.") for key in technique.settings):
            return None
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

    def layout_named(self, name: str) -> Settings:
        """Return the layout with this `name_of`, such as "pp=2 recompute.mode=full". UserError if there is none."""
        key_of = {short_name(key): key for key in self.space.settings}
        settings: Settings = {}
        for word in name.removeprefix(ONE_PROCESS).split():
            short, _, text = word.partition("=")
            if short not in key_of:
                raise UserError(f"--only: {word}: a layout has no such setting; it has {', '.join(key_of)}")
            values = {str(value).lower(): value for value in self.space.settings[key_of[short]]}
            if text.lower() not in values:
                allowed = ", ".join(values)
                raise UserError(f"--only: {word}: with --ranks={self.space.most_ranks} {short} is one of {allowed}")
            settings[key_of[short]] = values[text.lower()]
        smallest = {**dict.fromkeys(AXES, 1), **settings}
        if ranks_of(smallest) > self.space.most_ranks:
            raise UserError(f"--only: {name}: has {ranks_of(smallest)} ranks: give --ranks={ranks_of(smallest)} too")
        layout = self.layout_with(Technique(settings, lambda config: True, ""))
        if layout is None:
            config = self.space.config(smallest)
            reasons = [f"{reason.key}: {reason.message}" for reason in problems(config, config.parallel.ranks)]
            why = "; ".join(reasons) or "one of its settings has no effect without another one"
            raise UserError(f"--only: {name}: no such layout is valid: {why}")
        return layout

    def prove(self, layout: Settings, technique: Technique | None = None) -> ProvenLayout:
        """Train a layout and compare it with one process."""
        started = time.monotonic()
        self.proven.append(layout)
        config = self.decided(self.space.config(layout))
        agreement = self.agreement(config)
        if agreement.refusal:
            self.refused.append(layout)
        return ProvenLayout(layout, config, agreement, time.monotonic() - started, technique)

    def prove_resumed(self) -> ProvenLayout:
        """Save a run in one layout, resume it in another one, and compare it with one process that was not resumed.

        If that is wrong and saving and resuming in one process is too, it returns the latter.
        """
        saved, layout = self.layout_like({"parallel.dp_shard": 2}), self.layout_like({"parallel.tp": 2})
        result = self._prove_resumed(saved, layout)
        alone = self.layout_like({})
        if result.verdict == "wrong" and ranks_of(layout) > 1:
            result_alone = self._prove_resumed(alone, alone)
            return result_alone if result_alone.verdict == "wrong" else result
        return result

    def _prove_resumed(self, saved: Settings, layout: Settings) -> ProvenLayout:
        started = time.monotonic()
        config = self.decided(self.space.config(layout))
        saving = with_settings(self.space.config(saved), {"run.seed": config.run.seed})
        agreement = self.agreement(config, saving)
        return ProvenLayout(layout, config, agreement, time.monotonic() - started, RESUMED, saved)

    def layout_like(self, settings: Settings) -> Settings:
        """Return the smallest layout with these settings alone, or of one process if there is none or it is refused."""
        layout = self.layout_with(Technique(settings, lambda config: True, ""))
        if settings and (layout is None or layout in self.refused):
            return self.layout_like({})
        if layout is None:
            raise UserError(f"no layout of one process is valid with {', '.join(sorted(self.kept))} as given")
        return layout

    def agreement(self, config: Config, saving: Config | None = None) -> Agreement:
        """Return how well a layout agrees with one process: in float64, if it agrees there and not in float32.

        saving: the layout of a run that is resumed.
        """
        found = self.agreement_in(config, saving, in_float64=False)
        if not found.findings or self.is_bfloat16 or math.isnan(found.error):
            return found
        try:
            exact = self.agreement_in(config, saving, in_float64=True)
        except UserError:
            return _not_known(found, "the recipe fails in float64")
        if exact.findings and math.isnan(exact.error):
            return _not_known(found, f"the layout fails in float64 ({exact.findings[0]})")
        if exact.findings and exact.rounded:
            return _not_known(found, f"in float64 the recipe still rounds to float32 ({exact.rounded})")
        return found if exact.findings else exact._replace(rounding=found.error)

    def agreement_in(self, config: Config, saving: Config | None, in_float64: bool) -> Agreement:
        """Return how well a layout agrees with one process, computed in one dtype."""
        alone = one_process(config)
        expected = self.expected(alone, in_float64)
        recording = Recording(self.steps, weights=expected.weights, in_float64=in_float64)
        if self.is_bfloat16:
            recording = Recording(self.steps, self.own(config, expected).choices)
        try:
            if saving is not None:
                folder = {"run.folder": tempfile.mkdtemp(dir=self.folder)}
                saving = with_settings(saving, {**folder, "checkpoint.interval": SAVED_STEP})
                self.train(saving, recording._replace(steps=SAVED_STEP, saves=True))
                config = with_settings(config, {**folder, "checkpoint.resume": "auto"})
            trained = self.train(config, recording)
        except WorkerFailed as error:
            _, _, refusal = str(error).partition(f"{LayoutRefused.__module__}.{LayoutRefused.__name__}: ")
            if refusal and saving is None:  # a layout that was trained before is not refused when it resumes: it fails
                return Agreement("", 0.0, [], refusal=" ".join(refusal.split()))
            return Agreement("", math.nan, [error_line(str(error))])
        if saving is not None and trained.start != SAVED_STEP:
            return Agreement("", math.nan, [f"begins at step {trained.start + 1}: {NOT_RESUMED}"])
        if self.is_bfloat16:
            return compare_trainings(trained, expected, self.bfloat16_bounds(config, expected))
        agreement = compare_trainings(trained, expected, float32_bounds(expected, ()))
        if not agreement.findings or not agreement.error <= GRADIENT_ERROR:
            return agreement
        nudged = []
        for nudge in (GRADIENT_ERROR, -GRADIENT_ERROR):
            nudged.append(self.train_alone(alone, recording._replace(nudge=nudge)))
        return compare_trainings(trained, expected, float32_bounds(expected, nudged))

    def decided(self, config: Config) -> Config:
        """Return the config with the next seed where no token of one process is about to choose another expert.

        In bfloat16 choices are forced, and tokens of different experts must be told apart. UserError if there is none.
        """
        seeded = [with_settings(config, {"run.seed": seed}) for seed in range(self.seed, self.seed + SEEDS)]
        if self.is_bfloat16:
            return told_apart(seeded[:BFLOAT16_SEEDS], lambda config: self.expected(one_process(config)).choices)
        for config in seeded:
            if self.expected(one_process(config)).smallest_gap >= LEAST_GAP:
                return config
        raise UserError(
            f"--dtype: in float32 a token is about to choose another expert with each of {SEEDS} seeds: take bfloat16, "
            "in which tokens go to the experts of one process"
        )

    def expected(self, config: Config, in_float64: bool = False) -> Trained:
        """Return the results of one process in float32, or in float64. UserError if no gradients are seen."""
        config = with_settings(config, {"training.dtype": "float32", "float8.recipe": "none"})
        trained = self.train_alone(config, Recording(self.steps, in_float64=in_float64))
        if not any(trained.gradients):
            raise UserError(f"{self.recipe}: no gradients are seen, for its optimizer is no torch.optim.Optimizer")
        return trained

    def bfloat16_bounds(self, config: Config, expected: Trained) -> ErrorBounds:
        """Return how far a layout in bfloat16 may be from one process in float32."""
        own = self.own(config, expected)
        return float8_bounds(own, expected) if config.float8.is_on else bfloat16_bounds(own, expected)

    def own(self, config: Config, expected: Trained) -> Trained:
        """Return the results of one process in bfloat16, with the experts of `expected`."""
        alone = one_process(config, config.training.micro_batch_size)
        return self.train_alone(alone, Recording(self.steps, expected.choices))

    def train_alone(self, config: Config, recording: Recording) -> Trained:
        """Train in one process, once for each config. UserError if that fails."""
        key = config, recording.nudge, recording.in_float64
        if key not in self.trained_alone:
            try:
                trained = self.train(config, recording)
            except WorkerFailed as error:
                text = f"{self.recipe} fails in one process, on the small copy of the config:"
                raise UserError(f"{text}\n{error}") from error
            if not trained.is_finite:
                raise UserError(
                    f"{self.recipe}: a loss, a gradient or a weight of one process is not finite, on the small copy of "
                    f"the config: nothing can be compared with it (losses: {trained.losses})"
                )
            self.trained_alone[key] = trained
        return self.trained_alone[key]

    def train(self, config: Config, recording: Recording) -> Trained:
        """Take the recorded steps on the ranks of a layout. WorkerFailed if that fails."""
        ranks, pickled = config.parallel.ranks, pickle.dumps(config)
        trained: Trained = self.pool.run(train_on_rank, ranks, str(self.recipe), pickled, recording)[0]
        self.pool.renew(range(ranks))  # a training may leave state behind in the modules of a fork
        return trained


def _not_known(found: Agreement, reason: str) -> Agreement:
    """Return an agreement whose first finding says that rounding alone may be its cause."""
    first, *others = found.findings
    return found._replace(findings=[f"{first}; if by rounding is not known, for {reason}", *others])


def train_on_rank(recipe: str, pickled_config: bytes, recording: Recording) -> Trained | None:
    """Train a config with a recipe on this rank.

    pickled_config: the class of a fork's config can only be found after its recipe is imported.
    """
    train = import_recipe(Path(recipe)).train
    return record_training(train, pickle.loads(pickled_config), recording)


def error_line(text: str) -> str:
    """Return the line of a traceback that names the error, else the last one: a message may have several."""
    errors = re.findall(r"^[\w.]*(?:Error|Exception)\b.*", text, re.M)
    return errors[-1] if errors else text.strip().splitlines()[-1]
