"""Which collectives this rank has called, from PyTorch's flight recorder. Runs in the rank's own process.

The recorder notes each call before it begins, and keeps the newest 2,000 unless TORCH_FR_BUFFER_SIZE is set. Since
PyTorch 2.15 it records gloo's calls by default, except sends and receives, which are found in the main thread's frames.
Nothing is read until it is asked for. Then the asking thread reads it, while the main thread waits in native code.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from types import FrameType, TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

KEPT = 32
"""Newest calls that are sent, of all groups together, besides the newest of each group."""

RECORDED = ("gloo", "nccl")
"""Backends that some versions of PyTorch record."""

NO_GROUP = "it is in no process group"
"""Why the calls of a rank that has left its group are not known."""

RETURNED = "it has returned"
"""Why those of a rank whose function has returned are not."""


class Collectives(NamedTuple):
    """Which collectives a rank has called, as it answers when it is asked."""

    rank: int
    calls: tuple[tuple[Any, ...], ...] = ()
    """The newest, the newest last: the fields of `labkit.failures.missed.Call`."""
    groups: tuple[tuple[str, str, tuple[int, ...]], ...] = ()
    """The groups that the rank knows: name, description, ranks."""
    transfer: tuple[str, int, tuple[int, ...], str] | None = None
    """What it is sending or receiving: "send" or "recv", the other rank (-1: any), shape, type."""
    unknown: str = ""
    """Why its calls are not known; "" if they are."""
    is_last: bool = False
    """Whether this was in a failing rank's last moment. What its process says later is no longer about the failure."""


def look(rank: int, trace: TracebackType | None = None) -> Collectives:
    """Return the collectives that this rank has called, or why they are not known.

    Args:
        rank: This rank.
        trace: The traceback of an exception, if the rank is failing: in its frames is what it was sending or receiving.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return Collectives(rank, unknown=NO_GROUP)
    entries: list[dict[str, Any]] = []
    unknown = ""
    for backend in sorted(_backends()):
        try:
            entries += recorded(backend)
        except (AttributeError, TypeError, RuntimeError, ValueError):
            unknown = f"PyTorch {torch.__version__} records no calls of {backend}"
    if not entries and os.environ.get("TORCH_FR_BUFFER_SIZE") == "0":
        unknown = "the recorder is off: TORCH_FR_BUFFER_SIZE=0 was set when the ranks were started"
    entries.sort(key=lambda entry: entry.get("time_created_ns", 0))
    calls = [_call(entry) for entry in entries if not entry.get("is_p2p")]
    return Collectives(rank, _newest(calls), groups(), _transfer(trace), unknown)


def _newest(calls: Sequence[tuple[Any, ...]]) -> tuple[tuple[Any, ...], ...]:
    """Return the newest calls, and of each group the newest: without it a rank would seem not to have come to it."""
    of_groups = {call[0]: index for index, call in enumerate(calls)}.values()
    kept = sorted({*range(max(0, len(calls) - KEPT), len(calls)), *of_groups})
    return tuple(calls[index] for index in kept)


def forget() -> None:
    """Forget the calls of earlier jobs in this process."""
    for backend in RECORDED:
        try:
            torch._C._distributed_c10d._reset_fr_trace(backend=backend)
        except (AttributeError, TypeError, RuntimeError):
            continue  # there is none, or it cannot: a new group counts from 1 again, and old calls have the old name


def _backends() -> set[str]:
    configs = list(distributed_c10d._world.pg_backend_config.values())
    return {part.rpartition(":")[2] for config in configs for part in str(config).split(",")} - {"fake", "undefined"}


def recorded(backend: str) -> list[dict[str, Any]]:
    """Return a backend's calls. Raises AttributeError or TypeError where this PyTorch does not record it."""
    c10d: Any = torch._C._distributed_c10d
    if backend not in RECORDED:
        raise AttributeError(backend)
    dumped = c10d._dump_nccl_trace_json() if backend == "nccl" else c10d._dump_fr_trace_json(backend=backend)
    return json.loads(dumped).get("entries", [])


def _call(entry: dict[str, Any]) -> tuple[Any, ...]:
    """Return a recorder's entry as `Collectives` has it."""
    sizes = tuple(tuple(map(int, size)) for size in entry["input_sizes"])
    (dtype,) = entry["input_dtypes"][:1] or [""]
    # A call of gloo's that has finished stays "scheduled", but is "retired"; one of NCCL's is "completed".
    done = bool(entry.get("retired")) or entry.get("state") == "completed"
    kind = entry["profiling_name"].rpartition(":")[2].removeprefix("_")
    began_s = entry.get("time_created_ns", 0) / 1e9
    return entry["process_group"][0], int(entry["collective_seq_id"]), kind, sizes, _dtype(dtype), done, began_s


def _dtype(name: str) -> str:
    """Return "float32" for the recorder's "Float"."""
    return str(getattr(torch, name.lower(), name.lower())).removeprefix("torch.")


def groups() -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    """Return the groups that this rank is in: name, description, ranks."""
    world: Any = distributed_c10d._world
    # A copy: the main thread may be making one. Of groups that it is not in, the rank knows the members and no name.
    return tuple(
        (world.pg_names[group], group.group_desc, tuple(ranks))
        for group, ranks in list(world.pg_group_ranks.items())
        if group in world.pg_names
    )


def _transfer(trace: TracebackType | None) -> tuple[str, int, tuple[int, ...], str] | None:
    """Return what the main thread is sending or receiving, or was: how, the other rank (-1: any), shape and type."""
    for frame in _frames(trace):
        if frame.f_code.co_name in ("send", "recv") and frame.f_code.co_filename == distributed_c10d.__file__:
            values = frame.f_locals
            end = "dst" if frame.f_code.co_name == "send" else "src"
            peer = values.get(end)
            if peer is None and (in_group := values.get(f"group_{end}")) is not None:
                peer = dist.get_global_rank(values.get("group") or distributed_c10d._get_default_group(), in_group)
            tensor = values["tensor"]
            shape, dtype = tuple(tensor.shape), str(tensor.dtype).rpartition(".")[2]
            return frame.f_code.co_name, -1 if peer is None else int(peer), shape, dtype
    return None


def _frames(trace: TracebackType | None) -> Iterator[FrameType]:
    if trace is not None:
        yield from (frame for frame, _ in traceback.walk_tb(trace))
        return
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        yield frame
        frame = frame.f_back
