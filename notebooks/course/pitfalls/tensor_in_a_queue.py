"""A queue whose sender has gone."""

from course.pitfalls.base import Exhibit, Expected, has
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
    gives=has("FileNotFoundError", "ConnectionRefusedError"),
    expects=Expected("three ones", lambda found: found.count("1.") == 3),
    kind="error",
    needs="Linux",
)


PROGRAM = """
import torch
if __name__ == "__main__":
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=queue.put, args=(torch.ones(3),))
    child.start()
    child.join()
    print(queue.get())
"""


@EXHIBIT.broken
def tensor_in_a_queue():
    exit_code, said = python(PROGRAM)
    if exit_code:
        raise RuntimeError(said)
    return said


@EXHIBIT.right
def right():
    """The queue carries a handle to the tensor's shared memory, not the values. The sender
    must live until the receiver has opened that memory: let it wait, for an `Event` say, or
    send a copy, here by `.numpy()`. With CUDA tensors the sender must live for as long as the
    receiver uses them."""
    exit_code, said = python(PROGRAM.replace("torch.ones(3)", "torch.ones(3).numpy()"))
    assert exit_code == 0
    return said
