"""Keeps two run directories equal where nobody shares a folder: the notebook's, and one for each rank on its node.

Either end asks `news` and gives the other what it says, as `Piece`s. Files of ranks and `asked` only grow; all others
appear whole, once. Nothing here knows Ray; what is in the directories is `cluster.run_directory`'s to say.

Guarantees: whoever reads the notebook's directory sees no record before what its rank had printed before, and no word
before the job that it speaks of.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

BLOCK_BYTES = 1 << 22
"""Of one file at once at most, so that memory stays bounded however much a rank writes."""

END_BYTES = 4096
"""Of what a rank wrote before: as much as is needed to see whether it had ended."""

IDLE = b"idle\n"
"""The one word that a rank's supervisor writes into `asked`: nothing has run on a session for too long."""

_WHOLE = re.compile(r"(jobs/\d+/)?(rendezvous\.[\w.-]*\.json|failed\.\d+)")
"""What ranks write for each other."""

_GROWS = re.compile(r"(jobs/\d+/)?ranks/\d+\.\d+\.(records|out|stacks)")


class Piece(NamedTuple):
    """Some of a file."""

    name: str
    """Below the directory."""
    data: bytes
    is_whole: bool = True
    """Whether this is all of it; else it is to be appended."""


def put(directory: Path, piece: Piece) -> None:
    """Write a piece down. What is whole is seen as a whole or not at all."""
    path = directory / piece.name
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if piece.is_whole:
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        aside.write_bytes(piece.data)
        aside.replace(path)
    else:
        with open(path, "ab") as file:
            file.write(piece.data)


class NotebookSide:
    """The notebook's directory, to which every rank's is a part."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._asked_bytes = 0

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
        words = self._words()[self._asked_bytes :]
        words = words[: words.rfind(b"\n") + 1]
        if not words:
            return []
        self._asked_bytes += len(words)
        given = [word.split(b":")[1].decode() for word in words.split() if word.startswith(b"job:")]
        return [*(piece for number in given for piece in self._job(f"jobs/{number}/")), Piece("asked", words, False)]

    def take(self, pieces: list[Piece]) -> list[Piece]:
        """Write down what has come from a rank; return what the other ranks need of it."""
        needed = []
        for piece in pieces:
            if piece.name == "asked" and piece.data == IDLE:
                put(self._directory, piece)  # the others receive it as what the notebook asks
            elif _GROWS.fullmatch(piece.name) and not piece.is_whole:
                put(self._directory, piece)
            elif _WHOLE.fullmatch(piece.name) and piece.is_whole:
                put(self._directory, piece)
                needed.append(piece)
            else:
                raise ValueError(f"a rank has sent {piece.name!r}, which no rank writes")
        return needed

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
        self._sent: dict[str, int] = {}
        """Bytes of each file that the notebook has."""
        self._idle_given = 0
        self._jobs: list[str] = []
        for piece in pieces:
            if _GROWS.fullmatch(piece.name):
                self._sent[piece.name] = len(piece.data)
        (directory / "ranks").mkdir(mode=0o700, parents=True, exist_ok=True)
        self.take(pieces)

    def take(self, pieces: list[Piece]) -> None:
        """Write down what has come from the notebook."""
        for piece in pieces:
            if piece.name == "asked":
                self._idle_given += _count_idle(piece.data)
            elif piece.name.startswith("jobs/"):
                folder = "/".join(piece.name.split("/")[:2]) + "/"
                (self._directory / folder / "ranks").mkdir(mode=0o700, parents=True, exist_ok=True)
                if folder not in self._jobs:
                    # Of those before the last what is still to come is nobody's: the run has been told its end.
                    self._jobs = [*self._jobs, folder][-2:]
            if _WHOLE.fullmatch(piece.name):
                self._sent[piece.name] = len(piece.data)
            put(self._directory, piece)

    def news(self) -> list[Piece]:
        """Return what the rank has written since, and count it as sent."""
        found: list[Piece] = []
        for folder in ["", *self._jobs]:
            found += self._wholes(folder)
            names = sorted(f"{folder}ranks/{name}" for name in os.listdir(self._directory / folder / "ranks"))
            for records in (name for name in names if name.endswith(".records") and _GROWS.fullmatch(name)):
                found += self._of_process(records)
        asked = (self._directory / "asked").read_bytes()
        if (idle := _count_idle(asked)) > self._idle_given:
            self._idle_given = idle
            found.append(Piece("asked", IDLE, False))
        return found

    def _of_process(self, records: str) -> Iterator[Piece]:
        """Return what one process of the rank has written: records last, and only once all printed before is there."""
        base = records.removesuffix("records")
        has_begun = records in self._sent
        reported = self._read(records)  # before the output, so that what was printed first is there
        printed = self._read(f"{base}out")
        for name, data in ((f"{base}stacks", self._read(f"{base}stacks")), (f"{base}out", printed)):
            if data:
                yield self._send(name, data)
        if len(printed) < BLOCK_BYTES and (reported or not has_begun):  # its file says that the rank has begun
            yield self._send(records, reported)

    def _send(self, name: str, data: bytes) -> Piece:
        self._sent[name] = self._sent.get(name, 0) + len(data)
        return Piece(name, data, False)

    def _read(self, name: str) -> bytes:
        try:
            with open(self._directory / name, "rb") as file:
                file.seek(self._sent.get(name, 0))
                return file.read(BLOCK_BYTES)
        except FileNotFoundError:
            return b""

    def _wholes(self, folder: str) -> Iterator[Piece]:
        with contextlib.suppress(FileNotFoundError):
            for file in sorted(os.listdir(self._directory / folder)):
                name = f"{folder}{file}"
                if _WHOLE.fullmatch(name) and name not in self._sent:
                    data = (self._directory / name).read_bytes()
                    self._sent[name] = len(data)
                    yield Piece(name, data)


def _count_idle(words: bytes) -> int:
    return words.split().count(IDLE.strip())
