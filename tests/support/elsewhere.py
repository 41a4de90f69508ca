"""Functions that tests launch on a cluster, and that wait for the test by files. Light to import."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import torch.distributed as dist

import labkit
from labkit.rank.spawned import warm_up
from labkit.system import host
from tests.support import workloads


def wait_for(path):
    """Wait until the test has made this file; an hour at most, should the test have died."""
    deadline = time.monotonic() + 3600
    while not Path(path).exists() and time.monotonic() < deadline:
        time.sleep(0.01)


def fit_and_show(worker, go=None):
    """Train under DDP, ten steps and, once the test says go, ten more; say where this rank was."""
    print(f"hello from {worker.rank}")
    weights = workloads.fit(worker, steps=10)
    if go:
        wait_for(go)
    weights += workloads.fit(worker, steps=10)
    return weights, workloads.where_am_i(worker), os.environ.get("CUDA_VISIBLE_DEVICES")


def fit_where_it_lies(worker, go):
    """Do so beside a module of the notebook's folder, with a variable that the ranks were given."""
    import lies_there

    return (lies_there.VALUE, os.getcwd(), os.environ["GIVEN"]), *fit_and_show(worker, go)


def die(worker, go):
    """Once the test says go, the last rank is killed; the others wait for it in a collective."""
    worker.log(loss=1.0)
    wait_for(go)
    if worker.rank == worker.world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def save_when_stopped(worker, folder):
    """Count steps until told to stop; keep how many there were, as a last checkpoint does."""
    step = 0
    try:
        while True:
            dist.barrier()
            step += 1
            worker.log(step, attempt=int(os.environ.get("SLURM_RESTART_COUNT", 0)))
            time.sleep(0.01)
    except labkit.Stopped:
        Path(folder, f"{worker.rank}.{os.environ.get('SLURM_RESTART_COUNT', 0)}").write_text(str(step))
        raise


def log_and_print(worker):
    print("before", flush=True)
    for step in range(5):
        worker.log(loss=float(step))
    return worker.rank


def raise_on_one(worker):
    worker.log(loss=1.0)
    if worker.rank == 1:
        raise ValueError("bad batch")
    time.sleep(1e5)


def keep_logging(worker):
    while True:
        worker.log(pid=os.getpid())
        time.sleep(0.01)


LINES = 1_000_000
"""Of 100 characters each, 100 MB."""


STEPS = 40


def pattern(rank, size):
    """What a rank returns: bytes that differ by rank and place."""
    return (bytes(range(rank, 251)) * (size // (251 - rank) + 1))[:size]


def line(number):
    return f"line {number} ".ljust(99, ".")


def carry_much(worker, sizes):
    """Log what is no number, print 100 MB on the last rank, and return as many bytes as were asked for."""
    for _ in range(3):
        worker.log(loss=float("nan"), up=float("inf"), down=float("-inf"))
    if worker.rank:
        for number in range(0, LINES, 1000):
            print("\n".join(map(line, range(number, number + 1000))))
    return pattern(worker.rank, sizes[worker.rank])


def hold(worker, tensor):
    """Log how much memory this process takes, and at most took, while it has a tensor."""
    warm_up()  # as a rank does while it has no work: in one run that was before this, in another it was not
    tensor.sum()  # what is mapped and was not read takes none
    held = psutil.Process().memory_info().rss  # `host.resident_bytes` is 0 where a system does not tell cheaply
    worker.log(held=held, peak=host.peak_bytes(os.getpid()))
    return tensor.numel()


def return_a_lock(worker, size):
    """Return what can be sent on rank 0, and then what cannot on rank 1."""
    import threading

    if worker.rank:
        time.sleep(1)
        return threading.Lock()
    return pattern(0, size)


def fill_the_disk(worker, path):
    """Fill the disk on rank 0; log, print and return something, whether there is room or not."""
    dist.barrier()
    if worker.rank == 0:
        with open(path, "wb", buffering=0) as file:
            for size in (1 << 20, 1 << 12, 1):
                try:
                    while True:
                        file.write(b"x" * size)
                except OSError:
                    continue
    dist.barrier()
    for step in range(STEPS):
        worker.log(loss=float(step), **{f"a_name_that_takes_room_{number}": 0.0 for number in range(100)})
        print(f"step {step}", "." * 2000)
        time.sleep(0.01)
    return pattern(worker.rank, 1_000_000)


def wait_for_signal(worker, name):
    """Log until a signal comes that the function has a handler for; return its number."""
    came = []
    signal.signal(getattr(signal, name), lambda number, _: came.append(number))
    step = 0
    while not came:
        worker.log(step, waits=1.0)
        step += 1
        time.sleep(0.05)
    return came[0]


def rank_and_job(worker):
    return worker.rank, os.environ.get("SLURM_JOB_ID")
