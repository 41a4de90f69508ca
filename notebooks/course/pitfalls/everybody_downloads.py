"""Everybody downloads: an exhibit of the museum of pitfalls."""

from __future__ import annotations

import torch.distributed as dist

from course.pitfalls.base import Exhibit

EXHIBIT = Exhibit(
    wing="data",
    title="Everybody downloads",
    story="""
    `download=True` on every rank: each looks whether the file is there, and fetches it if not.
    The function below stands for a download; two barriers stand for bad luck: the other ranks
    come while rank 0 is half way. What do they read?
    """,
    choices=(
        "everybody has all of it",
        "an error on the late ones",
        "the late ones have half of it",
    ),
    shows=3,
    kind="wrong, in silence",
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


@EXHIBIT.symptom
def symptom(seen, world_size):
    return seen == ["first half, second half"] + ["first half, "] * (world_size - 1)


@EXHIBIT.right
def right(on_ranks, world_size, folder):
    """Fetch before you launch, or on one rank while the others wait at a barrier."""
    file = folder / "whole.txt"

    def load(worker):
        if worker.rank == 0:
            fetch(file)
        dist.barrier()
        return file.read_text()

    found = on_ranks(load)
    assert found == ["first half, second half"] * world_size
    return found
