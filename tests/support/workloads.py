"""Functions that tests launch. Importable, so that ranks get them by reference; cells' functions go by value."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import labkit
from labkit.protocol.packing import RECEIVED


def where_am_i(worker):
    """Everything about a rank's place that the contract promises."""
    import psutil

    total = torch.ones(1)
    dist.all_reduce(total)
    process = psutil.Process()
    connections = getattr(process, "net_connections", None) or process.connections  # its name before psutil 6
    listening = [c.laddr.ip for c in connections("tcp") if c.status == psutil.CONN_LISTEN]
    return {
        "rank": worker.rank,
        "local_rank": worker.local_rank,
        "world_size": worker.world_size,
        "device": str(worker.device),
        "backend": dist.get_backend(),
        "threads": torch.get_num_threads(),
        "sum": total.item(),
        "pid": os.getpid(),
        "heavy": [name for name in ("pandas", "plotly", "ipywidgets", "IPython") if name in sys.modules],
        "of_the_notebook": [name for name in sys.modules if name.startswith(("labkit.monitor", "labkit.ui"))],
        "listening": listening,
        "environment": {name: os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")},
        "has_notebooks_main": RECEIVED in vars(sys.modules["__main__"]),
        "collects": gc.isenabled(),
    }


def fit(worker, steps=20):
    """A small DDP training that logs its loss."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(steps, 4 * worker.world_size, 8, generator=torch.Generator().manual_seed(1))
    for step in range(steps):
        loss = model(data[step].chunk(worker.world_size)[worker.rank]).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        worker.log(loss=loss.item())
    return [p.detach() for p in model.module.parameters()]


def spin(worker, barrier=True):
    """Log for ever, in step with the others; return the steps taken once stopped."""
    step = 0
    try:
        while True:
            if barrier:
                dist.barrier()
            worker.log(loss=1 / (1 + step))
            step += 1
            time.sleep(0.005)
    except labkit.Stopped:
        return step


def random_numbers(worker):
    import random

    import numpy as np

    return torch.rand(1).item(), random.random(), float(np.random.rand())  # noqa: NPY002


def go_astray(worker, how):
    """After a step with the others, rank 1 does something that does not end; they wait for it."""
    total = torch.ones(1)
    dist.all_reduce(total)
    worker.log(loss=1.0)
    if worker.rank == 1:
        ASTRAY[how]()
    dist.all_reduce(total)  # the others are here


def sleeps():
    time.sleep(1e6)


def loops():
    n = 0
    while True:  # rank 1
        n += 1


def holds_the_lock():
    re.match(r"(a+)+$", "a" * 40 + "b")  # native code that keeps Python's lock; no signal cuts it short


def waits_elsewhere():
    dist.barrier()  # of rank 1 alone


def is_suspended():
    os.kill(os.getpid(), signal.SIGSTOP)


ASTRAY = {
    "sleeps": sleeps,
    "loops": loops,
    "holds the lock": holds_the_lock,
    "waits elsewhere": waits_elsewhere,
    "is suspended": is_suspended,
}


def log_once(worker):
    worker.log(loss=1.0)
    return worker.rank


def slow_steps(worker, seconds):
    """Take steps that end in an all-reduce; in some of them rank 1 sleeps before it logs, and rank 0 does not.

    Return the steps logged.
    """
    logged = 0
    try:
        for step in range(1000):
            if worker.rank == 0:
                worker.log(loss=1.0)
            else:
                time.sleep(seconds[min(step, len(seconds) - 1)])
                worker.log(loss=1.0)
            logged += 1
            dist.all_reduce(torch.ones(1))
    except labkit.Stopped:
        return logged
