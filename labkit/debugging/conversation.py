"""What a rank's debugger and the notebook say to each other, and which of pdb's commands let a rank go on."""

from __future__ import annotations

from typing import NamedTuple

LINE = "debugging line "
"""Begins a word to a rank: what follows has been typed for it."""

HOLD = "debugging hold"
"""A word to every rank: somebody debugs, so process groups are to wait."""

MOVES = frozenset(["c", "cont", "continue", "n", "next", "s", "step", "r", "return", "unt", "until"])
"""Commands of pdb after which a rank runs on, until it stops again or for good."""


class Asks(NamedTuple):
    """A rank waits for a line."""

    rank: int
    kind: str
    """ "breakpoint" or "input"."""
    prompt: str
    """Of `input`; "" where the debugger's own is meant."""
    text: str
    """What the debugger has written since it last asked."""
    file: str
    line: int
    function: str


class LetGo(NamedTuple):
    """A rank has been let go, or has its input."""

    rank: int
    text: str
    """What the debugger has written since it last asked."""


class Quits(NamedTuple):
    """A rank was told to quit, which ends the run."""

    rank: int


def is_move(line: str) -> bool:
    """Whether a line typed at pdb's prompt lets the rank go on."""
    return any(part.split()[:1] and part.split()[0] in MOVES for part in line.split(";;"))
