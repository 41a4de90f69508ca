"""What an exhibit is, and the table of all of them. An exhibit is one file of this folder, named as its function."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import os
import pkgutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import torch

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

KINDS = ("error", "warning", "slow", "hang", "wrong, in silence")
"""How a mistake shows itself."""

NEEDS = ("", "1 GPU", "2 GPUs", "no GPU", "fork", "Linux")


class Exhibit:
    """A mistake: what is done, what might come of it, and the right form.

    Its file makes one, and fills it in with decorators: `@EXHIBIT.broken` over the function that the reader runs;
    `@EXHIBIT.symptom` over what says whether that showed the mistake; `@EXHIBIT.right` over the right form, whose
    docstring says why. What these functions need they ask for by the names of their arguments: `on_ranks`, `images`,
    `world_size`, `folder`, … (`course.pitfalls.Museum` has them all).
    """

    def __init__(
        self,
        wing: str,
        title: str,
        story: str,
        choices: Sequence[str],
        shows: int,
        kind: str = "wrong, in silence",
        needs: str = "",
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
        """What the text does, and what the cell does of it, as Markdown."""
        self.choices = tuple(choices)
        """What might come of it."""
        self.answer = self.choices[shows - 1]
        """The choice that is right if the run shows the symptom; `shows` is its number, from 1."""
        self.kind = kind
        self.needs = needs
        """What not every machine has: one of `NEEDS`."""
        self.broken_form: Callable[..., Any] | None = None
        self.has_symptom: Callable[..., bool] | None = None
        self.right_form: Callable[..., Any] | None = None

    # What an exhibit's file fills in

    def broken(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Take the broken form."""
        self.broken_form = function
        return function

    def symptom(self, function: Callable[..., bool]) -> Callable[..., bool]:
        """Take what looks at what came of the broken form, its first argument: an error as text, or what it gave."""
        self.has_symptom = function
        return function

    def right(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Take the right form, which asserts what it promises."""
        self.right_form = function
        return function

    # What follows from it

    @property
    def form(self) -> Callable[..., Any]:
        """The broken form."""
        assert self.broken_form is not None, (
            "an exhibit's file marks its broken form with @EXHIBIT.broken"
        )
        return self.broken_form

    @property
    def name(self) -> str:
        """The broken form's name, and the file's."""
        return self.form.__name__

    @property
    def cell(self) -> str:
        """What the reader's cell holds: the broken form, and what stands before it in the file for its sake."""
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
        return " ".join((inspect.getdoc(self.right_form) or "").split())

    @property
    def missing(self) -> str:
        """What this machine lacks for it, in words; "" if it can run here."""
        gpus = torch.cuda.device_count()
        lacks = {
            "": "",
            "1 GPU": "" if gpus else "a GPU",
            "2 GPUs": "" if gpus > 1 else f"2 GPUs; here: {gpus}",
            "no GPU": "a machine without a GPU" if gpus else "",
            "fork": "" if hasattr(os, "fork") else "a system that can fork",
            "Linux": ""
            if sys.platform == "linux"
            else "Linux, where every address 127.x.x.x is this machine",
        }
        return lacks[self.needs]

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
    package = importlib.import_module("course.pitfalls")
    found = [
        find(module.name)
        for module in pkgutil.iter_modules(package.__path__)
        if module.name not in NO_EXHIBITS
    ]
    order = list(WINGS)
    return {
        each.name: each
        for each in sorted(found, key=lambda each: (order.index(each.wing), each.name))
    }


def find(name: str) -> Exhibit:
    """Return one exhibit. Raises ValueError if there is none of this name."""
    try:
        if name in NO_EXHIBITS:
            raise ModuleNotFoundError(name=f"course.pitfalls.{name}")
        exhibit: Exhibit = importlib.import_module(f"course.pitfalls.{name}").EXHIBIT
    except ModuleNotFoundError as error:
        if error.name != f"course.pitfalls.{name}":
            raise
        raise ValueError(f"there is no exhibit {name!r}; there are {', '.join(table())}") from None
    return exhibit
