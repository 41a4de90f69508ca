"""Ways to hang, each of one rank while the others go on; and faults that a transport may keep from the others."""

from __future__ import annotations

import os
import queue
import re
import signal
import threading
import time
from datetime import timedelta
from typing import NamedTuple

import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import labkit
from labkit.rank import recorder
from tests.support import transports


def is_recorded():
    """Whether this PyTorch's flight recorder has gloo's calls: since 2.15."""
    try:
        recorder.recorded("gloo")
    except (AttributeError, TypeError):
        return False
    return True


class Network(nn.Module):
    """Has buffers, and a branch that is not always taken."""

    def __init__(self):
        super().__init__()
        self.always, self.sometimes, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x, both=True):
        return self.norm(self.always(x) + self.sometimes(x) if both else self.always(x))


class Place(NamedTuple):
    """What a way to hang is told on a rank."""

    is_odd: bool
    odd: int
    rank: int
    world_size: int
    before: int
    total: torch.Tensor
    worker: labkit.Worker

    def is_ready(self):
        """What takes long on a busy machine has been done: begin to count the silence anew."""
        self.worker.log(ready=1)


def hidden_in_ddp(at):
    model = DistributedDataParallel(Network())
    at.is_ready()
    model(torch.ones(2, 4)).sum().backward()
    if at.is_odd:
        model.eval()(torch.ones(2, 4))
    dist.barrier()


def another_size_in_detail(at):
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        group = dist.new_group()
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)  # the process may stay, for another way to hang
    for number in range(at.before):  # each is checked by another: on a busy machine they take more than a second
        dist.all_reduce(at.total, group=group)
        at.worker.log(before=number)
    mine = torch.ones(20 if at.is_odd else 64)
    dist.all_gather([torch.empty_like(mine) for _ in range(at.world_size)], mine, group=group)


def ring_of_receivers(at):
    dist.recv(torch.ones(4), (at.rank + 1) % at.world_size)
    dist.send(torch.ones(4), (at.rank - 1) % at.world_size)


def monitored_barrier(at):
    if at.is_odd:
        time.sleep(1e6)
    dist.monitored_barrier(timeout=timedelta(seconds=0.5 if at.rank == 0 else 60))


def in_a_thread_of_the_others(at):
    if at.is_odd:
        time.sleep(1e6)
    thread = threading.Thread(target=dist.all_reduce, args=(at.total,))
    thread.start()
    thread.join()


def waits_for_a_thread_that_has_failed(at):
    def load():
        raise ValueError("no more batches")  # Python prints it

    if at.is_odd:
        threading.Thread(target=load).start()
        queue.Queue().get()
    dist.all_reduce(at.total)


def deep_in_a_recursion(at, count=200):
    if not at.is_odd:
        dist.all_reduce(at.total)
    elif count:
        deep_in_a_recursion(at, count - 1)
    else:
        time.sleep(1e6)


def sends_more_than_is_received(at):
    if at.rank == at.odd - 1:
        dist.recv(torch.ones(8), at.odd)
    elif at.is_odd:
        dist.send(torch.ones(16), at.odd - 1)


def past_a_groups_limit(at):
    group = dist.new_group()
    dist.set_timeout(timedelta(seconds=1), group)
    if at.is_odd:
        time.sleep(1e6)
    dist.all_reduce(at.total, group=group)


def past_nccls_limit(at):
    """As NCCL's watchdog ends those that wait too long."""
    if at.is_odd:
        time.sleep(1e6)
    transports.abort_after(at.rank, 1, at.before + 1)
    dist.all_reduce(at.total)


def leaves(at):
    if at.is_odd:
        dist.destroy_process_group()
        time.sleep(1e6)
    dist.all_reduce(at.total)


def returns(at):
    if not at.is_odd:
        dist.all_reduce(at.total)


def returns_from_a_group_of_two(at):
    pair = dist.new_group([at.odd - 1, at.odd])
    if at.rank == at.odd - 1:
        dist.all_reduce(at.total, group=pair)


def is_killed(at):
    if at.is_odd:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(at.total)


class Row(NamedTuple):
    """What must be said of one way to hang."""

    hangs: object
    said: str
    """In the report's first line, a regular expression: {odd} the odd rank, {n} the number of the missed call."""
    silent_s: float | None = 1.0
    """`stall_s` of the run; None: it ends by itself."""


UNNOTICED = ("leaves its group", "returns", "returns from a group of two", "is killed")
"""Rows that libuv and NCCL tell nobody of."""

ROWS = {
    "a collective hidden in DDP": Row(
        hidden_in_ddp,
        r"ranks met in different collectives, call #(?P<n>\d+) of the default group: .*"
        r"rank {odd} is in broadcast #(?P=n) .* at hangs.py.*",
    ),
    "another size, compared in detail": Row(
        another_size_in_detail,
        r"ranks met in different collectives: .*rank {odd} in ALLGATHER #{n} of shape \[20\]",
    ),
    "a ring of receivers": Row(
        ring_of_receivers,
        r"ranks .* wait for each other: rank 0 waits in recv \(float32 \[4\], from rank 1\) at hangs\.py.*",
    ),
    "missed in another thread": Row(in_a_thread_of_the_others, r"rank {odd} has not entered all_reduce #{n} .*"),
    "waits for a thread that has failed": Row(
        waits_for_a_thread_that_has_failed,
        r"rank {odd} has not entered all_reduce #{n} .*rank {odd} is in queue\.Queue\(\)\.get at hangs\.py.*",
    ),
    "deep in a recursion": Row(
        deep_in_a_recursion, r"rank {odd} has not entered all_reduce #{n} .*rank {odd} is in time\.sleep at hangs\.py.*"
    ),
    "sends more than is received": Row(sends_more_than_is_received, ".*got 64 bytes", None),
    "past a group's limit": Row(
        past_a_groups_limit,
        r"rank {odd} did not come to all_reduce #1 \(.*\) within 1 s, where rank \d waited .*",
        None,
    ),
    "past NCCL's limit": Row(
        past_nccls_limit, r"rank {odd} did not come to ALLREDUCE #{n} within 1 s, where rank \d waited.*", None
    ),
    "leaves its group": Row(
        leaves, r"rank {odd} left the process group .* (was|were) still in all_reduce #{n}.*", None
    ),
    "returns": Row(returns, r"rank {odd} returned while .* still in all_reduce #{n} .*", None),
    "returns from a group of two": Row(
        returns_from_a_group_of_two, r"rank {odd} returned while rank \d was still in all_reduce #1 \(.*", None
    ),
    "is killed": Row(is_killed, r"rank {odd} .*\(SIGKILL\).*", None),
    "a monitored barrier": Row(monitored_barrier, r"rank {odd} did not come to monitored_barrier within 0.5 s"),
}


def plant(worker, row, odd, before, path=None, _compiler=torch._dynamo):
    """Meet the others some times, then hang. What DDP imports has come with the function, before the rank counts as
    started."""
    total = torch.ones(1)
    for number in range(before):
        dist.all_reduce(total)
        worker.log(before=number)
    worker.log(before=before)
    if path:
        transports.keep_open(path)
    ROWS[row].hangs(Place(worker.rank == odd, odd, worker.rank, worker.world_size, before, total, worker))


def report(row, world_size, odd, before, on=None, path=None):
    """Return the error by which a planted hang ends. With `path` an end goes unnoticed (`transports.holding`)."""
    try:
        options = {"world_size": world_size, "stall_s": ROWS[row].silent_s, "live": False, "on": on}
        labkit.launch(plant, row, odd, before, path, backend="gloo", **options)
    except labkit.WorkerFailed as error:
        return error
    raise AssertionError(f"{row} did not hang")


def is_right(row, odd, before, error):
    """Whether a report names the right rank, the right collective, and its number."""
    said = ROWS[row].said.format(odd=odd, n=before + 1)
    headline = rf"(no rank .* anything for [\d.]+ s \(stall_s\): )?{said}"
    is_even = row in ("a ring of receivers", "sends more than is received")
    return (is_even or error.rank == odd) and re.match(headline, error.diagnosis.headline) is not None
