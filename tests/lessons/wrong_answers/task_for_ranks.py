"""Wrong answers to `task_for_ranks`, and a piece of what each must be told."""

import itertools
import threading
from pathlib import Path

from tests.support.wrong_answers import told


@told("`task` cannot be sent: cannot pickle")
def as_it_was(path, world_size):
    """Unrepaired."""
    lock = threading.Lock()
    numbers = (float(line) for line in Path(path).read_text().split())

    def task(rank: int) -> float:
        with lock:
            return sum(itertools.islice(numbers, rank, None, world_size))

    return task


@told("`task(0)` is 0 in its second call")
def an_iterator(path, world_size):
    """An iterator of a list can be sent, but is used up."""
    numbers = iter([float(line) for line in Path(path).read_text().split()])
    return lambda rank: sum(itertools.islice(numbers, rank, None, world_size))


@told("that is the sum of all")
def forgets_the_rank(path, world_size):
    """Every rank does everything."""
    return lambda rank: sum(map(float, Path(path).read_text().split()))


@told("returned a float, expected a function of the rank")
def calls_it(path, world_size):
    """No function is left to be sent."""
    return sum(map(float, Path(path).read_text().split()))
