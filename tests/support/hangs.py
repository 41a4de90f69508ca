"""Ways to hang, each of one rank while the others go on: those of lessons 14 and 14c, and more; for tests."""

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


def barrier_of_one(at):
    if at.is_odd:
        dist.barrier()
    dist.all_reduce(at.total)


def hidden_in_ddp(at):
    model = DistributedDataParallel(Network())
    at.is_ready()
    model(torch.ones(2, 4)).sum().backward()
    if at.is_odd:
        model.eval()(torch.ones(2, 4))
    dist.barrier()


def another_order(at):
    calls = [lambda: dist.all_reduce(at.total), lambda: dist.broadcast(at.total, src=0)]
    for call in calls[::-1] if at.is_odd else calls:
        call()


def another_size(at):
    mine = torch.ones(20 if at.is_odd else 64)
    dist.all_gather([torch.empty_like(mine) for _ in range(at.world_size)], mine)


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


def uneven_inputs(at):
    dist.all_reduce(torch.ones(1 if at.is_odd else 7850))


def another_type(at):
    dist.all_reduce(torch.ones(1024, dtype=torch.float64 if at.is_odd else torch.float32))


def unused_parameter(at):
    model = DistributedDataParallel(Network())
    at.is_ready()
    for step in range(3):
        model.zero_grad()
        model(torch.ones(2, 4), both=not (at.is_odd and step == 1)).sum().backward()


def stops_alone(at):
    if not at.is_odd:
        dist.all_reduce(at.total)


def sleeps(at):
    if at.is_odd:
        time.sleep(1e6)
    dist.all_reduce(at.total)


def loops(at):
    while at.is_odd:
        pass
    dist.all_reduce(at.total)


def holds_the_lock(at):
    if at.is_odd:
        re.match(r"(a+)+$", "a" * 40 + "b")
    dist.all_reduce(at.total)


def misses_an_asynchronous_one(at):
    handles = [dist.all_reduce(at.total.clone(), async_op=True) for _ in range(1 if at.is_odd else 3)]
    for handle in handles:
        handle.wait()
    if at.is_odd:
        time.sleep(1e6)


def two_groups(at):
    other = dist.new_group(group_desc="other")
    at.is_ready()
    groups = [dist.group.WORLD, other]
    for group in groups[::-1] if at.is_odd else groups:
        dist.all_reduce(at.total, group=group)


def ring_of_receivers(at):
    dist.recv(torch.ones(4), (at.rank + 1) % at.world_size)
    dist.send(torch.ones(4), (at.rank - 1) % at.world_size)


def receives_from_a_sleeper(at):
    if at.is_odd:
        time.sleep(1e6)
    if at.rank == (at.odd + 1) % at.world_size:
        dist.recv(torch.ones(4), at.odd)
    dist.all_reduce(at.total)


def monitored_barrier(at):
    if at.is_odd:
        time.sleep(1e6)
    dist.monitored_barrier(timeout=timedelta(seconds=0.5 if at.rank == 0 else 60))


class Row(NamedTuple):
    """What must be said of one way to hang."""

    hangs: object
    said: str
    """In the report's first line, a regular expression: {odd} the odd rank, {n} the number of the missed call."""
    either: bool = False
    """Whether nobody can say who is to blame: where two ranks differ, or all are in a circle."""


DIFFER = r"ranks differ in call #{n} of the default group"
SIZES = (
    r"ranks met in {kind} (at hangs.py, line \d+ )?with tensors of different sizes(; rank {{odd}} noticed; "
    r"ranks? .* (was|were) in {kind} #{{n}} \(float32 \[{others}\]\)|"
    r", call #{{n}} of the default group: .*rank {{odd}} is in {kind} #{{n}} \(float32 \[{odd}\]\))"
)
"""Of the rank that notices there is a record only if gloo did not end it in native code."""

IN_IT = (
    r"rank {odd} has not entered all_reduce #{n} \(float32 \[1\], default group; ranks? .* waits? in it at hangs.py,"
)
ROWS = {
    "a barrier on one rank only": Row(
        barrier_of_one, rf"{DIFFER}: .*rank {{odd}} is in barrier #{{n}} at .*", either=True
    ),
    "a collective hidden in DDP": Row(
        hidden_in_ddp,
        r"ranks differ in call #(?P<n>\d+) of the default group: .*rank {odd} is in broadcast #(?P=n) .* at hangs.py.*",
        either=True,
    ),
    "another order": Row(another_order, rf"{DIFFER}.*: .*rank {{odd}} is in broadcast #{{n}} .*", either=True),
    "another size": Row(another_size, SIZES.format(kind="all_gather", odd=20, others=64), either=True),
    "another size, compared in detail": Row(
        another_size_in_detail,
        r"ranks met in different collectives: .*rank {odd} in ALLGATHER #{n} of shape \[20\]",
        either=True,
    ),
    "uneven inputs": Row(uneven_inputs, SIZES.format(kind="all_reduce", odd=1, others=7850), either=True),
    "an unused parameter": Row(
        unused_parameter, "rank {odd} failed: RuntimeError: Expected to have finished reduction"
    ),
    "early stopping on one rank": Row(
        stops_alone, r"rank {odd} returned while rank \d was still in all_reduce #{n} \(float32 \[1\]\)"
    ),
    "sleeps": Row(
        sleeps, rf"{IN_IT} line \d+\); its last was all_reduce #{{before}}, and it is in time.sleep at hangs.py"
    ),
    "loops": Row(loops, rf"{IN_IT} line \d+\); its last was all_reduce #{{before}}, and it is at hangs.py"),
    "holds Python's lock": Row(
        holds_the_lock,
        r"ranks? .* in all_reduce #{n} \(float32 \[1\], default group\) at .*; rank {odd} is in re.match",
    ),
    "misses an asynchronous one": Row(
        misses_an_asynchronous_one,
        r"rank {odd} has not entered all_reduce #{after} \(float32 \[1\], default group; .*; "
        r"its last was all_reduce #{n}",
    ),
    "two groups": Row(
        two_groups,
        r".*rank {odd} has not entered all_reduce #{n} \(float32 \[1\], default group; .*"
        r"ranks? .* (has|have) not entered all_reduce #1 \(float32 \[1\], group 'other'; rank {odd} waits in it",
        either=True,
    ),
    "a ring of receivers": Row(
        ring_of_receivers,
        r"ranks .* wait for each other in a ring, 0 → 1 → .*0: rank 0 waits for float32 \[4\] from rank 1",
        either=True,
    ),
    "receives from a sleeper": Row(
        receives_from_a_sleeper, r".*rank {next}'?s? .*waits for float32 \[4\] from rank {odd} at hangs.py"
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


class Judged(NamedTuple):
    """What of a report is right; of what there is to name."""

    rank: bool
    collective: bool
    """Its kind, sizes, type and group, and who is in it."""
    number: bool


def judge(row, world_size, odd, before, error):
    """Return whether a report names the right rank, the right collective, and its number."""
    numbers = {"n": before + 1, "before": before, "after": before + 2}
    is_even = row == "a ring of receivers" or (world_size == 2 and ROWS[row].either)

    def says(numbers):
        said = ROWS[row].said.format(odd=odd, next=(odd + 1) % world_size, **numbers)
        return re.match(rf"(no rank .* anything for [\d.]+ s \(stall_s\): )?{said}", error.diagnosis.headline)

    any_number = dict.fromkeys(numbers, r"\d+")
    return Judged(is_even or error.rank == odd, says(any_number) is not None, says(numbers) is not None)
