"""What is done with the files of a run's directory, by supervisors, ranks and notebook alike.

Needs nothing but the standard library, as supervisors do.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from pathlib import Path
from typing import Any

from labkit.launchers.run_directory.private import private

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a full disk, or of a quota that is used up."""

TRY_EVERY_S = 0.1
"""Time between two trials to write a last word."""

END_CHARACTERS = 4096
"""Of a rank's records, in which its last is looked for."""

LOOK_AT_FOLDER_S = 1.0
"""Time between two looks whether the directory is still there, and how much the rank has printed."""

GONE_S = 3.0
"""How long the directory must be missing to count as deleted."""

CLOCK = ".labkit-clock"
"""In a copy of a run's directory, how far the clock there is ahead of the notebook's, in s."""

CLOCK_S = 3.0
"""From which difference on clocks count as different; a file system may keep times in steps of 2 s."""

OUTPUT_BYTES = 1 << 28
"""Of a rank's output at most in its file. When there is more, all but the beginning is dropped, and it starts anew."""

HEAD_BYTES = 1 << 20
"""Of the output that is dropped, the beginning that is kept."""


def append(records: Path, event: list[Any], wait_s: float = 0.0) -> bool:
    """Append an event in a line of its own, even if the rank was ended while it wrote one. Return whether it is there.

    On a full disk the rank's reserve is freed for it. It is tried for `wait_s`, unless the folder has gone; then the
    event is printed instead.
    """
    line = json.dumps(event)
    deadline = time.monotonic() + wait_s
    while True:
        try:
            with open(records, "ab", buffering=0) as file:
                left = memoryview(f"\n{line}\n".encode())
                while left:
                    left = left[file.write(left) :]
            return True
        except OSError as error:
            has_freed = error.errno in NO_ROOM and free_reserve(records)
            if not has_freed and (time.monotonic() > deadline or isinstance(error, FileNotFoundError)):
                print(f"{records} cannot be written ({error}): {line}", flush=True)
                return False
            time.sleep(0.0 if has_freed else TRY_EVERY_S)


def free_reserve(records: Path) -> bool:
    """Free the room that was kept for a rank's last words; return whether there was any."""
    try:
        os.unlink(records.with_suffix(".reserve"))
    except OSError:
        return False
    return True


def has_exit(records: Path) -> bool:
    """Whether a rank's last event is there."""
    try:
        with open(records, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - END_CHARACTERS))
            return any(line.startswith(b'["Exit"') for line in file.read().splitlines())
    except OSError:
        return False


def is_missing(path: Path) -> bool:
    """Whether a path is known not to be there: not where that cannot be told just now."""
    try:
        os.stat(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


class Folder:
    """The run's directory, seen from one machine: whether it is still there, and what may be dropped in it.

    The problem: a run whose directory was deleted goes on, and nobody can follow or stop it. What does not work: to ask
    whether the directory exists, for it does not either where a file system is unmounted for a while. So it counts as
    deleted where what is left of its path lies on the file system on which it lay. What still fails: a file system
    that is mounted below the run's directory.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._device: int | None = None
        self._missing_since_s: float | None = None
        self._looked_s = 0.0
        self.is_gone = False

    @property
    def was_seen(self) -> bool:
        """Whether it has been seen to be there."""
        return self._device is not None

    @property
    def gone_in_words(self) -> str:
        """That it is gone, for whoever reads what this process writes."""
        return f"the run's folder {self._directory} has gone: it was deleted or moved"

    def look(self, outputs: list[Path]) -> bool:
        """Look now and then; keep these files within bounds. Return whether the directory is gone."""
        now = time.monotonic()
        if now - self._looked_s >= LOOK_AT_FOLDER_S:
            self._looked_s = now
            self.look_now()
            for output in outputs:
                limit_output(output)
        return self.is_gone

    def look_now(self) -> None:
        """See whether the directory is there."""
        try:
            self._device = os.stat(self._directory).st_dev
            self._missing_since_s = None
        except FileNotFoundError:
            now = time.monotonic()
            self._missing_since_s = self._missing_since_s or now
            lies_there = self._device is not None and _device_of_parents(self._directory) == self._device
            self.is_gone = self.is_gone or (lies_there and now - self._missing_since_s >= GONE_S)
        except OSError:  # over a network not just now
            return


def _device_of_parents(path: Path) -> int | None:
    """Return the file system on which the nearest folder above lies that is there."""
    for parent in path.parents:
        try:
            return os.stat(parent).st_dev
        except FileNotFoundError:
            continue
        except OSError:
            return None
    return None


# The problem: a rank that prints without end fills the disk. What does not work: a limit of the system's, which ends
# the rank (RLIMIT_FSIZE); a pipe through the supervisor, for what native code printed before a crash is to be in order
# with the records. So the file is cut to nothing, as logrotate's "copytruncate" does: all writers append, and go on at
# its new end. A reader sees that the file has become shorter. What still fails: a reader that is so far behind that the
# file has grown past it again reads on in the middle.


def limit_output(path: Path) -> None:
    """Cut a rank's output to nothing once it is too long, but keep its beginning beside it."""
    head = Path(f"{path}.head")
    try:
        if (length := os.stat(path).st_size) < OUTPUT_BYTES:
            return
        with contextlib.suppress(OSError):  # a full disk, say, which this makes room on
            if not head.exists():
                with open(path, "rb") as output, open(head, "wb", opener=private) as kept:
                    kept.write(output.read(HEAD_BYTES))
        os.truncate(path, 0)
        with open(path, "ab") as output:
            said = f"\n... {length:,} bytes of output were dropped here; the first of them are in {head.name} ...\n"
            output.write(said.encode())
    except OSError:  # looked at again soon
        return


def was_cut(descriptor: int, offset: int) -> bool:
    """Whether `limit_output` has cut a file since it was read up to that offset."""
    return offset >= OUTPUT_BYTES // 2 and os.fstat(descriptor).st_size < offset


def clock_ahead_s(path: Path) -> float:
    """Return how far this machine's clock is ahead of that of the file system on which this file lies, in s.

    To be told the time a file system is asked to set it on the file. On a disk of this machine both are the same.
    """
    os.utime(path)
    return time.time() - os.stat(path).st_mtime


def clock_off_s(directory: Path, mine: Path) -> float:
    """Return how far this machine's clock is ahead of the notebook's, in s; 0 if hardly, or if nobody can tell.

    `mine` is a file there that this machine may touch. Where the directory is a copy, its keeper has written `CLOCK`.
    """
    told = [folder / CLOCK for folder in (directory, directory.parents[1])]  # a job's, or its session's
    try:
        if found := [file for file in told if file.exists()]:
            off_s = float(found[0].read_text(encoding="utf-8"))
        else:
            run = json.loads((directory / "run.json").read_text(encoding="utf-8"))
            off_s = clock_ahead_s(mine) - run["clock_ahead_s"]
    except (OSError, ValueError, LookupError, TypeError):
        return 0.0
    return off_s if abs(off_s) >= CLOCK_S else 0.0
