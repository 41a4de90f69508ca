"""One process per GPU: an exhibit of the museum of pitfalls."""

from __future__ import annotations

import torch

from course.pitfalls.base import Exhibit

EXHIBIT = Exhibit(
    wing="machines",
    title="One process per GPU",
    story="""
    `mp.spawn(train, nprocs=torch.cuda.device_count())` starts the processes, on a machine that
    has no GPU. Each adds 1 to the weights. What are they afterwards?
    """,
    choices=(
        "an error: no GPU",
        "1: one process, on the CPU",
        "0: nothing was started, and no error",
    ),
    shows=3,
    kind="wrong, in silence",
    needs="no GPU",
)


def add_one(rank, weights):
    weights += 1


@EXHIBIT.broken
def one_process_per_gpu():
    weights = torch.zeros(3).share_memory_()
    torch.multiprocessing.spawn(add_one, args=(weights,), nprocs=torch.cuda.device_count())
    return weights.tolist()


@EXHIBIT.symptom
def symptom(seen):
    return seen == [0.0, 0.0, 0.0]


@EXHIBIT.right
def right(on_ranks, world_size):
    """Starting no process at all is not an error. Fall back to the CPU, as `labkit` does,
    or refuse; and check that somebody has trained."""

    def train(worker):
        weights = torch.zeros(3)
        add_one(worker.rank, weights)
        return weights.tolist()

    trained = on_ranks(train)
    assert trained == [[1.0, 1.0, 1.0]] * world_size
    return f"{len(trained)} processes have trained"
