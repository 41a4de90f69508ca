"""Watch a plain training function on a rank: what a step is made of, what it sends, what it holds.

The function is left as it is. PyTorch says when a network is called, when `backward` runs and when an optimizer has
stepped, which ends a step; the profiler says when something was being sent. Steps are used up in turn (`Plan`): the
first warm up, in one memory is counted, one is recorded for ideal devices (`program`), some are profiled, and then
some are timed with nothing of this in them.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook

from labkit.comparison import old_differences as differences
from labkit.comparison.held import Held
from labkit.comparison.measured import Measured
from labkit.comparison.program import Program, Recorder
from labkit.comparison.timed import Load, LoadMeter, Timed, clip
from labkit.trace.phases import Phases
from labkit.trace.profiling import COLLECTIVE, KERNEL, Mark, counted_sent, events_of, profiler, received


class Plan(NamedTuple):
    """After how many steps what begins."""

    activations: int = 3
    recorded: int = 4
    profiled: int = 5
    timed: int = 8
    end: int = 13


def measure(worker: Any, function: Callable[..., Any], parameters: dict[str, Any]) -> Measured:
    """Call `function(worker, **parameters)` and measure its steps. To be launched: what `labkit.compare` launches."""
    observer = Observer(worker.device)
    with observer.watching():
        returned = function(worker, **parameters)
    if isinstance(returned, Mapping):
        returned = {k: differences.portable(v) if isinstance(v, Tensor) else v for k, v in returned.items()}
    return observer.measured(returned)


class Observer:
    """Notes what a rank does from step to step. A step ends where the first optimizer that steps has stepped."""

    def __init__(self, device: torch.device, plan: Plan | None = None) -> None:
        self._plan = plan or Plan()
        self._device = device
        self._optimizer: Any = None
        self._count = 0
        self._steps: list[Mark] = []
        self._marks: list[Mark] = []
        self._step_began_s = 0.0
        self._sent: list[float] = []
        self._open = contextlib.ExitStack()
        """What has begun and must end: counting memory, recording, the profiler."""
        self._held, self._recorder = Held(), Recorder()
        self._profiler: Any = None
        self._program = Program()
        self._modules: dict[int, torch.nn.Module] = {}
        """Those that the first step has called, until it is over: some are copies, and nobody else keeps these."""
        self._buffers: frozenset[str] = frozenset()
        self._is_one_replica = False
        self._meter = LoadMeter()
        self._load = Load()

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
            self._open.close()

    def _note_module(self, module: torch.nn.Module, inputs: Any) -> None:
        self._modules[id(module)] = module

    def _name_buffers(self) -> None:
        modules = list(self._modules.values())
        self._buffers = differences.buffer_names(modules)
        self._is_one_replica = any(
            isinstance(module, torch.nn.DataParallel) and len(module.device_ids) < 2 for module in modules
        )
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
        self._count += 1
        self._steps.append(Mark("step", self._step_began_s, self._marks[-1].end_s))
        if self._count in self._plan:
            self._change_over()
        self._step_began_s = self._now()

    def _change_over(self) -> None:
        plan, count = self._plan, self._count
        model = SimpleNamespace(parameters=self._parameters)
        self._open.close()
        if count == plan.activations:
            self._open.enter_context(self._held.watching(model))  # type: ignore[arg-type]
        elif count == plan.recorded:
            self._open.enter_context(self._recorder.recording())
        elif count == plan.profiled:
            self._program = self._recorder.program()
            self._profiler = self._open.enter_context(profiler(self._device, shapes=False))
        elif count in (plan.timed, plan.end):
            self._sent.append(counted_sent())
            self._load = self._meter.load(self._device)

    def _parameters(self) -> list[Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def measured(self, returned: Any) -> Measured:
        """Return what was found, once the function is over."""
        plan = self._plan
        timed = self._timed(slice(plan.profiled, plan.timed), self._spans() if self._profiler is not None else [])
        steps_s = tuple(step.end_s - step.start_s for step in self._steps[plan.timed : plan.end])
        sent = (self._sent[1] - self._sent[0]) / len(steps_s) if len(self._sent) == 2 else math.nan
        held, is_on_gpu = self._held, self._device.type == "cuda"
        return Measured(
            returned,
            timed,
            steps_s,
            self._program,
            sent,
            held.most,
            held.by_device(),
            is_on_gpu,
            self._buffers,
            self._is_one_replica,
            self._load,
        )

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
        for event in events:
            if COLLECTIVE.match(event.name) and not event.on_device:
                # NCCL's lasts only until its kernel is enqueued; the kernel's own event has the time on the device.
                end_s = event.start_s if event.name.startswith("nccl") else event.end_s
                found.append(Sent(event.name.partition(":")[2], event.start_s, end_s))
        waits = {id(event) for event in received(events)}
        for event in events:
            if KERNEL.match(event.name):
                found.append(Sent("recv" if id(event) in waits else "on the device", event.start_s, event.end_s))
        return found


class Sent(NamedTuple):
    """Something that was sent or awaited, from when to when."""

    kind: str
    start_s: float
    end_s: float
