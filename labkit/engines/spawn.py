"""One rank's process on this machine and the notebook's ends of its channels; `spawn` makes several at once."""

from __future__ import annotations

import contextlib
import multiprocessing.spawn
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from multiprocessing.connection import Connection
from multiprocessing.resource_tracker import ensure_running
from queue import SimpleQueue
from typing import Any

import psutil
import torch.multiprocessing as mp

from labkit.protocol import plugins
from labkit.protocol.job import Job
from labkit.rank import main
from labkit.rank.channels import EventQueue, RankPipes
from labkit.rank.signals import STACKS_SIGNAL

EXIT_CODE_S = 1.0
"""How long the exit code of a process that has ended may take to come."""


class RankProcess:
    """A process that waits for a job, or does one. It does not know its rank before the job comes."""

    def __init__(self, process: Any, inbox: Connection, queue: Any, output: Connection, stacks: Connection) -> None:
        self.process = process
        self.pid: int = process.pid
        self.queue, self.output, self.stacks = queue, output, stacks
        self._inbox, self._inbox_lock = inbox, threading.Lock()
        self._is_closed, self._close_lock = False, threading.Lock()
        self._is_ready, self._ready_lock = False, threading.Lock()

    def send_job(self, rank: int, job: Job) -> None:
        """Return the process its work. One that has died meanwhile is not noticed here: its exit will tell."""
        with self._ready_lock:
            self._is_ready = True  # from now on, what comes is for whoever follows the job
        self.send((rank, job))

    @property
    def is_ready(self) -> bool:
        """Whether the process has imported what a job needs."""
        with self._ready_lock:
            with contextlib.suppress(EOFError, OSError):  # it has ended; the next launch replaces it
                if not self._is_ready and self.queue._reader.poll():
                    self.queue.get()
                    self._is_ready = True
            return self._is_ready

    def send(self, word: Any) -> None:
        """Send the process a word. One that has ended is deaf."""
        with self._inbox_lock:
            self._send(word)

    def _send(self, word: Any) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._inbox.send(word)

    @property
    def is_alive(self) -> bool:
        """Whether the process has not ended."""
        # Whoever asks may be another thread than the one that lets go of the process at the end of its run.
        with self._close_lock:
            return not self._is_closed and bool(self.process.is_alive())

    def say(self, word: str) -> None:
        """Send a word without waiting: for a thread that is sending, or a process that does not read, another waits.

        A rank that has not read its job yet has nothing to keep, or to tell; one that has ended is deaf.
        """
        if self._inbox_lock.acquire(blocking=False):
            try:
                if self._has_room():
                    self._send(word)
                    return
            finally:
                self._inbox_lock.release()
        threading.Thread(target=self.send, args=(word,), name="labkit-say", daemon=True).start()

    def _has_room(self) -> bool:
        """Whether a word can be written at once, or nobody is there to read it. False where that cannot be asked."""
        if not hasattr(select, "poll"):
            return False
        look = select.poll()
        try:
            look.register(self._inbox.fileno(), select.POLLOUT)
        except OSError:  # it has been closed
            return True
        return bool(look.poll(0))

    def ask_for_stacks(self) -> bool:
        """Have the process write its main thread's stack to `stacks`; return whether it can.

        `faulthandler` answers the signal below Python, so also while the process sits in native code.
        """
        if STACKS_SIGNAL is None or not self.is_alive:
            return False
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(self.pid, STACKS_SIGNAL)
            return True
        return False

    def kill(self) -> None:
        """End the process now, and whatever processes it started."""
        children: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(self.pid).children(recursive=True)
        with self._close_lock:
            if self._is_closed:
                return
            self.process.kill()
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()

    def wait_for_exit(self) -> int:
        """Wait until the process has ended and give its exit code.

        The system tells the code once, to one thread; whoever asks at that moment too is told that there is none, so
        ask again. If the code never comes, other code in this process has taken it: 255 then stands for "unknown".
        """
        self.process.join()
        deadline = time.monotonic() + EXIT_CODE_S
        while self.process.exitcode is None and time.monotonic() < deadline:
            time.sleep(0.001)
        if self.process.exitcode is None:
            self.process._popen.returncode = 255
        return self.process.exitcode

    def close(self) -> None:
        """End the process if it lives, and let go of it and its channels. Closing twice does nothing."""
        if self.is_alive:
            self.kill()
        with self._close_lock:
            if self._is_closed:
                return
            self.wait_for_exit()
            self._is_closed = True
            for end in (self._inbox, self.queue, self.output, self.stacks):
                end.close()
            self.process.close()


def spawn(count: int) -> list[RankProcess]:
    """Start processes that wait for a job. Returns once they exist, not once they are ready."""
    starting = in_spawner_thread(lambda: _spawn(count))
    try:
        return starting.result()
    except BaseException:
        # Interrupted: what was started must not wait for a job that never comes.
        with contextlib.suppress(Exception):
            for process in starting.result():
                process.close()
        raise


def _spawn(count: int) -> list[RankProcess]:
    context = mp.get_context("spawn")
    ends, mine = [], []
    for _ in range(count):
        inbox_reader, inbox_writer = context.Pipe(duplex=False)
        output_reader, output_writer = context.Pipe(duplex=False)
        stacks_reader, stacks_writer = context.Pipe(duplex=False)
        # One queue a rank: a rank killed while it writes can then spoil no other rank's records.
        queue = EventQueue()
        ends.append(RankPipes(inbox_reader, queue, output_writer, stacks_writer))
        mine.append((inbox_writer, queue, output_reader, stacks_reader))
    if STACKS_SIGNAL is not None:
        # The notebook's interrupt goes to its whole process group. Ranks inherit this thread's mask, so that one that
        # is still importing does not die of it; `main.main` then ignores the signal. multiprocessing's resource tracker
        # takes the mask away as it starts, so it is to be there before.
        ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, STACKS_SIGNAL})
    with _nothing_in_place_of_main():
        begins, waits = plugins.those_with("rank_begins"), plugins.those_with("rank_waits")
        started = mp.spawn(main.main, args=(ends, begins, waits), nprocs=count, join=False)
    for end in ends:
        # Keep no copy of the ranks' ends, so that each channel closes when its rank is gone.
        for copy in (end.inbox, end.output, end.stacks):
            copy.close()
        end.queue.close_writer()
    return [RankProcess(process, *channel) for process, channel in zip(started.processes, mine, strict=True)]


_work: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
_spawner: threading.Thread | None = None
_spawner_lock = threading.Lock()


# The problem: ranks must not outlive the notebook, however it ends. What does not work: exit handlers (a kernel that is
# killed runs none); the closing of a pipe (a rank in native code that keeps Python's lock does not notice); a process
# group (a shell's Ctrl-C goes to it too, and the kernel may be its leader or not). So Linux is asked to kill each rank
# when its parent has gone, PR_SET_PDEATHSIG: but that fires when the *thread* ends that started it, and a run may be
# launched from a thread that ends before it. Hence one thread which starts every rank and never ends. What still
# fails: other systems, where the inbox's closing must do.


def in_spawner_thread(call: Callable[[], Any]) -> Future[Any]:
    """Call something in the one thread from which every rank is started; it lives as long as the notebook's kernel."""
    global _spawner
    with _spawner_lock:
        if _spawner is None:
            _spawner = threading.Thread(target=_serve, name="labkit-spawner", daemon=True)
            _spawner.start()
    future: Future[Any] = Future()
    _work.put((call, future))
    return future


def _serve() -> None:
    while True:
        call, future = _work.get()
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
