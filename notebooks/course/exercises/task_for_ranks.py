"""Exercise: repair a function that spawn refuses."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

from course.exercises.base import Exercise
from course.exercises.trial import Trial

EXERCISE = Exercise(
    lesson="11",
    title="Repair a function that spawn refuses",
    statement="""
    `task_for_ranks(path, world_size)` returns a function for the ranks: `task(rank)` adds up every `world_size`-th
    number of the file `path` (one number per line), beginning with line `rank`, counted from 0. In one process it
    works, once. But a spawned process gets its function as bytes, and pickle refuses this one, even by value
    (`cloudpickle`). Mend it: afterwards `task` can be sent to any number of ranks and called as often as one likes.
    """,
    hints=(
        "By value means: the function's code, and the values that it uses. Which of them is more than a value?",
        "A lock exists in one process only, and a process with a copy of its own needs none.",
        "A generator is half-finished work, and can be neither copied nor begun again. Send what it is made from: the "
        "path, or a list of the numbers.",
    ),
    why="What is sent should be values; locks, open files, generators and connections are made where they are used, "
    "inside the function.",
    world_sizes=(),
    imports=("import itertools", "import threading", "from pathlib import Path"),
    given={
        "body": """
lock = threading.Lock()
numbers = (float(line) for line in Path(path).read_text().split())

def task(rank):
    with lock:  # one rank at a time
        return sum(itertools.islice(numbers, rank, None, world_size))

return task
"""
    },
    cases=({"lines": 7, "world_size": 2}, {"lines": 3, "world_size": 4}, {"lines": 5, "world_size": 1}),
)


@EXERCISE.reference
def task_for_ranks(path, world_size):
    """Return task(rank), which can be sent to other processes: the sum of this rank's numbers in the file."""

    def task(rank):
        numbers = []
        for line in Path(path).read_text().split():
            numbers.append(float(line))
        return sum(numbers[rank::world_size])

    return task


@EXERCISE.trial
def trial(t: Trial, lines: int, world_size: int) -> None:
    """Call it, send what it returns as labkit does, and call that for every rank, twice."""
    import cloudpickle

    numbers = [float(number) for number in t.numbers(lines)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "numbers.txt"
        path.write_text("\n".join(map(str, numbers)))
        task = t.call(str(path), world_size)
        t.require(callable(task), f"returned a {type(task).__name__}, expected a function of the rank")
        try:
            sent = cloudpickle.dumps(task)
        except (TypeError, AttributeError) as error:
            t.fail(f"`task` cannot be sent: {error}")
        for rank in range(world_size):
            arrived = cloudpickle.loads(sent)
            for call in ("first", "second"):
                found = t.watch(functools.partial(arrived, rank))
                expected = sum(numbers[rank::world_size])
                t.require(isinstance(found, (int, float)), f"`task({rank})` is {found!r}, expected {expected}")
                t.require(
                    abs(found - expected) < 1e-6,
                    f"`task({rank})` is {found:g} in its {call} call, expected {expected:g}"
                    + (": that is the sum of all" if world_size > 1 and found == sum(numbers) else ""),
                )
