"""Which layout is fastest, before a GPU is rented; and how far its predictions are from measurements.

    python recipes/plan.py rank --model llama_65b --cluster dgx_a100 --gpus 64 \\
        --sequence-length 2048 --global-batch-size 2048
    python recipes/plan.py rank ... --gpus 64,128,256        a scaling table
    python recipes/plan.py rank ... --write my_run.toml      the run that ./run_train.sh my_run.toml starts
    python recipes/plan.py predict layouts.csv -o predicted.csv
    python recipes/plan.py score measured.csv ...
    python recipes/plan.py score measured.csv ... --leave-out model    the same of models that were not fitted to
    python recipes/plan.py calibrate measured.csv -o my_cluster.toml
    python recipes/plan.py score measured.csv --cluster my_cluster.toml

No torch and no GPU. A model is a name of train_configs/models or a TOML file, a cluster a name of
train_configs/clusters or a TOML file.
"""

import argparse
import gc
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from torchllm.config import Config
from torchllm.config.errors import UserError
from torchllm.config.read import read_table
from torchllm.config.toml import read_files, toml_value
from torchllm.planner.search.explain import (
    divides_nowhere,
    fits_nowhere,
    layout_figures,
    misses,
    ranking_table,
    rejections,
    scaling,
    why,
)
from torchllm.planner.search.layouts import Job
from torchllm.planner.search.search import Found, Objective, Ranked, search
from torchllm.planner.search.validity import judge
from torchllm.resources import find_config, name_base, resource
from torchllm.spec.cluster import Hardware, read_cluster, unknown_cluster

MODELS = resource("train_configs/models")


def main(words: Sequence[str]) -> None:
    """One subcommand."""
    given = parser().parse_args(words)
    given.run(given)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    own = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = own.add_subparsers(required=True, metavar="rank | predict | score | calibrate")
    ranks = commands.add_parser("rank", help="the best layouts of a model on a cluster")
    ranks.add_argument("--model", required=True, help="a name of train_configs/models, or a TOML file")
    ranks.add_argument("--cluster", required=True, help="a name of train_configs/clusters, or a TOML file")
    ranks.add_argument("--gpus", required=True, type=counts, help="how many; 64,128,256 for a scaling table")
    ranks.add_argument("--sequence-length", type=count, help="tokens; left out: the TOML's")
    ranks.add_argument("--global-batch-size", type=count, help="sequences in a step; left out: the TOML's")
    ranks.add_argument("--objective", choices=get_args(Objective), default="tokens_per_second")
    ranks.add_argument("--tokens", type=float, default=0.0, help="of the whole training: for days and GPU-hours")
    ranks.add_argument("--json", action="store_true", help="everything, as JSON; sizes in GiB, times in seconds")
    ranks.add_argument("--write", metavar="TOML", help="write a run with the best layout")
    ranks.add_argument("--plot", metavar="PNG", help="time by term, and MFU against memory; needs matplotlib")
    ranks.set_defaults(run=run_rank)
    predicts = commands.add_parser("predict", help="predict the layouts of a CSV file, one a row")
    predicts.add_argument("source", metavar="CSV")
    predicts.add_argument("-o", "--output", required=True, metavar="CSV")
    predicts.set_defaults(run=run_predict)
    scores = commands.add_parser("score", help="predicted against measured")
    scores.add_argument("sources", metavar="CSV", nargs="+")
    scores.add_argument("--json", action="store_true")
    of = scores.add_mutually_exclusive_group()
    of.add_argument("--cluster", default="", help="that they were made on; left out: what the rows say")
    of.add_argument("--leave-out", choices=("model", "dataset"), help="instead: errors on what was not fitted to")
    scores.set_defaults(run=run_score)
    calibrates = commands.add_parser("calibrate", help="fit the constants of software to measurements")
    calibrates.add_argument("source", metavar="CSV")
    calibrates.add_argument("--cluster", default="", help="that they were made on; left out: what the rows say")
    calibrates.add_argument("-o", "--output", required=True, metavar="TOML")
    calibrates.set_defaults(run=run_calibrate)
    return own


def count(text: str) -> int:
    """A whole number of at least 1."""
    if not re.fullmatch("[1-9][0-9]{0,8}", text):
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return int(text)


def counts(text: str) -> list[int]:
    """Some, with commas between them."""
    return sorted({count(each) for each in text.split(",")})


def run_rank(given: argparse.Namespace) -> None:
    """The best layouts, why they are, and what was rejected."""
    file, config = read_model(given.model)
    hardware = read_hardware(given.cluster)
    length = given.sequence_length or config.training.sequence_length
    batch = given.global_batch_size or config.training.global_batch_size
    training = read_table(
        type(config.training),
        {"sequence_length": length, "global_batch_size": batch, "loss_chunk": config.training.loss_chunk},
        [],
    )
    jobs = [Job(config.model, training, hardware, gpus) for gpus in given.gpus]
    results = [(job, checked(job, given.objective)) for job in jobs]
    if given.objective == "gpu_hours":
        results.sort(key=lambda one: one[1].best[0].prediction.step * one[0].gpus)
    elif given.objective == "tokens_per_second":
        results.sort(key=lambda one: one[1].best[0].prediction.step)
    job, found = results[0]
    if given.json:
        print(json.dumps([ranking_json(*result, tokens=given.tokens) for result in results], indent=2))
    else:
        print_ranking(results, given.tokens)
    if given.write:
        write_run(Path(given.write), file, config, given.cluster, job, found.best[0], given.tokens)
    if given.plot:
        from torchllm.planner.search.plot import plot

        plot(job, found, given.plot)


def checked(job: Job, objective: Objective) -> Found:
    """A search that found something; UserError says why it did not, and what would do."""
    beyond = job.hardware.links[-1].gpus
    if job.gpus > beyond:
        raise UserError(f"--gpus {job.gpus}: the cluster has {beyond}")
    found = search(job, objective=objective)
    if not found.layouts:
        raise UserError(divides_nowhere(job, found))
    if not found.best:
        raise UserError(fits_nowhere(job, found))
    return found


def print_ranking(results: Sequence[tuple[Job, Found]], tokens: float) -> None:
    """As text."""
    job, found = results[0]
    winner = found.best[0]
    if len(results) > 1:
        print("\n".join([*scaling([(job, found.best[0]) for job, found in results], tokens), ""]))
    print(f"{job.gpus} x {job.hardware.gpu}: the best of {found.layouts:,} layouts")
    print("\n".join([*ranking_table(job, found.best, tokens), "", *why(job, winner)]))
    verdict = judge(job.case(winner.layout), winner.prediction)
    low, high = verdict.seconds
    print(f"A step takes {low:.4g} to {high:.4g} s, {verdict.range}; it {verdict.fits} into memory.")
    sure = [place for place, one in enumerate(found.best, start=1) if layout_figures(job, one)["fits"] == "fits"]
    if sure and sure[0] > 1:
        print(f"The fastest of these that fits with some room is number {sure[0]}.")
    if near := list(misses(job, found)):
        print("\n".join(["", "Would be faster, but do not fit:", *near]))
    print("\n".join(["", "Rejected:", *rejections(found)]))


def ranking_json(job: Job, found: Found, tokens: float) -> dict[str, object]:
    """The same for programs."""
    verdict = judge(job.case(found.best[0].layout), found.best[0].prediction)
    return {
        "gpus": job.gpus,
        "layouts": found.layouts,
        "best": [layout_figures(job, one, tokens) for one in found.best],
        "why": why(job, found.best[0]),
        "verdict": verdict._asdict(),
        "near_misses": [
            layout_figures(job, Ranked(miss.layout, miss.prediction), tokens) | {"over_gib": miss.over / 2**30}
            for miss in found.misses
        ],
        "rejected": dict(found.rejected),
        "refused_meshes": dict(found.refused),
    }


def write_run(target: Path, model: str, config: Config, cluster: str, job: Job, one: Ranked, tokens: float) -> None:
    """A run of the best layout on top of the model's file."""
    nodes = -(-job.gpus // job.hardware.gpus_per_node)
    start = f"NPROC={job.gpus} ./run_train.sh {target}"
    if nodes > 1:
        start = f"srun --nodes={nodes} ./run_train.sh {target} --run.folder=/shared/{target.stem}"
    of, run = layout_figures(job, one), job.config(config, one.layout)
    lines = [
        f"# {one.layout.text()}, planned for {job.gpus} x {job.hardware.gpu}.",
        "#",
        f"#   {start}",
        "#",
        f"# Predicted: {of['step_seconds']:.4g} s a step, {of['tokens_per_second']:,.0f} tokens/s, "
        f"MFU {of['mfu']:.1%}, {of['memory_gib']:.1f} GiB a GPU.",
        f"base = {toml_value(name_base(model, str(target.parent)))}",
    ]
    if not cluster.endswith(".toml"):
        lines += ["", "[cluster]", f"name = {toml_value(cluster)}"]
    training = ["micro_batch_size", "global_batch_size", "sequence_length"]
    if tokens:
        steps = max(1, round(tokens / (job.training.global_batch_size * job.training.sequence_length)))
        lines += ["", "[training]", f"steps = {steps}"]
    else:
        lines += ["", "[training]"]
    lines += [f"{key} = {toml_value(getattr(run.training, key))}" for key in training]
    degrees = [key for key in one.layout._fields if key not in ("micro_batch_size", "recompute")]
    for section, keys in (
        ("parallel", [*degrees, "scatter_gather"]),
        ("recompute", ["mode"]),
        ("compile", ["norm", "block", "loss"]),
    ):
        table = getattr(run, section)
        lines += ["", f"[{section}]", *(f"{key} = {toml_value(getattr(table, key))}" for key in keys)]
    target.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"written to {target}", file=sys.stderr)


def read_model(name: str) -> tuple[str, Config]:
    """The file and the config in it. UserError with what is wrong."""
    file = find_config(name) if name.endswith(".toml") else str(MODELS / f"{name}.toml")
    if not Path(file).is_file():
        names = ", ".join(sorted(each.stem for each in MODELS.glob("*.toml")))
        raise UserError(f"--model {name}: no such file, and not in train_configs/models ({names})")
    found: list[str] = []
    faults: list[object] = []
    config = read_table(Config, read_files(file, found).table, faults)  # type: ignore[arg-type]
    found += [f"{file}: {fault}" for fault in faults]
    if found:
        raise UserError("\n".join(found))
    return file, config


def read_hardware(name: str) -> Hardware:
    """The cluster. UserError with what is wrong."""
    found: list[str] = []
    is_file = name.endswith(".toml")
    if not is_file and (unknown := unknown_cluster(name)):
        raise UserError(f"--cluster {unknown}")
    hardware = read_cluster(name, found)
    if hardware is None:
        raise UserError("\n".join(found))
    return hardware


def run_predict(given: argparse.Namespace) -> None:
    """One layout a row."""
    from torchllm.planner.evidence.score import predict_file

    print(predict_file(given.source, given.output))


def run_score(given: argparse.Namespace) -> None:
    """Errors of whole files."""
    if given.leave_out:
        from torchllm.planner.evidence.cross_validation import cross_validate

        print(cross_validate(given.sources, given.leave_out, given.json))
        return
    from torchllm.planner.evidence.score import score_files

    print(score_files(given.sources, given.json, given.cluster))


def run_calibrate(given: argparse.Namespace) -> None:
    """Constants of a cluster file."""
    from torchllm.planner.evidence.calibrate import calibrate_file

    print(calibrate_file(given.source, given.output, given.cluster))


if __name__ == "__main__":
    gc.disable()  # a search makes a million tuples, none in a cycle: looking for some takes a quarter of its time
    try:
        main(sys.argv[1:])
    except (UserError, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
