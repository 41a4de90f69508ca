"""Keeps two run directories equal where nobody shares a folder: the notebook's, and one for each rank on its node.

Either end asks `news` and gives the other what it says, as `Piece`s. Files of ranks and `asked` only grow; all others
appear whole, once. Nothing here knows Ray; what is in the directories is `launchers.run_directory`'s to say.

Guarantees: whoever reads the notebook's directory sees no record before what its rank had printed before, nor before
the files that it names, and no word before the job that it speaks of. What cannot be written, on a full disk, waits.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from labkit.launchers.run_directory.files import limit_output, was_cut
from labkit.launchers.run_directory.private import make_folders

BLOCK_BYTES = 1 << 22
"""Of one file at once at most, so that memory stays bounded however much a rank writes."""

UNREADABLE_S = 30.0
"""How long what a rank writes may not be readable on its own node."""

END_BYTES = 4096
"""Of what a rank wrote before: as much as is needed to see whether it had ended."""

IDLE = b"idle\n"
"""The one word that a rank's supervisor writes into `asked`: nothing has run on a session for too long."""

_WHOLE = re.compile(r"(jobs/\d+/)?(rendezvous\.[\w.-]*\.json|failed\.\d+)")
"""What ranks write for each other."""

_GROWS = re.compile(r"(jobs/\d+/)?ranks/\d+\.\d+\.(records|out|stacks|\d+\.blob)")
"""Large values, `blob`, too: they come in several pieces, and the record that names one after the last."""


class Piece(NamedTuple):
    """Some of a file."""

    name: str
    """Below the directory."""
    data: bytes
    is_whole: bool = True
    """Whether this is all of it, seen as a whole or not at all; else it is to be appended."""


class _Written:
    """A directory in which pieces are written one after the other: those that cannot be wait."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._waiting: deque[Piece] = deque()
        self.error: OSError | None = None
        """Why pieces wait, if they do."""

    def put(self, pieces: Iterable[Piece] = ()) -> list[Piece]:
        """Write pieces after those that wait; return those that have been written."""
        self._waiting += pieces
        written: list[Piece] = []
        self.error = None
        while self._waiting and self.error is None:
            piece = self._waiting[0]
            left = memoryview(piece.data)
            path = self._directory / piece.name
            into, flags = (path.with_name(f".{path.name}.part"), os.O_TRUNC) if piece.is_whole else (path, os.O_APPEND)
            try:
                descriptor = os.open(into, os.O_WRONLY | os.O_CREAT | flags, 0o600)
                try:
                    while left:
                        left = left[os.write(descriptor, left) :]
                finally:
                    os.close(descriptor)
                if piece.is_whole:
                    into.replace(path)
            except OSError as error:
                self.error = error
                if not piece.is_whole:
                    self._waiting[0] = piece._replace(data=bytes(left))
            else:
                written.append(self._waiting.popleft())
        return written


class NotebookSide:
    """The notebook's directory, to which every rank's is a part."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._written = _Written(directory)
        self._asked_bytes = 0

    @property
    def error(self) -> OSError | None:
        """Why some of what has come could not be written yet, if so: on a full disk, say."""
        return self._written.error

    def begin(self) -> None:
        """Take what has been asked so far as known: whoever begins now is given it by `for_rank`."""
        self._asked_bytes = len(self._words())

    def for_rank(self, rank: int) -> list[Piece]:
        """Return with what the directory of a rank begins: all that was asked, and the newest job.

        Of what earlier processes of that rank wrote, the ends: a session's supervisor looks which numbers are taken.
        """
        found = [self._whole("run.json")]
        if (self._directory / "job.pkl").exists():
            found.append(self._whole("job.pkl"))
        for folder in ["", *self._jobs()]:
            for file in sorted((self._directory / folder / "ranks").glob(f"{rank}.*.records")):
                if folder or (self._directory / "jobs").exists():  # a run's attempts are numbered by who starts them
                    found.append(Piece(f"{folder}ranks/{file.name}", _end_of(file)))
        if jobs := self._jobs():
            found += self._job(jobs[-1])
        return [*found, Piece("asked", self._words()[: self._asked_bytes])]

    def news(self) -> list[Piece]:
        """Return what the notebook has written since, for every rank."""
        try:
            words = self._words()[self._asked_bytes :]
            words = words[: words.rfind(b"\n") + 1]
            given = [word.split(b":")[1].decode() for word in words.split() if word.startswith(b"job:")]
            jobs = [piece for number in given for piece in self._job(f"jobs/{number}/")]
        except OSError:  # just now, or for ever: the notebook looks after its directory
            return []
        self._asked_bytes += len(words)
        return [*jobs, Piece("asked", words, False)] if words else []

    def take(self, pieces: list[Piece]) -> list[Piece]:
        """Write down what has come from a rank, after what waits; return what the other ranks need of it.

        If it cannot be written, `error` says why: it is tried again whenever this is called.
        """
        for piece in pieces:
            is_idle = piece.name == "asked" and piece.data == IDLE  # the others receive it as what the notebook asks
            if not (is_idle or (_WHOLE if piece.is_whole else _GROWS).fullmatch(piece.name)):
                raise ValueError(f"a rank has sent {piece.name!r}, which no rank writes")
        written = self._written.put(pieces)
        for piece in written:
            if piece.name.endswith(".out"):
                limit_output(self._directory / piece.name)
        return [piece for piece in written if piece.is_whole]

    def _words(self) -> bytes:
        return (self._directory / "asked").read_bytes()

    def _whole(self, name: str) -> Piece:
        return Piece(name, (self._directory / name).read_bytes())

    def _job(self, folder: str) -> list[Piece]:
        return [self._whole(f"{folder}{name}") for name in ("run.json", "job.pkl")] + [Piece(f"{folder}asked", b"")]

    def _jobs(self) -> list[str]:
        """Return the folders of a session's jobs, the newest last."""
        jobs = self._directory / "jobs"
        numbers = [int(name) for name in os.listdir(jobs) if name.isdigit()] if jobs.exists() else []
        given = self._words()[: self._asked_bytes]
        return [f"jobs/{number}/" for number in sorted(numbers) if b"job:%d:" % number in given]


def _end_of(file: Path) -> bytes:
    with open(file, "rb") as opened:
        opened.seek(max(0, opened.seek(0, os.SEEK_END) - END_BYTES))
        return opened.read()


class RankSide:
    """The directory of one rank on its node."""

    def __init__(self, directory: Path, pieces: list[Piece]) -> None:
        self._directory = directory
        self._written = _Written(directory)
        self._sent: dict[str, int] = {}
        """Bytes of each file that the notebook has."""
        self._idle_given = 0
        self._failing_since_s: float | None = None
        self._jobs: list[str] = []
        for piece in pieces:
            if _GROWS.fullmatch(piece.name):
                self._sent[piece.name] = len(piece.data)
        make_folders(directory / "ranks")
        self.take(pieces)
        if self._written.error is not None:
            raise self._written.error

    def take(self, pieces: list[Piece]) -> None:
        """Write down what has come from the notebook."""
        for piece in pieces:
            if piece.name == "asked":
                self._idle_given += _count_idle(piece.data)
            elif piece.name.startswith("jobs/"):
                folder = "/".join(piece.name.split("/")[:2]) + "/"
                with contextlib.suppress(OSError):  # the rank will say so
                    make_folders(self._directory / folder / "ranks")
                if folder not in self._jobs:
                    self._jobs.append(folder)
            if _WHOLE.fullmatch(piece.name):
                self._sent[piece.name] = len(piece.data)
        self._written.put(pieces)
        while len(self._jobs) > 2:
            # Of those before the last what is still to come is nobody's: the run has been told its end.
            over = self._directory / self._jobs.pop(0) / "ranks"
            for blob in over.glob("*.blob"):
                blob.unlink(missing_ok=True)

    @property
    def is_failing(self) -> bool:
        """Whether something could not be read at the last look, and may be at the next."""
        return self._failing_since_s is not None

    def news(self) -> list[Piece]:
        """Return what the rank has written since, and count it as sent.

        What cannot be read is looked for again. Raises OSError once that has lasted for `UNREADABLE_S`.
        """
        self._written.put()
        found: list[Piece] = []
        try:
            for folder in ["", *self._jobs]:
                found += self._wholes(folder)
                for records in self._names(f"{folder}ranks/"):
                    if records.endswith(".records") and _GROWS.fullmatch(records):
                        found += self._of_process(records)
            if (idle := _count_idle((self._directory / "asked").read_bytes())) > self._idle_given:
                self._idle_given = idle
                found.append(Piece("asked", IDLE, False))
        except OSError:
            now = time.monotonic()
            self._failing_since_s = self._failing_since_s or now
            if not found and now - self._failing_since_s > UNREADABLE_S:
                raise
        else:
            self._failing_since_s = None
        return found

    def _of_process(self, records: str) -> Iterator[Piece]:
        """Return what one process of the rank has written: records last, and only once all printed before is there."""
        base = records.removesuffix("records")
        has_begun = records in self._sent
        reported = self._read(records)  # before the output and the files, so that what was there first comes first
        printed = self._read(f"{base}out")
        for name, data in ((f"{base}stacks", self._read(f"{base}stacks")), (f"{base}out", printed)):
            if data:
                yield self._send(name, data)
        if (blob := self._next_blob(base)) is not None:
            yield self._send(blob, self._read(blob))
        elif len(printed) < BLOCK_BYTES and (reported or not has_begun):  # its file says that the rank has begun
            yield self._send(records, reported)

    def _next_blob(self, base: str) -> str | None:
        """Return the first large value that the notebook does not have yet as a whole."""
        for name in self._names(base.rpartition("/")[0] + "/"):
            is_blob = name.startswith(base) and name.endswith(".blob")
            if is_blob and self._sent.get(name, 0) < (self._directory / name).stat().st_size:
                return name
        return None

    def _send(self, name: str, data: bytes) -> Piece:
        self._sent[name] = self._sent.get(name, 0) + len(data)
        return Piece(name, data, False)

    def _read(self, name: str) -> bytes:
        try:
            with open(self._directory / name, "rb", buffering=0) as file:
                sent = self._sent.get(name, 0)
                if was_cut(file.fileno(), sent):
                    self._sent[name] = sent = 0
                file.seek(sent)
                return file.read(BLOCK_BYTES)
        except FileNotFoundError:
            return b""

    def _wholes(self, folder: str) -> Iterator[Piece]:
        for name in self._names(folder):
            if _WHOLE.fullmatch(name) and name not in self._sent:
                data = (self._directory / name).read_bytes()
                self._sent[name] = len(data)
                yield Piece(name, data)

    def _names(self, folder: str) -> list[str]:
        """Return the names of all in a folder, in order, below the directory."""
        try:
            return sorted(f"{folder}{name}" for name in os.listdir(self._directory / folder))
        except FileNotFoundError:
            return []


def _count_idle(words: bytes) -> int:
    return words.split().count(IDLE.strip())
