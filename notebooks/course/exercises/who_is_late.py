"""Exercise: find the straggler from when ranks entered a collective."""

from __future__ import annotations

from statistics import median

from course.exercises.base import Exercise
from course.exercises.trial import Trial

EXERCISE = Exercise(
    lesson="10",
    title="Who is late?",
    statement="""
    `entered[step][rank]` is the time at which a rank entered the all-reduce of a step, in seconds by
    one clock; there are two ranks or more. Return who is late, and by how much: `(rank, seconds)`.

    A rank's lateness in a step is the time from the arrival of the *last of the others* to its own: by
    that much the step would be shorter without it. (For a rank that is not the last it is negative.)
    Take the `median` over the steps, so that one slow step does not decide. Return the rank with the
    greatest median.
    """,
    hints=(
        "For one rank and one step: when did the last of the other ranks come?",
        "First a median for each rank, then the greatest of these: or else a rank that was late once wins.",
    ),
    why="Only what the others wait for costs time, and only what happens in most steps is worth looking for.",
    world_sizes=(),
    imports=("from statistics import median",),
    cases=(
        {"entered": ((0.0, 9.0, 0.125), (10.0, 10.0, 10.5), (11.0, 11.25, 11.5), (12.0, 12.0, 12.25))},
        {"entered": ((0.0, 0.125, 0.5, 0.25), (2.0, 1.0, 1.5, 1.125), (3.0, 3.25, 3.75, 3.0))},
        {"entered": ((0.0, 0.25), (1.0, 1.5), (2.0, 2.375))},
        {"entered": ((1.0, 0.75, 0.5),)},
    ),
)


@EXERCISE.reference
def who_is_late(entered):
    """Return (rank, seconds): for which rank the others wait longest, the median over steps."""
    late = []
    for rank in range(len(entered[0])):
        behind = []
        for step in entered:
            others = [came for other, came in enumerate(step) if other != rank]
            behind.append(step[rank] - max(others))
        late.append(median(behind))
    return late.index(max(late)), max(late)


@EXERCISE.trial
def trial(t: Trial, entered: tuple[tuple[float, ...], ...]) -> None:
    """Call it, and compare rank and lateness."""
    found = t.call([list(step) for step in entered])
    is_pair = isinstance(found, (list, tuple)) and len(found) == 2
    t.require(is_pair, f"returned {found!r:.60}, expected a pair: the rank, and seconds")
    rank, late_s = found
    ranks = range(len(entered[0]))
    by_rank = [median(sorted(step[r] - sorted(step[:r] + step[r + 1 :])[-1] for step in entered)) for r in ranks]
    expected_s = sorted(by_rank)[-1]
    expected = by_rank.index(expected_s)
    first = median(sorted(step[expected] - sorted(step)[0] for step in entered))
    once = sorted(step[expected] - sorted(step[:expected] + step[expected + 1 :])[-1] for step in entered)[-1]
    known = {
        first: ": that is how late it is to the first of the others, who waits for the rest as well",
        once: ": that is the worst step, not the median",
    }
    t.require(rank == expected, f"it is rank {rank}, expected rank {expected}: by rank the medians are {by_rank}")
    said = next((text for value, text in known.items() if value == late_s), "")
    t.require(abs(late_s - expected_s) < 1e-9, f"rank {rank} is {late_s} s late, expected {expected_s} s{said}")
