"""What every rank did when: `labkit.launch(train, trace=5)`, then `run.trace`: one timeline, who is late, a file."""

from __future__ import annotations

import html
import json
import statistics
import weakref
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from labkit.monitor.observers import RunObserver
from labkit.protocol.job import Job
from labkit.steps import record, watch
from labkit.steps.intervals import Intervals, intersect, length, subtract, union
from labkit.steps.profiler import merge
from labkit.steps.record import OWN, PARTS, Call, RankTime, StepRecord, times

if TYPE_CHECKING:
    import pandas as pd

    from labkit.monitor.record import RunRecord
    from labkit.ui.charts import Chart

LEAST_S, LEAST_SHARE = 1e-3, 0.1
"""A rank is a straggler if the others wait for it longer in a step than both: in seconds, and of a step."""

MOST_STEPS = 0.8
"""A straggler is late in this share of the steps: by half of what it is in the median, or more."""

INPUT_BOUND = 0.5
"""Share of a step from which on a loop is bound by its input."""

TRANSFERS, OVERLAPS = 0.05, 0.2
"""Transfers count if they take this share of a step, and do not overlap if less than this of them does."""

AVERAGING = ("all_reduce", "allreduce", "reduce_scatter")
"""Collectives that average gradients, by the beginning of their names."""

SAID = {"data": "DataLoader", "forward": "forward", "backward": "backward", "optimizer": "the optimizer's step"}

RANKS = 8
"""So many ranks are drawn at most, unless they are asked for."""


class TraceObserver(RunObserver):
    """Has some steps of a run recorded. Raises ValueError for no number of steps."""

    title = "trace observer"

    def __init__(self, steps: Any) -> None:
        self._plan = watch.check_steps(steps)

    def begin(self, job: Job) -> Job:
        """Return the job with a function that does what it did, and is watched."""
        return job._replace(function=watch.watched(job.function, self._plan))


def records_of(run: RunRecord) -> list[StepRecord]:
    """Return what the ranks of a run have recorded so far, in the order of ranks."""
    found = []
    for attached in run.attached:
        if watch.KIND in attached:
            record = StepRecord.unpack(attached[watch.KIND])
            if watch.TIMED in attached:
                record = record.followed_by(StepRecord.unpack(attached[watch.TIMED]))
            found.append(record)
    return found


_traces: weakref.WeakKeyDictionary[RunRecord, Trace] = weakref.WeakKeyDictionary()
"""Of runs that are over."""


def of_run(run: RunRecord) -> Trace:
    """Return what `run.trace` is.

    Raises ValueError if no rank has recorded anything: the run was launched without it, or its steps are not over.
    """
    if run in _traces:
        return _traces[run]
    is_over = run.over.is_set()
    records = records_of(run)
    if not records:
        going = "" if is_over else ", or its ranks are not through their first steps yet"
        raise ValueError(
            f"run {run.name!r} has no trace: it was launched without trace=…{going}. "
            "labkit.launch(…, trace=5) records five steps of every rank"
        )
    trace = Trace(records, run.name)
    if is_over:
        _traces[run] = trace
    return trace


class Straggler(NamedTuple):
    """A rank for which the others wait in every step."""

    rank: int
    late_s: float
    """How long the others wait for it in a step; the median of the others, and of the steps."""
    kind: str
    """In which collective: "all_reduce"."""
    is_every: bool
    """Whether it is as late to every one of these."""
    part: str
    """Where it spends the time: one of `labkit.steps.record.OWN`."""

    def __str__(self) -> str:
        """ "rank 2 is 48 ms late to every all_reduce: its time goes into DataLoader"."""
        ms = f"{1000 * self.late_s:.3g} ms"
        late = f"is {ms} late to every {self.kind}"
        if not self.is_every:
            late = f"keeps the others waiting {ms} a step in {self.kind}"
        return f"rank {self.rank} {late}: its time goes into {SAID.get(self.part, 'Python, outside of PyTorch')}"


class Trace:
    """Some steps of every rank of a run that was launched with `trace=…`: `run.trace`. Shows itself in a cell."""

    def __init__(self, records: Sequence[StepRecord], name: str = "trace") -> None:
        self.name = name
        self.records = sorted(records, key=lambda record: record.rank)
        """What each rank recorded; without ranks of which nothing has come."""
        self.times = times(self.records)
        """What each rank that has recorded steps did when, without overlap."""

    @property
    def steps(self) -> int:
        """How many steps all ranks have recorded."""
        return min((len(time.record.steps) for time in self.times), default=0)

    @property
    def step_s(self) -> float:
        """Seconds of a step: the median of all ranks and steps; NaN without any."""
        lengths = [end - start for time in self.times for start, end in time.record.steps]
        return statistics.median(lengths) if lengths else float("nan")

    # What it says

    @cached_property
    def straggler(self) -> Straggler | None:
        """The rank for which the others wait in most steps, how long, and where its time goes; None: there is none."""
        waits = [self._waits(step) for step in range(self.steps)]
        late = {
            rank: statistics.median(each.get(rank, 0.0) for each in waits)
            for rank in {r for each in waits for r in each}
        }
        if not late:
            return None
        rank = max(late, key=lambda one: late[one])
        is_late = [each.get(rank, 0.0) > late[rank] / 2 for each in waits]
        if late[rank] < max(LEAST_S, LEAST_SHARE * self.step_s) or statistics.mean(is_late) < MOST_STEPS:
            return None
        own = next(time for time in self.times if time.record.rank == rank)
        others = [time for time in self.times if time is not own]
        more = {part: own.seconds[part] - statistics.median(time.seconds[part] for time in others) for part in OWN}
        behind = [
            own.record.calls[index].kind
            for index, calls in own.met.items()
            if own.last[index] == rank and _late_s(calls, rank) > late[rank] / 2
        ]
        kind = statistics.mode(behind or [own.record.calls[index].kind for index in own.last])
        is_every = len(behind) >= MOST_STEPS * sum(own.record.calls[index].kind == kind for index in own.met)
        return Straggler(rank, late[rank], kind, is_every, max(more, key=lambda part: more[part]))

    def _waits(self, step: int) -> dict[int, float]:
        """Return how long other ranks wait for each rank in a step, in seconds: the median of those that meet it.

        Nobody waits while he computes: a collective that goes on beside a backward pass costs nothing until that is
        done.
        """
        found: dict[int, list[float]] = {}
        for time in self.times:
            start_s, end_s = time.record.steps[step]
            spans: dict[int, list[tuple[float, float]]] = {
                rank: [] for calls in time.met.values() for rank in calls if rank != time.record.rank
            }
            for index, rank in time.last.items():
                waits, _ = time.halves[index]
                if rank in spans and start_s <= waits[0] < end_s:
                    spans[rank].append(waits)
            for rank, each in spans.items():
                found.setdefault(rank, []).append(length(subtract(union(each), time.busy)))
        return {rank: statistics.median(waited) for rank, waited in found.items()}

    @property
    def overlap(self) -> float:
        """Share of the time in which gradients travel that is computed meanwhile; the median of ranks and steps.

        0: all averaging is in addition to computing; 1: it is free. NaN: no gradients travel. Waiting for ranks is not
        counted.
        """
        return self._averaging[1]

    @cached_property
    def _averaging(self) -> tuple[float, float, str]:
        """Of a step the share in which gradients travel; of that the share in which a rank computes; by which calls."""
        shares, beside, kinds = [], [], [""]
        for time in self.times:
            for start_s, end_s in time.record.steps:
                backward = intersect(time.record.phases.get("backward", []), [(start_s, end_s)])
                begun_s = backward[0][0] if backward else end_s
                called = [
                    (call.kind, moves)
                    for call, (_, moves) in zip(time.record.calls, time.halves, strict=True)
                    if call.kind.startswith(AVERAGING) and begun_s <= call.start_s < end_s
                ]
                sent = union(moves for _, moves in called)
                kinds += [kind for kind, _ in called]
                shares.append(length(sent) / (end_s - start_s))
                if sent:
                    beside.append(length(intersect(sent, time.busy)) / length(sent))
        found = statistics.median(beside) if beside else float("nan")
        return statistics.median(shares or [0.0]), found, statistics.mode(kinds[1:] or kinds)

    @cached_property
    def findings(self) -> dict[str, str]:
        """What costs time, by kind: "straggler", "input-bound", "no overlap"."""
        found = {"straggler": str(self.straggler)} if self.straggler else {}
        loads = [time.seconds["data"] / self.step_s for time in self.times]
        if loads and min(loads) >= INPUT_BOUND:
            found["input-bound"] = (
                f"an input-bound loop: every rank spends {statistics.median(loads):.0%} of a step in DataLoader; what "
                "is computed meanwhile would be free, with num_workers, say"
            )
        share, beside, kind = self._averaging
        if share >= TRANSFERS and beside < OVERLAPS:
            found["no overlap"] = (
                f"{kind} does not overlap with backward: for {share:.0%} of a step gradients travel and nothing is "
                "computed"
            )
        return found

    @property
    def notes(self) -> list[str]:
        """What must be known to read it: what is missing, and whose clocks are apart."""
        said = [each.unknown for each in self.records if each.unknown]
        there = {each.rank for each in self.records}
        world_size = max((each.world_size for each in self.records), default=0)
        if missing := [rank for rank in range(world_size) if rank not in there]:
            said.append(f"nothing has come of rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}")
        machines = {time.record.machine for time in self.times}
        if len(machines) > 1:
            unknown = machines - record.clocks([each for each in self.records if each.steps]).keys()
            how = (
                f"those of {', '.join(sorted(unknown))} are not known" if unknown else "set by the ends of all-reduces"
            )
            said.append(f"{len(machines)} machines have {len(machines)} clocks: {how}")
        return said

    def frame(self) -> pd.DataFrame:
        """Return the table: a row per rank, in columns the ms of a step by part, medians over steps.

        Waiting is until the last rank had entered a collective, transfer the rest of it, both where the rank did
        nothing else meanwhile.
        """
        import pandas as pd

        rows = {time.record.rank: time.seconds for time in self.times}
        return 1000 * pd.DataFrame.from_dict(rows, orient="index", columns=list(PARTS)).rename_axis("rank")

    # What a person sees

    def lanes(self, steps: int | None = None) -> dict[str, list[tuple[str, float, float]]]:
        """Return what each rank did in some of the steps, as `labkit.charts.gantt` takes it: see `lanes`."""
        return lanes(self.times, steps)

    def figure(self, ranks: Sequence[int] | None = None, steps: int | None = None) -> Chart:
        """Draw the timeline: of eight ranks at most unless they are given, the straggler among them; of all steps."""
        from labkit.ui import charts

        chosen = self._drawn() if ranks is None else ranks
        drawn = [time for time in self.times if time.record.rank in chosen]
        if not drawn:
            known = ", ".join(str(time.record.rank) for time in self.times) or "none"
            raise ValueError(f"no steps of rank {ranks} are recorded; of these there are: {known}")
        count = min(steps or self.steps, self.steps)
        return charts.gantt(
            lanes(drawn, count), f"{self.name}: {count} steps" if count > 1 else f"{self.name}: one step"
        )

    def _drawn(self) -> list[int]:
        first = [self.straggler.rank] if self.straggler is not None else []
        return sorted(list(dict.fromkeys([*first, *(time.record.rank for time in self.times)]))[:RANKS])

    def save(self, path: str | Path) -> Path:
        """Write one file that Perfetto (https://ui.perfetto.dev) opens: the profilers' own, merged, a process per rank.

        Returns the path. Raises ValueError if no rank has recorded steps.
        """
        files = {each.rank: each.file for each in self.records if each.file}
        if not files:
            raise ValueError(f"{self.name}: no rank has recorded steps. {' '.join(self.notes)}")
        path = Path(path)
        path.write_text(json.dumps(merge(files)), encoding="utf-8")
        return path

    def __str__(self) -> str:
        if not self.times:
            return "\n".join([f"{self.name}: no steps", *self.notes])
        head = f"{self.name}: {self.steps} steps of {len(self.times)} ranks, {1000 * self.step_s:.3g} ms a step"
        none = [] if self.straggler else ["no rank is late in every step"]
        return "\n".join([head, *none, *self.findings.values(), *self.notes])

    def __repr__(self) -> str:
        return str(self)

    def _ipython_display_(self) -> None:
        from labkit.ui import formatting, kernel

        if not kernel.has_kernel():
            print(self)
            return
        if self.times:
            kernel.display(self.figure())
        # JupyterLab breaks plain text in mid-word.
        wrapped = f'<pre style="{formatting.WRAPPED}">{html.escape(str(self))}</pre>'
        kernel.display({"text/plain": str(self), "text/html": wrapped}, raw=True)

    def __reduce__(self) -> Any:
        raise TypeError("a Trace stays in the notebook; trace.save(path) writes a file, trace.frame() is a table")


def _late_s(calls: Mapping[int, Call], rank: int) -> float:
    """Return by how much a rank entered a collective later than the others, their median."""
    return calls[rank].start_s - statistics.median(call.start_s for r, call in calls.items() if r != rank)


def lanes(ranks: Sequence[RankTime], steps: int | None = None) -> dict[str, list[tuple[str, float, float]]]:
    """Return what ranks did in some steps, two rows each: their own work by part, and their collectives.

    In these, waiting is until the last rank had entered, and transfer the rest.
    """
    last = min((len(time.record.steps) for time in ranks), default=0)
    count = last if steps is None else min(steps, last)
    if not count:
        return {}
    span = min(t.record.steps[0][0] for t in ranks), max(t.record.steps[count - 1][1] for t in ranks)
    rows: dict[str, list[tuple[str, float, float]]] = {}
    for time in ranks:
        own = {part: when for part, when in time.by_part(span).items() if part in OWN}
        calls = {"waiting": intersect(time.waiting, [span]), "transfer": intersect(time.transfer, [span])}
        for row, parts in ((f"rank {time.record.rank}", own), (f"{time.record.rank}: collectives", calls)):
            rows[row] = [
                (part, a, b) for part, when in parts.items() for a, b in _joined(when, (span[1] - span[0]) / 500)
            ]
    return rows


def _joined(when: Intervals, gap_s: float) -> Intervals:
    """Return intervals without the gaps that nobody sees in a chart."""
    found: Intervals = []
    for start_s, end_s in when:
        if found and start_s - found[-1][1] < gap_s:
            found[-1] = (found[-1][0], end_s)
        else:
            found.append((start_s, end_s))
    return found
