"""Exercise: the bubble of a pipeline, by formula."""

from __future__ import annotations

from course.exercises.base import Exercise
from course.exercises.trial import Trial

EXERCISE = Exercise(
    lesson="06",
    title="The bubble by formula",
    statement="""
    In a pipeline every stage does m forward and m backward passes, and waits for the rest of a step: for its first
    input, for its first gradient, and after its last. Return the share of a step's time in which a stage waits, a
    `float` from 0 to 1.

    All passes take equally long. It is the same for GPipe and 1F1B, and for every stage.
    """,
    hints=(
        "With one stage nobody waits; with many micro-batches hardly anybody.",
        "The first micro-batch needs p ticks to the end, and then one more comes out with every tick: forward takes "
        "m + p − 1 ticks, of which a stage works m.",
    ),
    why="Forward, and likewise backward, takes m + p − 1 ticks of which each stage works m, so p − 1 of them are "
    "the bubble.",
    world_sizes=(),
    imports=(),
    cases=tuple({"stages": p, "micro_batches": m} for p in (4, 2, 1, 8) for m in (6, 1, 2, 16)),
)


@EXERCISE.reference
def bubble(stages, micro_batches):
    """Return the share of a step in which a stage of the pipeline waits."""
    return (stages - 1) / (micro_batches + stages - 1)


@EXERCISE.trial
def trial(t: Trial, stages: int, micro_batches: int) -> None:
    """Call it, and count the ticks of a pipeline."""
    share = t.call(stages, micro_batches)
    t.require(isinstance(share, (float, int)), f"returned a {type(share).__name__}, expected a float")
    done = [[0] * micro_batches for _ in range(stages)]
    for stage in range(stages):
        for i in range(micro_batches):
            done[stage][i] = 1 + max(done[stage - 1][i] if stage else 0, done[stage][i - 1] if i else 0)
    ticks = done[-1][-1]
    expected = (ticks - micro_batches) / ticks
    known = {
        (ticks - micro_batches) / micro_batches: ": that is waiting over working, not over the whole",
        micro_batches / ticks: ": that is the share in which it works",
        stages / ticks: ": one tick too many waited, count them for 2 stages and 1 micro-batch",
    }
    said = next((text for value, text in known.items() if abs(value - share) < 1e-6), "")
    t.require(abs(share - expected) < 1e-6, f"it is {share:.4g}, expected {expected:.4g}{said}")
