"""How far weights, buffers and curves of two runs are apart, and what is said where there is no number."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from labkit.comparison.curves import curves_apart, mean_curve
from labkit.comparison.differences import (
    columns,
    greatest,
    largest_difference,
    rounding,
    weights_difference,
)
from labkit.monitor.history import History
from tests.comparison.test_comparison import log

NAN, INF = math.nan, math.inf


# One tensor


@pytest.mark.parametrize(
    ("one", "other", "off"),
    {
        "equal": ([1.0, 2.0], [1.0, 2.0], 0.0),
        "apart": ([1.0, 2.0], [1.5, 2.0], 0.5),
        "NaN first": ([NAN, 2.0], [1.0, 2.0], NAN),
        "NaN last": ([1.0, NAN], [1.0, 2.0], NAN),
        "NaN in both": ([1.0, NAN], [1.0, NAN], NAN),
        "a causal mask of infinities": ([0.0, -INF], [0.0, -INF], 0.0),
        "one is infinite": ([0.0, INF], [0.0, 1.0], INF),
        "opposite infinities": ([-INF], [INF], INF),
        "booleans": ([True, False], [True, False], 0.0),
        "other booleans": ([True, False], [True, True], 1.0),
        "integers": ([3, 4], [3, 7], 3.0),
        "none at all": ([], [], 0.0),
        "complex": ([1 + 1j], [1 + 4j], 3.0),
    }.values(),
)
def test_the_largest_difference_of_two_tensors(one, other, off):
    found = largest_difference(torch.tensor(one), torch.tensor(other))
    assert found == off or (math.isnan(found) and math.isnan(off))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.int64])
def test_tensors_of_any_type_are_compared(dtype):
    one, other = torch.tensor([1, 2]).to(dtype), torch.tensor([1, 4]).to(dtype)
    assert largest_difference(one, one) == 0
    assert largest_difference(one, other) == 2
    assert largest_difference(one.double(), other) == 2, "and of two"


def test_tensors_of_other_shapes_have_no_difference():
    with pytest.raises(ValueError, match=r"shapes \[3\] and \[3, 1\]"):
        largest_difference(torch.ones(3), torch.ones(3, 1))


@pytest.mark.parametrize("values", [[0.0, NAN], [NAN, 0.0], [0.0, INF, NAN], []])
def test_the_greatest_is_nan_if_there_is_one(values):
    assert math.isnan(greatest(values))
    assert greatest([0.0, 2.0]) == 2.0


# All tensors of a run


def rank(**tensors):
    return {name: torch.as_tensor(values) for name, values in tensors.items()}


def test_every_ranks_copy_is_compared_with_the_first_run():
    one = [rank(a=[1.0, 2.0], b=[3.0])]
    assert weights_difference(one, [rank(a=[1.0, 2.0]), rank(b=[3.75])])[:2] == (0.25, "b"), "stages, put together"
    assert weights_difference(one, [rank(a=[1.0, 2.0], b=[3.0]), rank(a=[1.0, 2.25], b=[3.0])])[:2] == (0.125, "a")
    assert weights_difference(one, [rank(a=[1.0, 2.0], b=[3.0]), {}]).off == 0, "rank 0 alone may return them"


def test_a_difference_is_relative_to_the_greatest_number_of_its_tensor():
    small, large = [rank(a=[1e-3, 0.0])], [rank(a=[1e3, 0.0])]
    assert weights_difference(small, [rank(a=[1.1e-3, 0.0])]).off == pytest.approx(0.1)
    assert weights_difference(large, [rank(a=[1.1e3, 0.0])]).off == pytest.approx(0.1)
    assert weights_difference([rank(a=[0.0])], [rank(a=[0.5])]).off == 0.5, "of zeros as it is"


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([{}], "not returned"),
        ([rank(a=[1.0, 2.0])], "other names: only in the first run b"),
        ([rank(x=[1.0], b=[3.0])], "other names: only here x; only in the first run a"),
        (
            [rank(**{"module.a": [1.0, 2.0], "module.b": [3.0]})],
            "other names: only here module.a, module.b; only in the first run a, b; return model.module.state_dict()",
        ),
        ([rank(a=[1.0, 2.0], b=[NAN])], "not finite (b)"),
        ([rank(a=[1.0, INF], b=[3.0])], "not finite (a)"),
        ([rank(a=[1.0], b=[3.0])], "not comparable: a: shapes [2] and [1]"),
        ([rank(a=[1.0], b=[NAN])], "not finite (b)"),
        ([rank(a=[1.0, 2.0], b=[3.0]), rank(a=[1.0, NAN], b=[3.0])], "not finite (a)"),
        ([rank(a=[1.0, 2.0], b=[3.0])], "equal"),
        ([rank(a=torch.tensor([1.0, 2.0 + 4e-8], dtype=torch.float64), b=[3.0])], "equal to 2e-08"),
        ([rank(a=[1.0, 2.0], b=[3.06])], "off by 2e-02 (b)"),
    ],
)
def test_equality_in_words(ranks, said):
    found = weights_difference([rank(a=[1.0, 2.0], b=[3.0])], ranks)
    assert found.words(1e-5) == said
    assert math.isnan(found.off) == (said.startswith(("not", "other names")))


def test_how_much_is_rounding_goes_by_the_digits_of_the_weights():
    assert rounding([rank(a=torch.ones(1), n=3)]) == pytest.approx(3.5e-5, rel=0.1)
    assert rounding([rank(a=torch.ones(1).double(), n=3)]) == pytest.approx(1.5e-9, rel=0.1)
    assert rounding([rank(n=3)]) == 0


def bn(mean, weight=1.0, mask=True):
    return rank(**{"0.weight": [weight], "1.running_mean": [mean], "1.num_batches_tracked": 7, "2.mask": [mask]})


def test_buffers_that_differ_by_rank_are_told_from_the_weights():
    ranks = [bn(0.5), bn(0.54)]
    found = columns(ranks, ranks, {"mask"})
    assert found["difference"] == 0
    assert found["buffers off by"] == pytest.approx(0.08)
    assert found["weights"] == "equal; buffers differ by rank, off by 8e-02 (1.running_mean)"


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([bn(0.5), bn(0.5)], "equal"),
        ([bn(0.7), bn(0.7)], "equal; buffers off by 4e-01 (1.running_mean)"),
        ([bn(NAN), bn(0.5)], "equal; buffers not finite (1.running_mean)"),
        ([bn(0.5, NAN)], "not finite (0.weight)"),
        ([bn(0.5, 3.0, False)], "off by 2e+00 (0.weight); buffers off in integers (2.mask)"),
        ([bn(0.5) | rank(**{"1.num_batches_tracked": 9})], "equal; buffers off in integers (1.num_batches_tracked)"),
    ],
)
def test_weights_and_buffers_in_words(ranks, said):
    assert columns([bn(0.5)], ranks, {"mask"})["weights"] == said


def test_a_run_without_buffers_has_no_column_for_them():
    assert set(columns([rank(a=[1.0])], [rank(a=[1.0])])) == {"difference", "weights"}


# Curves


def history_of(*ranks, name="loss"):
    """Each rank's (step, value)."""
    history = History(len(ranks))
    for number, calls in enumerate(ranks):
        if calls:
            steps, values = zip(*calls, strict=True)
            record = log(number, [0.1 * at for at in range(len(steps))], **{name: values})
            history.add(record._replace(steps=type(record.steps)("q", steps)))
    return history


def test_the_mean_curve_of_the_whole_history_is_over_the_ranks_that_log():
    history = history_of([(0, 1.0), (1, 2.0), (5, 9.0)], [(0, 3.0), (1, 4.0), (1, 8.0)], [])
    assert mean_curve(history, "loss").to_dict() == {(0, 0): 2.0, (1, 0): 3.0}


def test_one_step_of_a_long_run_that_is_off_is_seen():
    values = np.random.default_rng(0).normal(size=100_000).cumsum()
    other = values.copy()
    other[54_321] += 5.0
    one, two = (history_of(list(enumerate(each))) for each in (values, other))
    thinned = [dict(zip(*each.mean_curve("loss"), strict=True)) for each in (one, two)]
    shared = thinned[0].keys() & thinned[1].keys()
    assert max(abs(thinned[0][step] - thinned[1][step]) for step in shared) < 5.0, "a drawn curve has few of its steps"
    assert curves_apart(one, two, "loss") == (pytest.approx(5.0), "")


@pytest.mark.parametrize(
    ("one", "other", "off", "said"),
    [
        ([(0, 1.0), (1, NAN)], [(0, 1.0), (1, 2.0)], NAN, "not finite (from step 1)"),
        ([(0, 1.0), (7, NAN)], [(0, 1.0), (7, NAN)], NAN, "not finite (from step 7)"),
        ([(0, 1.0), (1, INF)], [(0, 1.0), (1, INF)], 0.0, ""),
        ([(0, INF)], [(0, 1.0)], NAN, "not finite (from step 0)"),
        ([(0, 1.0)], [(1, 1.0)], NAN, "no step in both"),
        ([(2**62, 1.0)], [(2**62, 3.0)], 2.0, ""),
        ([(0, 1.0), (0, 2.0)], [(0, 1.0), (0, 2.5)], 0.5, ""),  # steps counted anew in every epoch
    ],
)
@pytest.mark.filterwarnings("error")
def test_how_far_curves_are_apart(one, other, off, said):
    found = curves_apart(history_of(one), history_of(other), "loss")
    assert found == (pytest.approx(off, nan_ok=True), said)
