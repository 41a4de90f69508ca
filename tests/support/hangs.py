"""Ways to hang, each of one rank while the others go on: what `test_hangs.py` and the grammar of faults do not have."""

from __future__ import annotations

import re
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


def two_groups(at):
    other = dist.new_group(group_desc="other")
    at.is_ready()
    groups = [dist.group.WORLD, other]
    for group in groups[::-1] if at.is_odd else groups:
        dist.all_reduce(at.total, group=group)


def ring_of_receivers(at):
    dist.recv(torch.ones(4), (at.rank + 1) % at.world_size)
    dist.send(torch.ones(4), (at.rank - 1) % at.world_size)


def monitored_barrier(at):
    if at.is_odd:
        time.sleep(1e6)
    dist.monitored_barrier(timeout=timedelta(seconds=0.5 if at.rank == 0 else 60))


class Row(NamedTuple):
    """What must be said of one way to hang."""

    hangs: object
    said: str
    """In the report's first line, a regular expression: {odd} the odd rank, {n} the number of the missed call."""


ROWS = {
    "a collective hidden in DDP": Row(
        hidden_in_ddp,
        r"ranks differ in call #(?P<n>\d+) of the default group: .*rank {odd} is in broadcast #(?P=n) .* at hangs.py.*",
    ),
    "another size, compared in detail": Row(
        another_size_in_detail,
        r"ranks met in different collectives: .*rank {odd} in ALLGATHER #{n} of shape \[20\]",
    ),
    "two groups": Row(
        two_groups,
        r".*rank {odd} has not entered all_reduce #{n} \(float32 \[1\], default group; .*"
        r"ranks? .* (has|have) not entered all_reduce #1 \(float32 \[1\], group 'other'; rank {odd} waits in it",
    ),
    "a ring of receivers": Row(
        ring_of_receivers,
        r"ranks .* wait for each other in a ring, 0 → 1 → .*0: rank 0 waits for float32 \[4\] from rank 1",
    ),
    "a monitored barrier": Row(monitored_barrier, r"rank {odd} did not come to monitored_barrier within 0.5 s"),
}


def plant(worker, row, odd, before, _compiler=torch._dynamo):
    """Meet the others some times, then hang. What DDP imports has come with the function, before the rank counts as
    started."""
    total = torch.ones(1)
    for number in range(before):
        dist.all_reduce(total)
        worker.log(before=number)
    worker.log(before=before)
    ROWS[row].hangs(Place(worker.rank == odd, odd, worker.rank, worker.world_size, before, total, worker))


def report(row, world_size, odd, before, on=None, silent_s=1.0):
    """Return the error by which a planted hang ends."""
    try:
        labkit.launch(
            plant, row, odd, before, world_size=world_size, stall_s=silent_s, live=False, on=on, backend="gloo"
        )
    except labkit.WorkerFailed as error:
        return error
    raise AssertionError(f"{row} did not hang")


def is_right(row, odd, before, error):
    """Whether a report names the right rank, the right collective, and its number."""
    said = ROWS[row].said.format(odd=odd, n=before + 1)
    headline = rf"(no rank .* anything for [\d.]+ s \(stall_s\): )?{said}"
    is_even = row == "a ring of receivers"
    return (is_even or error.rank == odd) and re.match(headline, error.diagnosis.headline) is not None
