"""Exercise: an order with a split backward pass, which fills most of the bubble of 1F1B."""

from __future__ import annotations

from typing import Any

from course import replay
from course.exercises.base import Exercise
from course.exercises.trial import Trial

EXERCISE = Exercise(
    lesson="23",
    title="ZB-H1, a zero-bubble order",
    statement="""
    The backward pass is split: `("I", i)` computes the gradients of the inputs, for which the stage
    before waits, and `("W", i)` those of the weights, for which no stage waits. Return the order of
    `stage` (0 … stages − 1): a list of `("F", i)`, `("I", i)` and `("W", i)`, one of each for every
    micro-batch i. All three take equally long.

    `("F", i)` needs the previous stage's, `("I", i)` the next stage's and the stage's own `("F", i)`,
    `("W", i)` the stage's own `("I", i)`. A stage keeps activations from F to W, and those of at most
    `stages` micro-batches: as many as the first stage of 1F1B. Within that limit the step is to be as
    short as possible: 3 · micro_batches + stages − 1 passes, if there are enough micro-batches.
    """,
    hints=(
        "Begin with 1F1B's order: `stages - stage - 1` F's ahead, then F and I in turn, then the remaining I's.",
        "The last stage must not delay its first I's with W's, for all stages before it wait for these I's.",
        "In 1F1B a late stage keeps few activations, so it may put off as many W's as there are stages before it.",
        '`("W", i - stage)` after `("I", i)`, from `i = stage` on; the last `stage` W\'s come at the end.',
    ),
    why="1F1B idles for (p − 1)(F + I + W). A stage that puts off one W more than the stage before it sends its I's on "
    "earlier, and fills the end of the step with those W's: (p − 1)(F + I − W) is left.",
    world_sizes=(),
    imports=(),
    cases=tuple({"stages": p, "micro_batches": m} for p in (2, 3, 4, 1) for m in (8, 4, 3, 2, 1)),
)


@EXERCISE.reference
def zero_bubble(stage, stages, micro_batches):
    """Return the order of this stage's passes: [("F", 0), …], 3 × micro_batches of them."""
    ahead = min(stages - stage - 1, micro_batches)
    order = [("F", i) for i in range(ahead)]
    for i in range(micro_batches):
        if i + ahead < micro_batches:
            order.append(("F", i + ahead))
        order.append(("I", i))
        if i >= stage:
            order.append(("W", i - stage))
    return order + [("W", i) for i in range(max(0, micro_batches - stage), micro_batches)]


def _check_alone(t: Trial, stage: int, order: Any, stages: int, micro_batches: int) -> None:
    """Look at one stage's list by itself."""
    odd = replay.odd_pass(order, "FIW", micro_batches)
    t.require(not odd, f"stage {stage}: {odd}")
    missing = [(kind, i) for kind in "FIW" for i in range(micro_batches) if (kind, i) not in order]
    t.require(not missing, f"stage {stage}: {missing[0] if missing else None!r} is missing")
    for before, after in ("FI", "IW"):
        for i in range(micro_batches):
            is_in_order = order.index((before, i)) < order.index((after, i))
            t.require(is_in_order, f"stage {stage}: {(after, i)!r} comes before {(before, i)!r}")
    most = replay.most_kept(order)
    t.require(
        most <= stages,
        f"stage {stage} keeps the activations of {most} micro-batches, expected {stages} at most: from F to W",
    )


@EXERCISE.trial
def trial(t: Trial, stages: int, micro_batches: int) -> None:
    """Call it for every stage, look at each list, then let them run against each other."""
    orders = [t.call(stage, stages, micro_batches) for stage in range(stages)]
    for stage, order in enumerate(orders):
        _check_alone(t, stage, order, stages, micro_batches)
    passes = [[(kind, stage, i) for kind, i in order] for stage, order in enumerate(orders)]
    try:
        took = replay.length(replay.on_clock(passes, dict.fromkeys("FIW", 1)))
    except ValueError as error:
        t.fail(str(error))
    m, p = micro_batches, stages
    least = max(3 * m + p - 1, 2 * (m + p) - 1)
    is_at_once = all(order.index(("W", i)) == order.index(("I", i)) + 1 for order in orders for i in range(m))
    said = ": every W follows its I at once, so the stage before waits for what it does not need" if is_at_once else ""
    t.require(took <= least, f"{p} stages, {m} micro-batches: the step takes {took:.0f} passes, expected {least}{said}")
