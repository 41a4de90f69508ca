"""Wrong answers to an exercise: mistakes that learners make, and what they must be told.

Those that are the reference with a few words changed are rows of `tests/lessons/wrong_answers/slips.py`; others are
functions in a file for each exercise. Imported on ranks, too, so it imports nothing of the tests.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

from course import exercises

FOLDER = "tests.lessons.wrong_answers"


class WrongAnswer(NamedTuple):
    """A mistake that learners make, and what they must be told."""

    function: Callable[..., Any]
    said: str
    """A piece of the message."""


def told(said: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Mark a function as a wrong answer, whose message must have this in it."""

    def mark(function: Callable[..., Any]) -> Callable[..., Any]:
        function.said = said  # type: ignore[attr-defined]
        return function

    return mark


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
    slips = importlib.import_module(f"{FOLDER}.slips").SLIPS.get(name, [])
    found = [WrongAnswer(slip(name, *changes), said) for said, *changes in slips]
    if importlib.util.find_spec(f"{FOLDER}.{name}"):
        values = vars(importlib.import_module(f"{FOLDER}.{name}")).values()
        found += [WrongAnswer(value, value.said) for value in values if hasattr(value, "said")]
    return found
