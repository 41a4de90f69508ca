"""Exercise: how often to save, by Young's formula."""

from __future__ import annotations

import math

from course.exercises.base import Exercise
from course.exercises.trial import Trial

EXERCISE = Exercise(
    lesson="14",
    title="How often to save",
    statement="""
    Saving takes `save_s` seconds, during which training stands still. One machine fails once in
    `machine_mtbf_s` seconds on average; if one of the job's `machines` fails, the job stops, and what
    was trained since the last checkpoint is lost: half of the interval on average. Restarting takes no
    time.

    Return two numbers: the seconds of training between two checkpoints with which least is lost (Young
    1974, refined by Daly 2006), and the share of the time that is then lost, to saving and to training
    again. Saving is short compared with both.
    """,
    hints=(
        "With n machines some machine fails n times as often.",
        "Of an interval of t seconds, save_s are lost to saving, and with a probability of t / (time between failures) "
        "half of t.",
        "The lost share is save_s / t + t / (2 · time between failures). Where is its derivative 0?",
    ),
    why="The lost share save / t + t / (2 M) is least where both parts are equal, at t = √(2 · save · M), and is then "
    "√(2 · save / M).",
    world_sizes=(),
    imports=("import math",),
    cases=(
        {"save_s": 60.0, "machine_mtbf_s": 5e6, "machines": 100},
        {"save_s": 2.0, "machine_mtbf_s": 1e6, "machines": 1},
        {"save_s": 300.0, "machine_mtbf_s": 3e7, "machines": 2000},
    ),
)


@EXERCISE.reference
def checkpoint_interval(save_s, machine_mtbf_s, machines):
    """Return (seconds of training between two checkpoints, share of the time that is lost)."""
    between_failures_s = machine_mtbf_s / machines
    interval_s = math.sqrt(2 * save_s * between_failures_s)
    return interval_s, save_s / interval_s + interval_s / (2 * between_failures_s)


def _lost(interval_s: float, save_s: float, between_failures_s: float) -> float:
    return save_s / interval_s + interval_s / 2 / between_failures_s


@EXERCISE.trial
def trial(t: Trial, save_s: float, machine_mtbf_s: float, machines: int) -> None:
    """Call it, and look whether a little more or less often loses less."""
    found = t.call(save_s, machine_mtbf_s, machines)
    t.returned(found, "(interval_s, lost)")
    interval_s, lost = found
    t.require(isinstance(interval_s, (int, float)) and interval_s > 0, f"the interval is {interval_s!r:.40}")
    between_failures_s = machine_mtbf_s / machines
    best = _lost(interval_s, save_s, between_failures_s)
    for factor, word in ((0.99, "more"), (1.01, "less")):
        other = _lost(factor * interval_s, save_s, between_failures_s)
        said = ""
        if math.isclose(interval_s, math.sqrt(2 * save_s * machine_mtbf_s), rel_tol=1e-3):
            said = "; how often does one of all machines fail?"
        elif math.isclose(interval_s, math.sqrt(save_s * between_failures_s), rel_tol=1e-3):
            said = "; a failure loses half of the interval, not all of it"
        t.require(
            other >= best * (1 - 1e-9),
            f"with {save_s:g} s to save and {machines} machines the interval is {interval_s:.6g} s, but saving a "
            f"little {word} often loses less{said}",
        )
    said = ": that is without what is trained again" if math.isclose(lost, best / 2, rel_tol=1e-3) else ""
    t.require(math.isclose(lost, best, rel_tol=1e-3), f"the lost share is {lost:.4g}, expected {best:.4g}{said}")
