"""A fork after some computing."""

import multiprocessing
import time

import torch

from course.pitfalls.base import Exhibit

EXHIBIT = Exhibit(
    wing="starting",
    title="Processes that compute",
    story="""
    One text starts each `Process` by the default method, fork on Linux up to Python 3.13; [a
    guide of
    Keras](https://github.com/keras-team/keras-io/blob/master/guides/distributed_training_with_torch.py)
    forks on purpose, "to support notebooks". Here the notebook has computed something with
    several threads before it starts the children, which compute the same. They are killed
    after 3 seconds: how many have finished by then?
    """,
    choices=(
        "all of them",
        "all but one",
        "none",
    ),
    shows=3,
    gives=0,
    expects=lambda world_size: world_size,
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
        return sum(child.exitcode == 0 for child in children)
    finally:
        torch.set_num_threads(1)
        for child in children:
            child.kill()
            child.join()


@EXHIBIT.right
def right(on_ranks):
    """A forked child inherits the thread pool's state, but none of its threads: it waits
    forever for threads that do not exist. Spawned ranks, like these, create their own."""
    sums = on_ranks(lambda worker: compute())
    assert set(sums) == {compute()}
    return len(sums)
