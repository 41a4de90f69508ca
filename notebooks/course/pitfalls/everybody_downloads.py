"""Everybody downloads."""

import torch.distributed as dist

from course.pitfalls.base import Exhibit, OnEachRank

EXHIBIT = Exhibit(
    wing="data",
    title="download=True on every rank",
    story="""
    `download=True` on every rank: each checks whether the file is there, and downloads it if
    not. The function below stands for a download. Two barriers stand for bad luck: the other
    ranks arrive while rank 0 is half way. What do they read?
    """,
    choices=(
        "the whole file",
        "nothing: an error",
        "half of the file",
    ),
    shows=3,
    gives=lambda world_size: ["first half, second half"] + ["first half, "] * (world_size - 1),
    expects=OnEachRank("first half, second half"),
)


def fetch(file, pause=lambda: None):
    with file.open("w") as stream:
        stream.write("first half, ")
        stream.flush()
        pause()
        stream.write("second half")


@EXHIBIT.broken
def everybody_downloads(on_ranks, folder):
    file = folder / "half.txt"

    def load(worker):
        if not file.exists() and worker.rank == 0:
            fetch(file, pause=lambda: (dist.barrier(), dist.barrier()))
            return file.read_text()
        dist.barrier()  # comes later, and finds the file
        found = file.read_text() if file.exists() else "nothing"
        dist.barrier()
        return found

    return on_ranks(load)


@EXHIBIT.right
def right(on_ranks, folder):
    """Download before the launch, or on one rank (of each machine, if they share no disk) while
    the others wait at a barrier."""
    file = folder / "whole.txt"

    def load(worker):
        if worker.rank == 0:
            fetch(file)
        dist.barrier()
        return file.read_text()

    return on_ranks(load)
