"""A run's folder, through which ranks on other machines and the notebook speak: files that only grow, read as they do.

    job.pkl                  what every rank is to do (`worker.Job`)
    run.json                 what `labkit.attach` needs to follow the run again
    asked                    what the notebook asks of the ranks: a word a line
    ranks/<rank>.<attempt>.records   what a rank reports: a record a line, as JSON
    ranks/<rank>.<attempt>.out       what it prints
    ranks/<rank>.<attempt>.stacks    where it stands, when asked

No port is needed between notebook and ranks, and nothing is lost when the notebook is closed. Only the user can read
or write in there. Over a network's file system what is written is seen after seconds.
"""

from __future__ import annotations

import base64
import codecs
import contextlib
import json
import os
import threading
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle

from labkit import records
from labkit.worker import Job

BLOCK_BYTES = 1 << 22
"""Read at once from one file at most, so that a rank that writes much does not hide the others."""

_KINDS: dict[str, Any] = {kind.__name__: kind for kind in records.Record.__args__}


class RunFolder:
    """The notebook's or a rank's view of the folder; the file names are known here and in `guard` only."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        self.ranks = self.path / "ranks"
        self.job_file = self.path / "job.pkl"
        self.asked = self.path / "asked"

    def create(self, job: Job, about: dict[str, Any]) -> None:
        """Make the folder with a job in it. Raises OSError with what to do."""
        try:
            self.path.mkdir(parents=True)
            self.path.chmod(0o700)
            self.ranks.mkdir()
            self.asked.touch()
            self.write("job.pkl", cloudpickle.dumps(job))
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
        """Give what was noted. Raises ValueError if this is no run's folder, or somebody else's."""
        try:
            found: dict[str, Any] = json.loads((self.path / "run.json").read_text())
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{self.path} is not the folder of a run: run.json cannot be read ({error}). Give the folder that "
                "`run.folder` named, or the number of a SLURM job that SLURM still knows"
            ) from error
        if hasattr(os, "getuid") and os.stat(self.path).st_uid != os.getuid():
            raise ValueError(f"{self.path} belongs to another user; what lies there would be run as code: not read")
        return found

    def job(self) -> Job:
        """Give what the ranks are to do."""
        found: Job = cloudpickle.loads(self.job_file.read_bytes())
        return found

    def ask(self, word: str) -> None:
        """Say a word to every rank."""
        with open(self.asked, "a") as file:
            file.write(f"{word}\n")

    def file(self, rank: int, attempt: int, kind: str) -> Path:
        """Give the file with a rank's "records", "out" or "stacks"."""
        return self.ranks / f"{rank}.{attempt}.{kind}"


class FileSender:
    """Writes a rank's records to its file, each whole in one call, so that a reader sees whole lines but the last."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
        self._lock = threading.Lock()

    def send(self, record: records.Record) -> None:
        """Append one record."""
        left = memoryview((json.dumps([type(record).__name__, *_plain(record)]) + "\n").encode())
        with self._lock:
            while left:
                left = left[os.write(self._descriptor, left) :]


def _plain(record: Any) -> Iterator[Any]:
    """Give a record's fields as JSON knows them."""
    for value in record:
        if isinstance(value, bytes):
            yield {"bytes": base64.b64encode(value).decode()}
        elif isinstance(value, array):
            yield {value.typecode: value.tolist()}
        else:
            yield value


def _record(line: bytes) -> records.Record:
    kind, *fields = json.loads(line)
    found: records.Record = _KINDS[kind](*map(_rich, fields))
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

    def read(self) -> bytes:
        try:
            with open(self.path, "rb") as file:
                file.seek(self._offset)
                data = file.read(BLOCK_BYTES)
        except FileNotFoundError:
            return b""
        self._offset += len(data)
        return data

    def lines(self) -> list[bytes]:
        *whole, self._partial = (self._partial + self.read()).split(b"\n")
        return whole


class _RankFiles:
    """What one rank writes in one attempt."""

    def __init__(self, folder: RunFolder, rank: int, attempt: int) -> None:
        self._rank, self.attempt = rank, attempt
        self._records, self._out, self._stacks = (
            _Growing(folder.file(rank, attempt, kind)) for kind in ("records", "out", "stacks")
        )
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def read(self) -> Iterator[records.Record]:
        """Give what is new: what was printed before what was reported after it."""
        lines = self._records.lines()  # looked at before the output, so that what was printed first is there
        if text := self._decoder.decode(self._out.read()):
            yield records.Output(self._rank, text)
        if stacks := self._stacks.read():
            yield records.Stack(self._rank, stacks.decode("utf-8", "replace"))
        for line in lines:
            with contextlib.suppress(ValueError, KeyError, TypeError):  # cut short by the end of its writer
                yield _record(line)


class FolderReader:
    """Reads what all ranks write, from the first attempt on."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._files: dict[int, _RankFiles] = {}
        self.attempt = 0
        """The newest that any rank has begun."""
        self.begun: set[int] = set()
        """Ranks of which anything has been seen."""
        self.ended: set[int] = set()
        """Ranks whose last record of this attempt has been read."""

    def read(self) -> list[records.Record]:
        """Give what is new. Of attempts before the newest, only what was logged and printed."""
        found: list[records.Record] = []
        for rank, attempt in self._newest():
            self.begun.add(rank)
            files = self._files.get(rank)
            if files is not None and files.attempt < attempt:
                found += self._of(files)  # no more is written there
            if files is None or files.attempt < attempt:
                files = self._files[rank] = _RankFiles(self._folder, rank, attempt)
            if attempt > self.attempt:
                self.attempt = attempt
                self.ended = set()
                found.append(records.Restarted(-1, attempt))
            found += self._of(files)
        return found

    def _newest(self) -> list[tuple[int, int]]:
        """Give (rank, its newest attempt)."""
        newest: dict[int, int] = {}
        with contextlib.suppress(OSError):
            for name in os.listdir(self._folder.ranks):
                rank, attempt, kind = name.split(".")
                if kind == "records":
                    newest[int(rank)] = max(newest.get(int(rank), 0), int(attempt))
        return sorted(newest.items())

    def _of(self, files: _RankFiles) -> Iterator[records.Record]:
        for record in files.read():
            if files.attempt == self.attempt:
                if isinstance(record, records.Exit):
                    self.ended.add(record.rank)
                yield record
            elif isinstance(record, (records.Log, records.Output)):
                yield record
