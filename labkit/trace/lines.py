"""In which line of the reader's own code the main thread is, and since when.

The problem: a profiler knows operators, and stacks of them at ten times the cost; what the reader can act on is a line
of his cell, also where no operator runs: he sleeps, reads a file, loops in Python.

The solution: Python's own tracing (`sys.settrace`), which calls back for lines of functions that ask for it alone; only
the reader's do. Other functions cost a call when they begin. A debugger that traces already is left alone.
"""

from __future__ import annotations

import linecache
import sys
import time
from types import FrameType
from typing import Any

from labkit.protocol.modules import is_readers
from labkit.trace.records import Place

LIMIT = 100_000
"""Lines noted at most; after that no more are."""


class LineClock:
    """Within `with LineClock() as clock:` notes when the reader's code comes to another line: `clock.lines()`."""

    def __init__(self) -> None:
        self._noted: list[tuple[int, str, int]] = []
        self._is_own: dict[str, bool] = {}
        self._is_on = False

    def lines(self, zero_ns: int = 0) -> tuple[tuple[float, Place], ...]:
        """Return when which line began, in seconds since a time in ns since 1970, in order."""
        return tuple(((ns - zero_ns) / 1e9, (file, line)) for ns, file, line in self._noted)

    def __enter__(self) -> LineClock:
        if sys.gettrace() is None:
            self._is_on = True
            frames = self._own_frames(sys._getframe(1))
            for frame in frames:
                frame.f_trace = self._in_own
            if frames:
                self._note(frames[0])
            sys.settrace(self._at_call)
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_on:
            self._is_on = False
            sys.settrace(None)
            for frame in self._own_frames(sys._getframe(1)):
                frame.f_trace = None

    def _own_frames(self, frame: FrameType | None) -> list[FrameType]:
        found = []
        while frame is not None:
            if self._owns(frame.f_code.co_filename):
                found.append(frame)
            frame = frame.f_back
        return found

    def _owns(self, file: str) -> bool:
        known = self._is_own.get(file)
        if known is None:
            entry = linecache.cache.get(file)
            # As labkit.rank.failure puts cells there.
            is_cell = entry is not None and len(entry) == 4 and entry[1] is None
            known = self._is_own[file] = is_cell or is_readers(file, ())
        return known

    def _note(self, frame: FrameType) -> None:
        self._noted.append((time.time_ns(), frame.f_code.co_filename, frame.f_lineno))
        if len(self._noted) >= LIMIT:
            self.__exit__()

    def _at_call(self, frame: FrameType, event: str, _: Any) -> Any:
        if not self._is_on or not self._owns(frame.f_code.co_filename):
            return None
        return self._in_own

    def _in_own(self, frame: FrameType, event: str, _: Any) -> Any:
        if not self._is_on:
            return None
        if event == "line":
            self._note(frame)
        elif event == "return":
            caller = frame.f_back
            while caller is not None and not self._owns(caller.f_code.co_filename):
                caller = caller.f_back
            if caller is not None:
                self._note(caller)
        return self._in_own
