"""What a comparison takes from its runs: a step of every rank, in one window; equality in words; units."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from labkit.monitor.history import SAMPLES, History
from labkit.profiling import Mark
from labkit.run import Run

LARGE_KIB = 4096.0
"""From so many KiB on, a chart counts in MiB."""

ON_DEVICES = "simulated devices"
"""What an axis says where the device is the virtual accelerator …"""

HERE = "this machine's clock"
"""… and where the time is that of ranks that share this machine's cores."""


@runtime_checkable
class Measurement(Protocol):
    """A rank's result that says more of its run than the run itself knows: `labkit.benchmark.run_strategy`'s, say."""

    marks: Sequence[Any]
    """(what, start_s, end_s) of one step on this rank."""

    @staticmethod
    def columns(ranks: Sequence[Any], first: Sequence[Any]) -> dict[str, Any]:
        """Return further columns of a run's row, from all its ranks' results and those of the first run measured.

        Named "<part> ms" for the parts of a step, "<kind> KiB" for what a rank holds; "difference", a number, and
        "weights", how equal they are, in words.
        """


def measured(run: Run) -> list[Any]:
    """Return the ranks' results if they are measurements; else none."""
    return run.results if all(isinstance(result, Measurement) for result in run.results) else []


def one_step(ranks: Sequence[Any], here: bool = False) -> list[list[tuple[str, float, float]]]:
    """Return each rank's marks in one step of rank 0, in seconds since that began.

    Where the ranks know what came before and after it, all that they did meanwhile: in a pipeline they are not in the
    same step.
    """
    if not all(hasattr(rank, "on_devices") for rank in ranks):
        zero_s = min((start for rank in ranks for _, start, _ in rank.marks), default=0.0)
        return [[(what, start - zero_s, end - zero_s) for what, start, end in rank.marks] for rank in ranks]
    timed = [rank.timed if here else rank.on_devices for rank in ranks]
    if not timed[0].steps:
        return [[] for _ in ranks]
    lanes = []
    for one in timed:
        window = typical(timed[0].steps)
        if not exclusive(one.marks, window) and one.steps:  # ranks that never wait for each other drift apart
            window = typical(one.steps)
        lanes.append([(w, a - window.start_s, b - window.start_s) for w, a, b in exclusive(one.marks, window)])
    return lanes


def typical(steps: Sequence[Mark]) -> Mark:
    """Return the middle one by length; not the last, of which other ranks may have seen less."""
    by_length = sorted(steps[:-1] or steps, key=lambda step: step.end_s - step.start_s)
    return by_length[len(by_length) // 2]


def exclusive(marks: Sequence[Mark], window: Mark) -> list[Mark]:
    """Return what of these marks lies within a window; of waiting, where nothing is computed meanwhile."""
    inside = [Mark(w, max(a, window.start_s), min(b, window.end_s)) for w, a, b in marks]
    inside = [mark for mark in inside if mark.end_s > mark.start_s]
    own = [mark for mark in inside if mark.what not in ("waiting", "communication")]
    edges = sorted({t for mark in inside for t in (mark.start_s, mark.end_s)})
    waiting = [
        Mark("waiting", a, b)
        for a, b in zip(edges, edges[1:], strict=False)
        if any(m.what == "waiting" and m.start_s <= a and m.end_s >= b for m in inside)
        and not any(m.start_s <= a and m.end_s >= b for m in own)
    ]
    return [*waiting, *(mark for mark in inside if mark.what != "waiting")]


def in_order(
    rows: Mapping[str, Sequence[tuple[str, float, float]]], parts: Sequence[str]
) -> dict[str, list[tuple[str, float, float]]]:
    """Return rows whose marks come in the order of these parts, as the legend then lists them."""
    return {
        title: sorted((m for m in marks if m[0] in parts), key=lambda m: parts.index(m[0]))
        for title, marks in rows.items()
    }


def scale(kib: Iterable[float]) -> tuple[float, str]:
    """Return by what to multiply KiB, and the unit that this gives: MiB where they are many."""
    largest = max((value for value in kib if not math.isnan(value)), default=0.0)
    return (1 / 1024, "MiB") if largest >= LARGE_KIB else (1.0, "KiB")


MeanCurve = tuple[NDArray[np.int64], NDArray[np.float64]]


def mean_curve(history: History, name: str) -> MeanCurve:
    """Return the mean of a logged value over the ranks that log it, wherever all of them do, from the whole history.

    The first are (step, count): the first time that a rank logs a step has count 0, the next time 1. In order.
    """
    known = _mean_curves.setdefault(history, {})
    ranks, steps, values = history.logged(name)
    if name not in known or known[name][0] != (history.sifted, len(ranks)):
        known[name] = (history.sifted, len(ranks)), _mean_of(ranks, steps, values)
    return known[name][1]


_mean_curves: WeakKeyDictionary[History, dict[str, tuple[tuple[int, int], MeanCurve]]] = WeakKeyDictionary()
"""Those that are known, each with how much of the history it is of: a comparison is drawn again and again."""


def _mean_of(ranks: NDArray[np.int32], steps: NDArray[np.int64], values: NDArray[np.float64]) -> MeanCurve:
    order = np.lexsort((np.arange(len(steps)), steps, ranks))
    ranks, steps, values = ranks[order], steps[order], values[order]
    is_new = np.ones(len(steps), bool)
    is_new[1:] = (np.diff(ranks) != 0) | (steps[1:] != steps[:-1])
    first = np.maximum.accumulate(np.where(is_new, np.arange(len(steps)), 0))
    points, place = np.unique(np.stack((steps, np.arange(len(steps)) - first), axis=1), axis=0, return_inverse=True)
    place = place.reshape(-1)
    with np.errstate(over="ignore", invalid="ignore"):
        sums, counts = np.bincount(place, values, len(points)), np.bincount(place, minlength=len(points))
        by_all = counts == len(np.unique(ranks))
        return points[by_all], sums[by_all] / counts[by_all]


def curves_apart(one: History, other: History, name: str) -> tuple[float, str]:
    """Return the greatest difference of two mean curves at the steps of both, and what is to be said instead, or "".

    NaN where no step is in both, or a curve is not finite.
    """
    (points, means), (others, their_means) = mean_curve(one, name), mean_curve(other, name)
    pair = np.dtype([("step", np.int64), ("count", np.int64)])
    shared, at, their_at = np.intersect1d(
        np.ascontiguousarray(points).view(pair).ravel(),
        np.ascontiguousarray(others).view(pair).ravel(),
        assume_unique=True,
        return_indices=True,
    )
    if not len(shared):
        return math.nan, "no step in both"
    mine, theirs = means[at], their_means[their_at]
    with np.errstate(over="ignore", invalid="ignore"):
        apart = np.where(mine == theirs, 0.0, np.abs(mine - theirs))
    if np.isfinite(apart).all():
        return float(apart.max()), ""
    step = int(shared["step"][~np.isfinite(apart)][0])
    return math.nan, f"not finite (from step {step:,})"


def samples_per_s(run: Run) -> float:
    """Return samples per second over all ranks, from each rank's first log call to its last; NaN without `samples`."""
    history = run.history
    if SAMPLES not in history:
        return float("nan")
    per_rank = []
    for _, rows in history.dropna(subset=SAMPLES).groupby("rank"):
        span = rows["time_s"].iloc[-1] - rows["time_s"].iloc[0]
        per_rank.append(rows[SAMPLES].iloc[1:].sum() / span if span > 0 else float("nan"))
    return float(np.sum(per_rank))
