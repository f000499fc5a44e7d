"""Read measured layouts, one per row of a CSV file, as cases for `predict`. No torch.

The columns are `cells.COLUMNS`. Published tables omit much. Cells that follow from the framework or the GPU are read as
facts (`stacks`, train_configs/clusters); others are assumed and named in `MeasuredRow.assumed`, or the row is
invalid and says why: nothing is assumed that changes a prediction by more than a few percent.
"""

import re
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

from evidence.cells import Cells, with_assumptions
from evidence.row_kernels import measured_kernels, recompute_of
from evidence.row_layout import parallel_of, training_of
from evidence.row_model import model_of
from evidence.stacks import STACKS, stack_of
from torchllm.config import Compile, Config, Model
from torchllm.config.errors import UserError
from torchllm.config.schema import SCHEDULES
from torchllm.tools.config.checks import conflicts
from torchllm.tools.planner.calibration.rows import read_cells
from torchllm.tools.planner.case import Case
from torchllm.tools.planner.cluster import FOLDER, Hardware, read_cluster
from torchllm.tools.planner.experts import IMBALANCE
from torchllm.tools.planner.software import Software

CLUSTERS = Path(__file__).parent / "clusters"
"""machines that published rows are from; those that users plan for are in train_configs/clusters"""
CLUSTER_OF_GPU = (
    (r"A100.*40", "mosaic_a100_40gb"),
    (r"A100|A800", "dgx_a100"),
    (r"H100.*9[46]", "h100_96gb_500w"),
    (r"H100|H800|GH200", "dgx_h100"),
    (r"H200", "hgx_h200"),
    (r"GB300", "gb300_nvl72"),
    (r"GB200", "gb200_nvl72"),
    (r"B300", "hgx_b300"),
    (r"B200", "hgx_b200"),
    (r"MI300X", "mi300x"),
    (r"CPU", "this_cpu"),
)
"""GPU -> the cluster it is usually in, for rows whose cluster is unknown"""
DISPATCHERS = ("alltoall", "deepep", "hybridep")
"""how rows travel to their experts; the last two send a token to a node, and to a rank, once"""
ELSEWHERE = ("model.vocab", "parallel.pp", "model.router_renormalize")
"""keys whose values torchllm may refuse and others have: they pad the vocabulary, and a stage may have an end alone"""
ENDS = 2
"""of a model: its embedding and its head"""
CLUSTER_ALIASES = {
    "DGX-H100": "dgx_h100",
    "DGX-B200": "hgx_b200",
    "DGX-GB200": "gb200_nvl72",
    "aws_p5": "aws_p5_h100",
    "h100_96gb": "h100_96gb_500w",
    "h200_kempner": "h200_4per_node_ib",
    "h200_400g_per_gpu": "hgx_h200",
}
"""clusters by their other names"""


class MeasuredRow(NamedTuple):
    """One row of a table of measurements."""

    cells: dict[str, str]
    case: Case | None
    assumed: list[str]
    problem: str
    """why there is no case; empty if there is one"""

    @property
    def seconds(self) -> float | None:
        """Measured step time; None if the row has none."""
        if self.cells.get("status", "ok") not in ("", "ok"):
            return None
        text = self.cells.get("step_time_s")
        return float(text) if text else None

    @property
    def out_of_memory(self) -> bool | None:
        """Whether the layout ran out of memory; None if unknown (after a crash)."""
        return {"ok": False, "": False, "oom": True}.get(self.cells.get("status", ""))


def read_rows(file: str, cluster: str = "") -> list[MeasuredRow]:
    """Return the rows of a CSV file, see `calibration.rows.read_cells`."""
    return [read_row(cells) for cells in read_cells(file, cluster)]


def read_row(cells: dict[str, str]) -> MeasuredRow:
    """Read one row."""
    assumed: list[str] = []
    try:
        return MeasuredRow(cells, _case(with_assumptions(cells, assumed)), assumed, "")
    except (ValueError, UserError) as error:
        return MeasuredRow(cells, None, assumed, str(error))


def _case(cells: Cells) -> Case:
    """Return the case of a row. ValueError or UserError says why there is none."""
    if "RL trainer step" in cells.text("note"):
        raise ValueError("the step of a reinforcement learner: its loss is another one")
    hardware = _hardware(cells)
    software = _software(cells, hardware)
    model = model_of(cells, software)
    parallel = parallel_of(cells, model, software)
    training = training_of(cells, parallel)
    recompute, software = recompute_of(cells, software)
    kernels = measured_kernels(cells, software)
    _refuse(Config(model=model, training=training, parallel=parallel, recompute=recompute))
    return Case(model, training, parallel, recompute, kernels, hardware, software, imbalance=_imbalance(cells, model))


def _refuse(config: Config) -> None:
    """Raise ValueError if torchllm refuses the model or the layout of a row, whatever the row's framework does."""
    parallel, nothing = config.parallel, Compile(norm=False, block=False, loss=False)
    if parallel.schedule not in SCHEDULES:  # of another framework
        parallel = replace(parallel, schedule="1F1B")
    config = replace(config, parallel=parallel, compile=nothing)
    for problem in conflicts(config, parallel.ranks):
        if problem.key not in ELSEWHERE or parallel.stages > config.model.layers + ENDS:
            raise ValueError(f"{problem.key}: {problem.message}")


def _imbalance(cells: Cells, model: Model) -> float:
    """Return `Case.imbalance`: 1 for a benchmark with the same number of tokens per expert, as its note says."""
    if not model.experts or "force-balanced" in cells.text("note"):
        return 1.0
    cells.assume(f"the busiest rank's experts have {IMBALANCE} times the mean of rows")
    return IMBALANCE


def _software(cells: Cells, hardware: Hardware) -> Software:
    """Return the framework of a row, with the row's settings."""
    software = stack_of(cells.text("stack"), cells.assumed)
    if not software.fsdp and cells.number_or("zero_stage", 0) == 3:  # Megatron has no ZeRO 3
        software = STACKS["deepspeed-zero3-2021"]
    if software.name == "torchllm":  # whose constants are the machine's, once they are fitted there
        software = replace(software, constants=hardware.constants)
    if "fp8 all-gather" in cells.text("precision"):
        software = replace(software, gathered=1.0)
    software = _with_overlap(software, cells.text("tp_overlap"))
    return _with_dispatcher(software, cells.text("dispatcher"))


def _with_overlap(software: Software, overlap: str) -> Software:
    """Return a framework whose tensor parallelism overlaps with products as a row says; "": as usual."""
    match overlap:
        case "":
            return software
        case "async":
            return replace(software, overlaps_products=True)
        case "none":
            return replace(software, overlaps_products=False, overlaps_tensor_parallel=False)
    raise ValueError(f"tp_overlap {overlap!r} is unknown (none, async)")


def _with_dispatcher(software: Software, dispatcher: str) -> Software:
    """Return a framework whose rows travel to their experts as a row says; "": as usual."""
    if not dispatcher:
        return software
    if dispatcher not in DISPATCHERS:
        raise ValueError(f"dispatcher {dispatcher!r} is unknown ({', '.join(DISPATCHERS)})")
    return replace(software, sends_tokens_once=dispatcher != "alltoall")


def cluster_of_row(cells: dict[str, str]) -> str:
    """Return the cluster file of a row: the one it names, or its GPU's. ValueError if neither is known."""
    name, gpu = cells.get("cluster", ""), cells.get("gpu", "")
    name = CLUSTER_ALIASES.get(name, name)
    if name.endswith(".toml") or file_of_cluster(name):
        return name
    for pattern, cluster in CLUSTER_OF_GPU:
        if re.search(pattern, gpu or name, re.IGNORECASE):
            return cluster
    raise ValueError(f"cluster {name!r} has no file in train_configs/clusters, and GPU {gpu!r} is unknown")


def file_of_cluster(name: str) -> Path | None:
    """Return the file of a cluster: one that users plan for, or one that only rows of the evidence are from."""
    files = (folder / f"{name}.toml" for folder in (FOLDER, CLUSTERS))
    return next((file for file in files if file.is_file()), None)


def _hardware(cells: Cells) -> Hardware:
    """Return the cluster of a row. Its GPU's is assumed if the row's own is unknown and its network counts."""
    name = cluster_of_row(dict(cells.texts))
    hardware = _read_cluster(name)
    named = cells.text("cluster")
    is_assumed = CLUSTER_ALIASES.get(named, named) != name
    uses_network = cells.number("gpus") > hardware.gpus_per_node
    if is_assumed and uses_network:
        cells.assume(f"cluster {named!r} is unknown: the network of {name}, for its GPU")
    return hardware


@cache
def _read_cluster(name: str) -> Hardware:
    """Return a cluster by name or file. ValueError if it has no file, or a wrong one."""
    problems: list[str] = []
    hardware = read_cluster(str(file_of_cluster(name) or name), problems)
    if hardware is None:
        raise ValueError("; ".join(problems))
    return hardware


def cases(rows: Iterable[MeasuredRow]) -> list[Case]:
    """Return the cases of the valid rows."""
    return [row.case for row in rows if row.case is not None]
