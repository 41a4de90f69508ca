"""The folder through which a notebook and the nodes of its run communicate where they share a file system.

    run.json                  what `labkit.attach` needs
    job                       what every rank is to do, framed as in a pipe
    asked                     a word a line from the notebook: stop, stacks, end; node 0 passes them on
    node_zero.<attempt>.json  where the ranks rendezvous and the agents speak
    <node>.<attempt>.stream   what the ranks of one node report: events, framed as in a pipe
    done                      that all ranks have returned: if SLURM starts the job again, it is over at once

Nothing is lost when the notebook is closed, and no port is opened to it. Only the user can read or write in there.
Files are opened anew for every look and closed after every write: over a network they are then seen.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import stat
import time
from collections import deque
from pathlib import Path
from typing import Any

from labkit.launchers.job_events import Restarted
from labkit.protocol import events
from labkit.protocol.job import Job
from labkit.rank.channels import CorruptMessage, Messages, pack

BLOCK_BYTES = 1 << 22
"""Read at once from one node."""

RETRY_S = 1.0
"""Time between two trials to write on a full disk; the ranks wait meanwhile, once their pipes are full."""

LIST_S = 1.0
"""Time between two looks for streams that are new, once there is one of each node."""

WAIT_S = 0.1
"""Time between two looks for a file that is waited for."""

KEPT_OF_EARLIER = (events.Log, events.Output, events.Warned)


class RunFolder:
    """The notebook's or a node's view of the folder."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()

    @classmethod
    def new(cls, parent: Path, name: str) -> RunFolder:
        """Name a folder for a new run; it is not made yet."""
        title = re.sub(r"[^\w.-]+", "-", name, flags=re.ASCII)[:40]
        return cls(parent / f"{time.strftime('%Y%m%d-%H%M%S')}-{title}-{secrets.token_hex(2)}")

    def create(self, job: Job, about: dict[str, Any]) -> None:
        """Make the folder with a job in it. Raises OSError with what to do."""
        try:
            if not self.path.parent.exists():
                self.path.parent.mkdir(parents=True, mode=0o700)
                (self.path.parent / ".gitignore").write_text("*\n")
            self.path.mkdir(mode=0o700)
            (self.path / "asked").touch(mode=0o600)
            self.write("job", *pack(job))
            self.note(about)
        except OSError as error:
            raise OSError(
                f"the run's folder {self.path} cannot be made: {error.strerror or error}. It must be where this "
                "notebook and every node can write: give another with folder=…"
            ) from error

    def write(self, name: str, *content: bytes | memoryview) -> None:
        """Write a file whole: nobody sees a part of it."""
        aside = self.path / f".{name}.{os.getpid()}"
        with open(aside, "wb", opener=_private) as file:
            file.writelines(content)
        aside.replace(self.path / name)

    def note(self, about: dict[str, Any]) -> None:
        """Keep what `attach` will need."""
        self.write("run.json", json.dumps(about, indent=1).encode())

    def about(self) -> dict[str, Any]:
        """Return the run's notes. Raises ValueError if this is no run's folder, or others could have written there."""
        try:
            for path in (self.path, *self.path.iterdir()):
                if path == self.path or path.name in ("run.json", "job") or path.suffix == ".stream":
                    _check_mine(path)
            found: dict[str, Any] = json.loads((self.path / "run.json").read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"{self.path} is not the folder of a run ({error}); `run.folder` names one") from error
        return found

    def job(self) -> Job:
        """Return what the ranks are to do."""
        (found,) = _read(self.path / "job", 0, Messages())[1]
        return found

    def note_done(self) -> None:
        """Note that all ranks have returned."""
        self.write("done")

    def is_done(self) -> bool:
        """Whether all ranks have returned."""
        return (self.path / "done").exists()

    def wait_for(self, name: str, limit_s: float) -> bytes:
        """Return the content of a file once it is there."""
        deadline = time.monotonic() + limit_s
        while not (self.path / name).exists():
            if time.monotonic() > deadline:
                raise ConnectionError(f"{self.path / name} has not been written within {limit_s:g} s")
            time.sleep(WAIT_S)
        return (self.path / name).read_bytes()

    def tail(self, name: str) -> str:
        """Return the end of what a launcher or its agents have written."""
        try:
            return (self.path / name).read_text(errors="replace")[-3000:].strip() or "They wrote nothing."
        except FileNotFoundError:
            return f"The run's folder {self.path} has gone." if not self.path.exists() else "They wrote nothing."

    def ask(self, word: str) -> None:
        """Append a word."""
        with open(self.path / "asked", "a", encoding="utf-8") as file:
            file.write(f"{word}\n")

    def words(self, from_the_start: bool = True) -> Words:
        """Return what reads the words, perhaps only those that come from now on."""
        return Words(self.path / "asked", from_the_start)

    def stream(self, node: int, attempt: int) -> Stream:
        """Return what one node writes."""
        return Stream(self.path / f"{node}.{attempt}.stream")


def _private(path: str, flags: int) -> int:
    """Open a file that others than the user can neither read nor write, whatever the umask."""
    return os.open(path, flags, 0o600)


def _check_mine(path: Path) -> None:
    """Raise ValueError if another user than this one could have written a file or folder."""
    status = path.stat()
    if status.st_uid != os.getuid():
        raise ValueError(
            f"{path} belongs to another user; what lies there would be run as code: not read. Its owner is user "
            f"{status.st_uid}, you are {os.getuid()}: if it is yours, its file system does not know this machine's "
            "users; give a folder=… elsewhere, in your home, say"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ValueError(
            f"others than you can write into {path} (mode {stat.S_IMODE(status.st_mode):o}), and what lies there would "
            f"be run as code: not read. If nobody else has written there: chmod -R go-w {path}. Where the file "
            "system shows every file so, give a folder=… elsewhere, in your home, say"
        )


class Words:
    """The words of a file that grows."""

    def __init__(self, path: Path, from_the_start: bool) -> None:
        self._path, self._offset = path, 0 if from_the_start else path.stat().st_size

    def new(self) -> list[str]:
        """Return those since the last look; "end" once the folder is gone."""
        try:
            with open(self._path, "rb", buffering=0) as file:
                file.seek(self._offset)
                whole, newline, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return ["end"]
        except OSError:  # a network's file system, for a while
            return []
        self._offset += len(whole + newline)
        return whole.decode().split()


class Stream:
    """Writes the events of one node."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def put(self, found: list[events.Event]) -> None:
        """Append events. On a full disk it is tried until there is room: to print that would fail, too."""
        parts = deque(memoryview(part).cast("B") for event in found for part in pack(event))
        while parts:
            try:
                with open(self._path, "ab", buffering=0, opener=_private) as file:
                    while parts:
                        rest = parts[0][file.write(parts[0]) :]
                        parts.popleft()
                        if rest:
                            parts.appendleft(rest)
            except FileNotFoundError:  # the folder is gone: nobody reads any more
                return
            except OSError:
                time.sleep(RETRY_S)


class Streams:
    """Reads what all nodes write, from the first attempt on."""

    def __init__(self, folder: Path, nodes: int) -> None:
        self._folder, self._nodes = folder, nodes
        self._damaged: set[Path] = set()
        self._there: list[Path] = []
        """The newest attempt's."""
        self._attempt, self._list_s = 0, 0.0
        self._offsets: dict[Path, int] = {}
        self._messages: dict[Path, Messages] = {}

    def read(self) -> list[events.Event]:
        """Return what is new. Of attempts before the newest only what was logged and printed."""
        found: list[events.Event] = []
        if len(self._there) < self._nodes or time.monotonic() > self._list_s:
            self._list_s = time.monotonic() + LIST_S
            by_attempt: dict[int, list[Path]] = {}
            for path in self._folder.glob("*.stream"):
                by_attempt.setdefault(int(path.suffixes[0][1:]), []).append(path)
            newest = max(by_attempt, default=0)
            if newest > self._attempt:
                for attempt in range(self._attempt, newest):
                    for path in by_attempt.get(attempt, []):
                        while more := self._next(path):
                            found += [event for event in more if isinstance(event, KEPT_OF_EARLIER)]
                    found.append(Restarted(-1, attempt + 1))
                self._attempt = newest
            self._there = by_attempt.get(newest, [])
        for path in self._there:
            found += self._next(path)
        return found

    def _next(self, path: Path) -> list[events.Event]:
        """Return what is whole in the next block. One that was cut by the end of its writer is none."""
        if path in self._damaged:
            return []
        try:
            read, found = _read(path, self._offsets.get(path, 0), self._messages.setdefault(path, Messages()))
        except OSError:  # gone, or for a while
            return []
        except CorruptMessage as error:
            self._damaged.add(path)
            return [events.Warned(-1, "stream", f"{path} is damaged: {error}")]
        self._offsets[path] = self._offsets.get(path, 0) + read
        return found


def _read(path: Path, offset: int, messages: Messages) -> tuple[int, list[Any]]:
    """Read blocks until a message is whole, or all is read; return how many bytes, and the messages."""
    count, found, data = 0, list[Any](), b"-"
    with open(path, "rb", buffering=0) as file:
        file.seek(offset)
        while not found and data:
            data = file.read(BLOCK_BYTES)
            count += len(data)
            found = messages.add(data) if data else found
    return count, found
