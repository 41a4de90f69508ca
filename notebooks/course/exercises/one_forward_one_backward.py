"""Exercise: the order of forward and backward passes in a 1F1B pipeline."""

from __future__ import annotations

from typing import Any

from course import replay
from course.exercises.base import Exercise
from course.exercises.trial import Trial

EXERCISE = Exercise(
    lesson="06",
    title="One forward, one backward",
    statement="""
    Return the order in which `stage` (0 … stages − 1) of a pipeline works: a list of `("F", i)` and `("B", i)`, one
    of each for every micro-batch i.

    `("F", i)` needs the previous stage's, `("B", i)` needs the next stage's and the stage's own `("F", i)`. A stage
    keeps the activations of a micro-batch from F to B, and of at most `stages - stage` micro-batches at a time.
    Within that limit no stage waits longer than it must.
    """,
    hints=(
        "The stage before the last has done one F more by then; stage s begins with `stages - stage - 1` F's, if there "
        "are as many micro-batches.",
        "Then F and B take turns until no F is left, and the remaining B's follow.",
    ),
    why="A stage's first B comes back after the later stages have done one F each; so many F's fill the time "
    "until then, and from there each B frees the memory that the next F takes.",
    world_sizes=(),
    imports=(),
    cases=tuple({"stages": p, "micro_batches": m} for p in (2, 3, 4, 1) for m in (4, 3, 7, 2, 1)),
)


@EXERCISE.reference
def one_forward_one_backward(stage, stages, micro_batches):
    """Return the order of this stage's passes: [("F", 0), …], 2 × micro_batches of them."""
    ahead = min(stages - stage - 1, micro_batches)
    order = [("F", i) for i in range(ahead)]
    for i in range(micro_batches):
        if i + ahead < micro_batches:
            order.append(("F", i + ahead))
        order.append(("B", i))
    return order


def _check_alone(t: Trial, stage: int, order: Any, stages: int, micro_batches: int) -> None:
    """Look at one stage's list by itself."""
    odd = replay.odd_pass(order, "FB", micro_batches)
    t.require(not odd, f"stage {stage}: {odd}")
    missing = sorted({(kind, i) for kind in "FB" for i in range(micro_batches)} - set(order), reverse=True)
    t.require(not missing, f"stage {stage}: {(missing or [('', 0)])[0]!r} is missing")
    alive: set[int] = set()
    for kind, i in order:
        if kind == "B":
            t.require(i in alive, f"stage {stage}: ('B', {i}) comes before ('F', {i})")
            alive.discard(i)
        else:
            alive.add(i)
        most = stages - stage
        t.require(
            len(alive) <= most,
            f"stage {stage} keeps {len(alive)} activations after ('F', {i}), expected {most} at most",
        )


@EXERCISE.trial
def trial(t: Trial, stages: int, micro_batches: int) -> None:
    """Call it for every stage, look at each list, then let them run against each other."""
    orders = [t.call(stage, stages, micro_batches) for stage in range(stages)]
    for stage, order in enumerate(orders):
        _check_alone(t, stage, order, stages, micro_batches)
    passes = [[(kind, stage, i) for kind, i in order] for stage, order in enumerate(orders)]
    try:
        took = replay.length(replay.on_clock(passes, {"F": 1, "B": 1}))
    except ValueError as error:
        t.fail(str(error))
    least = 2 * (micro_batches + stages - 1)
    t.require(took <= least, f"takes {took:.0f} ticks, expected {least}: a stage waits though it could work")
