"""A run's directory, through which ranks on other machines and the notebook speak: files that only grow.

    job.pkl                  what every rank is to do (`protocol.job.Job`)
    run.json                 what `labkit.attach` needs to follow the run again
    asked                    what the notebook asks of the ranks, a word a line: stop, stacks, end
    ranks/<rank>.<attempt>.records   what a rank reports: a record a line, as JSON
    ranks/<rank>.<attempt>.out       what it prints
    ranks/<rank>.<attempt>.stacks    where it stands, when asked
    failed.<attempt>                 there once a rank has failed by itself

No port is needed between notebook and ranks, and nothing is lost when the notebook is closed. Only the user can read
or write in there. Over a network's file system what is written is seen after seconds.
"""

from __future__ import annotations

import base64
import codecs
import contextlib
import json
import os
import re
import threading
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle

from labkit.cluster import job_events
from labkit.protocol import events
from labkit.protocol.job import Job

BLOCK_BYTES = 1 << 22
"""Read at once from one file at most, so that a rank that writes much does not hide the others."""

_KINDS: dict[str, Any] = {kind.__name__: kind for kind in events.Event.__args__}


class RunDirectory:
    """The notebook's or a rank's view of the directory; the file names are known here and in `supervisor` only."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        self.ranks = self.path / "ranks"
        self.job_file = self.path / "job.pkl"
        self.asked = self.path / "asked"

    def create(self, job: Job, about: dict[str, Any]) -> None:
        """Make the directory with a job in it. Raises OSError with what to do."""
        self._make(about, lambda: self.write("job.pkl", cloudpickle.dumps(job)))

    def _make(self, about: dict[str, Any], fill: Callable[[], None]) -> None:
        try:
            self.path.mkdir(parents=True)
            self.path.chmod(0o700)
            self.ranks.mkdir()
            self.asked.touch()
            fill()
        except OSError as error:
            raise OSError(
                f"the run's folder {self.path} cannot be made: {error.strerror or error}. It must be where this "
                "notebook and every node can write: give another with folder=…"
            ) from error
        self.note(about)

    def write(self, name: str, content: bytes) -> None:
        """Write a file so that whoever sees it sees all of it."""
        aside = self.path / f".{name}.{os.getpid()}"
        aside.write_bytes(content)
        aside.replace(self.path / name)

    def note(self, about: dict[str, Any]) -> None:
        """Keep what `attach` will need."""
        self.write("run.json", json.dumps(about, indent=1).encode())

    def about(self) -> dict[str, Any]:
        """Return what was noted. Raises ValueError if this is no run's folder, or somebody else's."""
        try:
            found: dict[str, Any] = json.loads((self.path / "run.json").read_text())
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{self.path} is not the folder of a run: run.json cannot be read ({error}). Give the folder that "
                "`run.folder` named, or the number of a SLURM job that SLURM still knows"
            ) from error
        self._check_owner(os.stat(self.path))
        return found

    def job(self) -> Job:
        """Return what the ranks are to do. Raises ValueError if anybody else could have written it."""
        self._check_owner(os.stat(self.path))
        with open(self.job_file, "rb") as file:
            # Of the file that is open, not of its name: that may stand for another file by the time it is read.
            self._check_owner(os.fstat(file.fileno()))
            found: Job = cloudpickle.load(file)
        return found

    def _check_owner(self, status: os.stat_result) -> None:
        if hasattr(os, "getuid") and status.st_uid != os.getuid():
            raise ValueError(f"{self.path} belongs to another user; what lies there would be run as code: not read")

    def ask(self, word: str) -> None:
        """Append a word for every rank. Raises OSError, on a full disk, say."""
        with open(self.asked, "a") as file:
            file.write(f"{word}\n")

    def was_asked_to(self, word: str) -> bool:
        """Whether `ask` has said this word."""
        return word in self.asked.read_text().split()

    def file(self, rank: int, attempt: int, kind: str) -> Path:
        """Return the file with a rank's "records", "out" or "stacks"."""
        return self.ranks / f"{rank}.{attempt}.{kind}"


class FileSender:
    """Writes a rank's records to its file, each whole in one call, so that a reader sees whole lines but the last."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._lock = threading.Lock()
        self._is_closed = False

    def send(self, event: events.Event, is_last: bool = False) -> None:
        """Append one record; after the last what threads still send is dropped."""
        left = memoryview((json.dumps([type(event).__name__, *_plain(event)]) + "\n").encode())
        with self._lock:
            if self._is_closed:
                return
            while left:
                left = left[os.write(self._descriptor, left) :]
            if is_last:
                self._is_closed = True
                os.close(self._descriptor)


def _plain(event: Any) -> Iterator[Any]:
    """Return a record's fields as JSON knows them."""
    for value in event:
        if isinstance(value, bytes):
            yield {"bytes": base64.b64encode(value).decode()}
        elif isinstance(value, array):
            yield {value.typecode: value.tolist()}
        else:
            yield value


def _record(line: bytes) -> events.Event:
    kind, *fields = json.loads(line)
    found: events.Event = _KINDS[kind](*map(_rich, fields))
    return found


def _rich(value: Any) -> Any:
    if isinstance(value, dict):
        ((kind, content),) = value.items()
        return base64.b64decode(content) if kind == "bytes" else array(kind, content)
    return tuple(map(_rich, value)) if isinstance(value, list) else value


class _Growing:
    """A file that grows, read from where the last look ended. Opened for each look: over a network it is seen anew."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._partial = b""

    def read(self, all_of_it: bool = False) -> bytes:
        try:
            with open(self.path, "rb") as file:
                file.seek(self._offset)
                data = file.read(-1 if all_of_it else BLOCK_BYTES)
        except OSError:  # not there yet, or over a network not just now
            return b""
        self._offset += len(data)
        return data

    def lines(self, all_of_it: bool = False) -> list[bytes]:
        *whole, self._partial = (self._partial + self.read(all_of_it)).split(b"\n")
        return whole


class _RankFiles:
    """What one rank writes in one attempt."""

    def __init__(self, directory: RunDirectory, rank: int, attempt: int) -> None:
        self._rank = rank
        self._records, self._out, self._stacks = (
            _Growing(directory.file(rank, attempt, kind)) for kind in ("records", "out", "stacks")
        )
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.was_interrupted = False
        """Whether its supervisor has asked the rank to stop, because the launcher takes the machine away."""

    def read(self, all_of_it: bool = False) -> list[events.Event]:
        """Return what is new: what was printed before what was reported after it."""
        reported: list[events.Event] = []
        for line in self._records.lines(all_of_it):  # before the output, so that what was printed first is there
            if line.startswith(b'["Interrupted"'):
                self.was_interrupted = True
                continue
            with contextlib.suppress(ValueError, KeyError, TypeError):  # cut short by the end of its writer
                reported.append(_record(line))
        ended = any(isinstance(event, events.Exit) for event in reported)  # and prints no more
        found: list[events.Event] = []
        if text := self._decoder.decode(self._out.read(all_of_it or ended), final=ended):
            found.append(events.Output(self._rank, text))
        if stacks := self._stacks.read():
            found.append(events.Stack(self._rank, stacks.decode("utf-8", "replace")))
        return found + reported


class DirectoryReader:
    """Reads what all ranks write, from the first attempt on."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._files: dict[int, _RankFiles] = {}
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

    def read(self) -> list[events.Event]:
        """Return what is new. Of attempts before the newest, only what was logged and printed."""
        found: list[events.Event] = []
        there = self._there()
        newest = max((attempt for _, attempt in there), default=0)
        while self.attempt < newest:
            self._open(there)
            for files in self._files.values():
                found += [r for r in files.read(all_of_it=True) if isinstance(r, (events.Log, events.Output))]
            self._files = {}
            self.attempt += 1
            found.append(job_events.Restarted(-1, self.attempt))
        self._open(there)
        for files in self._files.values():
            found += files.read()
        return found

    def _there(self) -> list[tuple[int, int]]:
        """Return (rank, attempt) of all that have begun."""
        names: list[str] = []
        with contextlib.suppress(OSError):
            names = os.listdir(self._directory.ranks)
        found = (re.fullmatch(r"(\d+)\.(\d+)\.records", name) for name in names)
        return sorted((int(name[1]), int(name[2])) for name in found if name)

    def _open(self, there: list[tuple[int, int]]) -> None:
        for rank, attempt in there:
            if attempt == self.attempt and rank not in self._files:
                self._files[rank] = _RankFiles(self._directory, rank, attempt)
