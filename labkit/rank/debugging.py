"""`breakpoint()` in a launched function: pdb, whose lines the cell that waits asks for. Runs in the rank."""

from __future__ import annotations

import contextlib
import os
import pdb
import sys
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

from labkit.protocol.events import Asks
from labkit.protocol.job import Job, RankHook
from labkit.protocol.pages import help_hint
from labkit.protocol.source import place_of
from labkit.protocol.text import printable
from labkit.rank.channels import Channel
from labkit.rank.stop_agreement import Stopped

LINE = "debugging line "
"""Begins a word to a rank: what follows was typed for it."""


class Prompt(RankHook):
    """A rank's debugger, and the lines typed for it."""

    def __init__(self, why_nobody: str) -> None:
        self._why_nobody = why_nobody
        """Why nobody can answer; "" if somebody can."""

    @contextlib.contextmanager
    def around(self, job: Job, channel: Channel) -> Iterator[None]:
        """Have `breakpoint()` stop here."""
        self._cells, self._channel, self._written = job.cells, channel, ""
        self._lines: SimpleQueue[str | None] = SimpleQueue()
        self._debugger: pdb.Pdb | None = None
        instead: dict[tuple[Any, str], Any] = {(sys, "breakpointhook"): self._stop, (pdb, "set_trace"): self._stop}
        before = [(owner, name, getattr(owner, name)) for owner, name in instead]
        tracer = sys.gettrace()
        try:
            for (owner, name), new in instead.items():
                setattr(owner, name, new)
            yield
        finally:
            for owner, name, own in before:
                setattr(owner, name, own)
            if self._debugger is not None:
                self._debugger.clear_all_breaks()  # they are the whole process's
                sys.settrace(tracer)

    def receive(self, word: Any, channel: Channel) -> None:
        """Take a line, or the stop that ends the wait for one."""
        if word == "stop":
            self._lines.put(None)
        elif isinstance(word, str) and word.startswith(LINE):
            self._lines.put(word.removeprefix(LINE))

    def _stop(self, *_: Any, **__: Any) -> None:
        if os.environ.get("PYTHONBREAKPOINT") == "0":
            return
        frame = sys._getframe(1)
        if self._why_nobody:
            where = place_of(frame.f_code.co_filename, frame.f_lineno, self._cells)
            raise RuntimeError(
                f"rank {self._channel.rank} is at breakpoint() in {where}, and nobody can answer: {self._why_nobody}\n"
                + help_hint("nobody_answers")
            )
        if self._debugger is None:
            stream: Any = self
            skip = ["labkit.*", "contextlib"]  # what calls the function
            self._debugger = pdb.Pdb(stdin=stream, stdout=stream, skip=skip, nosigint=True, readrc=False)
            self._debugger.prompt = f"(rank {self._channel.rank}) "
        self._debugger.set_trace(frame)

    # What pdb reads from and writes to

    def write(self, text: str) -> None:
        """Keep it until pdb asks for a line."""
        self._written += text

    def flush(self) -> None:
        """Do nothing."""

    def readline(self) -> str:
        """Ask for a line. Raises `Stopped` once the run is to stop."""
        text, self._written = printable(self._written), ""
        for file, cell in self._cells.items():
            text = text.replace(file, cell.title)
        sys.stdout.flush()  # what was printed before the question is to be seen before it
        if self._channel.stop_asked_s is None:
            self._channel.send(Asks(self._channel.rank, text))
            if (line := self._lines.get()) is not None:
                return f"{line}\n"
        raise Stopped(f"rank {self._channel.rank} stopped at a breakpoint")
