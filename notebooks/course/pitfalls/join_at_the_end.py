"""join, and no look at the exit code."""

from course.pitfalls.base import Exhibit, Expected
from course.pitfalls.helpers import python

EXHIBIT = Exhibit(
    wing="starting",
    title="join, at the end of a program",
    story="""
    [*Writing Distributed Applications with
    PyTorch*](https://docs.pytorch.org/tutorials/intermediate/dist_tuto.html) ends with `for
    p in processes: p.join()`. Here the child fails. How does the program end?
    """,
    choices=(
        "with the child's error",
        "with exit code 1, and no error",
        "with exit code 0, as if all were well",
    ),
    shows=3,
    gives=Expected("exit code 0", lambda seen: seen[0] == 0),
    expects=Expected("an exit code that is not 0", lambda found: found[0] != 0),
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


@EXHIBIT.right
def right():
    """`join` only waits; the child's traceback scrolls by, and the program goes on. Check `exitcode`, or use a launcher that does: `mp.spawn`, torchrun,
    or `labkit`, which names the rank that failed and shows its error."""
    return python(f"{program}    raise SystemExit(p.exitcode)")
