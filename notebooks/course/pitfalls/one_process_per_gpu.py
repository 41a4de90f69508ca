"""One process per GPU."""

import torch

from course.pitfalls.base import Exhibit, Expected
from course.pitfalls.helpers import add_one

EXHIBIT = Exhibit(
    wing="machines",
    title="nprocs=torch.cuda.device_count()",
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
    gives=[0.0, 0.0, 0.0],
    expects=Expected("at least 1 in each place", lambda found: min(found) >= 1),
    needs="no GPU",
)


@EXHIBIT.broken
def one_process_per_gpu():
    weights = torch.zeros(3).share_memory_()
    torch.multiprocessing.spawn(add_one, args=(weights,), nprocs=torch.cuda.device_count())
    return weights.tolist()


@EXHIBIT.right
def right(on_ranks):
    """`spawn` with `nprocs=0` starts nothing and raises nothing. Fall back to the CPU, as
    `labkit` does, or raise an error; and check that training took place."""

    def train(worker):
        weights = torch.zeros(3)
        add_one(worker.rank, weights)
        return weights.tolist()

    return on_ranks(train)[0]
