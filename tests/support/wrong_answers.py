"""Wrong answers to an exercise: mistakes that learners make, and what they must be told.

Most are the reference with a few words changed, rows of `tests/lessons/wrong_answers/slips.py`; the others are in
`functions.py` beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from course import exercises
from tests.lessons.wrong_answers.functions import FUNCTIONS
from tests.lessons.wrong_answers.slips import SLIPS


class WrongAnswer(NamedTuple):
    """A mistake that learners make, and what they must be told."""

    function: Callable[..., Any]
    said: str
    """A piece of the message."""


def slip(name: str, *changes: tuple[str, str]) -> Callable[..., Any]:
    """Return the reference of the exercise of this name with a few words changed."""
    reference = exercises.find(name).solution
    source = exercises.find(name).solution_source
    for right, mistaken in changes:
        assert source.count(right) == 1, f"{name}: the reference has {right!r} {source.count(right)} times"
        source = source.replace(right, mistaken)
    made: dict[str, Any] = {}
    exec(source, reference.__globals__, made)
    return made[name]


def wrong_answers(name: str) -> list[WrongAnswer]:
    """Return the wrong answers to the exercise of this name."""
    found = [WrongAnswer(slip(name, *changes), said) for said, *changes in SLIPS.get(name, [])]
    return found + [WrongAnswer(function, said) for said, function in FUNCTIONS.get(name, [])]
