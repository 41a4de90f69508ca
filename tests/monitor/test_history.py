from array import array

import numpy as np
import pytest

from labkit.monitor.history import BUCKETS, History, thinned
from labkit.protocol.events import Log
from tests.support.logs import log

MOST_POINTS = 4 * BUCKETS + 1
"""Two points for each of up to 2 × BUCKETS buckets, and the end."""


def noise(count, seed=0):
    return np.random.default_rng(seed).normal(size=count)


@pytest.mark.parametrize("count", [0, 1, 2 * BUCKETS - 1])
def test_a_short_curve_is_kept_as_it_is(count):
    x, y = np.arange(count, dtype=float), noise(count)
    kept_x, kept_y = thinned(x, y)
    assert np.array_equal(kept_x, x)
    assert np.array_equal(kept_y, y)


# The second is the longest before buckets merge once more, so that nearly a whole bucket is left over.
@pytest.mark.parametrize("count", [10_001, 2 * BUCKETS * 2048 - 1])
def test_a_curve_of_any_length_is_drawn_in_few_points_which_keep_its_extremes_and_both_ends(count):
    y = noise(count)
    y[count // 3], y[count // 2] = 50, -50
    x, y = thinned(np.arange(count, dtype=float), y)
    assert len(x) <= MOST_POINTS
    assert (y.max(), y.min()) == (50, -50)
    assert {count // 3, count // 2} <= set(x)
    assert (np.diff(x) > 0).all()
    assert x[0] < count / BUCKETS
    assert x[-1] >= count - count / BUCKETS


@pytest.mark.parametrize(
    "x",
    [
        np.arange(5000.0),
        np.tile(np.arange(50.0), 100),  # steps counted anew in every epoch
        np.repeat(np.arange(2500.0), 2),  # two calls per step
    ],
    ids=["ascending", "restarting", "repeated"],
)
def test_points_come_in_the_order_in_which_they_were_added(x):
    y = noise(len(x))
    kept = list(zip(*thinned(x, y), strict=True))
    added = iter(zip(x, y, strict=True))
    assert all(point in added for point in kept)  # `in` moves the iterator on


def test_nan_hides_no_extreme_and_a_curve_of_nan_stays_one():
    y = noise(100_000)
    y[::3] = y[50_000:60_000] = np.nan
    x, kept = thinned(np.arange(100_000.0), y)
    assert (np.nanmax(kept), np.nanmin(kept)) == (np.nanmax(y), np.nanmin(y))
    assert np.isnan(kept[(x > 50_500) & (x < 59_500)]).all()  # a gap stays a gap
    assert np.isnan(thinned(np.arange(10_000.0), np.full(10_000, np.nan))[1]).all()


def add_in_uneven_batches(history, rank_steps, values, seed):
    """Each rank's calls in order, in batches of any length, the ranks in any order."""
    rng = np.random.default_rng(seed)
    at = [0] * len(rank_steps)
    while left := [rank for rank, steps in enumerate(rank_steps) if at[rank] < len(steps)]:
        rank = int(rng.choice(left))
        stop = at[rank] + int(rng.integers(1, 40))
        steps = rank_steps[rank][at[rank] : stop]
        history.add(log(rank, steps, loss=values[rank][steps]))
        at[rank] = stop


@pytest.mark.parametrize(("every", "common"), [((1, 1), 1), ((2, 3), 6), ((1, 2, 3), 6)], ids=str)
def test_mean_curve_is_numpys_mean_at_the_steps_that_all_ranks_logged(every, common):
    history = History(len(every))
    values = np.random.default_rng(0).normal(size=(len(every), 300))
    add_in_uneven_batches(history, [list(range(0, 300, n)) for n in every], values, seed=0)
    steps, mean = history.by_step("loss")
    assert steps.tolist() == list(range(0, 300, common))
    assert mean == pytest.approx(values.mean(axis=0)[::common])


def test_of_steps_that_are_counted_anew_in_every_epoch_the_mean_is_in_the_order_in_which_they_were_logged():
    history = History(2)
    for epoch in range(3):
        for rank in (0, 1):
            history.add(log(rank, range(4), loss=[10 * epoch + 2 * rank + step for step in range(4)]))
    steps, mean = history.curves("loss")["mean"]
    assert steps.tolist() == [0, 1, 2, 3] * 3
    assert mean.tolist() == [10 * epoch + step + 1 for epoch in range(3) for step in range(4)]


@pytest.mark.parametrize(
    ("world_size", "ranks", "labels"),
    [
        (1, [0], ["rank 0"]),  # one rank is its own mean
        (3, [1], ["rank 1"]),  # a name that only one rank logs
        (2, [0, 1], ["rank 0", "rank 1", "mean"]),
        (4, [0, 1], ["rank 0", "rank 1"]),  # as in a pipeline with two replicas
    ],
)
def test_curves_are_those_of_the_ranks_that_logged_the_name(world_size, ranks, labels):
    history = History(world_size)
    for rank in ranks:
        history.add(log(rank, [0, 1], loss=[1.0, 2.0]))
    assert list(history.curves("loss")) == labels


def test_rates_are_those_of_the_last_seconds():
    history = History(1)
    for step in range(100):
        history.add(log(0, [step], step_s=1, loss=[0]))
    for step in range(1000, 1200):  # from second 100 on, ten steps a second
        history.add(log(0, [step], step_s=0.1, loss=[0]))
    assert history.progress(0).steps_per_s == pytest.approx(10, rel=0.05)


def test_the_mean_of_a_run_that_is_over_is_over_the_ranks_that_logged():
    history = History(4)
    for rank in (1, 3):
        history.add(Log(rank, ("loss",), array("q", [0, 1, 2]), array("d", [1, 2, 3]), array("d", [rank, 2, 3 * rank])))
    assert "mean" not in history.curves("loss"), "while it goes on, the other ranks may yet log"
    steps, means = history.mean_curve("loss")
    assert steps.tolist() == [0, 1, 2]
    assert means.tolist() == [2, 2, 6]
