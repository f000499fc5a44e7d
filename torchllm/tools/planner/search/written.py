"""Write a plan as files: the first pick as a run, and the runs to measure as a sweep. No torch."""

import json
import os
import subprocess
import sys
from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from typing import Any

from torchllm.config import Config
from torchllm.config.toml import toml_value
from torchllm.tools.config.checks import conflicts
from torchllm.tools.config.idle import idle_keys
from torchllm.tools.config.named_base import name_base
from torchllm.tools.config.read import read_table
from torchllm.tools.config.toml_files import read_files
from torchllm.tools.planner.case import Case
from torchllm.tools.planner.predict import predict
from torchllm.tools.planner.search.explain import GIB, layout_figures
from torchllm.tools.planner.search.layouts import Job, Layout
from torchllm.tools.planner.search.question import PlannedModel
from torchllm.tools.planner.search.search import Ranked
from torchllm.tools.planner.validity import is_measured
from torchllm.tools.resources import find_config, resource

DEFAULT_DATA = [
    "",
    "# Python's standard library as bytes, to try the layout. Put your corpus and tokenizer in its place.",
    "[data]",
    'tokenizer = "bytes"',
    "",
    "[[data.sources]]",
    'kind = "stdlib"',
]
"""section of a written run whose model's file names no data"""
COMPILED_PARTS = ("norm", "block", "loss")
SWEEP_STEPS = 12
"""steps of each run of a written sweep"""

Tables = dict[str, dict[str, Any]]
"""sections of a TOML file by their dotted names"""


def write_run(target: Path, model: PlannedModel, cluster: str, job: Job, ranked: Ranked, tokens: float) -> None:
    """Write a config with a layout, based on the model's file; `tokens`: of the whole training, 0 if unknown."""
    tables: Tables = {"cluster": {"name": cluster_name(cluster)}} | sections(model, job, ranked.layout)
    if tokens:
        tokens_per_step = job.training.global_batch_size * job.training.sequence_length
        tables["training"]["steps"] = max(1, round(tokens / tokens_per_step))
    lines = [f"base = {toml_value(name_base(model.file, str(target.parent)))}"]
    for name, values in tables.items():
        lines += ["", f"[{name}]", *(f"{key} = {toml_value(value)}" for key, value in values.items())]
    if "data" not in model.layer.table:
        lines += DEFAULT_DATA
    target.write_text("\n".join(lines) + "\n", encoding="utf-8")
    written = read_table(Config, read_files(str(target), []).table, [])
    notes = [f"--check refuses {problem.key}: {problem.message}" for problem in conflicts(written, job.gpus)]
    traced = None if notes else traced_peak(target, job.gpus)
    lines = [*(f"# {note}" for note in notes), *header(target, job, ranked, traced), *lines]
    target.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if "data" not in model.layer.table:
        notes.append(
            "[data] is Python's standard library as bytes, to try the layout. Put your corpus and tokenizer there."
        )
    print(f"wrote {target}", *(f"{target}: {note}" for note in notes), sep="\n", file=sys.stderr)


def has_torch() -> bool:
    """Return whether this machine can run a dry run."""
    return find_spec("torch") is not None


def traced_peak(file: Path, gpus: int) -> int | None:
    """Return the bytes of the tensors on the fullest rank by a dry run of a config; None if it ends with an error."""
    if not has_torch():
        return None
    print(f"dry run of {file}: its memory, traced", file=sys.stderr)
    recipe = os.environ.get("RECIPE") or str(resource("recipes/pretrain.py"))
    words = [str(file), "--run.dry_run=true", "--run.json=true", f"--gpus={gpus}"]
    run = subprocess.run([sys.executable, recipe, *words], stdout=subprocess.PIPE, text=True, check=False)
    if run.returncode:
        return None
    return max(kind["peak"] for kind in json.loads(run.stdout)["kinds"])


def sections(model: PlannedModel, job: Job, layout: Layout) -> Tables:
    """Return the keys of the command line, then the keys that a layout sets."""
    run = job.config(model.config, layout)
    tables: Tables = {}
    for key in model.restrictions.overrides:
        *path, name = key.split(".")
        value: Any = model.layer.table
        for part in (*path, name):
            value = value[part]
        tables.setdefault(".".join(path), {})[name] = value
    parallel = [key for key in layout._fields if key not in ("micro_batch_size", "recompute")]
    written = {
        "training": (run.training, ["micro_batch_size", "global_batch_size", "sequence_length"]),
        "parallel": (run.parallel, [*parallel, "scatter_gather"]),
        "recompute": (run.recompute, ["mode"]),
        "compile": (run.compile, COMPILED_PARTS),
    }
    for section, (config, keys) in written.items():
        tables.setdefault(section, {}).update({key: getattr(config, key) for key in keys})
    for section in ("training", "parallel", "optimizer", "recompute"):  # the keys that a plan may change besides
        planned, base = getattr(run, section), getattr(model.config, section)
        changed = [field.name for field in fields(base) if getattr(planned, field.name) != getattr(base, field.name)]
        tables.setdefault(section, {}).update({name: getattr(planned, name) for name in changed})
    return {section: keys for section, keys in tables.items() if keys}


def header(target: Path, job: Job, ranked: Ranked, traced: int | None) -> list[str]:
    """Return the comment on top of a written config: the layout, the launch command and the prediction.

    traced: bytes of tensors by a dry run, None: `--check`, or the dry run, refuses the config.
    """
    config, folder = quote(str(target)), quote(f"/shared/{target.stem}")
    launch = f"NPROC={job.gpus} ./run_train.sh {config}"
    if nodes_of(job) > 1:
        launch = f"srun --nodes={nodes_of(job)} ./run_train.sh {config} --run.folder={folder}"
    figures = layout_figures(job, ranked)
    if traced:
        counted = f"by a dry run {traced / GIB:.1f}"
    elif has_torch():
        counted = "not counted by a dry run, which is refused"
    else:
        counted = "not counted by a dry run, for which torch is missing"
    lines = [
        f"# {ranked.layout.text()}, planned for {job.gpus} x {job.hardware.gpu}.",
        "#",
        f"#   {launch}",
        "#",
        f"# Predicted: {figures['step_seconds']:.4g} s per step, {figures['tokens_per_second']:,.0f} tokens/s, "
        f"MFU {figures['mfu']:.1%}, {figures['memory_gib']:.1f} GiB per GPU,",
        f"# of which {ranked.prediction.memory.live / GIB:.1f} are tensors: "
        f"{predict(as_traced(job.case(ranked.layout))).memory.live / GIB:.1f} with uncompiled blocks, {counted}.",
    ]
    if not is_measured(job.case(ranked.layout)):
        lines.append("# not measured on this GPU")
    return lines


def as_traced(case: Case) -> Case:
    """Return a case with the kernels that a dry run counts: no compiled block."""
    return replace(case, kernels=case.kernels._replace(compiled=False))


def write_sweep(folder: Path, model: PlannedModel, cluster: str, job: Job, first: Ranked, runs: list[Ranked]) -> None:
    """Write a sweep of some layouts, and the run that it changes: the first pick."""
    folder.mkdir(parents=True, exist_ok=True)
    run = folder / "run.toml"
    write_run(run, model, cluster, job, first, tokens=0.0)
    lines = [
        f"# Layouts of {model.name} on {job.gpus} x {job.hardware.gpu}, to calibrate the planner with.",
        "#",
        f"#   python recipes/sweep {quote(str(folder))}",
        f"#   python recipes/plan.py calibrate {quote(str(folder / 'results.csv'))} -o my_cluster.toml",
        "",
        "[sweep]",
        f"config = {toml_value(run.name)}",
        f"processes = {job.gpus}",
        f"steps = {SWEEP_STEPS}",
    ]
    if nodes_of(job) > 1:
        lines.append(f"launcher = {toml_value(f'srun --nodes={nodes_of(job)} --ntasks-per-node=1')}")
    written = settings(model, job, first.layout)
    for ranked in runs:
        changed = settings(model, job, ranked.layout).items() - written.items()
        lines += ["", "[[sweep.runs]]", f"# {ranked.layout.text()}: predicted {ranked.prediction.step:.4g} s per step"]
        lines.append(f"overrides = {toml_value([f'--{key}={value}' for key, value in sorted(changed)])}")
    target = folder / "sweep.toml"
    target.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"wrote {target}", file=sys.stderr)


def settings(model: PlannedModel, job: Job, layout: Layout) -> dict[str, str]:
    """Return the keys of a layout that have an effect in it, and their values as the command line takes them."""
    idle = {key.key for key in idle_keys(job.config(model.config, layout))}
    texts = {}
    for section, values in sections(model, job, layout).items():
        for name, value in values.items():
            if f"{section}.{name}" not in idle:
                texts[f"{section}.{name}"] = value if isinstance(value, str) else toml_value(value)
    return texts


def nodes_of(job: Job) -> int:
    """Return the number of nodes of a job."""
    return -(-job.gpus // job.hardware.gpus_per_node)


def cluster_name(cluster: str) -> str:
    """Return the value of `cluster.name` for --cluster: a name stays, a file becomes an absolute path."""
    if not cluster.endswith(".toml"):
        return cluster
    return str(Path(find_config(cluster)).resolve())
