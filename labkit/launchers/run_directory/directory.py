"""A run's directory, through which ranks on other machines and the notebook speak: files that only grow.

    job.pkl                  what every rank is to do (`protocol.job.Job`)
    run.json                 what `labkit.attach` needs to follow the run again
    asked                    what the notebook asks of the ranks, a word a line: stop, stacks, end
    stopped_by.json          which process was the first to have them stop, and when
    ranks/<rank>.<attempt>.records   what a rank reports: a record a line, as JSON (`sender`, `reader`)
    ranks/<rank>.<attempt>.<n>.blob  a large value of which a record speaks: it is there before, and whole
    ranks/<rank>.<attempt>.out       what it prints
    ranks/<rank>.<attempt>.stacks    where it stands, when asked
    failed.<attempt>                 there once a rank has failed by itself

No port is needed between notebook and ranks, and nothing is lost when the notebook is closed. Only the user can read
or write in there. Over a network's file system what is written is seen after seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle

from labkit.launchers.run_directory.files import clock_ahead_s
from labkit.launchers.run_directory.private import make_run_folder, private
from labkit.protocol.job import Job
from labkit.rank.private_folder import check_mine
from labkit.system import host


class RunDirectory:
    """The notebook's or a rank's view of the directory; the file names are known here and in `supervisor` only."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        self.ranks = self.path / "ranks"
        self.job_file = self.path / "job.pkl"
        self.asked = self.path / "asked"

    def create(self, job: Job, about: dict[str, Any]) -> None:
        """Make the directory with a job in it. Raises OSError or ValueError with what to do."""
        self._make(about, lambda: self._write("job.pkl", lambda file: cloudpickle.dump(job, file)))

    def _make(self, about: dict[str, Any], fill: Callable[[], None]) -> None:
        try:
            make_run_folder(self.path)
            self.ranks.mkdir(mode=0o700)
            open(self.asked, "x", encoding="utf-8", opener=private).close()
            fill()
            about["clock_ahead_s"] = clock_ahead_s(self.asked)
        except OSError as error:
            raise OSError(
                f"the run's folder {self.path} cannot be made: {error.strerror or error}. It must be where this "
                "notebook and every node can write: give another with folder=…"
            ) from error
        self.note(about)
        self._check()  # now, and not in the ranks, where the file system does not tell whose files are

    def write(self, name: str, content: bytes) -> None:
        """Write a file so that whoever sees it sees all of it."""
        self._write(name, lambda file: file.write(content))

    def _write(self, name: str, fill: Callable[[Any], Any]) -> None:
        aside = self.path / f".{name}.{os.getpid()}"
        with open(aside, "wb", opener=private) as file:
            fill(file)
        aside.replace(self.path / name)

    def note(self, about: dict[str, Any]) -> None:
        """Keep what `attach` will need."""
        self.write("run.json", json.dumps(about, indent=1).encode())

    def about(self) -> dict[str, Any]:
        """Return the run's notes. Raises ValueError if this is no run's folder, or other users could write there."""
        try:
            with open(self.path / "run.json", encoding="utf-8") as file:
                status, text = os.fstat(file.fileno()), file.read()
            found: dict[str, Any] = json.loads(text)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{self.path} is not the folder of a run: run.json cannot be read ({error}). Give the folder that "
                "`run.folder` named, or the number of a SLURM job that SLURM still knows"
            ) from error
        self._check()
        check_mine(self.path / "run.json", status)  # which says where the ranks look for modules
        return found

    def job(self) -> Job:
        """Return what the ranks are to do. Raises ValueError if anybody else could have written it."""
        self._check()
        with open(self.job_file, "rb") as file:
            # Of the file that is open, not of its name: that may stand for another file by the time it is read.
            check_mine(self.job_file, os.fstat(file.fileno()))
            found: Job = cloudpickle.load(file)
        return found

    def _check(self) -> None:
        """Raise ValueError if anybody else could have written what is here: results are unpickled, too."""
        for folder in (self.path, self.ranks):
            with contextlib.suppress(FileNotFoundError):
                check_mine(folder, os.stat(folder))

    def ask(self, word: str) -> None:
        """Append a word for every rank. Raises OSError, on a full disk, say."""
        if word == "stop":
            self.note_stopped_by()
        with open(self.asked, "a", encoding="utf-8") as file:
            file.write(f"{word}\n")

    def note_stopped_by(self) -> None:
        """Note that this process has the ranks stopped, if none has before: for other notebooks that follow them."""
        who = {"process": os.getpid(), "machine": host.node(), "at_s": time.time()}
        with (
            contextlib.suppress(OSError),
            open(self.path / "stopped_by.json", "x", encoding="utf-8", opener=private) as file,
        ):
            json.dump(who, file)

    def stopped_by(self) -> str:
        """Return which process had the ranks stopped, and when, in words; "" if none has."""
        try:
            found = json.loads((self.path / "stopped_by.json").read_text(encoding="utf-8"))
            at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found["at_s"]))
            return f"by process {found['process']} on {found['machine']}, at {at}"
        except (OSError, ValueError, LookupError, TypeError):
            return ""

    def was_asked_to(self, word: str) -> bool:
        """Whether `ask` has said this word, as far as that can be read."""
        try:
            return word in self.asked.read_text(errors="replace", encoding="utf-8").split()
        except OSError:
            return False

    def file(self, rank: int, attempt: int, kind: str) -> Path:
        """Return the file with a rank's "records", "out" or "stacks"."""
        return self.ranks / f"{rank}.{attempt}.{kind}"

    def open(self, rank: int, attempt: int, kind: str) -> int:
        """Open that file to append to it; return its descriptor."""
        return os.open(self.file(rank, attempt, kind), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
