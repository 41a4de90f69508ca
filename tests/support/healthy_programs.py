"""Healthy programs with pauses at random places: none is to be ended, and nothing is to be said of one.

One rank evaluates alone, compiles, reads or writes a file, computes, sleeps or has a child process at work while the
others wait for it, or have returned. None of that is a fault.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import labkit

PAUSES = ("sleeps", "computes", "evaluates", "compiles", "reads", "writes", "has a child")


def pause(how: str, for_s: float) -> None:
    """Do something else than to meet the other ranks for a while."""
    until_s = time.monotonic() + for_s
    if how == "sleeps":
        time.sleep(for_s)
    elif how == "has a child":
        subprocess.run([sys.executable, "-S", "-c", f"import time; time.sleep({for_s})"], check=True)
    with tempfile.TemporaryFile() as file:
        while time.monotonic() < until_s:
            if how == "computes":
                torch.ones(64, 64) @ torch.ones(64, 64)
            elif how == "evaluates":
                with torch.no_grad():
                    torch.nn.Linear(64, 64)(torch.ones(256, 64)).sum().item()
            elif how == "compiles":
                torch._dynamo.reset()
                torch.compile(lambda x: x * 2 + 1, backend="eager")(torch.ones(4))
            elif how == "writes":
                file.write(os.urandom(4096))
                os.fsync(file.fileno())
            else:
                Path(__file__).read_bytes()
                time.sleep(0.01)


class Plan:
    """What each rank does, step by step; the same for every rank that has it."""

    def __init__(self, chance: random.Random, world_size: int, longest_s: float) -> None:
        self.world_size, self.steps = world_size, chance.randint(1, 6)
        self.pauses: dict[tuple[int, int], tuple[str, float]] = {}
        for _ in range(2):  # before a step, or after the last, when others may have returned
            at = chance.randrange(self.steps + 1), chance.randrange(world_size)
            self.pauses[at] = chance.choice(PAUSES), 10 ** chance.uniform(-1, 0) * longest_s
        self.pair_goes_on = world_size > 2 and chance.random() < 0.5
        self.in_flight = chance.random() < 0.5
        """Whether a call is on its way during the pauses."""


def healthy(worker: Any, plan: Plan) -> int:
    """Do what is planned."""
    pair = dist.new_group([0, 1]) if plan.pair_goes_on else None
    x, steps = torch.ones(8), 0
    for step in range(plan.steps):
        work = dist.all_reduce(x, async_op=True) if plan.in_flight else None
        if (step, worker.rank) in plan.pauses:
            pause(*plan.pauses[step, worker.rank])
        if work is not None:
            work.wait()
        dist.barrier()
        if step % 2 == 0:
            worker.log(loss=1.0)
        steps += 1
    if pair is not None and worker.rank < 2:  # the others return meanwhile
        if (plan.steps, 1) in plan.pauses and worker.rank == 1:
            pause(*plan.pauses[plan.steps, 1])
        dist.barrier(pair)
    elif (plan.steps, worker.rank) in plan.pauses:
        dist.destroy_process_group()  # as scripts do before the last evaluation
        pause(*plan.pauses[plan.steps, worker.rank])
    return steps


def try_out(plan: Plan, on: Any) -> str:
    """Return what was said of a healthy program, or how it ended; "" if it was left alone."""
    run = labkit.launch(healthy, plan, world_size=plan.world_size, on=on, live=False, wait=False)
    while not run.over.wait(0.1):
        if _accuses(run.notice):
            said = run.notice
            run.stop(0)
            return said
    return str(run.error) if run.error else "" if run.results == [plan.steps] * plan.world_size else run.status


def _accuses(notice: str) -> bool:
    """Whether a notice is more than that a rank is new."""
    return bool(notice) and ("while rank" in notice or not (notice.startswith("rank") or "new since" in notice))
