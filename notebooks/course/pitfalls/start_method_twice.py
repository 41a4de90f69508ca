"""set_start_method in a cell: an exhibit of the museum of pitfalls."""

from __future__ import annotations

import multiprocessing

from course.pitfalls.base import Exhibit
from course.pitfalls.helpers import python

EXHIBIT = Exhibit(
    wing="starting",
    title="set_start_method in a cell",
    story="""
    A cell says `mp.set_start_method("spawn")`, and you run it twice: what happens? (It is
    tried in a fresh Python, to leave this kernel as it is. `torch.multiprocessing` takes
    the function from the standard library.)
    """,
    choices=(
        "the second time it does nothing",
        "an error the second time",
        "it starts two processes",
    ),
    shows=2,
    kind="error",
)


@EXHIBIT.broken
def start_method_twice():
    cell = "import multiprocessing as mp; mp.set_start_method('spawn')"
    return python(f"{cell}\n{cell}")


@EXHIBIT.symptom
def symptom(seen):
    return "context has already been set" in seen[1]


@EXHIBIT.right
def right():
    """`set_start_method` sets the method for the whole program, once. A context is your
    own: get one as often as you like."""
    contexts = [multiprocessing.get_context("spawn") for _ in range(2)]
    assert contexts[0].get_start_method() == contexts[1].get_start_method() == "spawn"
    return [context.get_start_method() for context in contexts]
