"""One rank's process on this machine and the notebook's ends of its channels; `spawn` makes several at once."""

from __future__ import annotations

import contextlib
import multiprocessing.spawn
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from multiprocessing import connection, resource_tracker
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import psutil

from labkit.protocol.job import Job, RankInfo
from labkit.protocol.pages import help_hint
from labkit.rank.channels import CorruptMessage, EachItsOwn, EventQueue, RankPipes, send
from labkit.system import host

EXIT_CODE_S = 1.0
"""How long the exit code of a process that has ended may take to come."""

GONE_S = 10.0
"""How long a process that was killed may take to be gone. A GPU's driver needs seconds; a file system that does not
answer can hold one indefinitely, and nobody is to wait for that."""

LOOK_EVERY_S = 0.02
"""Time between two looks whether a process has ended of which its sentinel does not tell."""

SHUTDOWN_S = 1.0
"""How long each rank, and then multiprocessing's resource tracker, may take to end with the kernel: milliseconds,
unless the system holds the rank, or others have the tracker's pipe."""

UNKNOWN = 255
"""The exit code of a process whose own did not come."""


class RankProcess:
    """A process that waits for a job, or does one. It does not know its rank before the job comes."""

    def __init__(self, process: Any, inbox: Connection, queue: Any, output: Any, stacks: Connection) -> None:
        self.process = process
        self.pid: int = process.pid
        self.queue, self.output, self.stacks = queue, output, stacks
        self._inbox, self._inbox_lock = inbox, threading.Lock()
        self._is_closed, self._close_lock = False, threading.Lock()
        self._session_is_ended = False
        self._is_ready, self._ready_lock = False, threading.Lock()
        self.killed_s = float("inf")
        """When it was first killed from here, as `time.monotonic()`."""

    def send_job(self, info: RankInfo, job: Job, memory: Any = None) -> None:
        """Give the process its work, and memory for what it returns.

        Raises OSError if it has died meanwhile, and whatever pickling the job raises.
        """
        with self._ready_lock:
            self._is_ready = True  # from now on, what comes is for the follower of the job
        with self._inbox_lock:
            send(self._inbox, (job, info, memory))

    @property
    def is_ready(self) -> bool:
        """Whether the process has imported what a job needs."""
        with self._ready_lock:
            # It has ended, and the next launch replaces it; or it sends what that will say is no event.
            with contextlib.suppress(EOFError, OSError, CorruptMessage):
                self._is_ready = self._is_ready or bool(self.queue.receive())
            return self._is_ready

    def send(self, word: Any) -> None:
        """Send the process a word. One that has ended is deaf."""
        with self._inbox_lock, contextlib.suppress(OSError, ValueError):
            send(self._inbox, word)

    @property
    def is_alive(self) -> bool:
        """Whether the process has not ended."""
        # The caller may be another thread than the one that lets go of the process at the end of its run.
        with self._close_lock:
            return not self._is_closed and bool(self.process.is_alive())

    def say(self, word: str) -> None:
        """Send a word without waiting: for a thread that is sending, or a process that does not read, another waits.

        A rank that has not read its job yet has nothing to keep, or to tell; one that has ended is deaf.
        """
        threading.Thread(target=self.send, args=(word,), name="labkit-say", daemon=True).start()

    def ask_for_stacks(self) -> bool:
        """Have the process write its main thread's stack to `stacks`; return whether it can.

        `faulthandler` answers the signal below Python, so also while the process sits in native code.
        """
        return self.is_alive and host.ask_for_stack(self.pid)

    def kill(self) -> None:
        """End the process now, and whatever processes it started."""
        with self._close_lock:
            if self._is_closed:
                return
            self.killed_s = min(self.killed_s, time.monotonic())
            host.end_session(self.pid)
            self.process.kill()  # in its first moments it has no session yet

    @property
    def is_stuck(self) -> bool:
        """Whether it was killed long ago, and is still there: the system holds it."""
        with self._close_lock:
            return time.monotonic() > self.killed_s + GONE_S and not (self._is_closed or self._has_ended())

    @property
    def has_ended(self) -> bool:
        """Whether the process is gone, no matter which thread has its exit code."""
        with self._close_lock:
            return self._is_closed or self._has_ended()

    def _has_ended(self) -> bool:
        """Return whether it is gone; end what it has started at once, while its number cannot be another's."""
        # Not by its sentinel: what it has forked may hold that open, and it may have closed that itself.
        ended = self.process.exitcode is not None or not psutil.pid_exists(self.pid)
        if ended and not self._session_is_ended:
            self._session_is_ended = True
            host.end_session(self.pid)
        return ended

    def wait_for_exit(self) -> int:
        """Wait until the process has ended and return its exit code; kill one that does not end by itself.

        The system tells the code once, to one thread; another that asks at that moment is told that there is none, so
        ask again. If the code never comes, other code in this process has taken it, or the system holds the process
        though it was killed: `UNKNOWN` then stands for it.
        """
        if not self.wait_until(min(self.killed_s, time.monotonic()) + GONE_S) and self.killed_s == float("inf"):
            self.process.kill()
            self.killed_s = time.monotonic()
            self.wait_until(self.killed_s + GONE_S)
        deadline = time.monotonic() + EXIT_CODE_S
        while self.process.exitcode is None and self._has_ended() and time.monotonic() < deadline:
            time.sleep(0.001)
        if self.process.exitcode is None:
            self.process._popen.returncode = UNKNOWN
        return self.process.exitcode

    def wait_until(self, deadline: float) -> bool:
        """Wait until the process has ended, or until then, as `time.monotonic()`; return whether it has."""
        while not self._has_ended():
            if time.monotonic() >= deadline:
                return False
            if connection.wait([self.process.sentinel], LOOK_EVERY_S):
                time.sleep(0.001)
        return True

    def close(self) -> None:
        """End the process if it lives, and let go of it and its channels. Closing twice does nothing."""
        if self.is_alive:
            self.kill()
        if not self._is_closed:
            self.wait_for_exit()
        with self._close_lock:
            if self._is_closed:
                return
            self._is_closed = True
            for end in (self._inbox, self.queue, self.output, self.stacks):
                end.close()
            self.process.close()


def spawn(count: int, ahead_of_torch: bool = False) -> list[RankProcess]:
    """Start processes that wait for a job. Returns once they exist, not once they are ready.

    `ahead_of_torch` is for a process that has not imported torch, and need not for this.

    Raises OSError if the system allows no more open files or processes.
    """
    starting: Future[list[RankProcess]] = Future()
    try:
        in_spawner_thread(lambda: _spawn(count, ahead_of_torch), starting)
        return starting.result()
    except BaseException:
        # Interrupted: what was started must not wait for a job that never comes; what was not begun never will be.
        if not starting.cancel():
            with contextlib.suppress(Exception):
                for process in starting.result():
                    process.close()
        raise


def _spawn(count: int, ahead_of_torch: bool) -> list[RankProcess]:
    with contextlib.ExitStack() as if_it_fails:
        ends, mine = open_pipes(count, if_it_fails)
        processes = _start(ends, ahead_of_torch)
        for end in ends:
            # Keep no copy of the ranks' ends, so that each channel closes when its rank is gone.
            for copy in (end.inbox, end.output, end.stacks):
                copy.close()
            end.queue.close_writer()
        if_it_fails.pop_all()
    return [RankProcess(process, *channel) for process, channel in zip(processes, mine, strict=True)]


def open_pipes(count: int, closing: contextlib.ExitStack) -> tuple[list[RankPipes], list[tuple[Any, ...]]]:
    """Return the ranks' ends of new channels, and the notebook's. Closed, they end the ranks that have begun."""
    context = multiprocessing.get_context("spawn")
    ends: list[RankPipes] = []
    mine: list[tuple[Any, ...]] = []
    for _ in range(count):
        (inbox, inbox_writer), (output_reader, output), (stacks_reader, stacks) = (
            [closing.enter_context(contextlib.closing(end)) for end in pair]
            for pair in (context.Pipe(duplex=False), context.Pipe(duplex=False), context.Pipe(duplex=False))
        )
        # One queue a rank: a rank killed while it writes can then spoil no other rank's records.
        queue = closing.enter_context(contextlib.closing(EventQueue()))
        ends.append(RankPipes(inbox, queue, output, stacks))
        mine.append((inbox_writer, queue, output_reader, stacks_reader))
    return ends, mine


def _start(ends: list[RankPipes], ahead_of_torch: bool) -> list[Any]:
    # The notebook's interrupt goes to its whole process group. Ranks inherit this thread's mask, so that one that is
    # still importing does not die of it; `spawned.main` then ignores the signal. multiprocessing's resource tracker
    # takes the mask away as it starts, so it is to be there before.
    resource_tracker.ensure_running()
    host.hold_back_signals()
    with _nothing_in_place_of_main():
        processes = _start_ahead_of_torch(ends) if ahead_of_torch else _start_with_torch(ends)
    _popens.update(process._popen for process in processes)
    return processes


def _start_with_torch(ends: list[RankPipes]) -> list[Any]:
    import torch.multiprocessing as mp

    from labkit.rank import spawned

    found: list[Any] = mp.spawn(spawned.main, args=(EachItsOwn(ends),), nprocs=len(ends), join=False).processes
    return found


def _start_ahead_of_torch(ends: list[RankPipes]) -> list[Any]:
    """Do what `mp.spawn` does in a process that has not imported torch: it and its ranks then import it at once."""
    processes = [multiprocessing.get_context("spawn").Process(target=_be_a_rank, args=(each,)) for each in ends]
    for process in processes:
        process.start()
    return processes


def _be_a_rank(ends: RankPipes) -> None:
    from labkit.rank import spawned

    spawned.main(0, ends)


_work: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
_spawner: threading.Thread | None = None
_spawner_pid: int | None = None
_spawner_lock = threading.Lock()


# The problem: ranks must not outlive the notebook, however it ends. What does not work: exit handlers (a kernel that is
# killed runs none); that a rank reads of a pipe's end (in native code that keeps Python's lock it does not); the
# notebook's process group (a shell's Ctrl-C goes to it too, and the kernel may be its leader or not). So Linux is asked
# to kill each rank's session when a pipe closes (`System.begin_session`), which a fork of the notebook must not keep
# open; and until the rank has one, when its parent has gone, PR_SET_PDEATHSIG: but that fires when the *thread* ends
# that started it, and a run may be launched from a thread that ends before it. Hence one thread which starts every rank
# and never ends. On other systems a rank ends as its pipe closes.


def in_spawner_thread(call: Callable[[], Any], future: Future[Any] | None = None) -> Future[Any]:
    """Call something in the one thread from which every rank is started; it lives as long as the notebook's kernel.

    Args:
        call: What is called.
        future: Receives the result. A caller that passes its own can cancel it even if this function is interrupted.
    """
    global _spawner, _spawner_pid
    check_not_forked()
    with _spawner_lock:
        if _spawner is None:
            _spawner_pid = os.getpid()
            _spawner = threading.Thread(target=_serve, name="labkit-spawner", daemon=True)
            _spawner.start()
    future = future or Future()
    _work.put((call, future))
    return future


_popens: weakref.WeakSet[Any] = weakref.WeakSet()
"""multiprocessing's own object for each rank; among its descriptors is this end of the pipe that the rank lives by."""


def _close_lifelines() -> None:
    for popen in _popens:
        for end in popen.finalizer._args or ():
            os.close(end)


os.register_at_fork(after_in_child=_close_lifelines)


def end_all() -> None:
    """End every rank, and multiprocessing's resource tracker, which ends when no process has its pipe any more.

    For a kernel that shuts down: ipykernel waits half a minute for its children, and the tracker ignores SIGTERM.
    """
    ending = [popen for popen in _popens if popen.poll() is None]
    for popen in ending:
        host.end_session(popen.pid)
        popen.kill()
    for popen in ending:
        popen.wait(SHUTDOWN_S)
    # Whatever else the notebook has forked may have that pipe, too: it is not waited for.
    stopping = threading.Thread(target=resource_tracker._resource_tracker._stop, daemon=True)  # type: ignore[attr-defined]
    stopping.start()
    stopping.join(SHUTDOWN_S)


def check_not_forked() -> None:
    """Raise RuntimeError in a fork of a process that has started ranks: its threads are not here, and its pipes are."""
    if _spawner_pid not in (None, os.getpid()):
        raise RuntimeError(
            f"process {os.getpid()} was forked from the notebook's, {_spawner_pid}, after that had started ranks, "
            "and can neither start nor reach any. Launch in the notebook, or start the process by spawn: "
            f"multiprocessing.get_context('spawn')\n{help_hint('main_guard')}"
        )


def _serve() -> None:
    while True:
        call, future = _work.get()
        if not future.set_running_or_notify_cancel():
            continue
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)


@contextlib.contextmanager
def _nothing_in_place_of_main() -> Iterator[None]:
    """Have the processes that this thread spawns import `die_with_parent` first, and not the script that is running.

    The function travels by value, so a rank has no need of the script. A script without an `if __name__ == "__main__"`
    guard would otherwise launch again in every rank.
    """
    prepare, here = multiprocessing.spawn.get_preparation_data, threading.get_ident()

    def instead(name: str) -> dict[str, Any]:
        vars(sys.modules["__main__"]).setdefault("__spec__", None)  # which %reset deletes, and `prepare` asks for
        data = prepare(name)
        if threading.get_ident() == here:
            data.pop("init_main_from_path", None)
            data["init_main_from_name"] = "labkit.rank.die_with_parent"
        return data

    multiprocessing.spawn.get_preparation_data = instead
    try:
        yield
    finally:
        multiprocessing.spawn.get_preparation_data = prepare
