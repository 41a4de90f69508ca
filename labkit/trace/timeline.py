"""The timeline as a chart: two rows a rank, what it does and its collectives; on a GPU a row for each stream, too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import plotly.graph_objects as go

from labkit.trace.intervals import subtract, union
from labkit.trace.meeting import RankTime
from labkit.trace.reading import Places
from labkit.trace.records import MAIN, NOWHERE, TRANSFER, WAITING, Call, Place, Span
from labkit.ui.charts import PART_COLORS, Chart, style

COLORS = {
    **{part: PART_COLORS[part] for part in ("data", "forward", "backward", "optimizer")},
    "other": "#F0E442",
    WAITING: PART_COLORS["waiting"],
    TRANSFER: PART_COLORS["communication"],
}

RANKS = 8
"""Drawn at most, unless they are asked for."""

BARS = 2000
"""Drawn at most; what is too short to be seen goes with its neighbours of the same part."""


class Bar(NamedTuple):
    """One bar of the chart."""

    row: str
    part: str
    start_s: float
    end_s: float
    text: str


def bars_of(time: RankTime, span: tuple[float, float], name: Mapping[Place, str], grain_s: float) -> list[Bar]:
    """Return what one rank did in a stretch of time; spans closer to each other than the grain, of one part, as one."""
    rank = time.rank
    title = f"rank {rank.rank}"
    found: list[Bar] = []
    for phase in rank.phases:
        if phase.part == "data" and span[0] <= phase.start_s < span[1]:
            text = _text("DataLoader: next batch", phase.end_s - phase.start_s, name.get(phase.place, ""))
            found.append(Bar(title, "data", phase.start_s, phase.end_s, text))
    for lane in sorted({s.lane for s in rank.spans}):
        row = title if lane == MAIN else f"{rank.rank}: {lane}"
        outer = [s for s in rank.spans if s.lane == lane and not s.depth and span[0] <= s.start_s < span[1]]
        if lane == MAIN:
            outer = [s for s in outer if s.part != "data"]  # the batch's own bar has them
        found += [_as_bar(row, group, name) for group in _grouped(outer, grain_s)]
    for call in rank.calls:
        if span[0] <= call.start_s < span[1]:
            found += _of_call(f"{rank.rank}: {call.lane}", call, time, name)
    return found + _of_python(title, time, span, name, grain_s)


def _of_python(
    row: str, time: RankTime, span: tuple[float, float], name: Mapping[Place, str], grain_s: float
) -> list[Bar]:
    """Return when the main thread neither computed nor waited: Python was at work, or slept, in a line of a cell."""
    computed = union((s.start_s, s.end_s) for s in time.rank.spans if s.lane == MAIN and not s.depth)
    places = Places(time.rank.lines)
    found = []
    for part, when in time.by_part(span).items():
        if part in (WAITING, TRANSFER):
            continue
        for start_s, end_s in subtract(subtract(when, computed), time.loading):
            if end_s - start_s >= grain_s:
                where = name.get(places.longest(start_s, end_s), "")
                found.append(Bar(row, part, start_s, end_s, _text(f"{part}: Python", end_s - start_s, where)))
    return found


def _grouped(spans: Sequence[Span], grain_s: float) -> list[list[Span]]:
    """Return spans in order; neighbours of one part and line with less than the grain from start to start together."""
    groups: list[list[Span]] = []
    for one in sorted(spans, key=lambda s: s.start_s):
        before = groups[-1] if groups else None
        if before and before[0].part == one.part and one.start_s - before[-1].end_s < grain_s:
            is_short = one.end_s - one.start_s < grain_s or before[-1].end_s - before[-1].start_s < grain_s
            if is_short and one.start_s - before[0].start_s < 4 * grain_s:
                before.append(one)
                continue
        groups.append([one])
    return groups


def _as_bar(row: str, spans: Sequence[Span], name: Mapping[Place, str]) -> Bar:
    start_s, end_s = spans[0].start_s, max(s.end_s for s in spans)
    longest = max(spans, key=lambda s: s.end_s - s.start_s)
    shapes = " × ".join(str(list(shape)) for shape in longest.shapes[:3])
    what = f"{spans[0].part}: {longest.name}"
    more = f"and {len(spans) - 1} more" if len(spans) > 1 else ""
    size = _size(longest.size)
    (place, _), *_ = Counter(s.place for s in spans).most_common(1)
    return Bar(
        row, spans[0].part, start_s, end_s, _text(what, end_s - start_s, more, shapes, size, name.get(place, ""))
    )


def _of_call(row: str, call: Call, time: RankTime, name: Mapping[Place, str]) -> list[Bar]:
    """Return a collective's two halves, waiting and transfer."""
    (start_s, middle_s), (_, end_s) = time.halves[id(call)]
    shapes = " × ".join(str(list(shape)) for shape in call.shapes[:3])
    number = f"{call.kind} #{call.key[1]}" if call.key else call.kind
    found = []
    if middle_s > start_s:
        last = time.last.get(id(call))
        waits = f"{number}: waits" + (f" for rank {last}" if last is not None else "")
        text = _text(waits, middle_s - start_s, shapes, _size(call.size), name.get(call.place, ""))
        found.append(Bar(row, WAITING, start_s, middle_s, text))
    if end_s > middle_s:
        text = _text(f"{number}: transfer", end_s - middle_s, shapes, _size(call.size), name.get(call.place, ""))
        found.append(Bar(row, TRANSFER, middle_s, end_s, text))
    return found


def _text(what: str, seconds: float, *more: str) -> str:
    return "<br>".join([what, f"{1000 * seconds:.3g} ms", *filter(None, more)])


def _size(size: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size} bytes" if size else ""


def draw(times: Sequence[RankTime], span: tuple[float, float], name: Mapping[Place, str], title: str) -> Chart:
    """Draw what these ranks did in a stretch of time, in ms since it began."""
    grain_s = (span[1] - span[0]) * max(1, len(times)) / BARS
    bars = [bar for time in times for bar in bars_of(time, span, name, grain_s)]
    rows = [row for time in times for row in _rows(time, [bar.row for bar in bars])]
    # First a bar of no length in every row: so rows come in this order in the picture, too.
    figure = go.Figure(go.Bar(y=rows, x=[0] * len(rows), orientation="h", showlegend=False, hoverinfo="skip"))
    for part, color in COLORS.items():
        found = [bar for bar in bars if bar.part == part]
        if not found:
            continue
        figure.add_bar(
            y=[bar.row for bar in found],
            # As arrays, which take fewer bytes in a saved notebook than lists.
            base=np.array([1000 * (bar.start_s - span[0]) for bar in found], dtype=np.float32),
            x=np.array([1000 * (bar.end_s - bar.start_s) for bar in found], dtype=np.float32),
            name=part,
            orientation="h",
            marker={"color": color, "line": {"width": 0}},
            hovertext=[bar.text for bar in found],
            hoverinfo="text",
            width=0.8,
        )
    edges = sorted({edge for time in times[:1] for step in time.rank.steps for edge in step})
    for edge in edges:
        if span[0] < edge < span[1]:
            figure.add_vline(x=1000 * (edge - span[0]), line={"color": "#BBBBBB", "width": 1, "dash": "dot"})
    figure.update_layout(barmode="overlay")
    figure.update_xaxes(title_text="milliseconds", range=[0, 1000 * (span[1] - span[0])])
    figure.update_yaxes(autorange="reversed", categoryorder="array", categoryarray=rows)
    return Chart(style(figure, title, height=150 + 26 * len(rows)))


def _rows(time: RankTime, used: Sequence[str]) -> list[str]:
    rank = time.rank.rank
    return [f"rank {rank}", *sorted({row for row in used if row.startswith(f"{rank}: ")})]


def line_of(place: Place, titles: Mapping[str, str]) -> str:
    """Return a line of the reader's code in words: "Cell In[3], line 14"; "" for none."""
    if place == NOWHERE:
        return ""
    file, line = place
    return f"{titles.get(file) or file.rpartition('/')[2]}, line {line}"
