"""Exercises: functions that the learner writes, tried on live ranks within a second. One file each.

    statement("ring_all_reduce")      what is asked; meanwhile the ranks start
    starter("ring_all_reduce")        what the learner's cell holds
    course.check(ring_all_reduce)     try what they have written; the Result has hints
    solution("ring_all_reduce")       the reference, and why it is so
    table()                           all of them; solved(), reset(): what this learner has done

`base` says what an exercise is; `trial` and `traffic` run in the ranks, `checking`, `ranks` and `result` in the
notebook. `predicting` asks before a cell that surprises; `progress` keeps what was done.
"""

from __future__ import annotations

import html
from typing import Any

from course.exercises.base import Exercise, find, table
from course.exercises.progress import of_lesson, predicted, reset, solved

__all__ = [
    "Exercise",
    "close",
    "find",
    "of_lesson",
    "predicted",
    "reset",
    "solution",
    "solved",
    "starter",
    "statement",
    "table",
    "tally",
]


class Statement:
    """What an exercise asks. Shows itself as Markdown."""

    def __init__(self, exercise: Exercise) -> None:
        self.exercise = exercise

    def __repr__(self) -> str:
        return f"Exercise: {self.exercise.title}\n\n{self.exercise.statement}"

    def _repr_markdown_(self) -> str:
        done = " ✔" if self.exercise.name in solved() else ""
        title = html.escape(self.exercise.title, quote=False)
        return f"#### ✎ {title}{done}\n\n{self.exercise.statement}"


def statement(name: str) -> Statement:
    """Return what an exercise asks. Where a person reads, the ranks that will try the answer start meanwhile."""
    from labkit.ui import kernel

    exercise = find(name)
    if exercise.needs_ranks and kernel.is_interactive():
        from course.exercises import ranks

        ranks.start_soon()
    return Statement(exercise)


def close() -> None:
    """End the ranks on which answers are tried; the next check starts new ones."""
    from course.exercises import ranks

    ranks.close()


def starter(name: str) -> str:
    """Return the code that the learner's cell begins with."""
    return find(name).starter


def solution(name: str) -> Any:
    """Return the reference solution as text, and why it is so."""
    from course.exercises.result import solution_text

    return solution_text(find(name))


def tally() -> Any:
    """Return how many of this notebook's predictions were right; None where none was asked for."""
    from course.exercises import predicting

    return predicting.tally()
