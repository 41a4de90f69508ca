"""Exercise: a step by the cost model, and the batch at which communication equals computing."""

from __future__ import annotations

import math

from course.exercises.base import Exercise
from course.exercises.trial import Trial

EXERCISE = Exercise(
    lesson="09",
    title="A step, and the samples at which averaging pays",
    statement="""
    n ranks train by DDP; nothing that they send hides behind computing. A rank computes its samples,
    `sample_s` seconds each; the batch is dealt out as evenly as whole samples can be, and all wait for
    the rank with most. Then gradients are averaged around a ring: 2 (n − 1) messages one after another,
    each of `latency_s`, and `byte_s` for every byte of an n-th of the parameters.

    Return two numbers: the seconds of a step, and the least number of samples per rank, 1 at least, with
    which computing takes at least as long as averaging.
    """,
    hints=(
        "The largest share is the batch divided by the ranks, rounded up.",
        "The samples are the ring's seconds over a sample's, rounded up.",
    ),
    why="The ring's bytes do not depend on the batch and computing grows with it, so they are equal at one number of "
    "samples.",
    world_sizes=(),
    imports=("import math",),
    cases=(
        {"batch": 128, "ranks": 4, "sample_s": 1e-3, "parameter_bytes": 1e8, "latency_s": 1e-5, "byte_s": 1.01e-10},
        {"batch": 130, "ranks": 8, "sample_s": 3e-3, "parameter_bytes": 4e8, "latency_s": 1e-3, "byte_s": 1e-9},
        {"batch": 7, "ranks": 3, "sample_s": 1e-2, "parameter_bytes": 1e6, "latency_s": 7e-3, "byte_s": 0.0},
        {"batch": 10, "ranks": 1, "sample_s": 2e-3, "parameter_bytes": 1e8, "latency_s": 1e-5, "byte_s": 1e-10},
        {"batch": 64, "ranks": 2, "sample_s": 5.0, "parameter_bytes": 1e6, "latency_s": 1e-6, "byte_s": 1e-10},
    ),
)


@EXERCISE.reference
def step_and_break_even(batch, ranks, sample_s, parameter_bytes, latency_s, byte_s):
    """Return (seconds of a step, samples with which a rank computes as long as it averages)."""
    ring_s = 2 * (ranks - 1) * (latency_s + parameter_bytes / ranks * byte_s)
    step_s = math.ceil(batch / ranks) * sample_s + ring_s
    return step_s, max(1, math.ceil(ring_s / sample_s))


@EXERCISE.trial
def trial(
    t: Trial, batch: int, ranks: int, sample_s: float, parameter_bytes: float, latency_s: float, byte_s: float
) -> None:
    """Call it; add up the step, and try numbers of samples one after another."""
    found = t.call(batch, ranks, sample_s, parameter_bytes, latency_s, byte_s)
    t.returned(found, "(step_s, samples)")
    step_s, least = found
    ring_s = 2 * (ranks - 1) * (latency_s + parameter_bytes / ranks * byte_s)
    computing_s = max(len(range(rank, batch, ranks)) for rank in range(ranks)) * sample_s
    expected_s = computing_s + ring_s
    known = {
        batch / ranks * sample_s + ring_s: ": samples are whole, and the largest share decides",
        computing_s + ring_s / 2: ": a ring all-reduce has 2 (n − 1) messages",
        computing_s: ": the averaging is missing",
        max(computing_s, ring_s): ": nothing hides behind computing, so the two add up",
    }
    said = next((text for value, text in known.items() if math.isclose(value, step_s, rel_tol=1e-6)), "")
    is_right = isinstance(step_s, (int, float)) and math.isclose(step_s, expected_s, rel_tol=1e-6)
    t.require(is_right, f"a step takes {step_s:.6g} s, expected {expected_s:.6g} s{said}")
    expected = 1
    while expected * sample_s < ring_s:
        expected += 1
    known_numbers = {
        expected * ranks: ": that is the batch over all ranks",
        math.floor(ring_s / sample_s): ": with so few, computing is shorter",
        ring_s / sample_s: ": samples are whole",
    }
    said = known_numbers.get(least, "") if least != expected else ""
    t.require(least == expected, f"the samples per rank are {least}, expected {expected}{said}")
