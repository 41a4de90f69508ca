"""Ranks as processes of this machine, started by `torch.multiprocessing.spawn` with the spawn start method."""

from __future__ import annotations

import codecs
import contextlib
import os
import queue
import signal
import socket
import sys
import threading
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import psutil
import torch.distributed as dist
import torch.multiprocessing as mp

from labkit import records, worker

SPAWNER = ThreadPoolExecutor(1, thread_name_prefix="labkit-spawner")
"""Every rank is started from this one thread, which lives as long as the notebook's kernel.

On Linux, `torch.multiprocessing.spawn` has each rank killed when the *thread* that started it ends; a run launched
from a short-lived thread would die with that thread.
"""


class _Channel(NamedTuple):
    """The notebook's ends of one rank's channels; see `worker.Ends`."""

    inbox: Connection
    inbox_lock: threading.Lock
    """Held while something is written to the inbox."""
    queue: Any  # a torch.multiprocessing SimpleQueue
    output: Connection


class LocalEngine:
    """Starts `world_size` ranks on this machine and brings their records."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._events: queue.SimpleQueue[records.Record] = queue.SimpleQueue()
        self.pids: list[int] = []
        """Process id of each rank."""
        self._processes: list[Any] = []
        self._channels: list[_Channel] = []
        self._listeners: list[threading.Thread] = []
        self._killed: set[int] = set()

    def start(self, job: worker.Job) -> None:
        """Start the ranks and send each the job. Returns once the processes exist, not once they are ready."""
        listener = socket.create_server(("127.0.0.1", 0), backlog=max(128, 2 * self.world_size))
        port = listener.getsockname()[1]
        # Given a socket, the store listens on that one only; by itself it would listen on every interface.
        self._store = dist.TCPStore(
            "127.0.0.1",
            port,
            self.world_size,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        job = job._replace(port=port, environment={**loopback_environment(), **job.environment})
        spawning = SPAWNER.submit(self._spawn)
        try:
            spawning.result()
        except BaseException:
            # Interrupted, or out of some resource: what was started must not wait for a job that never comes.
            spawning.exception()
            self.close()
            raise
        for rank in range(self.world_size):
            thread = threading.Thread(target=self._listen, args=(rank, job), name=f"labkit-rank-{rank}", daemon=True)
            thread.start()
            self._listeners.append(thread)

    def _spawn(self) -> None:
        context = mp.get_context("spawn")
        ends = []
        for _ in range(self.world_size):
            inbox_reader, inbox_writer = context.Pipe(duplex=False)
            output_reader, output_writer = context.Pipe(duplex=False)
            # One queue a rank: a rank killed while it writes can then spoil no other rank's records.
            rank_queue = context.SimpleQueue()
            ends.append(worker.Ends(inbox_reader, rank_queue, output_writer))
            self._channels.append(_Channel(inbox_writer, threading.Lock(), rank_queue, output_reader))
        if hasattr(signal, "pthread_sigmask"):
            # The notebook's interrupt goes to its whole process group. Ranks inherit this thread's mask, so that one
            # that is still importing does not die of it; `worker.main` then ignores the signal. Set for each launch,
            # because multiprocessing's resource tracker, when it starts, takes the mask away.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        with _main_not_run_again():
            started = mp.spawn(worker.main, args=(ends,), nprocs=self.world_size, join=False)
        self._processes = started.processes
        self.pids = [process.pid for process in self._processes]
        for end in ends:
            # Keep no copy of the ranks' ends, so that each channel closes when its rank is gone.
            end.inbox.close()
            end.output.close()
            end.queue._writer.close()  # type: ignore[attr-defined]

    def poll(self, timeout_s: float) -> list[records.Record]:
        """Give the records that have arrived, waiting at most `timeout_s` for the first."""
        arrived = []
        with contextlib.suppress(queue.Empty):
            arrived.append(self._events.get(timeout=timeout_s))
            while True:
                arrived.append(self._events.get_nowait())
        return arrived

    def ask_to_stop(self) -> None:
        """Ask every rank to stop; see `worker.Stopped`."""
        for channel in self._channels:
            # A rank that has not read its job yet has nothing to keep and will be killed; one that has ended is deaf.
            if channel.inbox_lock.acquire(blocking=False):
                with contextlib.suppress(OSError, ValueError):
                    channel.inbox.send("stop")
                channel.inbox_lock.release()

    def kill(self) -> None:
        """End every rank that still lives, and whatever processes it started."""
        for rank, process in enumerate(self._processes):
            if process.is_alive():
                self._killed.add(rank)
                children = _children(process.pid)
                process.kill()
                for child in children:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        child.kill()

    def killed(self, rank: int) -> bool:
        """Whether it was `kill` that ended this rank."""
        return rank in self._killed

    def close(self) -> None:
        """End what is left and let go of every process, thread, pipe and port."""
        self.kill()
        for process in self._processes:
            process.join()
        for thread in self._listeners:
            thread.join(timeout=2)
        for channel in self._channels:
            channel.inbox.close()
            channel.queue.close()
            channel.output.close()
        for process in self._processes:
            process.close()
        self._processes = []
        del self._store

    def _listen(self, rank: int, job: worker.Job) -> None:
        """Send the rank its job, then turn what comes from it into records, until it is gone."""
        process, channel = self._processes[rank], self._channels[rank]
        # Without a reader (the rank died at once) this ends in an error; the exit code will tell.
        with channel.inbox_lock, contextlib.suppress(OSError, ValueError):
            channel.inbox.send(job)
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        sources = {channel.queue._reader, channel.output, process.sentinel}
        while True:
            ready = wait(list(sources))
            if channel.output in ready:
                data = _read(channel.output)
                if text := decoder.decode(data, final=not data):
                    self._events.put(records.Output(rank, text))
                if not data:
                    sources.discard(channel.output)
            if channel.queue._reader in ready:
                try:
                    self._events.put(channel.queue.get())
                except (EOFError, OSError):
                    sources.discard(channel.queue._reader)
            if ready == [process.sentinel]:
                break
        process.join()
        self._events.put(records.Exit(rank, process.exitcode))


def _read(connection: Connection) -> bytes:
    try:
        return os.read(connection.fileno(), 1 << 16)
    except OSError:
        return b""


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


@contextlib.contextmanager
def _main_not_run_again() -> Iterator[None]:
    """Keep spawned processes from importing the script that is running.

    The function travels by value, so a rank has no need of the script. A script without an `if __name__ == "__main__"`
    guard would otherwise launch again in every rank.
    """
    actual = sys.modules["__main__"]
    stand_in = types.ModuleType("__main__")
    stand_in.__dict__.update({k: v for k, v in vars(actual).items() if k not in ("__file__", "__spec__")})
    stand_in.__spec__ = None
    sys.modules["__main__"] = stand_in
    try:
        yield
    finally:
        sys.modules["__main__"] = actual


def loopback_environment() -> dict[str, str]:
    """Environment that keeps gloo and NCCL on the loopback interface."""
    for interface, addresses in psutil.net_if_addrs().items():
        if any(address.address == "127.0.0.1" for address in addresses):
            return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    return {}
