"""An engine without ranks: it brings the events that a test puts in, and notes what it is asked."""

from __future__ import annotations

import queue
import time
from types import SimpleNamespace

import torch

from labkit.engines.base import Engine
from labkit.protocol import events
from labkit.protocol.job import Job, RankInfo
from labkit.protocol.packing import pack_call
from labkit.rank.channels import Channel
from labkit.rank.log_batcher import LogBatcher
from labkit.rank.worker import Worker

A_JOB = Job(
    function=pack_call(print, (), {}),
    world_size=2,
    backend=None,
    cuda_devices=0,
    threads=1,
    seed=0,
    port=0,
    start_s=0.0,
    environment={},
    cells={},
)


def a_job():
    return A_JOB._replace(start_s=time.time())


class FakeEngine(Engine):
    """Rank r's process ends by SIGKILL when it is killed, unless `immortal`."""

    failure_grace_s = 0.1
    stacks_s = 0.2
    stop_grace_s = 0.1

    def __init__(self, world_size: int = 2, immortal: bool = False) -> None:
        self.world_size, self.immortal = world_size, immortal
        self.pids: list[int] = []
        self.arrived: queue.Queue[events.Event | Exception] = queue.Queue()
        self.calls: list[str] = []
        self._killed: set[int] = set()

    def start(self, job: Job) -> None:
        self.calls.append("start")

    def poll(self, timeout_s: float) -> list[events.Event]:
        try:
            event = self.arrived.get(timeout=timeout_s) if timeout_s else self.arrived.get_nowait()
        except queue.Empty:
            return []
        if isinstance(event, Exception):
            raise event
        return [event]

    def ask_to_stop(self) -> None:
        self.calls.append("ask_to_stop")

    def ask_for_stacks(self) -> list[int]:
        self.calls.append("ask_for_stacks")
        return list(range(self.world_size))

    def kill(self) -> None:
        self.calls.append("kill")
        if not self.immortal:
            for rank in set(range(self.world_size)) - self._killed:
                self._killed.add(rank)
                self.arrived.put(events.Exit(rank, -9))

    def killed(self, rank: int) -> bool:
        return rank in self._killed

    def close(self) -> None:
        self.calls.append("close")


class KeptChannel(Channel):
    """Rank 1's channel, to nobody: keeps what is sent."""

    def __init__(self):
        self.sent = []
        super().__init__(SimpleNamespace(put=self.sent.append), 1)


def a_worker(**options):
    """Return rank 1's worker, the batcher of its log calls, and the channel that keeps them."""
    channel = KeptChannel()
    batcher = LogBatcher(1, channel.send, 0.0)
    return Worker(RankInfo(1, 1, 2, 2), torch.device("cpu"), batcher, channel, **options), batcher, channel
