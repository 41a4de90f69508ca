"""A fork after some computing: an exhibit of the museum of pitfalls."""

from __future__ import annotations

import multiprocessing
import time

import torch

from course.pitfalls.base import Exhibit

EXHIBIT = Exhibit(
    wing="starting",
    title="A fork after some computing",
    story="""
    [*Writing Distributed Applications with
    PyTorch*](https://docs.pytorch.org/tutorials/intermediate/dist_tuto.html) uses
    `Process`, which forks on Linux up to Python 3.13; [a guide of
    Keras](https://github.com/keras-team/keras-io/blob/master/guides/distributed_training_with_torch.py)
    forks on purpose, "to support notebooks". Here the notebook has computed something with
    several threads before it forks. The children are killed after 3 seconds: how far have
    they come by then?
    """,
    choices=(
        "exit codes 0",
        "exit codes 1",
        "stuck: no exit codes",
    ),
    shows=3,
    kind="hang",
    needs="fork",
)


def compute():
    torch.set_num_threads(2)
    return torch.ones(1000, 1000).matmul(torch.ones(1000, 1000)).sum().item()


@EXHIBIT.broken
def fork_after_computing(world_size):
    compute()
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=compute, daemon=True) for _ in range(world_size)]
    try:
        for child in children:
            child.start()
        deadline = time.monotonic() + 3
        while time.monotonic() < deadline and any(child.is_alive() for child in children):
            time.sleep(0.02)
        return [child.exitcode for child in children]
    finally:
        torch.set_num_threads(1)
        for child in children:
            child.kill()
            child.join()


@EXHIBIT.symptom
def symptom(seen, world_size):
    return seen == [None] * world_size


@EXHIBIT.right
def right(on_ranks, world_size):
    """A forked child has only one of its parent's threads, believes that it has all of
    them, and waits for the others. Spawned ranks, like these, have threads of their own."""
    sums = on_ranks(lambda worker: compute())
    assert sums == [sums[0]] * world_size
    return sums
