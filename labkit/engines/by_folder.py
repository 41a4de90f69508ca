"""What SLURM's and torchrun's engines share: ranks that others start, and a run's folder to speak through."""

from __future__ import annotations

import os
import re
import secrets
import sys
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

from labkit import records
from labkit.engines.folder import FolderReader, RunFolder
from labkit.worker import Job

LOOK_EVERY_S = 0.05
"""Time between two looks into the folder."""

SETTLE_S = 1.0
"""How long, after its ranks have ended, what they wrote may take to be seen."""

GUARD = Path(__file__).with_name("guard.py")


class FolderEngine:
    """Brings the records of ranks that something else starts and minds. Made by `Slurm` and `Torchrun`."""

    kind: ClassVar[str]
    """The launcher's name, as run.json has it."""
    minds_failures = True
    """The launcher ends the others when a rank fails, and may start them all again."""
    outlives_notebook = False
    stop_grace_s = 10.0
    """How long ranks that were asked to stop may take: the word travels through a file."""

    def __init__(self, world_size: int, folder: RunFolder, about: dict[str, Any]) -> None:
        self.world_size, self.folder = world_size, folder
        self.about = {"launcher": self.kind, "world_size": world_size, **about}
        """What is kept in the folder for `labkit.attach`."""
        self.pids: list[int] = []
        self._reader = FolderReader(folder)
        self._killed = False
        self._ended: set[int] = set()
        self._news: list[records.Record] = []
        self._lock = threading.Lock()
        self._over_s: float | None = None
        self._ending: records.JobEnded | None = None

    # For the launchers

    def submit(self, job: Job) -> dict[str, Any]:
        """Give the ranks to the launcher; what it returns is noted for `attach`. Raises what the launcher says."""
        raise NotImplementedError

    def end(self) -> None:
        """Have the launcher end the ranks."""
        raise NotImplementedError

    def say(self, record: records.Record) -> None:
        """Say something of all ranks."""
        with self._lock:
            self._news.append(record)

    def settle(self, ending: records.JobEnded | None = None) -> None:
        """Say that the launcher has done with the ranks: none lives."""
        with self._lock:
            self._ending, self._over_s = ending, self._over_s or time.monotonic()

    # For the run

    def start(self, job: Job) -> None:
        """Make the run's folder and submit the job."""
        self.about |= {"cwd": os.getcwd(), "path": sys.path}
        self.folder.create(job, self.about)
        self.about |= self.submit(job)
        self.folder.note(self.about)

    def poll(self, timeout_s: float) -> list[records.Record]:
        """Give what is new in the folder and of the job, waiting at most `timeout_s` for it."""
        deadline = time.monotonic() + timeout_s
        while not (found := self._new()) and time.monotonic() < deadline:
            time.sleep(LOOK_EVERY_S)
        return found

    def _new(self) -> list[records.Record]:
        with self._lock:
            found, self._news = self._news, []
            over_s, ending = self._over_s, self._ending
        read = self._reader.read()
        for record in read:
            if isinstance(record, records.Restarted):
                self._ended = set()
            elif isinstance(record, records.Exit) and record.ended:
                self._ended.add(record.rank)
        found += read
        left = set(range(self.world_size)) - self._reader.ended
        if over_s is not None and not read and (not left or time.monotonic() > over_s + SETTLE_S):
            if ending is not None:
                found.append(ending)
            self._ended |= left
            self._reader.ended |= left
            found += [records.Exit(rank, -9, ended=True) for rank in sorted(left)]
        return found

    def ask_to_stop(self) -> None:
        """Ask every rank to stop; see `worker.Stopped`."""
        self.folder.ask("stop")

    def ask_for_stacks(self) -> list[int]:
        """Ask every rank that has begun and not ended where it stands."""
        self.folder.ask("stacks")
        return sorted(self._reader.begun - self._reader.ended)

    def tell(self, rank: int, word: Any) -> None:
        """Not for ranks elsewhere: sessions are of this machine."""
        raise NotImplementedError

    def rest(self, resting: bool) -> None:
        """Nothing is kept ready elsewhere."""

    def usage(self, rank: int) -> tuple[int, float] | None:
        """Not known of a rank that may be elsewhere, before it ends."""
        return None

    def kill(self) -> None:
        """Have the ranks ended, once."""
        if not self._killed and self._over_s is None:
            self._killed = True
            self.end()

    def killed(self, rank: int) -> bool:
        """Whether the rank was ended from outside."""
        return self._killed or rank in self._ended

    def close(self) -> None:
        """Let go of what this process holds."""


def new_folder(where: str | os.PathLike[str], name: str) -> RunFolder:
    """Name a folder for a new run; it is not made yet."""
    title = re.sub(r"[^\w.-]+", "-", name)[:40]
    return RunFolder(Path(where) / f"{time.strftime('%Y%m%d-%H%M%S')}-{title}-{secrets.token_hex(2)}")
