"""Read measured layouts, one per row of a CSV file, as cases for `predict`. No torch.

The columns are those that recipes/sweep writes. Published tables omit much: a missing cell means the default of the
row's framework or GPU, which `MeasuredRow.assumed` names. An invalid row says why.
"""

import csv
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple, get_args

from torchllm.config import FAMILIES, SCHEDULES, Model, Parallel, Recompute, Training
from torchllm.planner.case import Case
from torchllm.planner.compute import Kernels
from torchllm.planner.evidence.stacks import STACKS, stack_of
from torchllm.spec.cluster import FOLDER, Hardware, read_cluster, unknown_cluster
from torchllm.spec.flops import parameter_count
from torchllm.spec.schedules import PUBLISHED
from torchllm.spec.software import AttentionKernel

CLUSTER_OF_GPU = (
    (r"A100.*40", "mosaic_a100_40gb"),
    (r"A100|A800", "dgx_a100"),
    (r"H100.*96", "h100_96gb_500w"),
    (r"H100|H800|GH200", "dgx_h100"),
    (r"H200", "hgx_h200"),
    (r"B200|B300", "hgx_b200"),
    (r"CPU", "this_cpu"),
)
"""GPU -> the cluster it is usually in, for rows whose cluster is unknown"""
MODES = {"": "none", "0": "none", "1": "full", "selective op": "selective", "disabled": "none", "every_layer": "full"}
ATTENTION = {
    "flash_attn2": "flash2",
    "flash_attention_2": "flash2",
    "sdpa": "flash2",
    "sdpa_flash": "flash2",
    "flex": "flash2",
    "cudnn": "flash3",
    "torch": "eager",
    "unfused": "eager",
    "megatron": "fused_softmax",
}
SCHEDULE = {
    "": "1F1B",
    "interleaved": "Interleaved1F1B",
    "ZB-1p": "ZB-H1",
    "ZB-2p": "ZB-H2",
    "ZB-H1": "ZB-H1",
    "ZB-H2": "ZB-H2",
    "ZBV": "ZBVZeroBubble",
}


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
        return float(self.cells["step_time_s"]) if self.cells.get("step_time_s") else None

    @property
    def out_of_memory(self) -> bool | None:
        """Whether the layout ran out of memory; None if unknown (after a crash)."""
        return {"ok": False, "": False, "oom": True}.get(self.cells.get("status", ""))


def read_rows(file: str, cluster: str = "") -> list[MeasuredRow]:
    """Return the rows of a CSV file. OSError if there is no such file, ValueError if it is no table of layouts.

    cluster: replaces the cluster that the rows name; ValueError if there is none of this name.
    """
    if cluster and (unknown := unknown_cluster(cluster)):
        raise ValueError(unknown)
    with open(file, newline="") as opened:
        reader = csv.DictReader(opened)
        if not reader.fieldnames or not {"hidden", "layers", "gpus"} <= set(reader.fieldnames):
            raise ValueError(f"{file}: no columns hidden, layers and gpus: not a table of layouts")
        named = {"cluster": cluster} if cluster else {}
        return [
            read_row({key: (value or "").strip() for key, value in cells.items() if key} | named) for cells in reader
        ]


def read_row(cells: dict[str, str]) -> MeasuredRow:
    """Read one row."""
    assumed: list[str] = []
    try:
        return MeasuredRow(cells, _case(cells, assumed), assumed, "")
    except (ValueError, KeyError, ZeroDivisionError) as error:
        return MeasuredRow(cells, None, assumed, str(error) or type(error).__name__)


def number(cells: dict[str, str], key: str, default: int | None = None) -> int:
    """Return a whole number of a row. ValueError naming the column if the cell is missing or something else."""
    text = cells.get(key, "")
    if not text and default is not None:
        return default
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{key} = {text!r} is not a number" if text else f"{key} is missing") from None
    if value != int(value) or value < 0:
        raise ValueError(f"{key} = {text} is not a whole number")
    return int(value)


def _case(cells: dict[str, str], assumed: list[str]) -> Case:
    software = stack_of(cells.get("stack", ""), assumed)
    if software.name == "megatron" and number(cells, "zero_stage", 0) == 3:  # which Megatron has not
        software = STACKS["deepspeed-zero3-2021"]
    hardware = _hardware(cells, assumed)
    if software.name == "torchllm":  # whose constants are the machine's, once they are fitted there
        software = replace(software, constants=hardware.constants)
    model = _model(cells, assumed, software.default_vocab)
    gpus, tp, pp, cp = (number(cells, key, None if key == "gpus" else 1) for key in ("gpus", "tp", "pp", "cp"))
    dp = number(cells, "dp", 0) or gpus // (tp * pp * cp)
    replicate = number(cells, "dp_replicate", 1)
    shard = number(cells, "dp_shard", 0) or dp // replicate
    if min(tp, pp, cp, dp, gpus) < 1:
        raise ValueError(f"gpus {gpus}, tp {tp}, pp {pp}, cp {cp}, dp {dp}: each must be at least 1")
    if replicate * shard * tp * pp * cp != gpus and cells.get("step_time_s"):
        if gpus % (tp * pp * cp):
            raise ValueError(f"{gpus} GPUs are not pp {pp} x dp {replicate * shard} x cp {cp} x tp {tp}")
        replicate, shard = 1, gpus // (tp * pp * cp)
        assumed.append(f"dp = {shard}, what {gpus} GPUs leave")
    micro = number(cells, "micro_batch", 1)
    sequences = number(cells, "global_batch_seqs", 0) or micro * replicate * shard * number(cells, "grad_accum", 1)
    rounds = sequences / (micro * replicate * shard)
    if rounds != int(rounds) or rounds < 1:
        raise ValueError(
            f"global_batch_seqs {sequences} does not divide by micro batch {micro} x dp {replicate * shard}"
        )
    word = cells.get("schedule", "")
    name = SCHEDULE.get(word, word)
    if name not in SCHEDULES and name not in PUBLISHED:
        raise ValueError(f"schedule {word!r} is unknown ({', '.join([*SCHEDULES, *SCHEDULE])})")
    virtual = number(cells, "interleave_v", 1)
    if name == "1F1B" and virtual > 1:
        name = "Interleaved1F1B"
    zero = number(cells, "zero_stage", software.default_zero_stage)
    parallel = Parallel(
        pp=pp,
        dp_replicate=replicate,
        dp_shard=shard,
        cp=cp,
        tp=tp,
        sequence_parallel=(cells.get("seq_parallel") or str(int(software.default_sequence_parallel))) == "1" and tp > 1,
        zero_stage=zero,
        schedule=name,  # type: ignore[arg-type]  # checked above
        virtual_stages=virtual if name == "Interleaved1F1B" and virtual > 1 else 0,
        cp_method="ulysses" if cells.get("cp_method") == "ulysses" else "ring",
    )
    parallel = replace(parallel, split=even_split(model.layers, parallel.stages))
    mode = cells.get("act_ckpt", "").lower()
    mode = MODES.get(mode, mode)
    if mode not in get_args(Recompute.__annotations__["mode"]):
        raise ValueError(f"act_ckpt {mode!r} is unknown ({', '.join([*get_args(Recompute.__annotations__['mode'])])})")
    if mode == "selective" and cells.get("act_ckpt", "").lower() == "selective op":
        software = replace(software, recomputes_attention_only=False)
    word = cells.get("attn_impl", "").lower()
    kind = ATTENTION.get(word, word)
    if kind in ("", "flash"):
        kind = software.attention
        assumed.append(f"attention {kind}")
    if kind not in get_args(AttentionKernel):
        raise ValueError(f"attn_impl {word!r} is unknown ({', '.join([*get_args(AttentionKernel), *ATTENTION])})")
    norm = cells.get("rmsnorm_kernel", "")
    kernels = Kernels(
        attention=kind,  # type: ignore[arg-type]  # checked above
        fused_norm=software.fused_norm if norm == "" else norm == "1",
        compiled=cells.get("compile", "") == "1",
        float8="8" in cells.get("precision", ""),
    )
    training = Training(micro_batch_size=micro, global_batch_size=sequences, sequence_length=number(cells, "seq_len"))
    recompute = Recompute(mode=mode)  # type: ignore[arg-type]  # checked above
    return Case(model, training, parallel, recompute, kernels, hardware, software)


def even_split(layers: int, stages: int) -> tuple[int, ...]:
    """Return the blocks of each stage as Megatron splits them: equal, or one fewer at both ends; else ()."""
    if layers % stages == 0 or stages == 1:
        return (layers // stages,) * stages
    if (layers + 2) % stages == 0:
        each = (layers + 2) // stages
        return (each - 1, *[each] * (stages - 2), each - 1)
    return ()


def cluster_of_row(cells: dict[str, str]) -> str:
    """Return the cluster file of a row: the one it names, or that of its GPU. ValueError if neither is known."""
    name, gpu = cells.get("cluster", ""), cells.get("gpu", "")
    if name.endswith(".toml") or (FOLDER / f"{name}.toml").is_file():
        return name
    for pattern, cluster in CLUSTER_OF_GPU:
        if re.search(pattern, gpu or name, re.IGNORECASE):
            return cluster
    raise ValueError(f"cluster {name!r} has no file in train_configs/clusters, and GPU {gpu!r} is unknown")


def _hardware(cells: dict[str, str], assumed: list[str]) -> Hardware:
    name = cluster_of_row(cells)
    if name != cells.get("cluster", ""):
        assumed.append(f"cluster {cells.get('cluster', '')!r} is unknown: {name}, for its GPU")
    if name not in _CLUSTERS:
        found: list[str] = []
        hardware = read_cluster(name, found)
        if hardware is None:
            raise ValueError("; ".join(found))
        _CLUSTERS[name] = hardware
    return _CLUSTERS[name]


_CLUSTERS: dict[str, Hardware] = {}


def _own_parts(cells: dict[str, str]) -> dict[str, Any]:
    """Return the keys of [model] for which tables may have no column; an empty cell is the default.

    Raises ValueError if a cell is no value of its key.
    """
    parts: dict[str, Any] = {"qkv_bias": cells.get("qkv_bias", "") == "1", "window": number(cells, "window", 0)}
    for key in ("qk_norm", "norm_position"):
        parts[key] = cells.get(key) or getattr(Model(), key)
        choices = get_args(Model.__annotations__[key])
        if parts[key] not in choices:
            raise ValueError(f"{key} = {parts[key]!r} is not one of {', '.join(choices)}")
    return parts


def _model(cells: dict[str, str], assumed: list[str], default_vocab: int) -> Model:
    layers, hidden, heads = (number(cells, key) for key in ("layers", "hidden", "heads"))
    length = number(cells, "seq_len")
    kv = number(cells, "kv_heads", 0)
    head_dim = number(cells, "head_dim", 0)  # 0: hidden / heads, as in tables without this column
    own_parts = _own_parts(cells)
    vocab = number(cells, "vocab", 0)
    if not vocab:
        vocab = default_vocab
        assumed.append(f"vocab {vocab:,}")
    tied = cells.get("tied_emb", "")
    ffn = number(cells, "ffn", 0)
    count = number(cells, "n_params", 0) or _count_in_name(cells.get("model", ""))
    candidates: list[Model] = []
    for family in ("llama", "gpt"):
        features = FAMILIES[family]
        width = ffn or (-(-8 * hidden // 768) * 256 if features.gated_ffn else 4 * hidden)
        is_tied = tied == "1" if tied else not features.gated_ffn  # as those of the time were
        candidates.append(
            Model(
                family=family,
                layers=layers,
                hidden=hidden,
                heads=heads,
                kv_heads=kv,
                head_dim=head_dim,
                **own_parts,
                ffn=width,
                vocab=vocab,
                tied_embeddings=is_tied,
                max_sequence_length=length,
            )
        )
    llama, gpt = candidates
    if not ffn:
        assumed.append("ffn 4 x hidden")
        return gpt
    if count:

        def error(model: Model) -> float:
            return abs(parameter_count(model) / count - 1)

        return min(candidates, key=error)
    return gpt if ffn == 4 * hidden else llama


def _count_in_name(name: str) -> float:
    found = re.search(r"([\d.]+)\s*([BTM])\b", name, re.IGNORECASE)
    return float(found[1]) * {"M": 1e6, "B": 1e9, "T": 1e12}[found[2].upper()] if found else 0.0


def cases(rows: Iterable[MeasuredRow]) -> list[Case]:
    """Return the cases of the valid rows."""
    return [row.case for row in rows if row.case is not None]
