"""What a comparison takes from its runs: a step of every rank, in one window; equality in words; units."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from labkit.comparison.curves import curves_apart as curves_apart
from labkit.comparison.curves import mean_curve as mean_curve
from labkit.comparison.measured import Measured
from labkit.comparison.replay import Devices, ReplayError, replay
from labkit.comparison.timed import Timed, clip
from labkit.monitor.history import SAMPLES
from labkit.run import Run
from labkit.steps.intervals import subtract, union
from labkit.trace.profiling import PARTS, Mark

LOG = logging.getLogger(__name__)

LARGE_KIB = 4096.0
"""From so many KiB on, a chart counts in MiB."""

ON_DEVICES = "ideal devices"
"""What an axis says where a step is computed for devices of the ranks' own …"""

ON_GPUS = "GPUs"
"""… where it was timed on real ones …"""

HERE = "this machine's clock"
"""… and where the time is that of ranks that share this machine's cores."""


SURE_S = 0.3
"""From how many seconds on it is sure what the cores did: systems count in hundredths."""


def measured(run: Run) -> list[Measured]:
    """Return the ranks' results if they are measurements; else none."""
    return run.results if all(isinstance(result, Measured) for result in run.results) else []


_replays: WeakKeyDictionary[Run, dict[Devices, list[list[Timed]]]] = WeakKeyDictionary()
"""Those that are known: a comparison is drawn again and again."""


def on_devices(run: Run, devices: Devices) -> list[list[Timed]]:
    """Return steps on devices of the ranks' own, by rank and then by the rank's devices: real ones, or ideal ones.

    Without steps where none was recorded, or where what was recorded does not fit together.
    """
    ranks = measured(run)
    if any(rank.is_on_gpu for rank in ranks):
        return [[rank.timed] for rank in ranks]
    if not all(rank.program.pieces for rank in ranks):  # it ended before the step that is recorded
        return [[Timed()] for _ in ranks]
    known = _replays.setdefault(run, {})
    if devices not in known:
        if len(known) > 100:
            known.clear()
        try:
            known[devices] = replay([rank.program for rank in ranks], devices)
        except ReplayError as error:
            LOG.warning("%s: a step on ideal devices cannot be computed: %s", run.name, error)
            known[devices] = [[Timed()] for _ in ranks]
    return known[devices]


def device_step_s(run: Run, devices: Devices) -> float:
    """Return the seconds of a run's step on devices of the ranks' own; NaN without any.

    A GPU's steps were timed without the profiler, too: where they were, that is what counts.
    """
    ranks = measured(run)
    timed_s = [second for rank in ranks if rank.is_on_gpu for second in rank.steps_s]
    if timed_s:
        return statistics.median(timed_s)
    return statistics.fmean(of_rank[0].step_s for of_rank in on_devices(run, devices))


def columns(run: Run, devices: Devices) -> dict[str, float]:
    """Return the columns of a run that was measured: what its steps last, by either clock, send and hold.

    Of this machine's clock "step ms", the median, with the 10th and the 90th percentile, and "<part> ms"; of devices
    "device step ms", "device busy ms", for which one computes, and "device <part> ms"; "sent KiB" per rank and step, by
    what PyTorch dispatched, and "wire KiB", by what the system has counted: all these are means over ranks. "<kind>
    KiB" of memory, on the rank that has most of it.
    """
    ranks = measured(run)
    lanes = on_devices(run, devices)
    every = [lane for of_rank in lanes for lane in of_rank]
    here_s = [second for rank in ranks for second in rank.steps_s]
    sent = [rank.program.bytes_sent if rank.program.pieces else math.nan for rank in ranks]
    low_s, middle_s, high_s = np.quantile(here_s, [0.1, 0.5, 0.9]) if here_s else [math.nan] * 3

    def parts(timed: Sequence[Timed], label: str) -> dict[str, float]:
        found = [one.parts_s() for one in timed]
        return {f"{label}{part} ms": 1000 * statistics.fmean(each[part] for each in found) for part in PARTS}

    return {
        "device step ms": 1000 * device_step_s(run, devices),
        "device busy ms": 1000 * statistics.fmean(lane.busy_s for lane in every),
        **parts([of_rank[0] for of_rank in lanes], "device "),
        "step ms": 1000 * float(middle_s),
        "step ms, 10th percentile": 1000 * float(low_s),
        "step ms, 90th percentile": 1000 * float(high_s),
        "steps": max((len(rank.steps_s) for rank in ranks), default=0),
        **parts([rank.timed for rank in ranks], ""),
        "sent KiB": statistics.fmean(sent) / 1024,
        "wire KiB": statistics.fmean(rank.wire_bytes for rank in ranks) / 1024,
        **{f"{what} KiB": max(rank.most_held.get(what, 0) for rank in ranks) / 1024 for what in ranks[0].most_held},
    }


def others_cores(run: Run) -> float:
    """Return how many of the machine's cores other programs used while a run's steps were timed; NaN if unknown."""
    loads = [rank.load for rank in measured(run) if rank.load.seconds > SURE_S]
    if not loads:
        return math.nan
    own_cores = sum(load.own_s / load.seconds for load in loads)
    return max(0.0, statistics.fmean(load.machine_s / load.seconds for load in loads) - own_cores)


def samples_per_step(run: Run) -> float:
    """Return how many samples a run takes in a step, over all its ranks; NaN if it has not logged `samples`."""
    history = run.history
    if SAMPLES not in history:
        return math.nan
    return float(history.dropna(subset=SAMPLES).groupby("rank")[SAMPLES].median().sum())


def speed_up(run: Run, first: Run, devices: Devices) -> dict[str, float]:
    """Return how many times as fast as the first run's a run's samples pass, and that by device.

    By the clock of devices, ideal or real; NaN where one has computed on GPUs and the other has not. Where not both
    have logged `samples`, their steps count as equally large.
    """
    if len({any(rank.is_on_gpu for rank in measured(one)) for one in (first, run)}) == 2:
        return {"speed-up": math.nan, "efficiency": math.nan}
    each_s = [device_step_s(one, devices) for one in (first, run)]
    samples = [samples_per_step(one) for one in (first, run)]
    larger = samples[1] / samples[0] if not any(map(math.isnan, samples)) and samples[0] else 1.0
    found = larger * each_s[0] / each_s[1] if each_s[1] else math.nan
    used, had = (sum(len(of_rank) for of_rank in on_devices(one, devices)) for one in (run, first))
    return {"speed-up": found, "efficiency": found * had / used}


def time_to_come(over: Sequence[Any], titles: Sequence[str]) -> str:
    """Say how many minutes these functions will take if each takes as long as those that are over; "" for less."""
    if not over or not titles:
        return ""
    minutes = len(titles) * statistics.fmean(run.elapsed_s for run in over) / 60
    return f"about {minutes:.0f} min for {', '.join(titles)}" if minutes >= 1 else ""


def uncounted(run: Run) -> dict[str, float]:
    """Return which operators of a step have no formula, and which share of its time in operators they took here.

    Means over ranks, the greatest first; "all" has their sum.
    """
    shares: dict[str, float] = {}
    ranks = measured(run)
    for rank in ranks:
        for name, share in rank.program.uncounted.items():
            shares[name] = shares.get(name, 0.0) + share / len(ranks)
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


Lane = list[tuple[str, float, float]]


def one_step(lanes: Sequence[Sequence[Timed]]) -> list[list[Lane]]:
    """Return what each rank's devices did in one step of the first, in seconds since that began.

    All that they did meanwhile: in a pipeline ranks are not in the same step.
    """
    steps = lanes[0][0].steps
    if not steps:
        return [[[] for _ in of_rank] for of_rank in lanes]

    def lane(one: Timed) -> Lane:
        window = typical(steps)
        if not exclusive(one.marks, window) and one.steps:  # ranks that never wait for each other drift apart
            window = typical(one.steps)
        return [(w, a - window.start_s, b - window.start_s) for w, a, b in exclusive(one.marks, window)]

    return [[lane(one) for one in of_rank] for of_rank in lanes]


def typical(steps: Sequence[Mark]) -> Mark:
    """Return the middle one by length; not the last, of which other ranks may have seen less."""
    by_length = sorted(steps[:-1] or steps, key=lambda step: step.end_s - step.start_s)
    return by_length[len(by_length) // 2]


def exclusive(marks: Sequence[Mark], window: Mark) -> list[Mark]:
    """Return what of these marks lies within a window; of waiting, where nothing is computed meanwhile."""
    inside = clip(marks, window)
    waited = union((mark.start_s, mark.end_s) for mark in inside if mark.what == "waiting")
    computed = union((m.start_s, m.end_s) for m in inside if m.what not in ("waiting", "communication"))
    waiting = [Mark("waiting", *span) for span in subtract(waited, computed)]
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


def samples_per_s(run: Run) -> float:
    """Return samples per second over all ranks; NaN without `samples`.

    Of a run that was measured, from the steps in which nobody looked; else from each rank's first log call to its last.
    """
    if steps_s := [second for rank in measured(run) for second in rank.steps_s]:
        return samples_per_step(run) / statistics.median(steps_s)
    if SAMPLES not in run.history:
        return math.nan
    logged = run.history.dropna(subset=SAMPLES).groupby("rank")
    span_s = logged["time_s"].last() - logged["time_s"].first()
    since = logged[SAMPLES].sum() - logged[SAMPLES].first()
    return float((since / span_s).where(span_s > 0).sum(skipna=False))
