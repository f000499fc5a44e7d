"""Find the fastest layout of a model before renting a GPU, and fit such predictions to measurements.

    python recipes/plan.py rank --model llama_65b --cluster dgx_a100 --gpus 64 \\
        --sequence-length 2048 --global-batch-size 2048
    python recipes/plan.py rank ... --gpus 64,128,256        print a scaling table as well
    python recipes/plan.py rank ... --write my_run.toml      write a config; ./run_train.sh my_run.toml starts it
    python recipes/plan.py rank ... --tokens 1e12            days and GPU-hours of the whole training
    python recipes/plan.py rank ... --gpus '<=100'           the number up to 100 that trains fastest
    python recipes/plan.py rank ... --parallel.pp=1 --max parallel.tp=4      with a key set, and another bounded
    python recipes/plan.py rank ... --dials                  with keys that free memory: dtypes, offloads, loss_chunk
    python recipes/plan.py rank ... --write-sweep FOLDER     the runs to measure: recipes/sweep FOLDER, then calibrate
    python recipes/plan.py explain my_run.toml               compare this layout with the one that rank takes
    python recipes/plan.py calibrate measured.csv -o my_cluster.toml     fit a cluster's constants to a sweep

It needs neither torch nor a GPU. A model is a name in train_configs/models or a TOML file; a cluster is a name in
train_configs/clusters or a TOML file.
"""

import argparse
import gc
import json
import re
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, get_args

from torchllm import __version__
from torchllm.config import Config
from torchllm.config.errors import UserError
from torchllm.config.keys import dotted
from torchllm.facts.flops import parameter_count
from torchllm.tools.config.checks import conflicts
from torchllm.tools.config.degrees import resolve_degrees
from torchllm.tools.planner.cluster import Hardware
from torchllm.tools.planner.experts import IMBALANCE
from torchllm.tools.planner.search.advice import Advice, advice_lines, advise, pick, within_risk
from torchllm.tools.planner.search.auto import job_of
from torchllm.tools.planner.search.compare import compare
from torchllm.tools.planner.search.dials import CHUNK, WORTH, DialedJob, dial_lines, turn_dials
from torchllm.tools.planner.search.explain import (
    GIB,
    divides_nowhere,
    fits_nowhere,
    layout_figures,
    misses,
    ranking_table,
    rejections,
    scaling,
    why,
)
from torchllm.tools.planner.search.first_runs import first_runs
from torchllm.tools.planner.search.layouts import Job, layout_of
from torchllm.tools.planner.search.numbers import fastest_number, wasted_gpus
from torchllm.tools.planner.search.over_stages import fastest_over_stages, stage_jobs, stage_table
from torchllm.tools.planner.search.question import BOUNDED, PlannedModel, Restrictions, read_hardware, read_model
from torchllm.tools.planner.search.search import Found, Objective, Ranked, Search, search
from torchllm.tools.planner.search.written import write_run, write_sweep
from torchllm.tools.planner.validity import judge
from torchllm.tools.proof.recipe import find_parts, lines_on_fork, schema_of_fork


class SearchResult(NamedTuple):
    """A search, its result, and the choice from it."""

    job: Job
    outcome: Found
    advice: Advice | None
    """None if the least memory is wanted: the choice is then the first one"""

    @property
    def first(self) -> Ranked:
        """The layout to take."""
        return self.advice.first if self.advice else self.outcome.best[0]

    @property
    def step_seconds(self) -> float:
        """Predicted step time of the layout to take."""
        return self.first.prediction.step

    @property
    def gpu_seconds(self) -> float:
        """The same times the GPUs."""
        return self.step_seconds * self.job.gpus


def main(arguments: Sequence[str]) -> None:
    """Run one subcommand. Raises UserError, OSError or ValueError for wrong input."""
    parser = plan_parser()
    options, others = parser.parse_known_args(arguments)
    if others and "most" not in options:
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    options.restrictions = Restrictions.parse(others, getattr(options, "most", []))
    options.run(options)


def plan_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = top.add_subparsers(required=True, metavar="rank | explain | calibrate")
    add_rank(commands.add_parser("rank", help="rank the layouts of a model on a cluster"))

    explain = commands.add_parser("explain", help="say why the plan takes another layout than a run's")
    explain.add_argument("layout", metavar="TOML", help="a config with its layout, or a run")
    explain.add_argument("--model", help="a name in train_configs/models, or a TOML file (default: the run's)")
    explain.add_argument("--cluster", help="a name in train_configs/clusters, or a TOML file (default: the run's)")
    explain.add_argument("--gpus", type=count, help="number of GPUs (default: the product of the run's degrees)")
    add_bounds(explain)
    explain.set_defaults(run=run_explain)

    calibrate = commands.add_parser("calibrate", help="fit a cluster's software constants to measurements")
    calibrate.add_argument("source", metavar="CSV")
    calibrate.add_argument("--cluster", default="", help="cluster of the measurements (default: of most rows)")
    calibrate.add_argument("-o", "--output", required=True, metavar="TOML")
    calibrate.set_defaults(run=run_calibrate)

    return top


def add_bounds(command: argparse.ArgumentParser) -> None:
    """Add the bounds of keys; the command takes overrides, too."""
    command.add_argument(
        "--max",
        action="append",
        default=[],
        dest="most",
        metavar="KEY=NUMBER",
        help="largest value of a key: parallel.tp=8; --parallel.tp=8 sets it",
    )


def add_rank(rank: argparse.ArgumentParser) -> None:
    """Add the options of `rank`."""
    rank.add_argument("--model", required=True, help="a name in train_configs/models, or a TOML file")
    rank.add_argument("--cluster", required=True, help="a name in train_configs/clusters, or a TOML file")
    rank.add_argument(
        "--gpus",
        required=True,
        type=counts,
        help="number of GPUs; 64,128,256 prints a scaling table; '<=100': the number up to 100 that trains fastest",
    )
    rank.add_argument("--sequence-length", type=count, help="tokens per sequence (default: the model file's)")
    rank.add_argument("--global-batch-size", type=count, help="sequences per step (default: the model file's)")
    rank.add_argument(
        "--imbalance",
        type=imbalance,
        help=f"with experts: rows of the busiest rank over the mean (default: {IMBALANCE})",
    )
    rank.add_argument(
        "--objective",
        choices=get_args(Objective),
        default="tokens_per_second",
        help="criterion; memory: the least among layouts at most 5 %% slower than the fastest",
    )
    rank.add_argument("--tokens", type=positive, help="tokens of the whole training: adds days and GPU-hours")
    rank.add_argument(
        "--dials",
        action="store_true",
        help="search the dtypes of weights and moments, both offloads and chunks of the loss, too",
    )
    rank.add_argument("--json", action="store_true", help="print JSON; sizes are in GiB, times in seconds")
    rank.add_argument("--write", metavar="TOML", help="write a config with the first pick")
    rank.add_argument("--write-sweep", metavar="FOLDER", help="write the runs to measure first, for recipes/sweep")
    rank.add_argument("--accept-risk", action="store_true", help="write a layout that may run out of memory, too")
    add_bounds(rank)
    rank.set_defaults(run=run_rank)


def count(text: str) -> int:
    """Parse a whole number of at least 1."""
    if not re.fullmatch("[1-9][0-9]{0,8}", text):
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return int(text)


def imbalance(text: str) -> float:
    """Parse a number of at least 1."""
    value = positive(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, which is even, not {text!r}")
    return value


def positive(text: str) -> float:
    """Parse a positive number."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be a number above 0, not {text!r}")
    return value


class GpuCounts(NamedTuple):
    """The value of --gpus."""

    numbers: list[int]
    """ascending, without duplicates"""
    is_limit: bool = False
    """smaller numbers are as welcome"""


def counts(text: str) -> GpuCounts:
    """Parse whole numbers separated by commas, or "<=" and one number."""
    if text.startswith("<="):
        return GpuCounts([count(text[2:])], is_limit=True)
    return GpuCounts(sorted({count(word) for word in text.split(",")}))


def run_rank(options: argparse.Namespace) -> None:
    """Search the best layouts; print and write them as the options say."""
    model = read_of_fork(options.model, options.restrictions)
    hardware = read_hardware(options.cluster)
    if options.imbalance is not None and not model.config.model.experts:
        raise UserError(f"--imbalance: {model.file} has no experts: remove it")
    if model.config.data.changes_size:
        return rank_over_stages(options, model, hardware)
    tokens = options.tokens or 0.0
    training = replace(
        model.config.training,
        sequence_length=planned_size("sequence_length", options, model),
        global_batch_size=planned_size("global_batch_size", options, model),
    )
    jobs = []
    for gpus in options.gpus.numbers:
        job = replace(model.job(hardware, gpus), training=training, imbalance=options.imbalance or IMBALANCE)
        jobs.append(fastest_number(job) if options.gpus.is_limit else job)
    written = {dotted(path) for path in model.layer.origins}
    is_open = "training.loss_chunk" not in written
    turned: list[DialedJob] = []
    if options.dials:
        if len(jobs) > 1 or options.objective == "memory":
            raise UserError("--dials: needs one number of --gpus, and no --objective memory")
        turned = turn_dials(jobs[0], written)
        if turned:
            jobs, is_open = [turned[-1].job], False
    results = [plan(job, options.objective, is_open) for job in jobs]
    if options.objective == "gpu_hours":
        results.sort(key=lambda result: result.gpu_seconds)
    elif options.objective == "tokens_per_second":
        results.sort(key=lambda result: result.step_seconds)

    lines = heading(model, options.cluster, results[0].job)
    if options.json:
        plans = [ranking_json(model, result, tokens) for result in results]
        if turned:
            plans[0]["dials"] = [
                {"keys": dialed.settings, **layout_figures(dialed.job, dialed.best, tokens)} for dialed in turned
            ]
        print(json.dumps(plans, indent=2))
    else:
        if len(results) > 1:
            firsts = [(result.job, result.first) for result in results]
            print_lines(*scaling(firsts, tokens), "")
        print_lines(*lines)
        if turned:
            print_lines(*dial_lines(turned), "")
        print_ranking(results[0], tokens)
    job, first = results[0].job, results[0].first
    if not (options.write or options.write_sweep):  # which say it of the file
        for problem in conflicts(job.config(model.config, first.layout), job.gpus):
            print(f"--check refuses {problem.key}: {problem.message}", file=sys.stderr)
    if options.write:
        refuse_risk(results[0], options.accept_risk)
        write_run(Path(options.write), model, options.cluster, job, first, tokens)
    if options.write_sweep:
        runs = first_runs(job, results[0].advice or advise(job, results[0].outcome))
        write_sweep(Path(options.write_sweep), model, options.cluster, job, first, runs)


def rank_over_stages(options: argparse.Namespace, model: PlannedModel, hardware: Hardware) -> None:
    """Print the layout that takes least time over all stages of a run, whose steps have several sizes."""
    for name in ("sequence_length", "global_batch_size", "tokens", "dials", "json", "write", "write_sweep"):
        if getattr(options, name):
            raise UserError(
                f"--{name.replace('_', '-')}: {model.file} has stages of several sizes: remove it, or plan one size "
                "with --data.stage=[]"
            )
    if options.objective != "tokens_per_second" or len(options.gpus.numbers) > 1 or options.gpus.is_limit:
        raise UserError(f"{model.file} has stages of several sizes: give one number of --gpus, and no --objective")
    job = replace(model.job(hardware, options.gpus.numbers[0]), imbalance=options.imbalance or IMBALANCE)
    refuse_gpus(job)
    stages = stage_jobs(model.config, job)
    best = fastest_over_stages(stages)
    print_lines(
        *heading(model, options.cluster, job)[:2],  # the batch is a stage's
        f"The fastest over {len(stages)} stages: {best.layout.text()}",
        *stage_table(stages, best.layout),
        'A run takes it with parallel.layout = "auto", if its file sets none of these keys.',
    )


def plan(job: Job, objective: Objective, chunk_is_open: bool) -> SearchResult:
    """Search, and choose; with the loss in chunks if that is open and lets a faster layout into the memory."""
    chunked = replace(job, training=replace(job.training, loss_chunk=CHUNK))
    outcome = search_layouts(job, objective)
    if chunk_is_open and outcome.layouts and not outcome.best:
        return plan(chunked, objective, chunk_is_open=False)
    refuse_none(job, outcome)
    result = SearchResult(job, outcome, advise(job, outcome) if objective != "memory" else None)
    if chunk_is_open and outcome.misses and result.advice:
        enough = (1 - WORTH) * result.step_seconds
        if Search(within_risk(chunked), count=1, below=enough).find_best().best:
            other = plan(chunked, objective, chunk_is_open=False)
            return min(result, other, key=lambda result: result.step_seconds)
    return result


def planned_size(key: str, options: argparse.Namespace, model: PlannedModel) -> int:
    """Return a batch size from the command line, else from the model's file. UserError if neither has it."""
    option: int | None = getattr(options, key)
    flag = "--" + key.replace("_", "-")
    if option is not None and f"training.{key}" in options.restrictions.overrides:
        raise UserError(f"{flag} and --training.{key} are the same key: remove one")
    if option is not None:
        return option
    written = model.layer.table.get("training", {})
    if key not in written:
        raise UserError(f"{flag} is missing: {model.file} has no training.{key}")
    size: int = getattr(model.config.training, key)
    return size


def search_layouts(job: Job, objective: Objective) -> Found:
    """Search, and return the result. Raises UserError if the cluster is too small."""
    refuse_gpus(job)
    return search(job, objective=objective)


def refuse_gpus(job: Job) -> None:
    """Raise UserError if the cluster has fewer GPUs than the job."""
    cluster_size = job.hardware.links[-1].gpus
    if job.gpus > cluster_size:
        raise UserError(f"--gpus {job.gpus}: the cluster has {cluster_size}")


def refuse_none(job: Job, outcome: Found) -> None:
    """Raise UserError with reason and remedy if there is no layout."""
    if not outcome.layouts:
        raise UserError(divides_nowhere(job, outcome))
    if not outcome.best:
        raise UserError(fits_nowhere(job, outcome))


def heading(model: PlannedModel, cluster: str, job: Job) -> list[str]:
    """Describe the job to plan: model, machines and batch."""
    training, shape = job.training, job.model
    tokens = training.sequence_length * training.global_batch_size
    lines = [
        f"{model.name} on {job.gpus} x {job.hardware.gpu} ({Path(cluster).stem})",
        f"{parameter_count(shape) / 1e9:.4g}B parameters: {shape.layers} blocks of {shape.hidden:,}, vocabulary of "
        f"{shape.vocab:,}; torchllm {__version__}, {job.optimizer.name}",
        f"sequences of {training.sequence_length:,} tokens, {training.global_batch_size:,} per step "
        f"({tokens:,} tokens)",
    ]
    if training.loss_chunk:
        lines.append(f"logits of {training.loss_chunk:,} tokens at a time (training.loss_chunk)")
    if job.model.experts:
        lines.append(f"experts of the busiest rank get {job.imbalance:g} times the mean number of rows (--imbalance)")
    return lines


def print_lines(*lines: str) -> None:
    """Print each text on a line."""
    print("\n".join(lines))


def print_ranking(result: SearchResult, tokens: float) -> None:
    """Print the best layouts, the choice with its reasons, near misses, and why others were rejected."""
    job, outcome = result.job, result.outcome
    print_lines(
        f"The best {len(outcome.best)} of {outcome.layouts:,} layouts:", *ranking_table(job, outcome.best, tokens)
    )
    if result.advice:
        print_lines("", *advice_lines(result.advice), *wasted_gpus(job, result.first))
        if not (result.advice.is_measured and result.advice.is_known):
            print_lines("", *to_be_measured(job, result.advice))
    print_lines("", *why(job, result.first))
    near_misses = list(misses(job, outcome))
    if near_misses:
        print_lines("", "Faster, but too large for the GPU's memory:", *near_misses)
    print_lines("", "Rejected:", *rejections(outcome))


def to_be_measured(job: Job, advice: Advice) -> list[str]:
    """Describe the runs that would tell most about this job on these machines."""
    lines = []
    if not advice.is_measured:
        lines.append(f"torchllm is not measured on {job.hardware.gpu}.")
    lines.append("Run these first (--write-sweep FOLDER writes them), then `plan.py calibrate`:")
    return [*lines, *(f"    {ranked.layout.text()}" for ranked in first_runs(job, advice))]


def refuse_risk(result: SearchResult, is_accepted: bool) -> None:
    """Raise UserError if the layout to take may run out of memory, and the user has not accepted that."""
    first = pick("it", result.job, result.first)
    if first.fits != "fits" and not is_accepted:
        raise UserError(
            f"--write: {result.first.layout.text()} runs out of memory in {100 * first.out_of_memory:.0f} of 100 cases "
            "like it: add --accept-risk to write it, or plan for more GPUs or shorter sequences"
        )


def ranking_json(model: PlannedModel, result: SearchResult, tokens: float) -> dict[str, object]:
    """Return the content of `print_ranking` as plain data."""
    job, outcome = result.job, result.outcome
    verdict = judge(job.case(result.first.layout), result.first.prediction)
    near_misses = []
    for miss in outcome.misses:
        near_miss = layout_figures(job, Ranked(miss.layout, miss.prediction), tokens)
        near_miss["over_gib"] = miss.over / GIB
        near_misses.append(near_miss)
    return {
        "model": model.name,
        "sequence_length": job.training.sequence_length,
        "global_batch_size": job.training.global_batch_size,
        "loss_chunk": job.training.loss_chunk,
        "gpus": job.gpus,
        "layouts": outcome.layouts,
        "best": [layout_figures(job, ranked, tokens) for ranked in outcome.best],
        "picks": picks_json(result, tokens),
        "why": why(job, result.first),
        "verdict": verdict._asdict(),
        "more_tokens_per_second": list(wasted_gpus(job, result.first)),
        "near_misses": near_misses,
        "rejected": dict(outcome.rejected),
        "refused_meshes": dict(outcome.refused),
    }


def picks_json(result: SearchResult, tokens: float) -> list[dict[str, object]]:
    """Return the three picks as plain data, the one to take first."""
    if result.advice is None:
        return []
    picks: list[dict[str, object]] = []
    for advised in result.advice.picks:
        figures = layout_figures(result.job, advised.ranked, tokens)
        picks.append({"title": advised.title, "seconds": advised.seconds, **figures})
    picks[0]["reason"] = result.advice.reason
    return picks


def read_of_fork(name: str, restrictions: Restrictions) -> PlannedModel:
    """Read the model that --model names, which may have keys and parts of the fork that RECIPE names."""
    schema = schema_of_fork(Config)
    model = read_model(name, restrictions, schema, partial(lines_on_fork, schema))
    find_parts(model.config.model)
    return model


def run_explain(options: argparse.Namespace) -> None:
    """Compare a run's layout with the one that the plan takes."""
    run = read_of_fork(options.layout, options.restrictions)
    model = read_of_fork(options.model, options.restrictions) if options.model else run
    cluster = options.cluster or run.config.cluster.name
    if not cluster:
        raise UserError(f"--cluster is missing: {run.file} has no cluster.name")
    parallel, wrong = resolve_degrees(run.config.parallel, options.gpus, "set --gpus")
    config = replace(run.config, model=model.config.model, parallel=parallel)
    wrong = wrong or conflicts(config, parallel.ranks)
    if wrong:
        lines = []
        for problem in wrong:
            written = model if problem.path[0] == "model" else run
            lines.append(f"{written.origin(problem.path)}: {problem.key}: {problem.message}")
        raise UserError("\n".join(lines))
    gpus = parallel.ranks
    job = replace(job_of(config, gpus, (), read_hardware(cluster)), most=options.restrictions.most)
    layout = layout_of(config)
    for name, most in options.restrictions.most.items():
        if getattr(layout, name) > most:
            raise UserError(f"--max {BOUNDED[name]}={most}: the run has {getattr(layout, name)}")
    if config.data.changes_size:
        refuse_gpus(job)
        stages = stage_jobs(config, job)
        best = fastest_over_stages(stages)
        print_lines(*heading(model, cluster, job)[:2], f"yours: {layout.text()}", *stage_table(stages, layout))
        print_lines(f"the fastest over {len(stages)} stages: {best.layout.text()}", *stage_table(stages, best.layout))
        return
    outcome = search_layouts(job, "tokens_per_second")
    refuse_none(job, outcome)
    print_lines(*heading(model, cluster, job), *compare(job, layout, advise(job, outcome)))


def run_calibrate(options: argparse.Namespace) -> None:
    """Fit constants and write them to a cluster file."""
    from torchllm.tools.planner.calibration.calibrate import calibrate_file

    print(calibrate_file(options.source, options.output, options.cluster))


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `plan.py ... | head` ends quietly
    gc.disable()  # a search makes a million tuples, none in a cycle: collecting takes a quarter of its time
    try:
        main(sys.argv[1:])
    except (UserError, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
