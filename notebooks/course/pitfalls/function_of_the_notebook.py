"""A function that only the notebook has."""

import pickle

import cloudpickle

from course.pitfalls.base import Exhibit, Expected
from course.pitfalls.helpers import python

EXHIBIT = Exhibit(
    wing="starting",
    title="A function from a cell",
    story="""
    A function from a cell is sent to a fresh process by `pickle`, as `mp.spawn` does, and
    `mp.Process` unless it forks. What happens there?
    """,
    choices=(
        "it prints 42",
        "an error: no such attribute",
        "a SyntaxError",
    ),
    shows=2,
    gives=Expected("no such function", lambda seen: "Can't get attribute 'work'" in seen[1]),
    expects=(0, "42"),
    kind="error",
)


def work():
    print(6 * 7)


@EXHIBIT.broken
def function_of_the_notebook():
    by_name = pickle.dumps(work)
    return python("import pickle, sys; pickle.load(sys.stdin.buffer)()", by_name)


@EXHIBIT.right
def right():
    """`pickle` sends a function's name, `cloudpickle` its code. `labkit` uses `cloudpickle`.
    Without it, put the function into a file that both sides can import."""

    def work():
        print(6 * 7)

    by_value = cloudpickle.dumps(work)
    return python("import pickle, sys; pickle.load(sys.stdin.buffer)()", by_value)
