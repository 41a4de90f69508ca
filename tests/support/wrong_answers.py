"""Wrong answers to an exercise: mistakes that learners make, and what they must be told. A file for each exercise.

Decorate a wrong answer with `@WRONG(said)`; one that is the solution with a few words changed is a line of its own,
`WRONG.slip(…)`. Imported on ranks, too, so it imports nothing of the tests.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

from course.exercises.base import Exercise


class WrongAnswer(NamedTuple):
    """A mistake that learners make, and what they must be told."""

    function: Callable[..., Any]
    said: str
    """A piece of the message."""


class WrongAnswers(list[WrongAnswer]):
    """The wrong answers to one exercise."""

    def __init__(self, exercise: Exercise) -> None:
        super().__init__()
        self.exercise = exercise

    def __call__(self, said: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Take a wrong answer, whose message must have this in it."""

        def take(function: Callable[..., Any]) -> Callable[..., Any]:
            self.append(WrongAnswer(function, said))
            return function

        return take

    def slip(self, name: str, said: str, *changes: tuple[str, str]) -> None:
        """Take a wrong answer that is the solution with a few words changed, and whose message must have `said` in it.

        Each change is what the solution has, in one place, and what the learner has written instead.
        """
        source = self.exercise.solution_source
        for right, mistaken in changes:
            assert source.count(right) == 1, f"{name}: the solution has {right!r} {source.count(right)} times"
            source = source.replace(right, mistaken)
        made: dict[str, Any] = {}
        exec(source, self.exercise.solution.__globals__, made)
        function = made[self.exercise.name]
        function.__name__ = function.__qualname__ = name
        self(said)(function)


def wrong_answers(name: str) -> WrongAnswers:
    """Return the wrong answers to the exercise of this name."""
    found: WrongAnswers = importlib.import_module(f"tests.lessons.wrong_answers.{name}").WRONG
    return found
