"""Ranks as processes of this machine, started by `torch.multiprocessing.spawn` with the spawn start method."""

from __future__ import annotations

import codecs
import contextlib
import functools
import os
import queue
import threading
from multiprocessing.connection import Connection, wait

import psutil
import torch.distributed as dist

from labkit.engines.spawn import RankProcess, spawn
from labkit.protocol import events, plugins
from labkit.protocol.job import Job
from labkit.rank.store import open_store

BACKLOG = 1000
"""Records that wait for the notebook at most; ranks that send more wait, so that memory stays bounded."""


class LocalEngine:
    """Starts `world_size` ranks on this machine and brings their records."""

    outlives_notebook = False
    stop_grace_s = 2.0
    failure_grace_s = 0.4
    stacks_s = 10.0
    """For those alone of which no companion can tell whether they will answer."""
    quiet_s = 0.0
    folder: None = None

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._events: queue.Queue[events.Event] = queue.Queue(BACKLOG)
        self.pids: list[int] = []
        """Process id of each rank."""
        self._ranks: list[RankProcess] = []
        self._listeners: list[threading.Thread] = []
        self._killed: set[int] = set()
        self._done: set[int] = set()
        """Ranks that have done their part, whose processes stay."""

    def start(self, job: Job) -> None:
        """Start the ranks and send each the job. Returns once the processes exist, not once they are ready."""
        with job.connecting("127.0.0.1"):
            self._store, port = self._open_store()
        job = job._replace(port=port, environment={**loopback_environment(), **job.environment})
        try:
            self._ranks = self._take()
        except BaseException:
            del self._store
            raise
        self.pids = [process.pid for process in self._ranks]
        for rank, _ in self._at_work():
            thread = threading.Thread(target=self._listen, args=(rank, job), name=f"labkit-rank-{rank}", daemon=True)
            thread.start()
            self._listeners.append(thread)

    def poll(self, timeout_s: float) -> list[events.Event]:
        """Return the records that have arrived, waiting at most `timeout_s` for the first."""
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
            self._ranks[rank].say("details")
        return asked

    def say(self, rank: int, word: str) -> None:
        """Send one rank a word, for `Channel.listen`."""
        self._ranks[rank].send(word)

    def kill(self) -> None:
        """End every rank that still lives, and whatever processes it started."""
        for rank, process in self._at_work():
            if process.is_alive:
                self._killed.add(rank)
                process.kill()

    def _at_work(self) -> list[tuple[int, RankProcess]]:
        """Return the processes that have not done their part, with their ranks."""
        return [(rank, process) for rank, process in enumerate(self._ranks) if rank not in self._done]

    def killed(self, rank: int) -> bool:
        """Whether it was `kill` that ended this rank."""
        return rank in self._killed

    def close(self) -> None:
        """End what is left and let go of every process, thread, pipe and port."""
        if not self._ranks:
            return
        self.kill()
        for rank in list(self._killed):  # also who has said meanwhile that it is done: it is to get no other work
            self._ranks[rank].wait_for_exit()
        for thread in self._listeners:
            thread.join(timeout=2)
        ranks, self._ranks = self._ranks, []
        del self._store
        self._give_back(ranks)

    def _open_store(self) -> tuple[dist.TCPStore, int]:
        """Return the store through which the ranks meet, and its port."""
        return open_store(self.world_size)

    def _take(self) -> list[RankProcess]:
        """Return the processes that are to be the ranks."""
        ranks: list[RankProcess] = next(iter(plugins.those_with("take_ranks")), spawn)(self.world_size)
        return ranks

    def _give_back(self, ranks: list[RankProcess]) -> None:
        """Take processes that have ended, or done their part."""
        for process in ranks:
            process.close()
        for done in plugins.those_with("ranks_done"):
            done(self.world_size)

    def _listen(self, rank: int, job: Job) -> None:
        """Send the rank its job, then turn what comes from it into records, until it is gone."""
        mine = self._ranks[rank]
        mine.send_job(rank, job)
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        process, output, stacks, reader = mine.process, mine.output, mine.stacks, mine.queue._reader
        sources = {reader, output, stacks, process.sentinel}
        while True:
            ready = wait(list(sources))
            # What a rank leaves behind may write on, or hold its output open; all of the rank's own is in one read.
            is_last = process.sentinel in ready
            # What a rank had printed when it sent a event comes before it. A pipe holds no more than one read takes.
            if output in ready or (reader in ready and output in sources and output.poll()):
                data = _read(output)
                if text := decoder.decode(data, final=not data):
                    self._events.put(events.Output(rank, text))
                if not data or is_last:
                    sources.discard(output)
            if stacks in ready:
                if data := _read(stacks):
                    self._events.put(events.Stack(rank, data.decode("utf-8", "replace")))
                else:
                    sources.discard(stacks)
            if reader in ready:
                try:
                    event = mine.queue.get()
                except (EOFError, OSError):
                    sources.discard(reader)
                else:
                    if isinstance(event, events.Exit):  # the process stays
                        self._done.add(rank)
                        self._events.put(event)
                        return
                    self._events.put(event)
            if ready == [process.sentinel]:
                break
        self._events.put(events.Exit(rank, mine.wait_for_exit()))


def _read(connection: Connection) -> bytes:
    with contextlib.suppress(OSError):
        return os.read(connection.fileno(), 1 << 16)
    return b""


@functools.cache
def loopback_environment() -> dict[str, str]:
    """Environment that keeps gloo, NCCL and TensorPipe on the loopback interface."""
    for interface, addresses in psutil.net_if_addrs().items():
        if any(address.address == "127.0.0.1" for address in addresses):
            return {f"{library}_SOCKET_IFNAME": interface for library in ("GLOO", "NCCL", "TP")}
    return {}
