"""What came of trying an answer. Shows itself: as text, and in a notebook with hints that unfold and a picture."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from course.exercises.base import Cost, Exercise
from course.exercises.traffic import Event

PASSED, WRONG, UNSOLVED = "right", "wrong", "unsolved"

LOOKS = {PASSED: ("✔", "#009E73"), WRONG: ("✘", "#D55E00"), UNSOLVED: ("○", "#8A8A8A")}
"""A sign beside each colour: not everybody can tell the colours apart."""

PRINTED_LINES = 10
"""Of each rank's output, the last lines are shown."""

_hints_given: dict[str, int] = {}
"""How many hints have been asked for, by exercise."""


class Text(str):
    """A text that shows itself as it is, without quotes."""

    def __repr__(self) -> str:
        return str(self)


class CaseGrade(NamedTuple):
    """Whether an answer was right in one case."""

    world_size: int
    """0: the exercise needs no ranks."""
    case: int
    """Number of the case, from 0."""
    passed: bool


class Grade(NamedTuple):
    """What an autograder needs of an answer. Has nothing of the reference solution."""

    exercise: str
    state: str
    """"right", "wrong" or "unsolved"."""
    message: str
    cases: tuple[CaseGrade, ...]

    @property
    def points(self) -> int:
        """How many cases were right."""
        return sum(case.passed for case in self.cases)

    @property
    def max_points(self) -> int:
        """How many cases there are."""
        return len(self.cases)

    def score(self, out_of: float = 1.0) -> float:
        """Return the points, scaled so that a right answer has `out_of`."""
        return out_of * self.points / self.max_points

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as plain values, for `json.dumps`."""
        return {
            "exercise": self.exercise,
            "state": self.state,
            "message": self.message,
            "points": self.points,
            "max_points": self.max_points,
            "cases": [case._asdict() for case in self.cases],
        }


class Result:
    """What came of trying an answer.

    Attributes:
        passed: whether the learner's answer is right; never True for a reference that was tried in its place.
        message: the first thing that is wrong; of a right answer, what was tried and what it cost.
        exercise: what was asked.
        report: points by case, for an autograder.
    """

    def __init__(
        self,
        exercise: Exercise,
        state: str,
        message: str,
        events: Sequence[Sequence[Event]] = (),
        printed: Sequence[str] = (),
    ) -> None:
        self.exercise, self.state = exercise, state
        self.events = [list(each) for each in events]
        """What each rank did in the last case with the most ranks."""
        self.printed = list(printed)
        """What each rank printed."""
        self.is_reference = False
        """Whether the reference was tried in the place of the learner's function."""
        self.right_cases: dict[int, int] = {}
        """By world size (0: without ranks), how many cases were right before the first that was not."""
        self.try_with: Callable[[int], int] | None = None
        """Tries the answer with a world size that has not been tried yet, and returns how many cases were right."""
        self.message = message or self._praise()

    @property
    def passed(self) -> bool:
        """Whether the learner's answer is right."""
        return self.state == PASSED and not self.is_reference

    @property
    def report(self) -> Grade:
        """Points for an autograder: one for each case at each world size.

        Tries the world sizes that the check did not come to, because it ends at the first that is wrong. Cases are
        tried in their order, and those after the first wrong one at a world size earn nothing.
        """
        is_tried = self.state != UNSOLVED and not self.is_reference
        if is_tried and self.try_with is not None:
            for world_size in self.exercise.world_sizes:
                if world_size not in self.right_cases:
                    self.right_cases[world_size] = self.try_with(world_size)
        cases = tuple(
            CaseGrade(world_size, case, is_tried and case < self.right_cases.get(world_size, 0))
            for world_size in self.exercise.world_sizes or (0,)
            for case in range(len(self.exercise.cases))
        )
        return Grade(self.exercise.name, self.state, self.message, cases)

    def hint(self) -> Text:
        """Return the next hint; after the last one, where the solution is."""
        given = _hints_given.get(self.exercise.name, 0)
        _hints_given[self.exercise.name] = given + 1
        if given >= len(self.exercise.hints):
            return Text(f"no more hints; course.exercises.solution({self.exercise.name!r}) shows the solution")
        return Text(f"hint {given + 1} of {len(self.exercise.hints)}: {self.exercise.hints[given]}")

    def solution(self) -> Text:
        """Return the reference solution, and why it is so."""
        return solution_text(self.exercise)

    # Showing

    @property
    def headline(self) -> str:
        """One line: the sign, the exercise and how it stands."""
        whose = ", the reference solution" if self.is_reference else ""
        return f"{LOOKS[self.state][0]} {self.exercise.name}{whose}: {self.state}"

    def _praise(self) -> str:
        lines = [f"Tried {_what_was_tried(self.exercise)}."]
        if spent := self._spent():
            lines.append(f"{spent}.")
        return "\n".join(lines)

    def _spent(self) -> str:
        """Say the cost beside the best, for the rank that sent most."""
        if not any(self.events):
            return ""
        spent = max((cost_of(events) for events in self.events), key=lambda each: (each.bytes, each.calls))
        said = f"Of {len(self.events)} ranks each sent at most {_cost(spent)}"
        if self.exercise.least is None:
            return said
        least = self.exercise.least(len(self.events), **self.exercise.cases[-1])
        return said + (", and that is the least" if spent == least else f"; the least is {_cost(least)}")

    def __repr__(self) -> str:
        printed = [
            f"rank {rank} printed: {line}"
            for rank, text in enumerate(self.printed)
            for line in text.splitlines()[-PRINTED_LINES:]
        ]
        return "\n".join([self.headline, *self.message.splitlines(), *printed])

    def _repr_html_(self) -> str:
        color = LOOKS[self.state][1]
        parts = [
            f"<b>{html.escape(self.headline)}</b>",
            *(f"<div style='margin-top:4px'>{with_code(line)}</div>" for line in self.message.splitlines()),
        ]
        if any(self.events):
            parts.append(lanes(self.events))
        if any(self.printed):
            parts.append(self._printed_html())
        if self.state == PASSED:
            parts.append(_fold("Why it is so", with_code(self.exercise.why)))
        else:
            parts.append(_hints_html(self.exercise.hints, 1))
        style = f"border-left:4px solid {color};padding:4px 12px;max-width:760px;overflow-wrap:anywhere"
        return f"<div style='{style}'>{''.join(parts)}</div>"

    def _printed_html(self) -> str:
        lines = [
            f"rank {rank}: {line[:300]}"
            for rank, text in enumerate(self.printed)
            for line in text.splitlines()[-PRINTED_LINES:]
        ]
        return _fold("what the ranks printed", f"<pre style='margin:0'>{html.escape(chr(10).join(lines))}</pre>")


def solution_text(exercise: Exercise) -> Text:
    """Return the reference solution as text, and why it is so."""
    return Text(f"{exercise.solution_source}\n# {exercise.why}")


def cost_of(events: Sequence[Event]) -> Cost:
    """Return what one rank spent."""
    sending = [event for event in events if event.is_call]
    return Cost(len(sending), sum(event.bytes for event in sending))


def _cost(cost: Cost) -> str:
    return f"{cost.bytes:,} B in {cost.calls} call{'s' * (cost.calls != 1)} ({1e6 * cost.time_s():,.0f} µs by formula)"


def _what_was_tried(exercise: Exercise) -> str:
    count = len(exercise.cases)
    cases = f"{count} case{'s' * (count != 1)}"
    if not exercise.needs_ranks:
        return cases
    *most, last = map(str, sorted(exercise.world_sizes))
    return f"{cases} on {', '.join(most)} and {last} ranks" if most else f"{cases} on {last} ranks"


def with_code(text: str) -> str:
    """Return text as HTML, `code` as code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", html.escape(text, quote=False))


def _fold(summary: str, inside: str) -> str:
    return f"<details style='margin-top:6px'><summary style='cursor:pointer'>{summary}</summary>{inside}</details>"


def _hints_html(hints: Sequence[str], number: int) -> str:
    """Return hints of which each has the next one inside."""
    if not hints:
        return ""
    return _fold(f"Hint {number}", f"<div>{with_code(hints[0])}</div>{_hints_html(hints[1:], number + 1)}")


# The picture: a lane for each rank, an arrow for each message

COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8C6BB1", "#7A7A7A")
"""`labkit.charts` has them too; it also brings Plotly, which takes a second to import."""

COLUMN, LANE, LEFT, TOP = 44, 40, 64, 18
COLUMNS_SHOWN = 20


class Placed(NamedTuple):
    """An event, and its place in time."""

    event: Event
    column: int


def lanes(events: Sequence[Sequence[Event]]) -> str:
    """Draw what ranks did as SVG. Time is in steps: what waits for something stands to the right of it."""
    placed = in_steps(events)
    last = max((each.column for lane in placed for each in lane), default=0)
    shown = min(last + 1, COLUMNS_SHOWN)
    width, height = LEFT + COLUMN * shown + 10, TOP + LANE * len(events)
    parts = []
    for rank, lane in enumerate(placed):
        y = TOP + LANE * rank + LANE // 2 - 6
        parts.append(f"<text x='0' y='{y + 4}' fill='currentColor'>rank {rank}</text>")
        parts.append(
            f"<line x1='{LEFT - 14}' x2='{width - 10}' y1='{y}' y2='{y}' stroke='{COLORS[rank % 8]}' "
            "stroke-opacity='.5'/>"
        )
        parts += [_mark(each, y, rank) for each in lane if each.column < shown]
    parts += _arrows(placed, shown)
    more = f" (the first {shown} of {last + 1} steps)" if last >= shown else ""
    caption = f"What each rank did, step by step{more}: {_key(events)}."
    return (
        f"<svg viewBox='0 0 {width} {height}' style='display:block;width:100%;max-width:{width}px;margin-top:8px' "
        f"font-size='12' font-family='sans-serif' role='img' aria-label='{html.escape(caption, quote=True)}'>"
        "<defs><marker id='labkit-tip' markerWidth='7' markerHeight='6' refX='6' refY='3' orient='auto'>"
        "<path d='M0,0 L7,3 L0,6 z' fill='currentColor' fill-opacity='.6'/></marker></defs>"
        f"{''.join(parts)}</svg><div style='font-size:85%;opacity:.8'>{caption}</div>"
    )


def _key(events: Sequence[Sequence[Event]]) -> str:
    """Say what the signs mean that are there."""
    kinds = {event.kind for lane in events for event in lane}
    collectives = sorted({e.kind for lane in events for e in lane if e.is_call} - {"send"})
    signs = {
        "● sends": "send" in kinds,
        "○ has received": "recv" in kinds,
        f"▬ {', '.join(collectives)}": collectives,
        "pale: waits for what it began": "wait" in kinds,
        "grey: backward of a layer": any(e.is_computing for lane in events for e in lane),
    }
    return ", ".join(sign for sign, is_there in signs.items() if is_there)


def _x(column: int) -> int:
    return LEFT + COLUMN * column


def _mark(placed: Placed, y: int, rank: int) -> str:
    x, color, event = _x(placed.column), COLORS[rank % 8], placed.event
    if event.kind == "send":
        return f"<circle cx='{x}' cy='{y}' r='6' fill='{color}'><title>sends {event.bytes} B</title></circle>"
    if event.kind == "recv":
        return (
            f"<circle cx='{x}' cy='{y}' r='5' fill='none' stroke='{color}' stroke-width='2.5'>"
            f"<title>has received {event.bytes} B</title></circle>"
        )
    if event.is_computing:
        return (
            f"<rect x='{x - 18}' y='{y - 4}' width='36' height='8' fill='currentColor' fill-opacity='.25'>"
            f"<title>{html.escape(event.kind)}</title></rect>"
        )
    return (
        f"<rect x='{x - 15}' y='{y - 6}' width='30' height='12' rx='3' fill='{color}' "
        f"fill-opacity='{0.35 if event.kind == 'wait' else 1}'><title>{event.kind}</title></rect>"
    )


def _arrows(placed: Sequence[Sequence[Placed]], shown: int) -> list[str]:
    found = []
    for sender, receiver, start, end in _messages(placed):
        if end >= shown:
            continue
        y1, y2 = (TOP + LANE * rank + LANE // 2 - 6 for rank in (sender, receiver))
        down = 7 if y2 > y1 else -7
        found.append(
            f"<line x1='{_x(start) + 3}' y1='{y1 + down}' x2='{_x(end) - 3}' y2='{y2 - down}' stroke='currentColor' "
            "stroke-opacity='.6' marker-end='url(#labkit-tip)'/>"
        )
    return found


def _messages(placed: Sequence[Sequence[Placed]]) -> list[tuple[int, int, int, int]]:
    """Return (sender, receiver, column of the send, column of the receive) of every message."""
    found = []
    for sender, lane in enumerate(placed):
        for receiver in range(len(placed)):
            sends = [each.column for each in lane if each.event[:2] == ("send", receiver)]
            arrivals = [each.column for each in placed[receiver] if each.event[:2] == ("recv", sender)]
            found += [(sender, receiver, start, end) for start, end in zip(sends, arrivals, strict=False)]
    return found


def in_steps(events: Sequence[Sequence[Event]]) -> list[list[Placed]]:
    """Return each rank's events with the step at which they could have happened at the earliest.

    A receive comes a step after its send; a collective at one step for all ranks.
    """
    columns = [[index for index, _ in enumerate(lane)] for lane in events]
    for _ in range(sum(map(len, events)) + 1):
        before = [list(lane) for lane in columns]
        _delay(events, columns)
        for lane in columns:
            for index in range(1, len(lane)):
                lane[index] = max(lane[index], lane[index - 1] + 1)
        if columns == before:
            break
    return [
        [Placed(event, column) for event, column in zip(*lanes_, strict=True)]
        for lanes_ in zip(events, columns, strict=True)
    ]


def _delay(events: Sequence[Sequence[Event]], columns: list[list[int]]) -> None:
    """Move receives behind their sends, and the ranks' parts in a collective under each other."""
    for receiver, lane in enumerate(events):
        seen: dict[int, int] = {}
        for index, event in enumerate(lane):
            if event.kind != "recv" or event.peer is None:
                continue
            number = seen[event.peer] = seen.get(event.peer, -1) + 1
            sends = [i for i, e in enumerate(events[event.peer]) if e[:2] == ("send", receiver)]
            if number < len(sends):
                columns[receiver][index] = max(columns[receiver][index], columns[event.peer][sends[number]] + 1)
    together = [[i for i, e in enumerate(lane) if e.is_call and e.kind != "send"] for lane in events]
    for parts in zip(*together, strict=False):
        column = max(columns[rank][index] for rank, index in enumerate(parts))
        for rank, index in enumerate(parts):
            columns[rank][index] = column
