"""Ranks as processes of this machine, started by `torch.multiprocessing.spawn` with the spawn start method."""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import time

import psutil

from labkit.engines import standby
from labkit.engines.base import Engine
from labkit.engines.listener import Listener
from labkit.engines.rendezvous import LocalRendezvous
from labkit.engines.spawn import RankProcess
from labkit.protocol import events
from labkit.protocol.job import Job, RankInfo

BACKLOG = 1000
"""Records that wait for the notebook at most; ranks that send more wait, so that memory stays bounded."""

LISTENERS_S = 2.0
"""How long threads that listen to ranks which have ended may take to notice it."""


class LocalEngine(Engine):
    """Starts ranks on this machine and brings their records: `world_size` of them, from number `first` on."""

    sends_words = True
    stacks_s = 5.0

    def __init__(self, world_size: int, first: int = 0) -> None:
        self.world_size, self._first = world_size, first
        self._events: queue.Queue[events.Event] = queue.Queue(BACKLOG)
        self.pids: list[int] = []
        """Process id of each rank."""
        self._ranks: list[RankProcess] = []
        self._listeners: list[threading.Thread] = []
        self._rendezvous: LocalRendezvous | None = None
        self._killed: set[int] = set()
        self._done: set[int] = set()
        """Ranks that have done their part, whose processes stay."""
        self._at_job: queue.SimpleQueue[None] = queue.SimpleQueue()
        """One for each rank that is not done with its job yet."""
        self._is_closed = False
        self._error: BaseException | None = None
        """What has ended a thread that listens to a rank, which is to be heard of."""

    def start(self, job: Job) -> None:
        """Start the ranks and send each the job. Returns once the processes exist, not once they are ready."""
        if not job.store:  # else it says where ranks of several machines meet
            self._rendezvous = self._new_rendezvous()
            job = job._replace(
                port=self._rendezvous.port,
                store=str(self._rendezvous.file),
                environment={**loopback_environment(), **job.environment},
            )
        try:
            self._ranks = self._take()
        except BaseException:
            self._close_rendezvous()
            raise
        self.pids = [process.pid for process in self._ranks]
        for _ in self._at_work():
            self._at_job.put(None)
        for rank, _ in self._at_work():
            thread = threading.Thread(target=self._listen, args=(rank, job), name=f"labkit-rank-{rank}", daemon=True)
            thread.start()
            self._listeners.append(thread)

    def poll(self, timeout_s: float) -> list[events.Event]:
        """Return the records that have arrived, waiting at most `timeout_s` for the first.

        Raises what has kept those of a rank from coming.
        """
        if self._error is not None:
            raise self._error
        arrived = []
        with contextlib.suppress(queue.Empty):
            arrived.append(self._events.get(timeout=timeout_s))
            while len(arrived) < BACKLOG:
                arrived.append(self._events.get_nowait())
        return arrived

    def ask_to_stop(self) -> None:
        """Ask every rank to stop; see `worker.Stopped`."""
        for _, process in self._at_work():
            process.say("stop")

    def ask_for_stacks(self) -> list[int]:
        """Ask every rank that lives for its stack and for details; return the ranks asked."""
        asked = [rank for rank, process in self._at_work() if process.ask_for_stacks()]
        for rank in asked:
            self._process(rank).say("details")
        return asked

    def say(self, rank: int, word: str) -> None:
        """Send one rank a word, for `Channel.listen`."""
        self._process(rank).send(word)

    def kill(self) -> None:
        """End every rank that still lives, and whatever processes it started."""
        errors: list[Exception] = []
        for rank, process in self._at_work():
            try:
                if process.is_alive:
                    self._killed.add(rank)
                    process.kill()
            except Exception as error:  # the others are to be ended all the same
                self._killed.discard(rank)
                errors.append(error)
        if errors:
            raise errors[0]

    def _at_work(self) -> list[tuple[int, RankProcess]]:
        """Return the processes that have not done their part, with their ranks."""
        return [(rank, each) for rank, each in enumerate(self._ranks, self._first) if rank not in self._done]

    def _process(self, rank: int) -> RankProcess:
        return self._ranks[rank - self._first]

    def killed(self, rank: int) -> bool:
        """Whether it was `kill` that ended this rank."""
        return rank in self._killed

    def close(self) -> None:
        """End what is left and let go of every process, thread, pipe and port."""
        if not self._ranks:
            self._close_rendezvous()  # once more, where that failed
            return
        with contextlib.ExitStack() as last:  # whatever one of these raises, the others are done
            last.callback(self._let_go)
            last.callback(self._wait_for_listeners)
            last.callback(self._wait_for_the_killed)
            self.kill()

    def _wait_for_the_killed(self) -> None:
        for rank in list(self._killed):  # also who has said meanwhile that it is done: it is to get no other work
            self._process(rank).wait_for_exit()

    def _wait_for_listeners(self) -> None:
        deadline = time.monotonic() + LISTENERS_S
        for thread in self._listeners:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _let_go(self) -> None:
        self._is_closed = True
        ranks, self._ranks = self._ranks, []
        with contextlib.ExitStack() as last:
            last.callback(self._give_back, ranks)
            self._close_rendezvous()

    def _new_rendezvous(self) -> LocalRendezvous:
        """Return where the ranks meet."""
        return LocalRendezvous()

    def _close_rendezvous(self) -> None:
        """Let go of where they met."""
        if self._rendezvous is not None:
            self._rendezvous.close()

    def _take(self) -> list[RankProcess]:
        """Return the processes that are to be the ranks."""
        return standby.take(self.world_size)

    def _give_back(self, ranks: list[RankProcess]) -> None:
        """Take processes that have ended, or done their part."""
        with contextlib.ExitStack() as last:
            last.callback(standby.done, self.world_size)
            for process in ranks:
                last.callback(process.close)

    def _put(self, event: events.Event) -> None:
        """Bring an event to the notebook. Waits while it is behind; drops the event once nobody takes any."""
        while not self._is_closed:
            with contextlib.suppress(queue.Full):
                self._events.put(event, timeout=0.1)
                return

    def _note_done(self, job: Job) -> None:
        """Note that a rank is done: once all are, the notebook needs no copy of the data in the job."""
        self._at_job.get()
        if self._at_job.empty():
            job.function.clear()

    def _listen(self, rank: int, job: Job) -> None:
        """Send a rank its job and bring what comes from it, its end above all, whatever happens."""
        try:
            info = RankInfo(rank, rank - self._first, job.world_size, self.world_size)
            listener = Listener(info, self._process(rank), self._put)
            last = listener.listen(job)
            self._note_done(job)
            if listener.last is not None:  # the process stays
                self._done.add(rank)
            self._put(last)
        except BaseException as error:
            self._error = error


@functools.cache
def loopback_environment() -> dict[str, str]:
    """Environment that keeps gloo, NCCL and TensorPipe on the loopback interface."""
    for interface, addresses in psutil.net_if_addrs().items():
        if any(address.address == "127.0.0.1" for address in addresses):
            found = {f"{library}_SOCKET_IFNAME": interface for library in ("GLOO", "NCCL", "TP")}
            return {**found, "LABKIT_INTERFACES": " ".join(found)}  # not meant for ranks on other machines
    return {}
