"""Watch the steps of a plain training function on its rank: one instrument, for a trace and for a comparison.

Steps are used up in turn: two warm up, in which DDP arranges its buckets and allocators fill; one is counted (memory,
operations); one passes, because ranks do not start the profiler at the same time; some are profiled; one passes as it
stops; all others are timed, with nothing of this on. The function is left as it is.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist

from labkit.protocol import events
from labkit.protocol.packed import Packed
from labkit.protocol.packing import pack_call, unpack
from labkit.rank import failure, recorder
from labkit.rank.worker import Worker
from labkit.steps import counting, profiler
from labkit.steps.hooks import Phases
from labkit.steps.intervals import union
from labkit.steps.record import Call, StepRecord

failure.OWN_FILES.add(__file__)

KIND, TIMED = "trace", "timed"
"""What the notebook knows a rank's record by; `TIMED` follows when the function is over."""

WARM = 2
FIRST = WARM + 2
"""Number of the first step that is profiled."""

MOST_TIMED = 5_000
EVERY_S = 0.3
"""How often the machine's load is looked at. Its counters go in steps of 10 ms a core: less than this says nothing."""

USERS_PROFILER = (
    "rank {rank} recorded nothing: the function has a profiler of its own on (torch.profiler), and a process has one "
    "at a time. Launch without trace=, or without that"
)

FEW_STEPS = (
    "rank {rank} took {count} steps of the {wanted} that are watched, the first {before} to warm up; a step ends where "
    "the first optimizer that steps has stepped or, without one, where the function logs"
)


class Plan(NamedTuple):
    """How many steps are profiled, and how many are timed at least."""

    profiled: int = 2
    timed: int = 5
    """0: a trace, which lets go of the function after the profiled steps."""
    threads: int = 0
    """With which each rank computes; 0: as it is."""
    gathers: bool = False
    """Whether sharded tensors that the function returns are put together."""

    @property
    def first_timed(self) -> int:
        """Number of the first step that is timed."""
        return FIRST + self.profiled + 1


def check_steps(steps: Any) -> Plan:
    """Return what `launch(trace=steps)` asks for. Raises ValueError for what is no number of steps."""
    if isinstance(steps, Plan):
        return steps
    if type(steps) is not int or steps < 1:
        raise ValueError(f"trace is a number of steps, at least 1, or None; got {steps!r:.60}")
    return Plan(steps, timed=0)


class StepWatch:
    """Notes what a rank does from step to step, and gives the record to `send`: when its profiled steps are over."""

    def __init__(
        self, rank: int, world_size: int, device: torch.device, plan: Plan, send: Callable[[str, StepRecord], None]
    ) -> None:
        self._plan, self._device, self._send = plan, device, send
        self._record = StepRecord(rank, world_size, device.type, threads=torch.get_num_threads())
        self._zero_ns, self._profiled_ns = time.time_ns(), 0
        self._began_s = 0.0
        self._steps: list[tuple[float, float]] = []
        self._count = 0
        self._marks: list[tuple[str, float, float]] = []
        self._open = contextlib.ExitStack()
        self._profiler: Any = None
        self._counted: tuple[Any, Any] | None = None
        self._looks: list[tuple[int, float, float, float]] = []
        self._computed: list[float] = []
        self._is_sent = self._is_broken = False
        self._phases = Phases(self._now, self._mark, lambda: self.step_ended(True))
        self._has_optimizer = False

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch what the function does inside; send what there is when it is over."""
        if not torch.autograd._profiler_enabled():
            with profiler.profiler(self._device):  # the first start takes time
                pass
        self._began_s = self._now()
        try:
            with self._phases.watching():
                yield
        finally:
            self._guarded(self._finish)

    def _now(self) -> float:
        # In the steps that are looked at, kernels belong to the part that has launched them.
        if self._device.type == "cuda" and (self._plan.timed or self._count < self._plan.first_timed):
            torch.cuda.synchronize(self._device)
        return (time.time_ns() - self._zero_ns) / 1e9

    def _guarded(self, call: Callable[[], None]) -> bool:
        """Make a call, and return whether it went well: what watches a run is not to end it."""
        try:
            call()
        except Exception as error:
            self._note(f"what rank {self._record.rank} does could not be watched ({type(error).__name__}: {error})")
            return False
        return True

    def _note(self, unknown: str) -> None:
        self._record = self._record._replace(unknown=self._record.unknown or unknown)

    def _mark(self, part: str, began_s: float) -> None:
        if WARM <= self._count < self._plan.first_timed:
            self._marks.append((part, began_s, self._now()))
        if self._count == WARM and not self._is_broken:
            self._is_broken = not self._guarded(lambda: self._look(part))

    def _look(self, part: str) -> None:
        """Note what is held. Parameters only when the optimizer steps: FSDP2 has gathered some before."""
        models, optimizers = self._phases.models.values(), self._phases.optimizers.values()
        if part == "forward":
            return
        if part == "backward":
            now = {"gradients": counting.gradient_bytes(counting.parameters_of(models, optimizers))}
        else:
            now = counting.held(models, optimizers)
        most = {kind: max(size, self._record.held.get(kind, 0)) for kind, size in now.items()}
        self._record = self._record._replace(held={**self._record.held, **most})

    def step_ended(self, by_optimizer: bool = False) -> None:
        """Note that a step has ended: an optimizer has stepped, or, without one, the function has logged."""
        self._has_optimizer = self._has_optimizer or by_optimizer
        is_wanted = self._count < self._plan.first_timed or (self._plan.timed and self._count < MOST_TIMED)
        if is_wanted and not self._is_broken and (by_optimizer or not self._has_optimizer):
            self._is_broken = not self._guarded(self._step_ended)
            if self._is_broken:
                self._guarded(self._open.close)

    def _step_ended(self) -> None:
        self._steps.append((self._began_s, self._now()))
        self._count = count = len(self._steps)
        first_timed = self._plan.first_timed
        if count == 1:
            self._name_buffers()
        if count == WARM:
            self._count_step()
        elif count == WARM + 1:
            if not self._has_optimizer:
                self._look("")
            self._open.close()
            self._start_profiler()
        elif count == first_timed - 1:
            self._send_record()
            self._phases.let_go()
        elif count == first_timed or (self._looks and self._now() - self._looks[-1][1] > EVERY_S):
            self._looks.append((count, self._now(), *used()))
        if count >= first_timed:
            self._computed = [*self._computed[:1], time.process_time()]
        if count != WARM:  # what the counted step is to know of
            self._phases.models.clear()
        self._began_s = self._now()

    def _name_buffers(self) -> None:
        modules = [module for model in self._phases.models.values() for module in model.modules()]
        names = {name for module in modules for name, _ in module.named_buffers(recurse=False)}
        taken = {name for module in modules for name, _ in module.named_parameters(recurse=False)}
        self._record = self._record._replace(buffers=frozenset(names - taken))
        if any(isinstance(m, torch.nn.DataParallel) and len(m.device_ids) < 2 for m in modules):
            self._note("nn.DataParallel has no second GPU here, and calls the network as it is in one process")

    def _count_step(self) -> None:
        if torch.autograd._profiler_enabled():  # a mode would call operators twice there
            self._give_way()
            return
        weights = counting.parameters_of(self._phases.models.values(), self._phases.optimizers.values())
        kept = self._open.enter_context(counting.Activations(weights))
        self._counted = kept, self._open.enter_context(counting.Flops())
        self._open.enter_context(profiler.giving_way(self._give_way))
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def _start_profiler(self) -> None:
        if self._counted is None:
            return
        kept, counted = self._counted
        is_threaded = self._phases.is_threaded  # hooks and modes belong to a thread
        found = {} if is_threaded else {"activations": kept.most}
        if self._device.type == "cuda":
            found["allocated"] = torch.cuda.max_memory_allocated(self._device)
        self._record = self._record._replace(
            held={**self._record.held, **found},
            flops=float("nan") if is_threaded else counted.total,
            is_threaded=is_threaded,
        )
        if is_threaded:
            self._note("threads call the network (nn.DataParallel): what they copy, compute and keep is not counted")
        if torch.autograd._profiler_enabled():
            self._give_way()
            return
        self._profiled_ns = time.time_ns()  # the recorder knows earlier calls, too
        self._profiler = self._open.enter_context(profiler.profiler(self._device))
        self._open.enter_context(profiler.giving_way(self._give_way))

    def _give_way(self) -> None:
        self._open.close()
        self._profiler = self._counted = None
        self._note(USERS_PROFILER.format(rank=self._record.rank))

    def _send_record(self) -> None:
        self._open.close()
        if self._profiler is not None and len(self._steps) > FIRST:
            self._guarded(self._read)
        self._profiler = None
        self._is_sent = True
        self._send(KIND, self._record)

    def _finish(self) -> None:
        plan = self._plan
        wanted = plan.first_timed - 1 + (plan.timed + 1 if plan.timed else 0)
        if len(self._steps) < wanted:
            said = FEW_STEPS.format(rank=self._record.rank, count=len(self._steps), wanted=wanted, before=FIRST)
            self._note(said)
        if not self._is_sent:
            self._send_record()
        if plan.timed:
            looks = (
                [now - then for then, now in zip(self._looks[0], self._looks[-1], strict=True)] if self._looks else []
            )
            timed_s = tuple(end_s - start_s for start_s, end_s in self._steps[plan.first_timed :])
            computed_s = (self._computed[-1] - self._computed[0]) / len(timed_s) if timed_s else float("nan")
            late = StepRecord(self._record.rank, self._record.world_size, timed_s=timed_s, computed_s=computed_s)
            self._send(TIMED, late._replace(load=tuple(looks) or late.load, unknown=self._record.unknown))  # type: ignore[arg-type]

    def _read(self) -> None:
        """Put into the record what the profiler has seen."""
        at = self._zero_ns / 1e9
        steps = self._steps[FIRST : FIRST + self._plan.profiled]
        start_s, end_s = steps[0][0], steps[-1][1]
        found = profiler.events_of(self._profiler, self._zero_ns)
        stepped_s = [began_s for part, began_s, _ in self._marks if part == "optimizer"]

        def placed(call: Call) -> Call:
            # gloo lets the rank go on before its own thread ends the record: when that steps next, it has waited.
            ended_s = min([call.end_s, *(s for s in stepped_s if s > call.start_s)])
            return call._replace(start_s=call.start_s + at, end_s=ended_s + at)

        parts = dict.fromkeys(part for part, *_ in self._marks)
        phases = {part: union((a, b) for p, a, b in self._marks if p == part) for part in parts}
        phases = {"data": profiler.loading(found), **phases}
        calls = profiler.calls_of(found, profiler.recorded(self._profiled_ns), self._zero_ns)

        def within(spans: Any) -> list[tuple[float, float]]:
            return [(a + at, b + at) for a, b in spans if b > start_s and a < end_s]

        self._record = self._record._replace(
            steps=tuple(within(steps)),
            phases={part: within(when) for part, when in phases.items()},
            busy=within(profiler.busy(found)),
            calls=tuple(placed(call) for call in calls if start_s <= call.start_s < end_s),
            groups={name: len(ranks) for name, _, ranks in recorder.groups()},
            file=profiler.as_file(self._profiler),
        )


def used() -> tuple[float, float]:
    """Return the seconds that the machine has computed, and this rank with its children (a DataLoader's workers)."""
    machine = psutil.cpu_times()
    children = psutil.Process().children(recursive=True)
    mine = time.process_time()
    for child in children:
        with contextlib.suppress(psutil.Error):
            mine += sum(child.cpu_times()[:2])
    return sum(getattr(machine, kind, 0.0) for kind in ("user", "nice", "system", "irq", "softirq", "steal")), mine


# What is launched


def watched(call: Packed, plan: Plan) -> Packed:
    """Return a call that does what a packed call does, and is watched."""
    return pack_call(watch, (call, plan), {})


def watch(worker: Worker, call: Packed, plan: Plan) -> Any:
    """Make a call that `pack_call` has packed, return what it returns, and send a record of its steps."""
    function, args, kwargs = unpack(call, worker.device)
    threads = torch.get_num_threads()
    if plan.threads:
        torch.set_num_threads(plan.threads)

    def send(kind: str, record: StepRecord) -> None:
        worker._channel.send(events.Attached(worker.rank, kind, record.pack()))

    watcher = StepWatch(worker.rank, worker.world_size, worker.device, plan, send)

    def log(*args: Any, **kwargs: Any) -> None:
        try:
            Worker.log(worker, *args, **kwargs)
        finally:
            watcher.step_ended()

    worker.log = log  # type: ignore[method-assign]
    try:
        with watcher.watching():
            returned = function(worker, *args, **kwargs)
        return gathered(returned) if plan.gathers else returned
    finally:
        vars(worker).pop("log", None)
        if plan.threads:
            torch.set_num_threads(threads)


def gathered(returned: Any) -> Any:
    """Return the mapping that a function has returned, the parts of sharded tensors put together.

    Every rank calls this, whatever its function has returned. A tensor of which not all ranks of its mesh have returned
    their part stays as it is.
    """
    mine = {k: v for k, v in returned.items() if hasattr(v, "full_tensor")} if isinstance(returned, Mapping) else {}
    whole = {}
    if dist.is_available() and dist.is_initialized():
        told: list[Any] = [None] * dist.get_world_size()
        with contextlib.suppress(Exception):  # another rank has left the group
            dist.all_gather_object(told, sorted(map(str, mine)))
            for name, tensor in sorted(mine.items(), key=lambda item: str(item[0])):
                if all(str(name) in told[rank] for rank in tensor.device_mesh.mesh.flatten().tolist()):
                    whole[name] = tensor.detach().full_tensor().cpu()
    return {**returned, **whole} if whole else returned
