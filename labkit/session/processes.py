"""Which processes the ranks of a session on a cluster are, by what their supervisors have written."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from labkit.failures.exit_codes import in_words
from labkit.session.directory import SessionDirectory
from labkit.session.ranks import Replaced


class Process(NamedTuple):
    """What is known of one process of a rank."""

    number: int
    """Of all that the rank has had, from 0; −1 if it has none yet."""
    pid: int = 0
    node: str = ""
    is_ready: bool = False
    exit_code: int | None = None
    was_ended: bool = False
    """Whether it was ended from outside: with its run, or by the launcher."""


class Processes:
    """The process of each rank, and which of them are new.

    Guarantees: a process that has ended, or whose node was taken away, is known by its number, which no other process
    of that rank has.
    """

    def __init__(self, directory: SessionDirectory, known: list[int]) -> None:
        self.directory = directory
        self._lock = threading.RLock()
        self._known = known
        """The number of each rank's process that the session knows of."""
        self.notes: list[str] = [""] * len(known)
        """Since when each rank's process is there, if it is not the first."""
        self._least = [0] * len(known)
        """Processes with lesser numbers are gone, whether they could say so or not."""
        self._why_new = ""
        """Why all ranks are new, if they are."""
        self._newest = [Process(-1)] * len(known)

    def now(self) -> list[Process]:
        """Return the newest process of each rank, whether it has ended or not."""
        with self._lock:
            numbers = [-1] * len(self._newest)
            with contextlib.suppress(OSError):
                for file in self.directory.ranks.glob("*.records"):
                    whose, count, _ = file.name.split(".")
                    numbers[int(whose)] = max(numbers[int(whose)], int(count))
            for rank, number in enumerate(numbers):
                seen = self._newest[rank]
                if number >= 0 and (number > seen.number or seen.exit_code is None):
                    self._newest[rank] = read_process(self.directory, rank, number)
            return list(self._newest)

    @property
    def incarnations(self) -> list[int]:
        """The number of each rank's process; of one that has ended, its successor's."""
        with self._lock:
            return [
                max(least, process.number + (process.exit_code is not None))
                for least, process in zip(self._least, self.now(), strict=True)
            ]

    def is_idle(self, rank: int) -> bool:
        """Whether a rank's process, as it was last seen, waits for work."""
        process = self._newest[rank]
        return process.is_ready and process.exit_code is None and process.number >= self._least[rank]

    def node(self, rank: int) -> str:
        """Return the node of a rank, as it was last seen; "" if it has none yet."""
        return self._newest[rank].node

    def have_begun(self) -> bool:
        """Whether each rank has had a process."""
        return all(process.number >= 0 for process in self.now())

    def have_ended(self) -> bool:
        """Whether no rank has a process that lives."""
        return all(process.exit_code is not None for process in self.now())

    def exit_code(self, rank: int) -> int:
        """Return how the process of a rank ended that was the last to end there."""
        last = self.now()[rank]
        if last.exit_code is None and last.number > 0:
            last = read_process(self.directory, rank, last.number - 1)
        return -9 if last.exit_code is None else last.exit_code

    def take_replaced(self) -> list[Replaced]:
        """Return the ranks that are new since this was last called."""
        found = []
        with self._lock:
            for rank, number in enumerate(self.incarnations):
                if number == self._known[rank]:
                    continue
                before = self._newest[rank]
                if before.number == number:
                    before = read_process(self.directory, rank, number - 1)
                how = self._why_new
                if not how and not before.was_ended and before.exit_code is not None:
                    how = in_words(before.exit_code)
                self._known[rank] = number
                self.notes[rank] = f"new since {time.strftime('%H:%M:%S')}" + (f", after {how}" if how else "")
                found.append(Replaced(rank, how))
            self._why_new = ""
        return found

    def lose(self, ranks: Sequence[int], why: str) -> None:
        """Count the processes of ranks as gone, though nobody has seen them end."""
        with self._lock:
            newest = self.now()
            self._why_new = why
            for rank in ranks:
                self._least[rank] = max(self._least[rank], newest[rank].number + 1)

    def dead_before_ready(self) -> str:
        """Return which rank could not start, and what it wrote; "" if none failed so."""
        for rank, process in enumerate(self.now()):
            if process.exit_code is not None and not process.is_ready and not process.was_ended:
                file = self.directory.file(rank, process.number, "out")
                output = file.read_text(errors="replace", encoding="utf-8").strip()
                how = in_words(process.exit_code)
                return f"rank {rank} died ({how}) before it was ready; it wrote: {output[-2000:] or 'nothing'}"
        return ""


def read_process(directory: SessionDirectory, rank: int, number: int) -> Process:
    """Return what is known of one process of a rank."""
    found = Process(number)
    if number < 0:
        return found
    with contextlib.suppress(OSError):
        for line in directory.file(rank, number, "records").read_text(errors="replace", encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):  # cut short
                kind, _, *rest = json.loads(line)
                if kind == "Process":
                    found = found._replace(pid=rest[0], node=rest[1])
                elif kind == "Ready":
                    found = found._replace(is_ready=True)
                elif kind == "Exit":
                    found = found._replace(exit_code=rest[0], was_ended=rest[2])
    return found
