"""One job of a launcher, SLURM's or Ray's: some ranks that it starts, and that a supervisor each minds."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from labkit.engines.spawn import in_spawner_thread
from labkit.launchers import job_events
from labkit.launchers.run_directory.directory import RunDirectory
from labkit.launchers.run_directory.private import private
from labkit.protocol import events

SETTLE_S = 1.0
"""How long, after its ranks have ended, what they wrote may take to be seen."""

END_S = 45.0
"""How long the launcher may take to end the ranks when it is told to, before this process no longer waits for it. Less
than `Run.stop` waits, so that the run is over, and says why."""

START_S = 60.0
"""How long an interrupted start is waited for, so that what it has started can be ended."""

LEAVE_S = 5.0
"""How long a process that has started the ranks may take, once they have ended, to take its leave of others."""

SUPERVISOR = Path(__file__).with_name("supervisor.py")


class RanksSeen(NamedTuple):
    """What the ranks themselves have told of their ends."""

    exits: dict[int, events.Exit]
    missing: list[int]
    """Those that have not told."""
    begun: set[int]
    """Those that have begun."""
    returned: Collection[int] = ()
    """Those whose function has returned."""

    @property
    def is_whole(self) -> bool:
        """Whether every rank has returned, and ended well: whoever has asked them to end meanwhile."""
        return not self.missing and all(exit.code == 0 and rank in self.returned for rank, exit in self.exits.items())

    @property
    def explains(self) -> bool:
        """Whether a rank has failed by itself. One that ends with 0 has, too, unless its function has returned."""
        return any((exit.code or rank not in self.returned) and not exit.ended for rank, exit in self.exits.items())


class LauncherJob:
    """What an engine and a session need of a launcher. Made by `Slurm.job` and `Ray.job`.

    Guarantees: a start that is interrupted ends what it has started; once `end` was called, `is_over` within `END_S`.

    What a new launcher sees to besides its methods; `tests/engines/test_engine_contract.py` tries it, given a row:

    * It starts `supervisor` once for each rank, with LABKIT_RANK, LABKIT_LOCAL_RANK, LABKIT_WORLD_SIZE,
      LABKIT_LOCAL_WORLD_SIZE and LABKIT_ATTEMPT in its environment, or is known to `labkit.launchers.environments` by
      its own variables; with MASTER_ADDR and MASTER_PORT, or LABKIT_NODE_ADDRESS, if there are several machines.
    * When a rank fails (the directory gets `failed.<attempt>`) it ends the others' supervisors, by SIGTERM.
    * Processes of this machine are started by `in_spawner_thread`: they live as long as the thread that started them.
    """

    kind: ClassVar[str]
    """The launcher's name, as run.json has it."""
    outlives_notebook = False

    def __init__(self, world_size: int, directory: RunDirectory, about: dict[str, Any]) -> None:
        self.world_size, self.directory = world_size, directory
        self.about = {"launcher": self.kind, "world_size": world_size, **about}
        """What is kept in the directory for `labkit.attach`."""
        self.supervisor = SUPERVISOR
        """The script that minds each rank."""
        self.is_started = self.was_ended = False
        """Whether there are ranks; whether this notebook has had them ended."""
        self._news: list[events.Event] = []
        self._lock = threading.Lock()
        self._over_at_s: float | None = None
        self._end_due_s: float | None = None

    def start(self, make: Callable[[dict[str, Any]], None]) -> None:
        """Have the directory made with what is to be noted there, and give the ranks to the launcher.

        Raises what the launcher says.
        """
        self.about |= {"cwd": os.getcwd()}
        make(self.about)
        # In another thread, which the notebook's interrupt does not reach: between the start and the note of what was
        # started nobody would know what to end.
        starting: Future[None] = Future()
        try:
            name = f"labkit-{self.kind}-start"
            threading.Thread(target=self._submit_and_note, args=(starting,), name=name, daemon=True).start()
            starting.result()
        except BaseException:
            if not starting.cancel():  # else the thread has not begun, and will do nothing
                ending = threading.Thread(target=self._end_what_has_started, args=(starting,), daemon=True)
                ending.start()
                ending.join(START_S)  # it goes on if the next interrupt ends this wait
            raise

    def _submit_and_note(self, starting: Future[None]) -> None:
        if not starting.set_running_or_notify_cancel():
            return
        try:
            self.about |= self.submit()
            self.is_started = True
            self.directory.note(self.about)
            starting.set_result(None)
        except BaseException as error:
            starting.set_exception(error)

    def _end_what_has_started(self, starting: Future[None]) -> None:
        if starting.exception() is None:
            self.end_now()
            self.close()

    # What each launcher does in its own way

    def submit(self) -> dict[str, Any]:
        """Give the ranks to the launcher; return what is to be noted for `attach`. Raises what the launcher says."""
        raise NotImplementedError

    def end(self) -> None:
        """Have the launcher end the ranks, without waiting until it has."""
        raise NotImplementedError

    def end_now(self) -> None:
        """Have the launcher end the ranks, and wait until it knows."""
        raise NotImplementedError

    def ending(self, seen: RanksSeen) -> job_events.JobEnded | None:
        """Return why the launcher has done with the ranks, if that is no rank's doing."""
        raise NotImplementedError

    def interruption(self) -> job_events.JobEnded:
        """Return why the launcher has ended all ranks, though it will start them again."""
        return job_events.JobEnded(-1, f"the {self.kind} job was interrupted", "Its ranks begin again.", "session")

    def ranks_have_begun(self) -> None:
        """Take notice that ranks have begun, and that the launcher is not waited for any more."""
        self.look()

    def look(self) -> None:
        """Ask the launcher at once how the ranks are."""

    def close(self) -> None:
        """Let go of what this process holds."""

    @property
    def silent_s(self) -> float:
        """How long the launcher has not answered, in s."""
        return 0.0

    @property
    def time_left_s(self) -> float:
        """How long the launcher will keep the ranks, in s; infinite if it has not said."""
        return float("inf")

    # What it says

    def emit(self, event: events.Event) -> None:
        """Have an event of all ranks taken to the notebook."""
        with self._lock:
            self._news.append(event)

    def take_news(self) -> list[events.Event]:
        """Return the events since the last call."""
        with self._lock:
            found, self._news = self._news, []
            return found

    def settle(self, patience_s: float = SETTLE_S) -> None:
        """Note that the launcher has done with the ranks: none lives, but what they wrote may be seen later."""
        with self._lock:
            self._over_at_s = self._over_at_s or time.monotonic() + patience_s

    def end_is_due(self) -> None:
        """Note that the ranks are to be ended: the launcher has `END_S` for it, however often it is told."""
        with self._lock:
            self._end_due_s = self._end_due_s or time.monotonic() + END_S

    @property
    def does_not_end(self) -> bool:
        """Whether the launcher was told to end the ranks, and has not confirmed it in time."""
        with self._lock:
            return self._over_at_s is None and self._end_due_s is not None and time.monotonic() > self._end_due_s

    @property
    def is_over(self) -> bool:
        """Whether the launcher has done with the ranks, or is not waited for any longer."""
        return self._over_at_s is not None or self.does_not_end

    @property
    def is_settled(self) -> bool:
        """Whether it is over, and what the ranks wrote should have been seen by now."""
        with self._lock:
            if self._over_at_s is not None:
                return time.monotonic() > self._over_at_s
        return self.does_not_end


class ProcessJob(LauncherJob):
    """Ranks that a process beside the notebook has started: they end with it, and it with the notebook."""

    output: ClassVar[str]
    """The file in the run's directory that has what the process writes."""

    def __init__(self, world_size: int, directory: RunDirectory, about: dict[str, Any]) -> None:
        super().__init__(world_size, directory, about)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The process, once it has been started."""
        assert self._process is not None
        return self._process

    @property
    def is_going(self) -> bool:
        """Whether the process has been started, and has not ended."""
        return self._process is not None and self._process.poll() is None

    def start_process(self, command: list[str], environment: dict[str, str], talks: bool = False) -> None:
        """Start Python with these arguments; `talks` is whether this process has pipes to it and from it."""

        def start() -> None:
            with open(self.directory.path / self.output, "ab", opener=private) as output:
                self._process = subprocess.Popen(
                    [sys.executable, *command],
                    stdin=subprocess.PIPE if talks else subprocess.DEVNULL,
                    stdout=subprocess.PIPE if talks else output,
                    stderr=output,
                    env=environment,
                    start_new_session=True,  # the notebook's interrupt is not meant for it
                )

        # It ends with the thread that has started it: the spawner's lives as long as the notebook's kernel.
        in_spawner_thread(start).result()

    def what_it_wrote(self) -> str:
        """Return the end of what the process has written, in a sentence."""
        try:
            text = (self.directory.path / self.output).read_text(errors="replace", encoding="utf-8").strip()
        except OSError as error:
            return f"{self.output} cannot be read: {error}"
        return f"What it wrote:\n{text[-3000:]}" if text else "It wrote nothing."

    def end_now(self) -> None:
        """End the ranks with the process, and wait until it has gone."""
        self.end()
        self.process.wait()

    def kill(self) -> None:
        """End a process that does not end by itself."""
        self.process.kill()

    def close(self) -> None:
        """Wait until the process has ended, which may have others to tell, and kill it if it takes too long."""
        if self._process is not None:
            try:
                self._process.wait(LEAVE_S)
            except subprocess.TimeoutExpired:
                self.kill()
                self._process.wait()
