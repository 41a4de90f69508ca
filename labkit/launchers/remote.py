"""Ranks on other machines, as the notebook has them: one engine for SLURM, Ray and whatever starts agents."""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from labkit.engines.base import Engine, Target
from labkit.engines.spawn import in_spawner_thread
from labkit.launchers.job_events import JobEnded, Notice, Restarted, StoppedElsewhere
from labkit.launchers.run_folder import RunFolder, Streams
from labkit.protocol import events
from labkit.protocol.job import Job

T = TypeVar("T")

LOOK_S = 0.1
"""Time between two looks at what the nodes report."""

SETTLE_S = 1.0
"""How long what ranks wrote may take to be seen once the launcher has ended."""

DISK_S, FULL_BYTES = 1.0, 1 << 20
"""Time between two looks how much room there is where the folder lies; a disk with less is full."""

SILENT_S = 45.0
"""How long a launcher that was told to end the ranks is waited for."""

LEAVE_S = 5.0
"""How long agents that are processes of this machine may take to be gone once their ranks have ended."""

UNDO_S = 15.0
"""How long a start that was interrupted is waited for, and the end of what it has started."""


class RemoteJob:
    """The ranks of one run, `nodes` × `ranks_per_node`, wherever they are. What a new launcher implements.

    Events of the launcher's own (`Notice`, `Restarted`) come from `poll` among those of the ranks.
    """

    outlives_notebook = False
    """Whether the ranks go on when the notebook ends."""
    folder: RunFolder | None = None
    """Where nodes and notebook share files, if they do."""
    may_restart = False
    """Whether all ranks are started again when one fails."""
    over_s = float("inf")
    """When the launcher was done with the ranks, as `time.monotonic()`."""

    def __init__(self, nodes: int, ranks_per_node: int) -> None:
        self.nodes, self.ranks_per_node, self.world_size = nodes, ranks_per_node, nodes * ranks_per_node

    def start(self, job: Job) -> None:
        """Have the ranks started. Raises what the launcher says."""
        raise NotImplementedError

    def poll(self) -> list[events.Event]:
        """Return what is new, without waiting."""
        raise NotImplementedError

    def tell(self, word: str) -> None:
        """Send a word to node 0, which passes it on: "stop", "stacks" or "end"."""
        raise NotImplementedError

    def end(self) -> None:
        """Have the ranks ended, without waiting until they are."""
        raise NotImplementedError

    def why_over(self, missing: list[int]) -> JobEnded | None:
        """Return why the launcher has ended the ranks; `missing` are those that have not reported their end."""
        raise NotImplementedError

    def look(self) -> None:
        """Learn soon whether the launcher is done with the ranks, which have all ended."""

    def close(self) -> None:
        """Release what this process holds."""


class RemoteEngine(Engine):
    """Carries one run on other machines."""

    stop_grace_s = 10.0
    failure_grace_s = float("inf")
    """The agents end the others when a rank fails, and all may be started again."""
    quiet_s = 1.0
    stacks_s = 10.0

    def __init__(self, job: RemoteJob) -> None:
        self.launched, self.world_size = job, job.world_size
        self.outlives_notebook = job.outlives_notebook
        self.folder = job.folder.path if job.folder else None
        self.pids: list[int] = []
        self._exits: dict[int, events.Exit] = {}
        self._begun: set[int] = set()
        self._ended_s, self._look_s = float("inf"), 0.0
        self._is_told = self._is_started = False

    def start(self, job: Job) -> None:
        """Have the ranks started."""
        self.launched.start(job)
        self._is_started = True

    def attached(self) -> None:
        """Take note that the ranks were started before."""
        self._is_started = True

    def poll(self, timeout_s: float) -> list[events.Event]:
        """Return what is new, waiting at most `timeout_s` for it. How ranks ended comes once no restart can follow."""
        deadline = time.monotonic() + timeout_s
        while True:
            if (rest_s := self._look_s - time.monotonic()) > 0 and timeout_s:
                time.sleep(rest_s)
            self._look_s = time.monotonic() + LOOK_S
            if (found := self._new()) or time.monotonic() > deadline:
                return found

    def _new(self) -> list[events.Event]:
        if self._is_told:
            return []
        is_over = time.monotonic() > min(self.launched.over_s + SETTLE_S, self._ended_s + SILENT_S)  # before the look
        found: list[events.Event] = []
        for event in self.launched.poll():
            if isinstance(event, events.Exit):
                self._exits[event.rank] = event
                continue
            if isinstance(event, Restarted):
                self._exits.clear()
                self._begun.clear()
            elif isinstance(event, events.Started):
                self._begun.add(event.rank)
            found.append(event)
        if (is_over and not found) or (len(self._exits) == self.world_size and self._is_final()):
            self._is_told = True
            found += self._last_events()
        elif len(self._exits) == self.world_size:
            self.launched.look()
        return found

    def _is_final(self) -> bool:
        """Whether ranks that have all ended do not begin again."""
        if self._ended_s < float("inf") or not any(exit.code or exit.ended for exit in self._exits.values()):
            return True
        return self._explains() and not self.launched.may_restart

    def _explains(self) -> bool:
        """Whether a rank has failed by itself."""
        return any(exit.code and not exit.ended for exit in self._exits.values())

    def _last_events(self) -> list[events.Event]:
        missing = [rank for rank in range(self.world_size) if rank not in self._exits]
        explained = self._explains()
        is_well = not missing and not any(exit.code or exit.ended for exit in self._exits.values())
        ending = None if is_well or explained or self._ended_s < float("inf") else self.launched.why_over(missing)
        for rank in missing:
            self._exits[rank] = events.Exit(rank, -9, ended=ending is not None or explained, unseen=True)
        return [*([ending] if ending else []), *self._exits.values()]

    def ask_to_stop(self) -> None:
        """Ask every rank to stop at a common step."""
        self.launched.tell("stop")

    def ask_for_stacks(self) -> list[int]:
        """Ask every rank where it is; return those that have begun and not ended."""
        self.launched.tell("stacks")
        return sorted(self._begun - self._exits.keys())

    def kill(self) -> None:
        """Have the ranks ended."""
        if self._is_started and self._ended_s == float("inf"):
            self._ended_s = time.monotonic()
            self.launched.end()

    def killed(self, rank: int) -> bool:
        """Whether the rank was ended from outside."""
        return self._ended_s < float("inf") or (rank in self._exits and self._exits[rank].ended)

    def close(self) -> None:
        """Release what this process holds."""
        self.launched.close()


class FolderJob(RemoteJob):
    """Ranks whose nodes share a folder with the notebook."""

    folder: RunFolder
    kind: ClassVar[str]
    """The launcher's name, as run.json has it."""

    def __init__(self, nodes: int, ranks_per_node: int, folder: RunFolder, about: dict[str, Any]) -> None:
        super().__init__(nodes, ranks_per_node)
        self.folder, self._streams = folder, Streams(folder.path, nodes)
        self.about = {
            "launcher": self.kind,
            "nodes": nodes,
            "world_size": self.world_size,
            "ranks_per_node": ranks_per_node,
            "cwd": os.getcwd(),
            **about,
        }
        self._news: queue.SimpleQueue[events.Event] = queue.SimpleQueue()
        self._disk_s, self._is_full = 0.0, False
        self._has_asked = False
        """Whether this process has asked the ranks to end, and need not be told."""

    def start(self, job: Job) -> None:
        """Make the folder, and have the agents started; a start that is interrupted ends what it has started."""
        self.folder.create(job, self.about)
        self.about |= start_uninterrupted(self.submit, self._end_started)
        self.folder.note(self.about)

    def _end_started(self) -> None:
        self.end()
        self.close()

    def submit(self) -> dict[str, Any]:
        """Have the agents started; return what is to be noted for `attach`."""
        raise NotImplementedError

    def poll(self) -> list[events.Event]:
        """Return what the launcher and the ranks have reported."""
        if time.monotonic() > self._disk_s:
            self._disk_s = time.monotonic() + DISK_S
            self._look_at_the_disk()
        found = self._streams.read()
        is_ending = any(isinstance(event, (events.Stopped, events.Exit)) for event in found)
        if is_ending and not self._has_asked and self._was_asked_elsewhere():
            self._has_asked = True
            found = [StoppedElsewhere(-1, "by another notebook"), *found]
        return [self._news.get() for _ in range(self._news.qsize())] + found

    def tell(self, word: str) -> None:
        """Send a word to node 0."""
        self._has_asked = self._has_asked or word in ("stop", "end")
        try:
            self.folder.ask(word)
        except OSError as error:  # a full disk, say; the caller has a deadline, after which the ranks are ended
            self._news.put(Notice(-1, f"the ranks could not be asked ({word}): {error}"))

    def _was_asked_elsewhere(self) -> bool:
        return self.folder.path.exists() and not {"stop", "end"}.isdisjoint(self.folder.words().new())

    def _look_at_the_disk(self) -> None:
        """Say that there is no room, which nobody there can write down, or that there is again."""
        with contextlib.suppress(OSError):
            is_full = shutil.disk_usage(self.folder.path).free < FULL_BYTES
            if is_full != self._is_full:
                self._is_full = is_full
                text = f"the disk of {self.folder.path} is full: the ranks wait until there is room"
                self._news.put(events.Warned(-1, "disk", text if is_full else ""))


def start_uninterrupted(start: Callable[[], T], end: Callable[[], object]) -> T:
    """Return what `start` returns; if it is waited for no longer, `end` what it has started.

    It runs in another thread, which the notebook's interrupt does not reach: between the start and the note of what was
    started nobody would know what to end.
    """
    started: Future[T] = Future()
    starter = threading.Thread(target=_fulfil, args=(started, start), name="labkit-start", daemon=True)
    starter.start()
    try:
        return started.result()
    except BaseException:
        started.add_done_callback(lambda done: None if done.exception() else end())
        starter.join(UNDO_S)  # a script that ends now would take along the thread that ends what was started
        raise


def _fulfil(future: Future[Any], call: Any) -> None:
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)


class ProcessJob(FolderJob):
    """Agents, or what starts them, as processes that the notebook has started."""

    processes: Sequence[subprocess.Popen[bytes]] = ()
    _kill_s = float("inf")

    def commands(self) -> list[list[str]]:
        """Return what is to be started; each is to end with this process."""
        raise NotImplementedError

    def environment(self) -> dict[str, str] | None:
        """Return the variables of what is started; None: this process's."""
        return None

    def submit(self) -> dict[str, Any]:
        """Start the processes."""
        self.processes = in_spawner_thread(self._start).result()
        return {"processes": [process.pid for process in self.processes]}

    def _start(self) -> list[subprocess.Popen[bytes]]:
        with open(self.folder.path / "output", "ab") as output:
            options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
            options |= {"env": self.environment(), "start_new_session": True}
            return [subprocess.Popen(command, **options) for command in self.commands()]

    def poll(self) -> list[events.Event]:
        """Return what the ranks have reported. One agent that fails ends all."""
        codes = [process.poll() for process in self.processes]
        if time.monotonic() > self._kill_s:
            for process in self.processes:
                process.kill()
        if None not in codes:
            self.over_s = min(self.over_s, time.monotonic())
        elif any(codes) and self._kill_s == float("inf"):
            self.end()
        return super().poll()

    def end(self) -> None:
        """Tell the nodes; kill those that do not hear."""
        self.tell("end")
        self._kill_s = min(self._kill_s, time.monotonic() + LEAVE_S)

    def close(self) -> None:
        """Wait until the processes have ended."""
        for process in self.processes:
            try:
                process.wait(LEAVE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class Launcher(Target):
    """What `on=` takes to have ranks on other machines: `nodes` × `ranks_per_node`."""

    nodes: int
    ranks_per_node: int
    folder: Path

    def job(self, name: str, stall_s: float | None) -> RemoteJob:
        """Return a job for one run; it is not started yet."""
        raise NotImplementedError

    def engine(self, name: str, stall_s: float | None) -> RemoteEngine:
        """Return the engine for one run."""
        return RemoteEngine(self.job(name, stall_s))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(nodes={self.nodes}, ranks_per_node={self.ranks_per_node}, …)"


def check_whole(name: str, count: Any) -> int:
    """Return a number of nodes or ranks. Raises ValueError for what is none."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"{name} is a whole number of at least 1, got {count!r}")
    return count
