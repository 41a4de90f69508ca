"""A pipeline's step replayed on ideal devices."""

from __future__ import annotations

import itertools
import re

import pytest

from course.exercises import find
from course.replay import length, most_kept, on_clock, step_length

NAMES = {"F": "forward", "B": "backward"}
LASTS = {"forward": 1.0, "backward": 2.0}


def gpipe(stage, stages, micro_batches):
    return [(what, i) for what in ("forward", "backward") for i in range(micro_batches)]


def one_forward_one_backward(stage, stages, micro_batches):
    order = find("one_forward_one_backward").solution(stage, stages, micro_batches)
    return [(NAMES[kind], i) for kind, i in order]


@pytest.mark.parametrize("schedule", [gpipe, one_forward_one_backward])
@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("micro_batches", [1, 2, 8])
def test_both_schedules_take_as_long_as_the_formula_says_with_fewer_micro_batches_than_stages_too(
    schedule, stages, micro_batches
):
    orders = [schedule(stage, stages, micro_batches) for stage in range(stages)]
    assert step_length(orders, LASTS) == 3 * (micro_batches + stages - 1)


def test_a_deadlock_of_stages_says_before_which_pass_each_is_blocked():
    orders = [[("backward", 0), ("forward", 0)], gpipe(1, 2, 1)]
    with pytest.raises(ValueError, match=re.escape("rank 0 is blocked before ('B', 0, 0), rank 1 is blocked before (")):
        step_length(orders, LASTS)


UNITS = {"F": 1, "B": 2, "I": 1, "W": 1}


def zb_h1(rank, ranks, micro_batches):
    return [(what, rank, i) for what, i in find("zero_bubble").solution(rank, ranks, micro_batches)]


@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 4), (2, 8), (4, 4), (4, 8)])
def test_zb_h1_idles_for_a_third_of_1f1b_and_no_rank_keeps_more_than_1f1bs_first(ranks, micro_batches):
    split = [zb_h1(rank, ranks, micro_batches) for rank in range(ranks)]
    assert length(on_clock(split, UNITS)) == 3 * micro_batches + ranks - 1
    assert [most_kept(order) for order in split] == [ranks] * ranks
    whole = [find("one_forward_one_backward").solution(rank, ranks, micro_batches) for rank in range(ranks)]
    assert [most_kept(order) for order in whole] == [ranks - rank for rank in range(ranks)]


def test_a_pass_ends_before_those_that_need_it_begin():
    timed = on_clock([zb_h1(rank, 3, 6) for rank in range(3)], UNITS)
    ends = {one[:3]: one.end for order in timed for one in order}
    for order in timed:
        assert all(a.end <= b.begin for a, b in itertools.pairwise(order))
        for one in order:
            needs = {"F": ("F", one.stage - 1), "I": ("I", one.stage + 1), "W": ("I", one.stage)}[one.what]
            assert ends.get((*needs, one.micro_batch), 0) <= one.begin
