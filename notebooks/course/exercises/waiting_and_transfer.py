"""Exercise: how much of a collective is waiting."""

from __future__ import annotations

from course.exercises.base import Exercise
from course.exercises.trial import Trial

EXERCISE = Exercise(
    lesson="10",
    title="Waiting, and transfer",
    statement="""
    An all-reduce took 60 ms on one rank and 5 ms on another. Is the network slow? Split what each rank
    spent in one collective into *waiting*, until every rank had entered it, and *transfer*, from then
    on.

    `entered[r]` and `ended[r]` are the times at which rank r came in and went on, in seconds by one
    clock. Return a list with a pair for each rank: `(waiting, transfer)`, in seconds.
    """,
    hints=(
        "Nothing can be summed before the last summand is there.",
        "When is the collective full? That instant is the same for all ranks.",
    ),
    why="No rank can leave an all-reduce before the last one has entered it, so only the last one does not wait.",
    world_sizes=(),
    imports=(),
    cases=(
        {"entered": (0.0625, 0.0), "ended": (0.078125, 0.0703125)},
        {"entered": (2.5, 2.25, 2.375, 2.0), "ended": (2.625, 2.75, 2.6875, 2.5625)},
        {"entered": (1.0,), "ended": (1.5,)},
    ),
)


@EXERCISE.reference
def waiting_and_transfer(entered, ended):
    """Return (waiting, transfer), in seconds, of each rank in one collective."""
    full = max(entered)
    return [(full - came, went - full) for came, went in zip(entered, ended, strict=True)]


@EXERCISE.trial
def trial(t: Trial, entered: tuple[float, ...], ended: tuple[float, ...]) -> None:
    """Call it, and compare rank by rank."""
    found = t.call(list(entered), list(ended))
    t.require(isinstance(found, (list, tuple)), f"returned a {type(found).__name__}, expected a list of pairs")
    t.require(len(found) == len(entered), f"returned {len(found)} entries, expected {len(entered)}: one for each rank")
    full = sorted(entered)[-1]
    for rank, pair in enumerate(found):
        t.require(
            isinstance(pair, (list, tuple)) and len(pair) == 2,
            f"for rank {rank} it is {pair!r:.40}, expected a pair: waiting and transfer",
        )
        expected = (full - entered[rank], ended[rank] - full)
        whole = ended[rank] - entered[rank]
        known = (  # the first that fits is said
            (expected[::-1], ": the other way round"),
            ((expected[0], whole), ": transfer begins when the last rank has come, not before"),
            ((0.0, whole), ": nobody has waited here"),
            ((entered[rank] - sorted(entered)[0], whole), ": it is the last rank that waits for nobody, not the first"),
        )
        is_right = all(abs(one - other) < 1e-9 for one, other in zip(pair, expected, strict=True))
        said = next((text for value, text in known if tuple(pair) == value), "")
        t.require(is_right, f"rank {rank} has {tuple(pair)}, expected {expected}{said}")
