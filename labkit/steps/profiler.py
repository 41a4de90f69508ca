"""PyTorch's profiler on one rank, and what its events say: collectives as calls, and when the rank computed."""

from __future__ import annotations

import contextlib
import gzip
import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd import DeviceType

from labkit.rank import recorder
from labkit.steps.intervals import Intervals, union
from labkit.steps.record import Call

COLLECTIVE = re.compile(r"(?:gloo|nccl):_?(recv|\w+)")
"""How events of collectives are called; gloo's "recvAnySource" is a recv."""

KERNEL = re.compile(r"nccl(?:Dev)?Kernel_?([A-Za-z]+)")
"""How NCCL's kernels are: `ncclDevKernel_AllReduce_Sum_f32_RING_LL(…)`."""

LOADING = "enumerate(DataLoader)#"
USER_SCOPE = 7
"""Of events that someone wrote about: a DataLoader, an optimizer, DDP. They compute nothing themselves."""

ITEM_BYTES = {
    **dict.fromkeys(("double", "long int", "long", "c10::complex<float>"), 8),
    **dict.fromkeys(("float", "int"), 4),
    **dict.fromkeys(("c10::Half", "c10::BFloat16", "short int", "short"), 2),
    "c10::complex<double>": 16,
}
"""Bytes per number of the profiler's types; of others 1, as for bool and the 8-bit ones."""


def profiler(device: torch.device) -> Any:
    """Return PyTorch's profiler of the host and, if there is one, of the GPU; a context, to be given to `events_of`.

    For a GPU it is `torch.profiler.profile`. That one first imports the compiler, to ask it about CUDA graphs: on a CPU
    that is seconds of every rank for nothing, so there it is the profiler inside, `torch.autograd.profiler.profile`.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # what it says of itself is no rank's output
    if device.type != "cuda":
        return torch.autograd.profiler.profile(use_kineto=True, record_shapes=True)
    from torch.profiler import ProfilerActivity, profile

    return profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True)


@contextlib.contextmanager
def giving_way(give_way: Callable[[], None]) -> Iterator[None]:
    """Call `give_way` before another profiler starts, which would fail where one is on."""
    kind = torch.autograd.profiler.profile
    start = kind._prepare_trace

    def prepare_trace(profiler: Any) -> None:
        give_way()
        start(profiler)

    kind._prepare_trace = prepare_trace  # type: ignore[method-assign]
    try:
        yield
    finally:
        kind._prepare_trace = start  # type: ignore[method-assign]


class Event(NamedTuple):
    """One of the profiler's events, in seconds."""

    name: str
    start_s: float
    end_s: float
    thread: int = 0
    on_device: bool = False
    scope: int = 0
    shapes: tuple[tuple[int, ...], ...] = ()
    """Of a collective: of the tensors put in …"""
    size: int = 0
    """… and their bytes."""


def events_of(profiler: Any, zero_ns: int) -> list[Event]:
    """Return what a profiler that has ended recorded, in seconds since a time in ns since 1970."""
    found = []
    for e in getattr(profiler, "profiler", profiler).kineto_results.events():
        name, start_ns = e.name(), e.start_ns() - zero_ns
        tensors = zip(e.shapes(), e.dtypes(), strict=False) if COLLECTIVE.match(name) else ()
        put_in = [(tuple(shape), ITEM_BYTES.get(kind, 1)) for shape, kind in tensors if shape]
        times_s = start_ns / 1e9, (start_ns + e.duration_ns()) / 1e9
        shapes, size = tuple(s for s, _ in put_in), sum(math.prod(s) * item for s, item in put_in)
        on_device = e.device_type() != DeviceType.CPU
        found.append(Event(name, *times_s, e.device_resource_id(), on_device, e.scope(), shapes, size))
    return found


def as_file(profiler: Any) -> bytes:
    """Return the profiler's own file, which Perfetto opens, compressed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return gzip.compress(path.read_bytes(), 1)


def recorded(since_ns: int) -> list[dict[str, Any]]:
    """Return what PyTorch's flight recorder has of the calls since then, in order; [] where it records none."""
    if not (dist.is_available() and dist.is_initialized()):
        return []
    found = []
    for backend in recorder.RECORDED:
        with contextlib.suppress(AttributeError, TypeError, RuntimeError, ValueError):  # then calls meet by their order
            found += recorder.recorded(backend)
    return sorted((e for e in found if e["time_created_ns"] >= since_ns), key=lambda e: e["time_created_ns"])


def calls_of(events: Sequence[Event], recorded: Sequence[Mapping[str, Any]], zero_ns: int = 0) -> list[Call]:
    """Return the collectives and messages.

    `recorded` are the calls in PyTorch's flight recorder since the events began, in order: they have the group, the
    number in it, and when the rank called (in ns since 1970), before a thread of gloo's took the work up. Name and
    size tell which event is which entry: two threads of gloo's take calls up, not always in order.

    gloo works on the host, where its events last as long as the work. Of NCCL there end when the work has been handed
    over; its kernel spans the work itself.
    """
    hosts = sorted((e for e in events if not e.on_device and COLLECTIVE.match(e.name)), key=lambda e: e.start_s)
    kernels = sorted((e for e in events if e.on_device and KERNEL.match(e.name)), key=lambda e: e.start_s)
    # gloo's event of a send begins when all has been handed over.
    sends_s = sorted(e.start_s for e in events if e.name == "c10d::send")
    entries: dict[Any, list[Mapping[str, Any]]] = {}
    for entry in recorded:
        count = sum(math.prod(shape) for shape in entry["input_sizes"])
        entries.setdefault((entry["profiling_name"], count), []).append(entry)
    found: list[Call] = []
    of_nccl: list[Call] = []
    for event in hosts:
        known = entries.get((event.name, sum(math.prod(shape) for shape in event.shapes)))
        entry = known.pop(0) if known else {}
        key = (
            (str(entry["process_group"][0]), int(entry["collective_seq_id"])) if entry.get("is_p2p") is False else None
        )
        start_s = min(event.start_s, (entry["time_created_ns"] - zero_ns) / 1e9) if entry else event.start_s
        kind = COLLECTIVE.match(event.name)[1]  # type: ignore[index]
        if kind == "send" and sends_s:
            start_s = min(start_s, sends_s.pop(0))
        call = Call(kind, key, start_s, event.end_s, event.size)
        (of_nccl if event.name.startswith("nccl") else found).append(call)
    if len(of_nccl) == len(kernels):
        found += [c._replace(start_s=k.start_s, end_s=k.end_s) for c, k in zip(of_nccl, kernels, strict=True)]
    else:  # several calls in one kernel, or the other way round: bytes are the calls', times the kernels'
        found += [call._replace(end_s=call.start_s) for call in of_nccl]
        found += [Call(_of_kernel(k.name), None, k.start_s, k.end_s) for k in kernels]
    return sorted(found, key=lambda call: call.start_s)


def _of_kernel(name: str) -> str:
    found = KERNEL.match(name)
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", found[1]).lower() if found else name


def loading(events: Sequence[Event]) -> Intervals:
    """Return when a batch was being loaded: in `next` of a DataLoader's iterator."""
    return union((e.start_s, e.end_s) for e in events if e.name.startswith(LOADING))


def busy(events: Sequence[Event]) -> Intervals:
    """Return when the rank computed: on a GPU kernels but NCCL's, else operators without a collective in them."""
    kernels = [e for e in events if e.on_device and e.scope != USER_SCOPE and not e.name.startswith("nccl")]
    if kernels:
        return union((e.start_s, e.end_s) for e in kernels)
    here = [e for e in events if not e.on_device and not COLLECTIVE.match(e.name)]
    computing = [
        e for thread in {e.thread for e in here} for e in computing_of([e for e in here if e.thread == thread])
    ]
    return union((e.start_s, e.end_s) for e in computing)


def computing_of(events: Sequence[Event]) -> list[Event]:
    """Return the events of one thread that compute.

    What only contains others is left out: annotations, autograd's own bookkeeping, and whatever has a collective in it
    and so may wait.
    """
    ordered = sorted(events, key=lambda e: (e.start_s, -e.end_s))
    wraps = [e.scope == USER_SCOPE or e.name.startswith("autograd::engine::") or "c10d" in e.name for e in ordered]
    stack: list[int] = []
    for index, event in enumerate(ordered):
        while stack and ordered[stack[-1]].end_s <= event.start_s:
            stack.pop()
        if "c10d" in event.name:
            for above in stack:
                wraps[above] = True
        stack.append(index)
    return [event for event, is_wrapper in zip(ordered, wraps, strict=True) if not is_wrapper]


def merge(files: Mapping[int, bytes]) -> dict[str, Any]:
    """Return the files of ranks as one, a process per rank, on one clock."""
    whole = {rank: json.loads(gzip.decompress(file)) for rank, file in files.items()}
    zero_ns = min((each["baseTimeNanoseconds"] for each in whole.values()), default=0)
    merged: list[dict[str, Any]] = []
    for rank, each in whole.items():
        threads: dict[Any, int] = {}  # no number twice: Perfetto takes equal ones for one thread
        for name, value in (("name", f"rank {rank}"), ("sort_index", rank)):
            merged.append({"ph": "M", "name": f"process_{name}", "pid": rank, "tid": 0, "ts": 0, "args": {name: value}})
        for event in each["traceEvents"]:
            if event["name"].startswith("process_"):
                continue
            key = event.get("pid"), event.get("tid")
            event |= {"pid": rank, "tid": threads.setdefault(key, 1000 * (rank + 1) + len(threads))}
            if "ts" in event:
                event["ts"] += (each["baseTimeNanoseconds"] - zero_ns) / 1000
            if "id" in event:
                event["id"] = f"{rank}.{event['id']}"  # arrows stay within a rank
            if event["name"].startswith("gloo:") and "dur" in event:  # which overlap: a track of its own
                event |= {"ph": "b", "id": f"{rank}.gloo.{len(merged)}"}
                merged.append({**event, "ph": "e", "ts": event["ts"] + event.pop("dur")})
            merged.append(event)
    return {"traceEvents": merged, "baseTimeNanoseconds": zero_ns, "displayTimeUnit": "ms"}
