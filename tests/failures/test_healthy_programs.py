"""Healthy programs with pauses at random places: none is ended, and nothing is said of one.

One rank compiles, writes a file, computes, sleeps or has a child process at work while the others wait for it, or have
returned. None of that is a fault.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time

import pytest
import torch
import torch.distributed as dist

import labkit
from labkit.monitor.asking import QUIET_S
from tests.support.tiers import few

SESSION_RANKS = 3


def has_a_child():
    subprocess.run([sys.executable, "-S", "-c", f"import time; time.sleep({QUIET_S})"], check=True)


def compiles():
    torch._dynamo.reset()
    torch.compile(lambda x: x * 2 + 1, backend="eager")(torch.ones(4))


def writes():
    with tempfile.TemporaryFile() as file:
        file.write(os.urandom(4096))
        os.fsync(file.fileno())


PAUSES = (lambda: time.sleep(QUIET_S), has_a_child, compiles, writes, lambda: torch.ones(64, 64) @ torch.ones(64, 64))


def pause(worker, chance):
    """Have one rank, the same on all, do something else than to meet the others for a while."""
    rank, do, for_s = chance.randrange(worker.world_size), chance.choice(PAUSES), 2 * QUIET_S * chance.uniform(0.1, 1)
    until_s = time.monotonic() + for_s
    while worker.rank == rank and time.monotonic() < until_s:
        do()


def healthy(worker, seed):
    """Meet some times, with pauses between; a pair of ranks, or one that has left its group, goes on at the end."""
    chance = random.Random(seed)
    pair, x = dist.new_group([0, 1]), torch.ones(8)
    for step in range(3):
        call = dist.all_reduce(x, async_op=True)  # on its way during the pause
        pause(worker, chance)
        call.wait()
        if step % 2 == 0:
            worker.log(loss=1.0)
    if worker.rank < 2:
        if worker.rank == 1:
            time.sleep(QUIET_S)
        dist.barrier(pair)
    if worker.rank == 0:
        dist.destroy_process_group()  # as scripts do before the last evaluation
        time.sleep(QUIET_S)
    return True


def accuses(notice):
    """Whether a notice says more than that a rank is new."""
    return bool(notice) and ("while rank" in notice or not (notice.startswith("rank") or "new since" in notice))


@pytest.mark.spawns
@pytest.mark.parametrize("seed", few(range(4), 4))
def test_nothing_is_said_of_a_healthy_program_whatever_pauses_it_makes(seed, ranks):
    run = labkit.launch(healthy, seed, on=ranks, live=False, wait=False)
    said = []
    while not run.over.wait(0.1):
        said += [run.notice] if accuses(run.notice) else []
    assert (run.error, said, run.results) == (None, [], [True] * 3)
