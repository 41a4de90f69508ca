"""What an exhibit is, and the table of all of them. An exhibit is one file of this folder, named as its function."""

from __future__ import annotations

import ast
import functools
import inspect
import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from course import files

NO_EXHIBITS = {"base", "helpers", "museum"}
"""Files of this folder that are the machinery."""

WINGS = {
    "starting": "16a_pitfalls_starting",
    "machines": "16b_pitfalls_machines",
    "data": "16c_pitfalls_data",
    "learning": "16d_pitfalls_learning",
    "gradients": "16e_pitfalls_gradients",
    "well_known": "16f_pitfalls_well_known",
}
"""The museum's wings, and the notebook of each."""

SOUND = "looks wrong, is right"
KINDS = ("error", "warning", "slow", "hang", "silently wrong", SOUND)
"""How a mistake shows itself; or that there is none."""

NEEDS = {
    "": "",
    "1 GPU": "a GPU",
    "2 GPUs": "2 GPUs",
    "no GPU": "a machine without a GPU",
    "fork": "a system that can fork",
    "Linux": "Linux",
}
"""What not every machine has, and how a card says so."""


class Expected(NamedTuple):
    """What a right form returns, where more than one value will do."""

    words: str
    holds: Callable[[Any], Any]


class OnEachRank(NamedTuple):
    """A list with the same value for each rank."""

    value: Any


def near(value: float, within: float = 1e-6) -> Expected:
    """Expect a number within a distance of this one."""
    return Expected(f"{value:.4g}, within {within:g}", lambda found: abs(found - value) <= within)


def below(limit: float) -> Expected:
    """Expect a smaller number."""
    return Expected(f"less than {limit:g}", lambda found: found < limit)


def above(limit: float) -> Expected:
    """Expect a greater number."""
    return Expected(f"more than {limit:g}", lambda found: found > limit)


def has(*texts: str) -> Expected:
    """Expect a text, such as an error's, that has one of these in it."""
    return Expected(" or ".join(texts), lambda found: any(text in found for text in texts))


def fault(expected: Any, found: Any, world_size: int) -> str:
    """Return what was found and what was expected, with the rank where there is one; "" if they agree."""
    if isinstance(expected, OnEachRank):
        if not isinstance(found, list) or len(found) != world_size:
            return (
                f"found {brief(found)}, expected a list of {world_size} values, one for each rank"
            )
        told = [fault(expected.value, each, world_size) for each in found]
        return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(told) if text)
    if not isinstance(expected, Expected):
        value = expected
        expected = Expected(brief(value), lambda found: found == value)
    try:
        is_right = bool(expected.holds(found))
    except Exception:  # a value of another type
        is_right = False
    return "" if is_right else f"found {brief(found)}, expected {expected.words}"


def brief(value: Any) -> str:
    """Return a value as text, cut where it is long."""
    words = " ".join(repr(value).split()).replace("`", "'")
    return words if len(words) <= 240 else f"{words[:239]}…"


class Exhibit:
    """Code that looks right or wrong: what it does, what might come of it, and what a right form returns.

    The exhibit's file fills it in with decorators. A mistake has two: `@EXHIBIT.broken` over the function that the
    reader runs; `@EXHIBIT.right` over the right form, whose docstring says why. Code that only looks wrong has one,
    `@EXHIBIT.sound`, and `why` as an argument.
    These functions ask for what they need by the names of their arguments: `on_ranks`, `images`, `world_size`,
    `folder`, … (`course.pitfalls.Museum` has them all).
    """

    def __init__(
        self,
        wing: str,
        title: str,
        story: str,
        choices: Sequence[str],
        shows: int,
        expects: Any,
        gives: Any = None,
        kind: str = "silently wrong",
        needs: str = "",
        why: str = "",
    ) -> None:
        if (
            wing not in WINGS
            or kind not in KINDS
            or needs not in NEEDS
            or not 1 <= shows <= len(choices)
        ):
            raise ValueError(
                f"{title}: wing={wing!r}, kind={kind!r}, needs={needs!r}, shows={shows} of {choices}"
            )
        self.wing = wing
        self.title = title
        self.story = textwrap.dedent(story).strip()
        """What the text does, and what the cell reproduces, as Markdown."""
        self.choices = tuple(choices)
        """What might come of it."""
        self.answer = self.choices[shows - 1]
        """The right choice; `shows` is its number, from 1."""
        self.expects = expects
        """What a right form returns: a value, an `Expected`, `OnEachRank`, or a function that returns one of these."""
        self.gives = gives
        """What the broken form gives where it shows its mistake, likewise; its error as a text."""
        self.kind = kind
        self.needs = needs
        """What not every machine has: one of `NEEDS`."""
        self.broken_form: Callable[..., Any] | None = None
        self.right_form: Callable[..., Any] | None = None
        self._why = why

    # What an exhibit's file fills in

    def broken(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Take the broken form."""
        self.broken_form = function
        return function

    def sound(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Take a form that looks wrong and is right."""
        self.broken_form = self.right_form = function
        self.kind = SOUND
        return function

    def right(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Take the right form, which asserts what it promises."""
        self.right_form = function
        return function

    # What follows from it

    @property
    def form(self) -> Callable[..., Any]:
        """The form that the reader runs."""
        assert self.broken_form is not None, (
            "an exhibit's file marks the form that the reader runs with @EXHIBIT.broken or @EXHIBIT.sound"
        )
        return self.broken_form

    @property
    def is_sound(self) -> bool:
        """Whether the form only looks wrong."""
        return self.kind == SOUND

    @property
    def name(self) -> str:
        """The name of the form and of the file."""
        return self.form.__name__

    @property
    def cell(self) -> str:
        """The code to read and to change: the form, and what stands before it in the file for its sake."""
        module = inspect.getmodule(self.form)
        assert module is not None
        text = inspect.getsource(module)
        kept, inside = [], False
        for node in ast.parse(text).body:
            if inside:
                first = getattr(node, "lineno", 1)
                kept.append("\n".join(text.splitlines()[first - 1 : node.end_lineno]))
            if isinstance(node, ast.FunctionDef) and node.name == self.name:
                break
            inside = inside or (
                isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EXHIBIT"
            )
        return _spaced(kept)

    @property
    def card(self) -> str:
        """The Markdown cell above the code: title, story, and what might come of it."""
        choices = "\n".join(f"* **{letter}** {choice}" for letter, choice in self.lettered.items())
        needs = f"\n\n*Needs {NEEDS[self.needs]}.*" if self.needs else ""
        return f"### {self.title}\n\n{self.story}\n\n{choices}{needs}"

    @property
    def lettered(self) -> dict[str, str]:
        """The choices by their letters."""
        return dict(zip("abc", self.choices, strict=False))

    @property
    def hung(self) -> str:
        """The reader's cell: the code, and the call that runs it."""
        *first, last = self.lettered
        letters = f"{', '.join(first)} or {last}"
        return f'{self.cell}\n\n\nmuseum.reveal({self.name}, prediction="")  # {letters}'

    @property
    def question(self) -> str:
        """The question that a prediction answers."""
        return f"{self.title}: what happens?"

    def chosen(self, prediction: str) -> str | None:
        """Return the choice that a prediction means, by its letter or in its words; None for "".

        Raises ValueError for anything else.
        """
        choice = self.lettered.get(prediction, prediction)
        if choice and choice not in self.choices:
            letters = ", ".join(f"{letter!r} ({text})" for letter, text in self.lettered.items())
            raise ValueError(f"{self.name}: {prediction!r} is no prediction; there are {letters}")
        return choice or None

    @property
    def right_source(self) -> str:
        """The right form as text, without its docstring."""
        assert self.right_form is not None
        lines = inspect.getsource(self.right_form).splitlines()
        lines = lines[next(i for i, line in enumerate(lines) if line.startswith("def ")) :]
        function = ast.parse("\n".join(lines)).body[0]
        assert isinstance(function, ast.FunctionDef)
        return "\n".join(
            [*lines[: function.body[0].lineno - 1], *lines[function.body[0].end_lineno or 0 :]]
        )

    @property
    def why(self) -> str:
        """Why the right form is right."""
        return " ".join((self._why or inspect.getdoc(self.right_form) or "").split())

    @property
    def missing(self) -> str:
        """What this machine lacks for it, in words; "" if it can run here."""
        gpus = torch.cuda.device_count()
        is_there = {
            "": True,
            "1 GPU": gpus > 0,
            "2 GPUs": gpus > 1,
            "no GPU": gpus == 0,
            "fork": hasattr(os, "fork"),
            "Linux": sys.platform == "linux",
        }
        return "" if is_there[self.needs] else NEEDS[self.needs]

    def __repr__(self) -> str:
        return f"<Exhibit {self.name!r} of {WINGS[self.wing]}: {self.title}>"


def _spaced(parts: Sequence[str]) -> str:
    """Join top-level statements as ruff spaces them: two blank lines around functions and classes."""
    text = parts[0]
    for before, after in zip(parts, parts[1:], strict=False):
        apart = any(part.startswith(("def ", "class ", "@")) for part in (before, after))
        text += ("\n\n\n" if apart else "\n") + after
    return text


@functools.cache
def table() -> dict[str, Exhibit]:
    """Return every exhibit by its function's name, wing by wing."""
    found = [find(name) for name in files.names("course.pitfalls", NO_EXHIBITS)]
    order = list(WINGS)
    return {
        each.name: each
        for each in sorted(found, key=lambda each: (order.index(each.wing), each.name))
    }


def find(name: str) -> Exhibit:
    """Return one exhibit. Raises ValueError if there is none of this name."""
    exhibit: Exhibit = files.defined("course.pitfalls", name, "EXHIBIT", NO_EXHIBITS, table)
    return exhibit
