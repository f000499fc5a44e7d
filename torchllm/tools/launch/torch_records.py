"""Reads torch's flight recorder, and limits its process groups; private names as in `torch_compat.py`."""

import pickle
from collections.abc import Container
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

DUMP_FLIGHT_RECORDER = [getattr(c10d, name) for name in ("_dump_fr_trace", "_dump_nccl_trace") if hasattr(c10d, name)]
"""functions that dump a flight recorder, pickled; there is one for NCCL and one for all other backends.

FOOTGUN: `_dump_fr_trace` omits NCCL's records, and `_dump_nccl_trace` exists only in a torch with NCCL.
"""


class FlightRecord(NamedTuple):
    """A collective or message that this rank has started, from torch's flight recorder."""

    number: int
    """number of the record on this rank"""
    group: str
    """torch's name of the process group"""
    name: str
    """backend and operation: gloo:all_reduce"""
    sequence: int
    """number of the collective in its group, the same on all of its ranks; 0 for a message"""
    created: int
    """when it began, in nanoseconds since 1970"""
    done: bool
    where: str
    """file:line of the caller, the innermost outside torch; empty if not requested"""


def flight_records(since: int = 0, places: bool = False) -> list[FlightRecord]:
    """Return the records of this rank after `since`, in nanoseconds since 1970, oldest first.

    The recorder keeps the last TORCH_FR_BUFFER_SIZE records. `places`: also find the caller of each, slower.
    Private: torch documents the flight recorder and the tool that reads its files, but not this call, nor the keys.
    """
    records = []
    for dump in DUMP_FLIGHT_RECORDER:
        for entry in pickle.loads(dump(True, places, False)).get("entries", []):
            if entry["time_created_ns"] > since:
                record = FlightRecord(
                    number=entry["record_id"],
                    group=entry["process_group"][0],
                    name=entry["profiling_name"],
                    sequence=0 if entry["is_p2p"] else entry["collective_seq_id"],
                    created=entry["time_created_ns"],
                    done=entry["retired"],
                    where=_innermost_outside_torch(entry.get("frames", [])),
                )
                records.append(record)
    return records


def _innermost_outside_torch(frames: list[dict[str, Any]]) -> str:
    """Return file:line of the innermost frame outside torch; empty if there is none. frames: innermost first."""
    for frame in frames:
        if "/torch/" not in frame["filename"]:
            return f"{frame['filename']}:{frame['line']}"
    return ""


class GroupProgress(NamedTuple):
    """Progress of a process group, in collectives of this rank."""

    enqueued: int
    """number of the last started collective"""
    completed: int
    """number of the last finished collective"""


def group_progress() -> dict[str, GroupProgress]:
    """Return the progress of each process group of this rank; takes microseconds. Private: as `flight_records`.

    FOOTGUN: if two collectives end together, the earlier one may be recorded last, and so seem to be the last finished.
    Gloo neither counts nor records messages (`send`, `recv`).
    """
    progress = {}
    for recorder, dump in enumerate(DUMP_FLIGHT_RECORDER):
        for group, status in pickle.loads(dump(False, False, False)).get("pg_status", {}).items():
            counts = GroupProgress(status["last_enqueued_collective"], status["last_completed_collective"])
            progress[f"{recorder}/{group}"] = counts
    return progress


class LimitedGroup(NamedTuple):
    """A process group of this rank."""

    ranks: list[int]
    description: str
    """group_desc of `dist.new_group`"""


def limit_groups(seconds: float, limited: Container[str]) -> dict[str, LimitedGroup]:
    """Set the timeout of every process group whose name is not in `limited`; return these groups by name.

    Private: torch lists no groups, and before 2.14 has no public name for the setting. The groups of a mesh accept no
    timeout; they get torch's default, 10 min with NCCL and 30 min with gloo. Gloo's messages (`send`, `recv`) keep
    the default, as does the first operation of a group that connects its ranks lazily (`TORCH_GLOO_LAZY_INIT`): a rank
    whose peer never comes waits for the connection.
    """
    set_timeout = dist.set_timeout if hasattr(dist, "set_timeout") else dist.distributed_c10d._set_pg_timeout
    groups: dict[str, LimitedGroup] = {}
    for group in list(dist.distributed_c10d._world.pg_map):
        if group.group_name not in limited:
            set_timeout(timedelta(seconds=seconds), group)
            groups[group.group_name] = LimitedGroup(dist.get_process_group_ranks(group), group.group_desc)
    return groups
