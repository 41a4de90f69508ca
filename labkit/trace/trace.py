"""What the reader holds of a trace: one timeline of all ranks, who is late, and the file for Perfetto."""

from __future__ import annotations

import html
import json
import weakref
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.trace import chrome, findings
from labkit.trace.findings import Finding, Straggler
from labkit.trace.meeting import Meeting, RankTime, meetings
from labkit.trace.recording import KIND
from labkit.trace.records import PARTS, TRANSFER, WAITING, Place, RankTrace, unpack

if TYPE_CHECKING:
    import pandas as pd

    from labkit.monitor.record import RunRecord
    from labkit.ui.charts import Chart


_traces: weakref.WeakKeyDictionary[RunRecord, Trace] = weakref.WeakKeyDictionary()
"""Of runs that are over: to match and measure thousands of spans takes a while."""


def of_run(run: RunRecord) -> Trace:
    """Return what `run.trace` is.

    Raises ValueError if no rank has recorded anything: the run was launched without it, or its steps are not over.
    """
    if run in _traces:
        return _traces[run]
    is_over = run.over.is_set()
    blobs = [attached[KIND] for attached in run.attached if KIND in attached]
    if not blobs:
        going = "" if is_over else ", or its ranks are not through their first steps yet"
        raise ValueError(
            f"run {run.name!r} has no trace: it was launched without trace=…{going}. "
            "labkit.launch(…, trace=5) records five steps of every rank"
        )
    titles = {file: cell.title for file, cell in run.cells.items()}
    trace = Trace([unpack(blob) for blob in blobs], run.world_size, run.name, titles)
    if is_over:
        _traces[run] = trace
    return trace


class Trace:
    """Some steps of every rank of a run that was launched with `trace=…`: `run.trace`. Shows itself in a cell."""

    def __init__(
        self, ranks: Sequence[RankTrace], world_size: int, name: str = "trace", titles: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self.world_size = world_size
        zero_ns = min(rank.zero_ns for rank in ranks)
        self.records = [rank.on_clock_of_rank_0(zero_ns) for rank in sorted(ranks, key=lambda rank: rank.rank)]
        """What each rank recorded, all on rank 0's clock; without ranks of which nothing has come."""
        self._machines = {rank.machine: rank for rank in ranks if rank.uncertain_s}
        self._titles = titles or {}

    @property
    def ranks(self) -> list[RankTrace]:
        """The records of ranks that have recorded steps."""
        return [rank for rank in self.records if rank.steps]

    @cached_property
    def meetings(self) -> list[Meeting]:
        """The collectives in which ranks have met."""
        return meetings(self.ranks)

    @cached_property
    def times(self) -> list[RankTime]:
        """What each rank did when, without overlap."""
        return [RankTime(rank, self.meetings) for rank in self.ranks]

    @cached_property
    def _names(self) -> dict[Place, str]:
        from labkit.trace.timeline import line_of

        found = {span.place for rank in self.ranks for span in rank.spans}
        found |= {each.place for rank in self.ranks for each in rank.calls}
        found |= {phase.place for rank in self.ranks for phase in rank.phases}
        found |= {place for rank in self.ranks for _, place in rank.lines}
        return {place: said for place in found if (said := line_of(place, self._titles))}

    @property
    def steps(self) -> int:
        """How many steps all ranks have recorded."""
        return findings.steps_of(self.ranks)

    # What it says

    @cached_property
    def straggler(self) -> Straggler | None:
        """The rank for which the others wait in every step, how long, and where its time goes; None: there is none."""
        return findings.straggler(self.times, self.meetings, self._names)

    @cached_property
    def findings(self) -> list[Finding]:
        """What costs time: a straggler, a loop bound by its input, gradients that travel beside nothing."""
        found: list[Finding | None] = []
        if (late := self.straggler) is not None:
            found.append(Finding("straggler", late.text, late.late_s / self.step_s))
        found += [findings.input_bound(self.times), findings.no_overlap(self.times, self._names)]
        return [one for one in found if one is not None]

    @cached_property
    def overlap(self) -> float:
        """Share of the time in which gradients travel that is computed meanwhile; the median of ranks and steps.

        0: all averaging is in addition to computing; 1: it is free. NaN: no gradients travel. Waiting for ranks is not
        counted.
        """
        return findings.averaging(self.times).beside

    @property
    def step_s(self) -> float:
        """Seconds of a step: the median of all ranks and steps; NaN without any."""
        import statistics

        lengths = [end - start for rank in self.ranks for start, end in rank.steps]
        return statistics.median(lengths) if lengths else float("nan")

    @property
    def notes(self) -> list[str]:
        """What must be known to read it: clocks that were compared, what is missing."""
        said = [rank.unknown for rank in self.records if rank.unknown]
        there = {rank.rank for rank in self.records}
        if missing := [rank for rank in range(self.world_size) if rank not in there]:
            said.append(f"nothing has come of rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}")
        if self._machines:
            worst = max(self._machines.values(), key=lambda rank: rank.uncertain_s)
            said.append(
                f"clocks of {1 + len(self._machines)} machines compared when the run began: times of different "
                f"machines are right within {1000 * worst.uncertain_s:.2g} ms"
            )
        if left_out := sum(rank.left_out for rank in self.ranks):
            said.append(f"{left_out:,} spans left out, the shortest")
        return said

    def frame(self) -> pd.DataFrame:
        """Return the table: a row per rank, in columns the ms of a step by part, medians over steps.

        Waiting is until the last rank had entered a collective, transfer the rest of it, both where the rank did
        nothing else meanwhile.
        """
        import pandas as pd

        order = [*PARTS, WAITING, TRANSFER]
        rows = {}
        for time in self.times:
            steps = pd.DataFrame([time.seconds(step) for step in time.rank.steps])
            rows[time.rank.rank] = 1000 * steps.reindex(columns=order).fillna(0.0).median()
        table = pd.DataFrame.from_dict(rows, orient="index", columns=order)
        table.index.name = "rank"
        return table

    # What a person sees

    def figure(self, ranks: Sequence[int] | None = None, steps: int | None = None) -> Chart:
        """Draw the timeline: of eight ranks at most unless they are given, the straggler among them; of all steps."""
        from labkit.trace import timeline

        times = [time for time in self.times if time.rank.rank in (self._drawn() if ranks is None else ranks)]
        if not times:
            known = ", ".join(str(rank.rank) for rank in self.ranks) or "none"
            raise ValueError(f"no steps of rank {ranks} are recorded; of these there are: {known}")
        last = min(len(time.rank.steps) for time in times)
        last = last if steps is None else max(1, min(steps, last))
        span = (min(t.rank.steps[0][0] for t in times), max(t.rank.steps[last - 1][1] for t in times))
        title = f"{self.name}: {last} steps" if last > 1 else f"{self.name}: one step"
        return timeline.draw(times, span, self._names, title)

    def memory(self, rank: int | None = None) -> Chart:
        """Draw what a rank holds over the step before the traced ones, by part; by default the rank that holds most.

        Raises ValueError if no memory was counted: the function has no optimizer.
        """
        from labkit.trace import memory

        found = {r.rank: r.memory for r in self.ranks if r.memory and rank in (None, r.rank)}
        if not found:
            raise ValueError(
                f"no memory of {'any rank' if rank is None else f'rank {rank}'} was counted: that takes an "
                "optimizer, whose parameters are looked at"
            )
        most = max(found, key=lambda r: max(sum(held.bytes[p] for p in memory.PARTS) for held in found[r]))
        return memory.draw(found[most], f"{self.name}: memory of rank {most} over one step")

    def _drawn(self) -> list[int]:
        from labkit.trace.timeline import RANKS

        first = [self.straggler.rank] if self.straggler is not None else []
        return sorted(list(dict.fromkeys([*first, *(rank.rank for rank in self.ranks)]))[:RANKS])

    def save(self, path: str | Path) -> Path:
        """Write the trace as one file that Perfetto (https://ui.perfetto.dev) and chrome://tracing open.

        Chrome's trace event format, a process per rank; returns the path.
        """
        path = Path(path)
        path.write_text(json.dumps(chrome.as_json(self.ranks, self.meetings, self._names)), encoding="utf-8")
        return path

    def __str__(self) -> str:
        head = f"{self.name}: {self.steps} steps of {len(self.ranks)} ranks, {1000 * self.step_s:.3g} ms a step"
        if not self.ranks:
            return "\n".join([f"{self.name}: no steps", *self.notes])
        none = [] if self.straggler else ["no rank is late in every step"]
        return "\n".join([head, *none, *map(str, self.findings), *self.notes])

    def __repr__(self) -> str:
        return str(self)

    def _ipython_display_(self) -> None:
        from labkit.ui import formatting, kernel

        if not kernel.has_kernel():
            print(self)
            return
        if self.ranks:
            kernel.display(self.figure())
        # JupyterLab breaks plain text in mid-word.
        wrapped = f'<pre style="{formatting.WRAPPED}">{html.escape(str(self))}</pre>'
        kernel.display({"text/plain": str(self), "text/html": wrapped}, raw=True)

    def __reduce__(self) -> Any:
        raise TypeError("a Trace stays in the notebook; trace.save(path) writes a file, trace.frame() is a table")
