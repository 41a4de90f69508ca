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

from labkit.cluster.run_directory import FolderReader, RunFolder
from labkit.protocol import events
from labkit.protocol.job import Job

LOOK_EVERY_S = 0.05
"""Time between two looks into the folder, unless a look takes long."""

LOOKING_SHARE = 5
"""A look that takes a second is followed by as many seconds of rest."""

SETTLE_S = 1.0
"""How long, after its ranks have ended, what they wrote may take to be seen."""

SUPERVISOR = Path(__file__).with_name("supervisor.py")


class FolderEngine:
    """Brings the records of ranks that something else starts and minds. Made by `Slurm` and `Torchrun`."""

    kind: ClassVar[str]
    """The launcher's name, as run.json has it."""
    outlives_notebook = False
    stop_grace_s = 10.0
    """How long ranks that were asked to stop may take: the word travels through a file."""
    failure_grace_s = float("inf")
    stacks_s = 10.0
    """The launcher ends the others when a rank fails, and may start them all again."""
    quiet_s = 1.0

    def __init__(self, world_size: int, folder: RunFolder, about: dict[str, Any]) -> None:
        self.world_size, self.folder = world_size, folder
        self.about = {"launcher": self.kind, "world_size": world_size, **about}
        """What is kept in the folder for `labkit.attach`."""
        self.pids: list[int] = []
        self._reader = FolderReader(folder)
        self._killed = False
        self._exits: dict[int, events.Exit] = {}
        self._news: list[events.Event] = []
        self._lock = threading.Lock()
        self._give_up_s: float | None = None

    # For the launchers

    @property
    def explained(self) -> bool:
        """Whether a rank has failed by itself."""
        return any(exit.code and not exit.ended for exit in self._exits.values())

    def submit(self, job: Job | None) -> dict[str, Any]:
        """Give the ranks to the launcher, for a job or, without one, for a session.

        What it returns is noted for `attach`. Raises what the launcher says.
        """
        raise NotImplementedError

    def end(self) -> None:
        """Have the launcher end the ranks."""
        raise NotImplementedError

    def ranks_have_begun(self) -> None:
        """Take notice that ranks have begun, and that the launcher is not waited for any more."""

    def ranks_have_ended(self) -> None:
        """Take notice that all ranks have ended; the launcher may start them again."""

    def ending(self, missing: list[int]) -> events.JobEnded | None:
        """Say why the launcher has done with the ranks, if that is no rank's doing.

        `missing` are ranks that did not say how they ended.
        """
        raise NotImplementedError

    def say(self, event: events.Event) -> None:
        """Say something of all ranks."""
        with self._lock:
            self._news.append(event)

    def settle(self, patience_s: float = SETTLE_S) -> None:
        """Say that the launcher has done with the ranks: none lives, but what they wrote may be seen later."""
        with self._lock:
            self._give_up_s = self._give_up_s or time.monotonic() + patience_s

    # For a session

    @property
    def is_over(self) -> bool:
        """Whether the launcher has done with the ranks."""
        with self._lock:
            return self._give_up_s is not None

    def end_now(self) -> None:
        """Have the launcher end the ranks, and wait until it knows."""
        self.kill()

    def news(self) -> list[events.Event]:
        """Return what there is new to say of all ranks."""
        with self._lock:
            found, self._news = self._news, []
            return found

    def look(self) -> None:
        """Ask the launcher at once how the ranks are."""

    def interruption(self) -> events.JobEnded:
        """Say why the launcher has ended all ranks, though it will start them again."""
        raise NotImplementedError

    def time_left_s(self) -> float:
        """Return how long the launcher will keep the ranks, in s; infinite if it has not said."""
        return float("inf")

    # For the run

    def start(self, job: Job | None) -> None:
        """Make the folder of a run or, without a job, of a session, and submit it."""
        self.about |= {"cwd": os.getcwd(), "path": sys.path}
        self.folder.create(job, self.about)
        self.about |= self.submit(job)
        self.folder.note(self.about)

    def poll(self, timeout_s: float) -> list[events.Event]:
        """Give what is new in the folder and of the job, waiting at most `timeout_s` for it.

        How ranks ended is said when no more can come of them: the launcher may start them all again.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            began = time.monotonic()
            if (found := self._new()) or not timeout_s:
                return found
            looked_s = time.monotonic() - began
            time.sleep(max(LOOK_EVERY_S, LOOKING_SHARE * looked_s))  # a slow file system is others' too
            if time.monotonic() > deadline:
                return []

    def _new(self) -> list[events.Event]:
        with self._lock:
            found, self._news = self._news, []
            give_up_s = self._give_up_s
        had_begun, had_ended = bool(self._reader.begun), len(self._exits) == self.world_size
        read = self._reader.read()
        for event in read:
            if isinstance(event, events.Exit):
                self._exits[event.rank] = event
                continue
            if isinstance(event, events.Restarted):
                self._exits, had_begun, had_ended = {}, False, False
            found.append(event)
        if self._reader.begun and not had_begun:
            self.ranks_have_begun()
        if (all_ended := len(self._exits) == self.world_size) and not had_ended:
            self.ranks_have_ended()
        all_well = all_ended and not any(exit.code for exit in self._exits.values())
        no_more = give_up_s is not None and not read and (all_ended or time.monotonic() > give_up_s)
        return found + self._last_words() if all_well or no_more else found

    def _last_words(self) -> list[events.Event]:
        """Say how every rank ended."""
        missing = sorted(set(range(self.world_size)) - set(self._exits))
        well = not missing and not any(exit.code for exit in self._exits.values())
        ending = None if well else self.ending(missing)
        for rank in missing:
            explained = ending is not None or self._killed  # whom the launcher alone ended could still say so
            self._exits[rank] = events.Exit(rank, -9, ended=explained, at_s=self._last_sign_s(rank), unseen=True)
        exits = [self._exits[rank] for rank in sorted(self._exits)]
        return [*([ending] if ending else []), *exits]

    def _last_sign_s(self, rank: int) -> float:
        """When the rank wrote last, for a run that ended long ago."""
        try:
            return self.folder.file(rank, self._reader.attempt, "records").stat().st_mtime
        except OSError:
            return 0.0

    def ask_to_stop(self) -> None:
        """Ask every rank to stop; see `worker.Stopped`."""
        self.folder.ask("stop")

    def ask_for_stacks(self) -> list[int]:
        """Ask every rank that has begun and not ended where it stands."""
        self.folder.ask("stacks")
        return sorted(self._reader.begun - set(self._exits))

    def usage(self, rank: int) -> tuple[int, float] | None:
        """Not known of a rank that may be elsewhere, before it ends."""
        return None

    def kill(self) -> None:
        """Have the ranks ended, once."""
        if not self._killed and self._give_up_s is None:
            self._killed = True
            self.end()

    def killed(self, rank: int) -> bool:
        """Whether the rank was ended from outside."""
        return self._killed or (rank in self._exits and self._exits[rank].ended)

    def close(self) -> None:
        """Let go of what this process holds."""


def check_whole(name: str, count: Any, least: int = 1) -> None:
    """Raise ValueError if an argument is no whole number, or too small."""
    if isinstance(count, bool) or not isinstance(count, int) or count < least:
        raise ValueError(f"{name} is a whole number of at least {least}, got {count!r}")


def new_folder(where: str | os.PathLike[str], name: str) -> RunFolder:
    """Name a folder for a new run; it is not made yet."""
    title = re.sub(r"[^\w.-]+", "-", name, flags=re.ASCII)[:40]
    return RunFolder(Path(where) / f"{time.strftime('%Y%m%d-%H%M%S')}-{title}-{secrets.token_hex(2)}")
