"""What an exercise is, and the table of all of them. An exercise is one file of this folder, named as its function."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from course import files

POINT_TO_POINT = ("send", "recv", "isend", "irecv", "batch_isend_irecv")

NO_EXERCISES = {"base", "checking", "local", "predicting", "progress", "ranks", "result", "traffic", "trial"}
"""Files of this folder that are the machinery."""


class Cost(NamedTuple):
    """What one rank spends at most in one call of the function."""

    calls: int
    """Messages sent, and collectives called."""
    bytes: int
    """Sent by one rank."""

    @classmethod
    def all_reduce(cls, size: int, world_size: int, calls: int = 1) -> Cost:
        """Return the cost of all-reduces of so many bytes each, around a ring."""
        return cls(calls, calls * 2 * ring_bytes(size, world_size))

    def time_s(self, latency_s: float = 50e-6, bytes_per_s: float = 1e9) -> float:
        """Return calls × latency + bytes ÷ bandwidth, in s."""
        return self.calls * latency_s + self.bytes / bytes_per_s


def ring_bytes(size: int, world_size: int) -> int:
    """Return what one rank sends once around a ring, as for a reduce-scatter or an all-gather of so many bytes."""
    return size * (world_size - 1) // world_size


class Exercise:
    """One exercise: what is asked, the reference, wrong answers, and how an answer is tried.

    Its file makes one, and fills it in with decorators: `@EXERCISE.reference` over the solution, whose signature and
    docstring the learner gets; `@EXERCISE.trial` over what tries an answer, once for each of the `cases`;
    `@EXERCISE.best` over the least cost, where communication counts. Wrong answers, and what they must be told, are in
    tests/lessons/wrong_answers.
    """

    def __init__(
        self,
        lesson: str,
        title: str,
        statement: str,
        why: str,
        hints: Sequence[str],
        cases: Sequence[Mapping[str, Any]],
        world_sizes: Sequence[int] = (2, 3, 4, 1),
        allowed: Sequence[str] = (),
        imports: Sequence[str] = ("import torch", "import torch.distributed as dist"),
        given: Mapping[str, str] | None = None,
    ) -> None:
        self.lesson = lesson
        """Number of the lesson's notebook: "03"."""
        self.title = title
        self.statement = textwrap.dedent(statement).strip()
        """What is asked, as Markdown."""
        self.why = why
        """Why the solution is as it is: a sentence."""
        self.hints = tuple(hints)
        """From vague to plain."""
        self.cases = tuple(cases)
        """What the trial is called with, one after another."""
        self.world_sizes = tuple(world_sizes)
        """In this order; none where the answer is a plain function that needs no ranks."""
        self.allowed = frozenset(allowed)
        """What of torch.distributed's communication an answer may call."""
        self.imports = tuple(imports)
        """Lines that the learner's cell begins with."""
        self.given = given or {}
        """Where the learner mends rather than writes: `{"body": source}` of the function that they get."""
        self.solution_function: Callable[..., Any] | None = None
        self.try_out: Callable[..., None] | None = None
        self.least: Callable[..., Cost] | None = None

    # What an exercise's file fills in

    def reference(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Take the solution."""
        self.solution_function = function
        return function

    def trial(self, function: Callable[..., None]) -> Callable[..., None]:
        """Take what tries an answer: `trial(t, **case)`, `t` being a `Trial`; on every rank."""
        self.try_out = function
        return function

    def best(self, function: Callable[..., Cost]) -> Callable[..., Cost]:
        """Take the least cost: `best(world_size, **case)`."""
        self.least = function
        return function

    # What follows from it

    @property
    def solution(self) -> Callable[..., Any]:
        """The reference solution, as a function."""
        assert self.solution_function is not None, "an exercise's file marks its solution with @EXERCISE.reference"
        return self.solution_function

    @property
    def name(self) -> str:
        """The function's name, and the file's."""
        return self.solution.__name__

    @property
    def needs_ranks(self) -> bool:
        """Whether an answer is tried on ranks."""
        return bool(self.world_sizes)

    @property
    def solution_source(self) -> str:
        """The reference solution, as text."""
        lines = inspect.getsource(self.solution).splitlines(keepends=True)
        start = next(index for index, line in enumerate(lines) if line.startswith("def "))
        return "".join(lines[start:]).rstrip() + "\n"

    @property
    def starter(self) -> str:
        """What the learner's cell holds: imports, signature, docstring, and `...` where the answer goes."""
        head = "".join(f"{line}\n" for line in self.imports) + ("\n\n" if self.imports else "")
        source = self.solution_source
        function = ast.parse(source).body[0]
        assert isinstance(function, ast.FunctionDef)
        docstring = function.body[0]
        kept = source.splitlines()[: docstring.end_lineno]
        body = textwrap.indent(textwrap.dedent(self.given.get("body", "...")).removeprefix("\n").rstrip("\n"), "    ")
        return head + "\n".join(kept) + f"\n{body}\n"

    def __repr__(self) -> str:
        return f"<Exercise {self.name!r} of lesson {self.lesson}: {self.title}>"


@functools.cache
def table() -> dict[str, Exercise]:
    """Return every exercise by its function's name, in the order of the lessons."""
    found = [find(name) for name in files.names("course.exercises", NO_EXERCISES)]
    return {exercise.name: exercise for exercise in sorted(found, key=lambda each: (each.lesson, each.name))}


def find(name: str) -> Exercise:
    """Return one exercise. Raises ValueError if there is none of this name."""
    exercise: Exercise = files.defined("course.exercises", name, "EXERCISE", NO_EXERCISES, table)
    return exercise
