"""Reads in a run's directory what its ranks write there: see `sender`. Whatever lies there, nothing here raises."""

from __future__ import annotations

import codecs
import os
import pickle
import re
import time
from collections import Counter, deque
from collections.abc import Iterable
from typing import Any

from labkit.launchers import job_events
from labkit.launchers.run_directory import growing
from labkit.launchers.run_directory.directory import RunDirectory
from labkit.launchers.run_directory.files import Folder
from labkit.launchers.run_directory.growing import Growing, Lines
from labkit.launchers.run_directory.records import CUT, Stored, decoded
from labkit.protocol import events
from labkit.protocol.pickling import Message

UNREADABLE_S = 30.0
"""How long files must not have been readable before it is said."""

SEEN_LATE_S = 60.0
"""How long a file that a record names may take to be seen over a network's file system."""


class NotThereError(Exception):
    """A file that a record names is not there yet, or not whole."""


class RankFiles:
    """What one rank writes in one attempt."""

    def __init__(self, directory: RunDirectory, rank: int, attempt: int) -> None:
        self._rank, self._folder = rank, directory.ranks
        self._records = Lines(directory.file(rank, attempt, "records"))
        self._out, self._stacks = (Growing(directory.file(rank, attempt, kind)) for kind in ("out", "stacks"))
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._pending: deque[bytes] = deque()
        """Lines that have been read, and wait for a file or for the end of what was printed."""
        self._missing_since_s: float | None = None
        self.unreadable = 0
        """Records that are none."""
        self.was_interrupted = False
        """Whether its supervisor has asked the rank to stop, because the launcher takes the machine away."""

    @property
    def files(self) -> tuple[Growing, ...]:
        """The files that grow."""
        return self._records, self._out, self._stacks

    @property
    def has_more(self) -> bool:
        """Whether another look may find more at once."""
        return bool(self._pending and self._missing_since_s is None) or any(file.has_more for file in self.files)

    @property
    def is_behind(self) -> bool:
        """Whether more may be there than was returned, or is on its way."""
        return bool(self._pending) or self._records.awaits_rest or any(file.grew for file in self.files)

    def read(self, room: int) -> tuple[list[events.Event], int]:
        """Return what is new, what was printed before what was reported after it; and what is left of `room`.

        Large values are read until there is no room left, in bytes.
        """
        self._pending += self._records.new()  # before the output, so that what was printed first is there
        found: list[events.Event] = []
        if text := self._decoder.decode(self._out.read()):
            found.append(events.Output(self._rank, text))
        if stacks := self._stacks.read():
            found.append(events.Stack(self._rank, stacks.decode("utf-8", "replace")))
        while self._pending:
            line = self._pending[0]
            event = self._event(line)
            if isinstance(event, events.Exit):
                if self._out.has_more:
                    break  # it comes last
                if rest := self._decoder.decode(b"", final=True):
                    found.append(events.Output(self._rank, rest))
            elif isinstance(event, events.Result | events.Attached) and isinstance(event.blob, Stored):
                stored: Stored = event.blob
                if room <= 0:
                    break
                try:
                    event = event._replace(blob=self._large(stored, isinstance(event, events.Result)))
                except NotThereError:
                    break
                except (OSError, EOFError, MemoryError) as error:
                    event = self._without(event, stored, error)
                room -= stored.size
            self._pending.popleft()
            if event is not None:
                found.append(event)
        return found, room

    def read_logs(self) -> list[events.Event]:
        """Return all that was logged and printed, of an attempt that is over."""
        found: list[events.Event] = []
        has_more = True
        while has_more:
            lines = self._records.new()
            if text := self._decoder.decode(self._out.read()):
                found.append(events.Output(self._rank, text))
            has_more = self._records.grew or self._out.grew
            new = (self._event(line) for line in [*self._pending, *lines])
            found += (event for event in new if isinstance(event, events.Log | events.Warned))
            self._pending.clear()
        return found

    def _event(self, line: bytes) -> Any:
        """Return the event of a line; None if it has none for the run."""
        if not line or line.endswith(CUT[:-1]):
            return None
        if line.startswith(b'["Interrupted"'):
            self.was_interrupted = True
            return None
        try:
            event = decoded(line)
            if event.rank != self._rank:
                raise ValueError("another rank's")
        except ValueError:  # cut short by the end of its writer, say
            self.unreadable += 1
            return None
        return event

    def _large(self, stored: Stored, is_message: bool) -> Message | bytes:
        """Return a large value. Raises NotThereError if its file may still be seen; OSError if not."""
        error: OSError
        path = self._folder / stored.name
        try:
            with open(path, "rb") as file:
                size = os.stat(file.fileno()).st_size
                if size == stored.size:
                    value = Message.of_file(file) if is_message else file.read()
                    self._missing_since_s = None
                    return value
            error = OSError(f"{path} has {size:,} bytes of {stored.size:,}")
        except OSError as missing:
            error = missing
        now = time.monotonic()
        self._missing_since_s = self._missing_since_s or now
        if now - self._missing_since_s < SEEN_LATE_S:
            raise NotThereError
        self._missing_since_s = None
        raise error

    def _without(self, event: Any, stored: Stored, error: Exception) -> Any:
        """Return an event in the place of one whose value is not to be read: a result says so when it is unpickled."""
        if not isinstance(event, events.Result):
            self.unreadable += 1
            return None
        said = f"the result of rank {self._rank}, {stored.size:,} bytes, cannot be read: {error}"
        return event._replace(blob=pickle.dumps(_Unreadable(said)))


class _Unreadable:
    """Raises OSError where it is unpickled."""

    def __init__(self, said: str) -> None:
        self._said = said

    def __reduce__(self) -> Any:
        return _raise, (self._said,)


def _raise(said: str) -> None:
    raise OSError(said)


class DirectoryReader:
    """Reads what all ranks write, from the first attempt on."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._files: dict[int, RankFiles] = {}
        self._folder = Folder(directory.path)
        self._listing_error: OSError | None = None
        self._failing_since_s: float | None = None
        self._unreadable: Counter[int] = Counter()
        """By rank, of attempts that are over."""
        self._warned: dict[tuple[int, str], str] = {}
        self.attempt = 0
        """The newest that any rank has begun."""

    @property
    def begun(self) -> set[int]:
        """Ranks that have begun this attempt."""
        return set(self._files)

    @property
    def interrupted(self) -> set[int]:
        """Ranks of this attempt whose supervisors have asked them to stop."""
        return {rank for rank, files in self._files.items() if files.was_interrupted}

    @property
    def has_more(self) -> bool:
        """Whether another look may find more at once."""
        return any(files.has_more for files in self._files.values())

    @property
    def is_behind(self) -> bool:
        """Whether more may be there than was returned, or is on its way: a file that grew, a line that is not whole, or
        what cannot be read, before that is said.
        """
        fails = self._failing_since_s is not None and not self._warned.get((-1, "reading"))
        return not self.is_gone and (fails or any(files.is_behind for files in self._files.values()))

    @property
    def is_gone(self) -> bool:
        """Whether the directory was deleted or moved."""
        return self._folder.is_gone

    def read(self) -> list[events.Event]:
        """Return what is new. Of attempts before the newest, only what was logged and printed."""
        found: list[events.Event] = []
        there = self._there()
        newest = max((attempt for _, attempt in there), default=0)
        while self.attempt < newest:
            self._open(there)
            for rank, files in self._files.items():
                found += files.read_logs()
                self._unreadable[rank] += files.unreadable
            self._files = {}
            self.attempt += 1
            found.append(job_events.Restarted(-1, self.attempt))
        self._open(there)
        room = growing.BLOCK_BYTES
        for files in self._files.values():
            new, room = files.read(room)
            found += new
        return found + self._warnings()

    def _there(self) -> list[tuple[int, int]]:
        """Return (rank, attempt) of all that have begun."""
        names: list[str] = []
        self._listing_error = None
        try:
            names = os.listdir(self._directory.ranks)
        except OSError as error:
            self._listing_error = error
        if not names or not self._folder.was_seen:
            self._folder.look_now()
        found = (re.fullmatch(r"(\d+)\.(\d+)\.records", name) for name in names)
        return sorted((int(name[1]), int(name[2])) for name in found if name)

    def _open(self, there: Iterable[tuple[int, int]]) -> None:
        for rank, attempt in there:
            if attempt == self.attempt and rank not in self._files:
                self._files[rank] = RankFiles(self._directory, rank, attempt)

    # What is said of it

    def _warnings(self) -> list[events.Event]:
        """Return what is to be said that has not been said: what cannot be read, just now or ever."""
        said = {(-1, "reading"): self._not_readable_in_words()}
        for rank, files in self._files.items():
            if count := self._unreadable[rank] + files.unreadable:
                are = "a record is" if count == 1 else f"{count:,} records are"
                said[rank, "records"] = f"rank {rank}: {are} damaged or cut short, and left out"
        new = {key: text for key, text in said.items() if text != self._warned.get(key, "")}
        self._warned |= new
        return [events.Warned(rank, topic, text) for (rank, topic), text in new.items()]

    def _not_readable_in_words(self) -> str:
        """Return that files cannot be read, if that lasts; else ""."""
        errors = [(self._directory.ranks, self._listing_error)]
        errors += [(file.path, file.error) for files in self._files.values() for file in files.files]
        failing = [(path, error) for path, error in errors if error is not None]
        if not failing or self.is_gone:
            self._failing_since_s = None
            return ""
        now = time.monotonic()
        self._failing_since_s = self._failing_since_s or now
        if now - self._failing_since_s < UNREADABLE_S:
            return ""
        path, error = failing[0]
        return (
            f"{path} cannot be read for {UNREADABLE_S:.0f} s: {error.strerror or error}. The ranks may be well; it is "
            "looked for on"
        )
