"""A queue whose sender has gone: an exhibit of the museum of pitfalls."""

from __future__ import annotations

from course.pitfalls.base import Exhibit
from course.pitfalls.helpers import python

EXHIBIT = Exhibit(
    wing="starting",
    title="A tensor in a queue",
    story="""
    One text sends tensors between processes by `torch.multiprocessing`'s `Queue` and `Pipe`,
    and says no more about it. Below, a child puts a tensor into a queue and ends; then the
    parent takes it out. What does it get?
    """,
    choices=(
        "the tensor",
        "a tensor of zeros",
        "an error",
    ),
    shows=3,
    kind="error",
    needs="Linux",
)


PROGRAM = """
import torch
if __name__ == "__main__":
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=queue.put, args=(torch.ones(3){copied},))
    child.start()
    child.join()
    print(queue.get())
"""


@EXHIBIT.broken
def tensor_in_a_queue():
    exit_code, said = python(PROGRAM.format(copied=""))
    if exit_code:
        raise RuntimeError(said)
    return said


@EXHIBIT.symptom
def symptom(seen):
    return "FileNotFoundError" in seen or "ConnectionRefusedError" in seen


@EXHIBIT.right
def right():
    """What travels is not the tensor but how to find its memory, and the sender must live
    until the receiver has opened it: keep the sender waiting, at an `Event`, say, or send a
    copy, as here by `.numpy()`. For CUDA tensors it must live for as long as the receiver
    uses them."""
    exit_code, said = python(PROGRAM.format(copied=".numpy()"))
    assert (exit_code, said) == (0, "[1. 1. 1.]")
    return said
