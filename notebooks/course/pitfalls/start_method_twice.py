"""set_start_method in a cell."""

from course.pitfalls.base import Exhibit, Expected
from course.pitfalls.helpers import python

EXHIBIT = Exhibit(
    wing="starting",
    title="set_start_method in a cell",
    story="""
    A cell says `mp.set_start_method("spawn")`, and you run it twice: what happens? (It is
    tried in a fresh Python, to leave this kernel as it is. `torch.multiprocessing` takes
    the function from the standard library.)
    """,
    choices=(
        "the second time it does nothing",
        "an error the second time",
        "it starts two processes",
    ),
    shows=2,
    gives=Expected("an error", lambda seen: "context has already been set" in seen[1]),
    expects=Expected("exit code 0", lambda found: found[0] == 0),
    kind="error",
)


@EXHIBIT.broken
def start_method_twice():
    cell = "import multiprocessing as mp; mp.set_start_method('spawn')"
    return python(f"{cell}\n{cell}")


@EXHIBIT.right
def right():
    """`set_start_method` sets the method for the whole program, once. A context belongs to
    the code that asks for it, and can be created again and again."""
    cell = "import multiprocessing as mp; mp.get_context('spawn')"
    return python(f"{cell}\n{cell}")
