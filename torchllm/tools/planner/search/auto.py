"""Choose layouts for a run with `[parallel] layout = "auto"` or "tune", on the machine it is started on. No torch.

The choice depends only on the config, the number of ranks and the name of the machine, so that all ranks agree.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from torchllm.config import Config
from torchllm.config.errors import UserError
from torchllm.tools.planner.case import Case
from torchllm.tools.planner.cluster import FOLDER, Hardware, read_cluster
from torchllm.tools.planner.frozen_weights import with_frozen_weights
from torchllm.tools.planner.optimizer_states import with_optimizer_states
from torchllm.tools.planner.parameters import why_not_costed
from torchllm.tools.planner.predict import Prediction, predict
from torchllm.tools.planner.search.advice import Advice, advise, within_risk
from torchllm.tools.planner.search.explain import GIB, divides_nowhere, fits_nowhere
from torchllm.tools.planner.search.layouts import Job, Layout, kernels_of
from torchllm.tools.planner.search.search import Ranked, search
from torchllm.tools.planner.software import TORCHLLM

C = TypeVar("C", bound=Config)
DRIVER = Path("/proc/driver/nvidia/gpus")
CPU = "this_cpu"
"""cluster of a machine without a GPU"""
NVIDIAS_OWN = ("dgx_", "hgx_")
"""how names of NVIDIA's own systems begin"""


def choose_layouts(config: C, world_size: int, written: Collection[str], count: int = 1) -> tuple[list[C], str]:
    """Return the config with each of `count` layouts, and a line that describes the first.

    The first is the first pick of `advice`; after it come the fastest that leave as much room in memory.

    written: keys ("parallel.tp", "recompute.mode") that the run sets; they stay, unless they are -1 or a default.
    UserError if nothing fits, or the machine is unknown.
    """
    name = _cluster_of_run(config)
    problems: list[str] = []
    hardware = read_cluster(name, problems)
    if hardware is None:
        raise UserError("; ".join(problems))
    job = job_of(config, world_size, written, hardware)
    if config.data.changes_size:
        return _choose_over_stages(config, job, name, count)
    outcome = search(job, count)
    if not outcome.layouts:
        raise UserError(divides_nowhere(job, outcome))
    if not outcome.best:
        raise UserError(fits_nowhere(job, outcome))
    advice = advise(job, outcome)
    chosen = []
    for ranked in roomy_layouts(job, advice, count):
        run = job.config(config, ranked.layout)
        chosen.append(replace(run, parallel=replace(run.parallel, layout="manual")))
    layouts = f"{outcome.layouts:,} layouts of {world_size} ranks on {name}"
    return chosen, _line(advice, layouts, hardware if name == CPU else None, is_float8=config.float8.is_on)


def _choose_over_stages(config: C, job: Job, cluster: str, count: int) -> tuple[list[C], str]:
    """Return what `choose_layouts` does, for a run whose stages have several sizes."""
    from torchllm.tools.planner.search.over_stages import fastest_over_stages, stage_jobs  # few runs have them

    if count > 1:
        raise UserError('"tune" measures steps of one size, and data.stage has several: set it to "auto"')
    stages = stage_jobs(config, job)
    best = fastest_over_stages(stages)
    chosen = job.config(config, best.layout)
    line = (
        f"{best.layout.text()}: the fastest over {len(stages)} stages that {job.gpus} ranks on {cluster} can have, "
        f"predicted {best.seconds / 3600:.3g} hours, at most {best.memory / GIB:.3g} GiB per rank"
    )
    return [replace(chosen, parallel=replace(chosen.parallel, layout="manual"))], line


def _line(advice: Advice, layouts: str, cpu: Hardware | None, is_float8: bool) -> str:
    """Return a line that describes the first pick. layouts: those it was picked from. cpu: where no GPU is planned."""
    layout, prediction = advice.first
    memory = f"{prediction.memory.total / GIB:.3g} GiB per {'GPU' if cpu is None else 'rank'}"
    line = f"{layout.text()}: first pick of {layouts}, predicted {prediction.step:.3g} s per step, {memory}"
    if cpu is not None:
        line += f"; {CPU} has figures of {cpu.gpus_per_node} ranks on another CPU"
    elif not advice.is_measured:
        line += "; not measured on this GPU"
    if advice.simple.fits != "fits":
        line += f"; out of memory in {100 * advice.simple.out_of_memory:.0f} of 100 cases like it"
    if is_float8:
        line += "; planned with products in bfloat16, not in float8"
    return line


def roomy_layouts(job: Job, advice: Advice, count: int) -> list[Ranked]:
    """Return the first pick, and after it the fastest layouts that leave as much room in memory as a pick does."""
    roomy = [advice.first]
    if count == 1:
        return roomy
    for ranked in search(within_risk(job), count).best:
        if ranked.layout != advice.first.layout:
            roomy.append(ranked)
    return roomy[:count]


def planned(config: Config) -> Prediction | None:
    """Predict a run whose layout is resolved. None if `why_unplanned` says why it cannot be predicted."""
    if why_unplanned(config):
        return None
    hardware = read_cluster(_cluster_of_run(config), [])
    assert hardware is not None
    return predict(case_of(config, hardware))


def why_unplanned(config: Config) -> str:
    """Return why a run whose layout is resolved cannot be predicted; "" if it can."""
    if reason := why_not_costed(config.model) or _stages_of_other_sizes(config):
        return reason
    unknown_machine = "no cluster file describes this machine"
    try:
        name = _cluster_of_run(config)
    except UserError:
        return unknown_machine
    hardware = read_cluster(name, [])
    # FOOTGUN: the CPU's figures hold for the number of ranks that shared it when they were measured.
    if hardware is None or (name == CPU and config.parallel.ranks != hardware.gpus_per_node):
        return unknown_machine
    optimizer = config.optimizer
    if (optimizer.offload or optimizer.ema_offload or config.recompute.offload) and not hardware.host.bandwidth:
        return "the cluster file has no [host], which the time of offload follows from"
    return ""


def _stages_of_other_sizes(config: Config) -> str:
    """Return why a run with stages is not planned; "" if all of its steps have one size."""
    reason = "data.stage: a stage has another batch size or length, and this plan is of one size of a step"
    return reason if config.data.changes_size else ""


def _cluster_of_run(config: Config) -> str:
    if config.cluster.name:
        return config.cluster.name
    gpu = "" if config.run.device == "cpu" else device()
    return cluster_with_gpu(gpu)


def case_of(config: Config, hardware: Hardware) -> Case:
    """Return a run as the planner sees it: torchllm, with the cluster's constants."""
    software = replace(TORCHLLM, constants=hardware.constants)
    software = with_optimizer_states(software, config.model, config.training, config.optimizer)
    software = with_frozen_weights(software, config.model, config.trained)
    kernels = kernels_of(config.model, config.compile, software, hardware)
    return Case(
        config.model,
        config.training,
        config.parallel,
        config.recompute,
        kernels,
        hardware,
        software,
        config.trained,
        config.optimizer,
    )


OF_ALL_LAYOUTS = ("expert_dispatch", "expert_chunks", "split", "keep_last_block", "prefetch")
"""keys of [parallel] that a plan does not choose, and whose values it prices"""


def job_of(config: Config, world_size: int, written: Collection[str], hardware: Hardware) -> Job:
    """Return the question to the planner for [training]: keys that the run sets are fixed, others are open."""
    fixed: dict[str, Any] = {}
    if "training.micro_batch_size" in written:
        fixed["micro_batch_size"] = config.training.micro_batch_size
    if "recompute.mode" in written:
        fixed["recompute"] = config.recompute.mode
    for key in Layout._fields:
        value = getattr(config.parallel, key, -1)
        is_open = value == -1 or (key == "virtual_stages" and value == 0)
        if f"parallel.{key}" in written and not is_open:
            fixed[key] = value
    return Job(
        config.model,
        config.training,
        hardware,
        world_size,
        compile=config.compile,
        float8=config.float8,
        trained=config.trained,
        optimizer=config.optimizer,
        fixed=fixed,
        of_all_layouts={key: getattr(config.parallel, key) for key in OF_ALL_LAYOUTS},
        offloads_inputs=config.recompute.offload,
        recompute_k=config.recompute.k,
    )


def device() -> str:
    """Return the driver's name of this machine's first GPU; empty if it has none."""
    for file in sorted(DRIVER.glob("*/information")):
        if model := re.search(r"^Model:\s*(.+)$", file.read_text(), re.MULTILINE):
            return model[1].strip()
    return ""


def cluster_with_gpu(gpu: str) -> str:
    """Return the first of train_configs/clusters that has this GPU, NVIDIA's own systems first."""
    if not gpu:
        return CPU
    names = sorted(file.stem for file in FOLDER.glob("*.toml"))
    nvidias_own = [name for name in names if name.startswith(NVIDIAS_OWN)]
    for name in [*nvidias_own, *names]:
        hardware = read_cluster(name, [])
        if hardware is not None and _same(gpu, hardware.gpu):
            return name
    raise UserError(f"no file of train_configs/clusters has a {gpu}: set cluster.name")


def _same(gpu: str, gpu_of_file: str) -> bool:
    """Return whether a driver's "NVIDIA H100 80GB HBM3" is the file's "H100-SXM5-80GB".

    They name the same chip, and the same memory if both name one. PCIe cards, laptops and a "4090 D" have other chips.
    """
    words, words_of_file = _words(gpu), _words(gpu_of_file)
    if words[0] != words_of_file[0] or {"PCIE", "NVL", "LAPTOP", "D"} & set(words):
        return False
    size, size_of_file = _memory_size(words), _memory_size(words_of_file)
    return size == size_of_file or not size or not size_of_file


def _words(gpu: str) -> list[str]:
    """Return the words of a GPU's name: the chip first."""
    return [word for word in re.findall(r"\w+", gpu.upper()) if word not in ("NVIDIA", "GEFORCE", "RTX")]


def _memory_size(words: Sequence[str]) -> set[str]:
    """Return the word that says how much memory a GPU has, if there is one."""
    return {word for word in words if re.fullmatch(r"\d+GB", word)}
