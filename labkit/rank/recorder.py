"""Which collectives this rank has called, as PyTorch's flight recorder keeps them. Runs in the rank's own process.

The recorder notes each call before it begins; its newest 2,000 stay unless TORCH_FR_BUFFER_SIZE says otherwise. Since
PyTorch 2.15 it records gloo, too, by default, but not what passes from one rank to one other, which is seen in the main
thread's frames. Reading costs nothing until somebody asks, and is done in whatever thread asks, while the main thread
waits in native code.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

KEPT = 32
"""Newest calls that are told of, of all groups together."""

RECORDED = ("gloo", "nccl")
"""Backends that some PyTorch records."""

NO_GROUP = "it is in no process group"
"""Why a rank's calls are not known that has left."""

DTYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "Byte": "uint8",
    "Char": "int8",
    "Short": "int16",
    "Int": "int32",
    "Long": "int64",
}
"""The recorder's words for types that are not PyTorch's own in lower case."""


class Collectives(NamedTuple):
    """Which collectives a rank has called, as PyTorch's flight recorder keeps them; as it says when it is asked."""

    rank: int
    calls: tuple[tuple[Any, ...], ...] = ()
    """The newest, the newest last: the fields of `labkit.failures.missed.Call`."""
    groups: tuple[tuple[str, str, tuple[int, ...]], ...] = ()
    """The groups that the rank knows: name, description, ranks."""
    transfer: tuple[str, int, tuple[int, ...], str] | None = None
    """What it sends or receives just now: "send" or "recv", the other rank (-1: any), shape, type."""
    unknown: str = ""
    """Why its calls are not known; "" if they are."""


def look(rank: int, trace: TracebackType | None = None) -> Collectives:
    """Return the collectives that this rank has called, or why they are not known.

    Of one that fails, what it was sending or receiving is in the frames of its exception's traceback.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return Collectives(rank, unknown=NO_GROUP)
    entries: list[dict[str, Any]] = []
    unknown = ""
    for backend in sorted(_backends()):
        try:
            entries += recorded(backend)
        except (AttributeError, TypeError):
            unknown = f"PyTorch {torch.__version__} records no calls of {backend}"
        except (RuntimeError, ValueError) as error:
            unknown = f"the recorder of {backend} could not be read ({error})"
    if not entries and os.environ.get("TORCH_FR_BUFFER_SIZE") == "0":
        unknown = "the recorder is off: TORCH_FR_BUFFER_SIZE=0 was set when the ranks were started"
    entries.sort(key=lambda entry: entry.get("time_created_ns", 0))
    calls = tuple(_call(entry) for entry in entries if not entry.get("is_p2p"))[-KEPT:]
    return Collectives(rank, calls, _groups(), _transfer(trace), unknown)


def forget() -> None:
    """Forget what jobs before this one have called, in a process that stays."""
    for backend in RECORDED:
        try:
            torch._C._distributed_c10d._reset_fr_trace(backend=backend)
        except (AttributeError, TypeError, RuntimeError):
            continue  # there is none, or it cannot: numbers begin anew with the group, and old calls are named by it


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
    """Return one call as `Collectives` has it."""
    sizes = tuple(tuple(map(int, size)) for size in entry["input_sizes"])
    (dtype,) = entry["input_dtypes"][:1] or [""]
    # gloo's calls stay "scheduled", but one that has ended is "retired"; NCCL's say so themselves.
    done = bool(entry.get("retired")) or entry.get("state") == "completed"
    kind = entry["profiling_name"].rpartition(":")[2].removeprefix("_")
    began_s = entry.get("time_created_ns", 0) / 1e9
    return entry["process_group"][0], int(entry["collective_seq_id"]), kind, sizes, _dtype(dtype), done, began_s


def _dtype(name: str) -> str:
    return DTYPES.get(name, name.lower())


def _groups() -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    world: Any = distributed_c10d._world
    # A copy: the main thread may be making one. Of groups that it is not in, the rank knows the members and no name.
    return tuple(
        (world.pg_names[group], group.group_desc, tuple(ranks))
        for group, ranks in list(world.pg_group_ranks.items())
        if group in world.pg_names
    )


def _transfer(trace: TracebackType | None) -> tuple[str, int, tuple[int, ...], str] | None:
    """Return what the main thread sends or receives just now, or did: how, the other rank (-1: any), shape and type."""
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
