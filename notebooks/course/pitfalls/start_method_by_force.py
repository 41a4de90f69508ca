"""set_start_method, with force=True."""

from course.pitfalls.base import Exhibit, Expected
from course.pitfalls.helpers import python

EXHIBIT = Exhibit(
    wing="starting",
    title="set_start_method, with force=True",
    story="""
    The same cell, run twice in a fresh Python, now with `force=True`. What happens?
    """,
    choices=(
        "no error",
        "an error the second time",
        "an error both times",
    ),
    shows=1,
    expects=Expected("exit code 0", lambda found: found[0] == 0),
    why="""
    `force=True` sets the method again. A notebook may do so; a library should not: it would
    change the method for all other code.
    """,
)


@EXHIBIT.sound
def start_method_by_force():
    cell = "import multiprocessing as mp; mp.set_start_method('spawn', force=True)"
    return python(f"{cell}\n{cell}")
