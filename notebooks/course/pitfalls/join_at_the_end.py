"""join, and no look at the exit code: an exhibit of the museum of pitfalls."""

from __future__ import annotations

import labkit
from course.pitfalls.base import Exhibit
from course.pitfalls.helpers import python

EXHIBIT = Exhibit(
    wing="starting",
    title="join, and no look at the exit code",
    story="""
    [*Writing Distributed Applications with
    PyTorch*](https://docs.pytorch.org/tutorials/intermediate/dist_tuto.html) ends with `for
    p in processes: p.join()`. Here the child fails. How does the program end?
    """,
    choices=(
        "the child's error",
        "exit code 1",
        "success: exit code 0",
    ),
    shows=3,
    kind="wrong, in silence",
)


program = """
import multiprocessing, operator
if __name__ == "__main__":
    p = multiprocessing.get_context("spawn").Process(target=operator.truediv, args=(1, 0))
    p.start()
    p.join()
    print("training complete")
"""


@EXHIBIT.broken
def join_at_the_end():
    return python(program)


@EXHIBIT.symptom
def symptom(seen):
    return seen[0] == 0


@EXHIBIT.right
def right(on_ranks):
    """`join` only waits. Look at `exitcode`, or use something that does: `mp.spawn`,
    torchrun, or `labkit`, which says which rank failed and why."""
    try:
        on_ranks(lambda worker: 1 / worker.rank)
        said = "nothing"
    except labkit.WorkerFailed as failure:
        said = failure.diagnosis.headline
    assert said.startswith("rank 0 failed: ZeroDivisionError")
    return said
