"""Watch a plain training function on a rank: what a step is made of, what it sends, what it holds.

The function is left as it is. PyTorch says when a network is called, when `backward` runs and when an optimizer has
stepped, which ends a step; the profiler says when something was being sent. Steps are used up in turn (`Plan`): the
first warm up, one counts what is kept for the backward pass, some are timed as they are, and some on a virtual device.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook

from labkit.comparison import differences
from labkit.comparison.accelerator import VirtualDevices
from labkit.comparison.differences import Portable
from labkit.comparison.held import Held
from labkit.profiling import (
    COLLECTIVE,
    KERNEL,
    PARTS,
    Mark,
    counted_sent,
    events_of,
    profiler,
    received,
    split,
)
from labkit.rank import recorder
from labkit.trace.phases import Phases
from labkit.trace.recording import flight_record


class Plan(NamedTuple):
    """After how many steps what begins."""

    activations: int = 3
    timed: int = 4
    simulated: int = 8
    end: int = 13
    """The first of the simulated steps warms up."""


@dataclass(frozen=True)
class Timed:
    """Some steps of one rank, in seconds on the machine's clock, so that ranks can be drawn together."""

    steps: list[Mark] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    """What the rank did from the first of the steps to the last; "waiting": a message was awaited."""

    @property
    def step_s(self) -> float:
        """Seconds of a step, the median; NaN without any."""
        return statistics.median(s.end_s - s.start_s for s in self.steps) if self.steps else math.nan

    def parts_s(self) -> dict[str, float]:
        """Return the seconds of a step by part (`labkit.profiling.PARTS`), the median of each.

        "data" is loading, logging and whatever else no mark covers.
        """
        each = [split([s, Mark("data", s.start_s, s.end_s), *clip(self.marks, s)]) for s in self.steps]
        return {part: statistics.median(e[part] for e in each) if each else math.nan for part in PARTS}


@dataclass(frozen=True)
class Measured:
    """What one rank found out about a training function, and what that returned."""

    returned: Any
    timed: Timed
    """Steps as they are on this machine."""
    simulated: Timed
    """Steps on a device of the rank's own, by the clock; none where the rank has a real one."""
    bytes_sent: float
    """Per step, counted; NaN where the system does not count."""
    bytes_expected: float
    """Per step: what theory says of the collectives and messages that were called."""
    memory: dict[str, int]
    """The most bytes held of each kind (`KINDS` in `labkit/comparison/held.py`)."""
    busy_s: float = math.nan
    """Seconds for which simulated devices of the rank compute in a step, by their speed; NaN on real ones."""
    buffers: frozenset[str] = frozenset()
    """The last parts of the names of the network's buffers."""

    @property
    def weights(self) -> dict[str, Portable]:
        """The weights by name, if that is what the function returned; else none."""
        parts = list(self.returned.values()) if isinstance(self.returned, Mapping) else [None]
        return dict(self.returned) if all(isinstance(part, Portable) for part in parts) else {}

    @property
    def on_devices(self) -> Timed:
        """Steps on a device of the rank's own: simulated, or its GPU."""
        return self.simulated if self.simulated.steps else self.timed

    @property
    def marks(self) -> list[Mark]:
        """What the rank did in one of those steps."""
        steps = self.on_devices.steps
        return [steps[-1], *clip(self.on_devices.marks, steps[-1])] if steps else []

    @staticmethod
    def columns(ranks: Sequence[Measured], first: Sequence[Any]) -> dict[str, Any]:
        """Return what `labkit.compare` says of a run with these ranks; `first` are those of the run it differs from.

        `difference`, the greatest of any rank's weight to the first run's (NaN where weights were not returned, or are
        not finite), `buffers off by`, likewise, and `weights`, both in words;
        `device step ms`, of a step on devices of the ranks' own, and `device busy ms`, for which those compute in it;
        `step ms`, as it is on this machine; `<part> ms` of the device's step; KiB sent per rank and step, counted and
        by the formula; all these are means over ranks. KiB of each kind of memory on the rank that has most of it.
        """
        mean_ms = {
            f"{part} ms": 1000 * statistics.fmean(rank.on_devices.parts_s()[part] for rank in ranks) for part in PARTS
        }
        held = {what: max(rank.memory.get(what, 0) for rank in ranks) for what in ranks[0].memory}
        return {
            **differences.columns([rank.weights for rank in first], [rank.weights for rank in ranks], ranks[0].buffers),
            "device step ms": 1000 * statistics.fmean(rank.on_devices.step_s for rank in ranks),
            "device busy ms": 1000 * statistics.fmean(rank.busy_s for rank in ranks),
            "step ms": 1000 * statistics.fmean(rank.timed.step_s for rank in ranks),
            **mean_ms,
            "sent KiB": statistics.fmean(rank.bytes_sent for rank in ranks) / 1024,
            "formula KiB": statistics.fmean(rank.bytes_expected for rank in ranks) / 1024,
            **{f"{what} KiB": size / 1024 for what, size in held.items()},
        }


def clip(marks: Sequence[Mark], span: Mark) -> list[Mark]:
    """Return what of these marks lies within a span."""
    inside = [Mark(w, max(a, span.start_s), min(b, span.end_s)) for w, a, b in marks]
    return [mark for mark in inside if mark.end_s > mark.start_s]


def expected_bytes(kind: str, size: int, ranks: float) -> float:
    """Return the bytes that a rank sends for one call, the mean over ranks, as textbooks have it; NaN if unknown.

    `size` is how many bytes this rank put in: all that is reduced or broadcast, its own part of what is gathered;
    `ranks` are those of the call's group.
    """
    if kind == "send":
        return float(size)
    if kind in ("recv", "barrier"):
        return 0.0
    others = (ranks - 1) / ranks
    each = {
        **dict.fromkeys(("all_reduce", "allreduce"), 2 * others),  # a ring: Patarasuk and Yuan 2009
        **dict.fromkeys(("reduce_scatter", "broadcast", "reduce", "scatter", "all_to_all", "gather"), others),
        "all_gather": ranks - 1,
    }
    return each.get(kind.strip("_").removesuffix("_base"), math.nan) * size


def measure(worker: Any, function: Callable[..., Any], parameters: dict[str, Any], gflops: float) -> Measured:
    """Call `function(worker, **parameters)` and measure its steps. To be launched: what `labkit.compare` launches."""
    observer = Observer(worker.device, gflops)
    with observer.watching():
        returned = function(worker, **parameters)
    if isinstance(returned, Mapping):
        returned = {k: differences.portable(v) if isinstance(v, Tensor) else v for k, v in returned.items()}
    return observer.measured(returned)


class Observer:
    """Notes what a rank does from step to step. A step ends where the first optimizer that steps has stepped."""

    def __init__(self, device: torch.device, gflops: float, plan: Plan | None = None) -> None:
        self._plan = plan or Plan()
        self._device = device
        self._is_simulating = True
        self._accelerator = VirtualDevices(gflops)
        self._optimizer: Any = None
        self._count = 0
        self._steps: list[Mark] = []
        self._marks: list[Mark] = []
        self._step_began_s = 0.0
        self._memory: dict[str, int] = {}
        self._busy_s = math.nan
        self._sent: list[float] = []
        self._open = contextlib.ExitStack()
        """What has begun and must end: counting activations, the virtual device, the profiler."""
        self._held = Held()
        self._profiler: Any = None
        self._profiled_from_ns = 0
        self._called: list[dict[str, Any]] | None = None
        """What PyTorch's flight recorder has of the profiled steps …"""
        self._group_sizes: dict[str, int] = {}
        """… and how large each group is; of when they ended, as the function may then leave its groups."""
        self._modules: dict[int, torch.nn.Module] = {}
        """Those that the first step has called, until it is over: some are copies, and nobody else keeps these."""
        self._buffers: frozenset[str] = frozenset()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch everything that PyTorch does inside."""
        self._step_began_s = self._now()
        try:
            with Phases(self._now, self._mark, self._stepped).watching(), contextlib.ExitStack() as self._first_step:
                self._first_step.callback(self._name_buffers)
                self._first_step.callback(register_module_forward_pre_hook(self._note_module).remove)
                yield
        finally:
            self._stop_profiling()

    def _note_module(self, module: torch.nn.Module, _: Any) -> None:
        self._modules[id(module)] = module

    def _name_buffers(self) -> None:
        self._buffers = differences.buffer_names(self._modules.values())
        self._modules.clear()

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.time()

    def _mark(self, what: str, began_s: float) -> None:
        self._marks.append(Mark(what, began_s, self._now()))
        if self._count == self._plan.activations:  # in the step that counts what is held
            self._held.look(self._optimizer)

    def _stepped(self, optimizer: Any) -> None:
        if self._optimizer is None:
            self._optimizer = optimizer
            self._first_step.close()
            # Where it computes, which may be the CPU though there is a GPU: one that ranks would have to share, say.
            self._device = next((p.device for p in self._parameters()), self._device)
            self._is_simulating = self._device.type == "cpu"
        self._count += 1
        self._steps.append(Mark("step", self._step_began_s, self._marks[-1].end_s))
        if self._count in self._plan:
            self._change_over()
        self._step_began_s = self._now()

    def _change_over(self) -> None:
        plan, count = self._plan, self._count
        last = plan.end if self._is_simulating else plan.simulated
        model = SimpleNamespace(parameters=self._parameters)
        if count == plan.activations:
            self._open.enter_context(self._held.watching(model))  # type: ignore[arg-type]
        elif count == plan.timed:
            self._open.close()
            self._memory = self._held.most
            self._profiler = self._open.enter_context(profiler(self._device))
            self._profiled_from_ns = time.time_ns()
            self._sent.append(counted_sent())
        elif count == plan.simulated:
            self._sent.append(counted_sent())
            if self._is_simulating:
                self._open.enter_context(self._accelerator)
        if count == last:
            self._busy_s = self._accelerator.given_s / (plan.end - plan.simulated) if self._is_simulating else math.nan
            self._stop_profiling()

    def _stop_profiling(self) -> None:
        if self._profiler is not None and self._called is None:
            self._called = flight_record(self._profiled_from_ns)
            groups = recorder.look(-1).groups if dist.is_initialized() else ()
            self._group_sizes = {name: len(ranks) for name, _, ranks in groups}
        self._open.close()

    def _parameters(self) -> list[Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def measured(self, returned: Any) -> Measured:
        """Return what was found, once the function is over."""
        sent = self._spans() if self._profiler is not None else []
        plan = self._plan
        timed = self._timed(slice(plan.timed, plan.simulated), sent)
        simulated = self._timed(slice(plan.simulated + 1, plan.end), sent) if self._is_simulating else Timed()
        counted = (self._sent[1] - self._sent[0]) / len(timed.steps) if len(self._sent) == 2 else math.nan
        expected = self._expected(timed, sent)
        return Measured(returned, timed, simulated, counted, expected, self._memory, self._busy_s, self._buffers)

    @staticmethod
    def _expected(timed: Timed, sent: list[Sent]) -> float:
        """Return the bytes of a step by theory; NaN without a step, or where a call is not known."""
        if not timed.steps:
            return math.nan
        first_s, last_s = timed.steps[0].start_s, timed.steps[-1].end_s
        inside = [s for s in sent if first_s <= s.start_s < last_s and s.kind != "on the device"]
        return sum(expected_bytes(s.kind, s.size, s.ranks) for s in inside) / len(timed.steps)

    def _timed(self, which: slice, sent: list[Sent]) -> Timed:
        steps = self._steps[which]
        if len(steps) < which.stop - which.start:
            return Timed()
        whole = Mark("step", steps[0].start_s, steps[-1].end_s)
        sent = [s._replace(end_s=min(s.end_s, self._next_optimizer_s(s))) for s in sent]
        waiting = [Mark("waiting", s.start_s, s.end_s) for s in sent if s.kind == "recv"]
        communication = [Mark("communication", s.start_s, s.end_s) for s in sent if s.kind != "recv"]
        own = sorted(self._marks, key=lambda mark: mark.start_s)
        return Timed(steps, clip([*waiting, *own, *communication], whole))

    def _next_optimizer_s(self, sent: Sent) -> float:
        """Return when the rank stepped next after it began to send something: then it had waited for that.

        gloo lets whoever waits go on before its own thread ends the record; where that thread is run late, the record
        would reach into the next step. What a program really leaves under way beyond an optimizer's step is cut, too.
        """
        if sent.kind == "on the device" or self._device.type == "cuda":
            return math.inf
        steps_s = (mark.start_s for mark in self._marks if mark.what == "optimizer" and mark.start_s > sent.start_s)
        return min(steps_s, default=math.inf)

    def _spans(self) -> list[Sent]:
        found = []
        events = events_of(self._profiler)
        calls = [event for event in events if COLLECTIVE.match(event.name) and not event.on_device]
        sizes = group_sizes([call.name for call in calls], self._called or (), self._group_sizes)
        for event, ranks in zip(calls, sizes, strict=True):
            # NCCL's lasts only until its kernel is enqueued; the kernel's own event has the time on the device.
            end_s = event.start_s if event.name.startswith("nccl") else event.end_s
            found.append(Sent(event.name.partition(":")[2], event.size, event.start_s, end_s, ranks))
        kernels = [event for event in events if KERNEL.match(event.name)]
        waits = {id(event) for event in received(events)}
        for event in kernels:
            found.append(Sent("recv" if id(event) in waits else "on the device", 0, event.start_s, event.end_s))
        return found


def group_sizes(
    names: Sequence[str], recorded: Sequence[Mapping[str, Any]], sizes: Mapping[str, int]
) -> Sequence[float]:
    """Return for each call of the profiler's, given by name and in order, how many ranks its group has.

    `recorded` are the flight recorder's calls meanwhile, which have the group, and `sizes` those of all groups of the
    rank. NaN where calls and records do not match, or this PyTorch records none, unless all groups are of one size.
    """
    found = [math.nan] * len(names)
    for name in set(names):
        places = [index for index, each in enumerate(names) if each == name]
        known = [sizes.get(str(e["process_group"][0]), math.nan) for e in recorded if e["profiling_name"] == name]
        if len(known) != len(places):
            one_size = set(known or sizes.values())
            known = [one_size.pop() if len(one_size) == 1 else math.nan] * len(places)
        for place, size in zip(places, known, strict=True):
            found[place] = size
    return found


class Sent(NamedTuple):
    """Something that was sent or awaited, from when to when."""

    kind: str
    size: int
    """Bytes that the rank put in."""
    start_s: float
    end_s: float
    ranks: float = math.nan
    """Of the group in which it was called; NaN if not known."""
