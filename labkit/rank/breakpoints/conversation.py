"""What a rank's debugger and the notebook say to each other, and which of pdb's commands let a rank go on."""

from __future__ import annotations

import sys
import threading
from queue import SimpleQueue
from types import FrameType
from typing import Any, NamedTuple

from labkit.protocol.text import printable
from labkit.rank import failure
from labkit.rank.channels import Channel
from labkit.rank.stop_agreement import Stopped

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
    """ "breakpoint", "input" or "getpass"."""
    prompt: str
    """Of `input` and `getpass`; "" where the debugger's own is meant."""
    text: str
    """What the debugger has written since it last asked."""
    file: str
    line: int
    function: str

    @property
    def is_debugger(self) -> bool:
        """Whether it takes commands, and not a value."""
        return self.kind == "breakpoint"

    @property
    def is_secret(self) -> bool:
        """Whether what is typed is not to be seen."""
        return self.kind == "getpass"


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


def place_of(frame: FrameType) -> tuple[str, int, str]:
    """Return file, line and function of a frame."""
    return frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name


def outermost_of_the_reader(frame: FrameType) -> FrameType:
    """Return the frame of the launched function, below those that call it."""
    while frame.f_back is not None and frame.f_back.f_code.co_filename not in failure.OWN_FILES:
        frame = frame.f_back
    return frame


class Conversation:
    """A rank's end of the conversation with whoever answers. One thread of the rank at a time asks."""

    def __init__(self, channel: Channel) -> None:
        self.rank = channel.rank
        self._channel: Any = channel
        self._lines: SimpleQueue[str | None] = SimpleQueue()
        self._asking = threading.RLock()

    def receive(self, word: str) -> None:
        """Take a word of the notebook."""
        if word == "stop":
            self._lines.put(None)
        elif word.startswith(LINE):
            self._lines.put(word.removeprefix(LINE))

    def ask(self, kind: str, prompt: str, text: str, place: tuple[str, int, str]) -> str:
        """Wait for a line and return it. Raises `Stopped` once the run is to stop."""
        with self._asking:
            line = None
            if self._channel.stop_asked_s is None:
                sys.stdout.flush()  # what was printed before the question is to be seen before it
                self._channel.send(Asks(self.rank, kind, printable(prompt), printable(text), *place))
                line = self._lines.get()
            if line is None:
                raise Stopped(f"rank {self.rank} stopped at a {kind}")
            return line

    def let_go(self, text: str) -> None:
        """Say that the rank runs on."""
        self._channel.send(LetGo(self.rank, printable(text)))

    def quit(self) -> None:
        """Have the run stopped."""
        self._channel.send(Quits(self.rank))
