"""Engines whose ranks speak through a directory: what SLURM's, Ray's and a session's on a cluster share."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import threading
import time
from pathlib import Path
from typing import Any

from labkit.engines.base import Engine, Target
from labkit.launchers import job_events
from labkit.launchers.launcher_job import LauncherJob, RanksSeen
from labkit.launchers.run_directory.directory import RunDirectory
from labkit.launchers.run_directory.files import is_missing
from labkit.launchers.run_directory.reader import DirectoryReader
from labkit.protocol import events
from labkit.protocol.job import Job

LOOK_EVERY_S = 0.05
"""Time between two looks into the directory, unless a look takes long."""

LOOKING_SHARE = 5
"""A look that takes a second is followed by as many seconds of rest."""

SILENT_S = 60.0
"""How long, once all ranks have ended, a launcher that does not answer is waited for."""

FULL_BYTES = 1 << 20
"""A disk with less room than this is full."""


class DirectoryEngine(Engine):
    """Brings the events of ranks that something else starts and minds."""

    stop_grace_s = 10.0
    """How long ranks that were asked to stop may take: the word travels through a file."""
    failure_grace_s = float("inf")
    """The launcher ends the others when a rank fails, and may start them all again."""
    stacks_s = 10.0
    """Question and answer travel through files, which over a network are seen after seconds."""

    def __init__(self, world_size: int, directory: RunDirectory, asked_in: RunDirectory) -> None:
        """Take the directory into which ranks write, and that in which they are asked."""
        self.world_size, self.directory, self.folder = world_size, directory, directory.path
        self._asked_in = asked_in
        self.pids: list[int] = []
        self._reader = DirectoryReader(directory)
        self._exits: dict[int, events.Exit] = {}
        self._knows_who_stopped = False
        """Whether it is known who had the ranks stopped: this engine, or another, which the run has been told."""
        self._news: list[events.Event] = []
        self._lock = threading.Lock()

    def emit(self, event: events.Event) -> None:
        """Have an event of all ranks come with the next `poll`."""
        with self._lock:
            self._news.append(event)

    def poll(self, timeout_s: float) -> list[events.Event]:
        """Return what is new in the directory and of the launcher, waiting at most `timeout_s` for it.

        How ranks ended is told when no more can come of them: the launcher may start them all again.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            began = time.monotonic()
            if (found := self._new()) or not timeout_s:
                return found
            looked_s = time.monotonic() - began
            if not self._reader.has_more:
                time.sleep(max(LOOK_EVERY_S, LOOKING_SHARE * looked_s))  # a slow file system is others' too
            if time.monotonic() > deadline:
                return []

    def _new(self) -> list[events.Event]:
        with self._lock:
            found, self._news = self._news, []
        if not self._knows_who_stopped and (by := self.directory.stopped_by()):
            self._knows_who_stopped = True
            found.append(job_events.StoppedElsewhere(-1, by))
        return found

    def ask_to_stop(self) -> None:
        """Ask every rank to stop; see `worker.Stopped`."""
        self._knows_who_stopped = True
        self._ask("stop")

    def ask_for_stacks(self) -> list[int]:
        """Ask every rank that has begun and not ended where it stands; return those."""
        return sorted(self._reader.begun - set(self._exits)) if self._ask("stacks") else []

    def _ask(self, word: str) -> bool:
        """Ask something of the ranks. Return whether it could be written down; else the notebook is told why."""
        try:
            self._asked_in.ask(word)
        except OSError as error:  # a full disk, say; whoever asked has a deadline, after which the ranks are ended
            self.emit(job_events.Notice(-1, f"the ranks could not be asked ({word}): {error}"))
            return False
        return True


class Launcher(Target):
    """What `on=` takes to have a launcher start the ranks."""

    folder: Path
    """Where the runs' folders are made."""

    def job(self, name: str, stall_s: float | None) -> LauncherJob:
        """Return a job for one run or session; it is not started yet."""
        return self.job_in(new_directory(self.folder, name), {"name": name, "stall_s": stall_s})

    def job_in(self, directory: RunDirectory, about: dict[str, Any]) -> LauncherJob:
        """Return a job whose files are in this directory; `about` is what is to be noted of it."""
        raise NotImplementedError

    def engine(self, name: str, stall_s: float | None) -> LaunchedEngine:
        """Return the engine for one run."""
        return LaunchedEngine(self.job(name, stall_s))


class LaunchedEngine(DirectoryEngine):
    """Carries one run as one job of a launcher."""

    def __init__(self, launched: LauncherJob) -> None:
        super().__init__(launched.world_size, launched.directory, launched.directory)
        self.launched = launched
        self.outlives_notebook = launched.outlives_notebook
        self._is_told = False
        """Whether it has been told how every rank ended: nothing comes after that."""
        self._returned: set[int] = set()
        """Ranks whose function has returned."""
        self._gone: job_events.JobEnded | None = None
        """That the directory was deleted, which ends the ranks."""
        self._ended_s: float | None = None
        """When all ranks had ended."""

    def start(self, job: Job) -> None:
        """Make the run's directory, and give the ranks to the launcher."""
        self.launched.start(lambda about: self.directory.create(job, about))

    def _new(self) -> list[events.Event]:
        found = super()._new() + self.launched.take_news()
        is_settled = self.launched.is_settled  # before the look: what ranks wrote until then is seen by it
        had_begun, had_ended = bool(self._reader.begun), len(self._exits) == self.world_size
        read = self._reader.read()
        for event in read:
            if isinstance(event, events.Exit):
                self._exits[event.rank] = event
                continue
            if isinstance(event, job_events.Restarted):
                self._exits, had_begun, had_ended = {}, False, False
                self._returned.clear()
            elif isinstance(event, events.Result):
                self._returned.add(event.rank)
            found.append(event)
        if self._reader.begun and not had_begun:
            self.launched.ranks_have_begun()
        if (all_ended := len(self._exits) == self.world_size) and not had_ended:
            self._ended_s = time.monotonic()
            self.launched.look()
        # Ranks that stopped because the launcher asked them to may begin again, however well they ended.
        all_well = all_ended and not any(exit.code or exit.ended for exit in self._exits.values())
        is_over = is_settled or (all_ended and (self.launched.is_over or self._nobody_answers()))
        no_more = is_over and not (read or self._reader.is_behind)
        if self._reader.is_gone:
            self._gone = folder_gone(self.directory.path)
            self.kill()  # again, should the launcher not have obeyed
        if (all_well or no_more) and not self._is_told:
            self._is_told = True
            found += self._last_events()
        return found

    def _nobody_answers(self) -> bool:
        assert self._ended_s is not None
        return min(self.launched.silent_s, time.monotonic() - self._ended_s) > SILENT_S

    def _last_events(self) -> list[events.Event]:
        """Return how every rank ended."""
        missing = sorted(set(range(self.world_size)) - set(self._exits))
        well = not missing and not any(exit.code or exit.ended for exit in self._exits.values())
        seen = RanksSeen(dict(self._exits), missing, self._reader.begun, self._returned)
        if missing and is_missing(self.directory.path):
            self._gone = self._gone or folder_gone(self.directory.path)
        ending = None if well else self._gone or self.launched.ending(seen)
        for rank in missing:
            # Whom the launcher alone ended could still tell so, unless it was before he had begun.
            was_ended = ending is not None or self.launched.was_ended or (seen.explains and rank not in seen.begun)
            self._exits[rank] = events.Exit(rank, -9, ended=was_ended, at_s=self._last_sign_s(rank), unseen=True)
        exits = [self._exits[rank] for rank in sorted(self._exits)]
        said = [events.Warned(-1, "disk", text)] if missing and (text := disk_full(self.directory.path)) else []
        return [*self.launched.take_news(), *said, *([ending] if ending else []), *exits]

    def _last_sign_s(self, rank: int) -> float:
        """Return when the rank wrote last, for a run that ended long ago."""
        try:
            written_s = self.directory.file(rank, self._reader.attempt, "records").stat().st_mtime
        except OSError:
            return 0.0
        return written_s + float(self.launched.about.get("clock_ahead_s", 0.0))  # by this machine's clock

    def kill(self) -> None:
        """Have the ranks ended."""
        if self.launched.is_started and not self.launched.was_ended and not self.launched.is_over:
            if not self._reader.begun:  # so that they are not even asked to stop
                self._knows_who_stopped = True
                self.directory.note_stopped_by()
            self.launched.end()

    def killed(self, rank: int) -> bool:
        """Whether the rank was ended from outside."""
        return self.launched.was_ended or (rank in self._exits and self._exits[rank].ended)

    def close(self) -> None:
        """Let go of what this process holds."""
        self.launched.close()


def folder_gone(path: Path, whose: str = "run") -> job_events.JobEnded:
    """Return that a run's directory was deleted, or a session's, which ends its ranks."""
    return job_events.JobEnded(
        -1,
        f"the {whose}'s folder {path} has gone",
        "It was deleted or moved while the ranks ran. They speak with the notebook through it, so they were ended. "
        f"What had come from them is kept. Launch again, and leave the folder until the {whose} is over.",
        page="run_folder",
    )


def disk_full(path: Path) -> str:
    """Return that there is no room where a run's directory lies, if so."""
    try:
        free_bytes = shutil.disk_usage(path).free
    except OSError:
        return ""
    if free_bytes > FULL_BYTES:
        return ""
    return f"the disk under {path} is full: what the ranks wrote last may be missing. Make room, or give folder=…"


def check_whole(name: str, count: Any, least: int = 1) -> None:
    """Raise ValueError if an argument is no whole number, or too small."""
    if isinstance(count, bool) or not isinstance(count, int) or count < least:
        raise ValueError(f"{name} is a whole number of at least {least}, got {count!r}")


def runs_folder(folder: str | os.PathLike[str]) -> Path:
    """Return where runs' folders are made, as it is now: the notebook may go elsewhere, by os.chdir."""
    return Path(folder).expanduser().absolute()


def new_directory(where: str | os.PathLike[str], name: str) -> RunDirectory:
    """Name a directory for a new run; it is not made yet."""
    title = re.sub(r"[^\w.-]+", "-", name, flags=re.ASCII)[:40]
    return RunDirectory(Path(where) / f"{time.strftime('%Y%m%d-%H%M%S')}-{title}-{secrets.token_hex(2)}")
