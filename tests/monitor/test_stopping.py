"""When ranks that were asked to stop are ended, from what they logged and answered: no process."""

from __future__ import annotations

import pickle
from array import array

import pytest

from labkit.failures.stop_deadlock import USED_SHARE, StopDeadlock
from labkit.monitor.pace import RECENT, Pace
from labkit.protocol.events import Attached, Log
from labkit.rank.waiting import KIND, Waits

GRACE_S = 2.0


def logged(pace, rank, *times_s):
    pace.add(Log(rank, ("loss",), array("q", range(len(times_s))), array("d", times_s), array("d", times_s)))


# How long steps take


def test_the_pace_is_that_of_the_slowest_rank():
    pace = Pace(2)
    assert pace.longest_step_s == 0
    logged(pace, 0, 1.0, 1.5)
    logged(pace, 1, 1.0, 2.0, 2.5)
    assert pace.longest_step_s == 1.0
    logged(pace, 0, 4.5)
    assert pace.longest_step_s == 3.0, "from one record to the next"


def test_the_first_call_says_something_of_the_pace_only_while_there_is_no_second():
    pace = Pace(2)
    pace.begin(0, 2.0)
    pace.begin(1, 2.0)
    logged(pace, 0, 5.0)
    assert pace.longest_step_s == 3.0
    logged(pace, 0, 5.25)
    assert pace.longest_step_s == 0.25


def test_a_long_step_is_forgotten_in_time():
    pace = Pace(1)
    logged(pace, 0, 0.0, 60.0)
    logged(pace, 0, *(60.0 + step for step in range(1, RECENT)))
    assert pace.longest_step_s == 60.0
    logged(pace, 0, 60.0 + RECENT)
    assert pace.longest_step_s == 1.0
    logged(pace, 0, *(1000.0 + step for step in range(10 * RECENT)))
    assert pace.longest_step_s == 1.0, "of a long record, the end"


def test_what_lies_between_two_attempts_is_no_step():
    pace = Pace(1)
    logged(pace, 0, 1.0, 2.0)
    pace.begin(0, 99.0)
    logged(pace, 0, 100.0, 101.0)
    assert pace.longest_step_s == 1.0


# Whether anything can come

COLLECTIVE = Waits(0, "ranks", "all_reduce 17", 0.0, 5.0)
EVENT = Waits(0, "nobody", "wait 4", 0.0, 5.0)
ASLEEP = Waits(0, "time", "1234.5", 3600.0, 5.0)
AT_WORK = Waits(0, "", "", 0.0, 5.0)


def attached(answer):
    return Attached(answer.rank, KIND, pickle.dumps(tuple(answer)))


def rounds(*answers, quiet_s=0.0, living=None):
    """Whether ranks that have answered so are deadlocked: for each question, a second apart, the answers by rank."""
    living = living or set(range(len(answers[0])))
    stopping, now = StopDeadlock(0.0, quiet_s), 0.0
    for number, by_rank in enumerate(answers):
        now = float(number)
        assert not number or stopping.ask_again(living, now), "all have answered, a while ago"
        for rank, answer in enumerate(by_rank):
            if answer is not None:
                stopping.take(attached(answer._replace(rank=rank)), now)
        assert not stopping.ask_again(living, now), "not at once"
    return stopping.is_proven(living, now + GRACE_S, now)


@pytest.mark.parametrize(
    ("what", "second", "is_deadlock"),
    [
        ("all are in collectives", [COLLECTIVE, COLLECTIVE], True),
        ("one waits for itself", [COLLECTIVE, EVENT], True),
        ("one sleeps for an hour", [COLLECTIVE, ASLEEP], True),
        ("one sleeps for a second", [COLLECTIVE, ASLEEP._replace(left_s=1.0)], False),
        ("one is at work", [COLLECTIVE, AT_WORK], False),
        ("one has not answered", [COLLECTIVE, None], False),
        ("one is in another collective by now", [COLLECTIVE, COLLECTIVE._replace(at="all_reduce 18")], False),
        ("one has used the processor", [COLLECTIVE, COLLECTIVE._replace(used_s=6.0)], False),
        ("labkit's own threads have", [COLLECTIVE, COLLECTIVE._replace(used_s=5.0 + USED_SHARE)], True),
        ("one sleeps, and its other threads work", [COLLECTIVE, ASLEEP._replace(used_s=6.0)], True),
        ("one sleeps anew", [COLLECTIVE, ASLEEP._replace(at="2345.6")], False),
    ],
)
def test_ranks_are_deadlocked_if_two_rounds_of_answers_tell_of_the_same_waits(what, second, is_deadlock):
    sleeps = second[1] is not None and second[1].what == "time"
    first = [COLLECTIVE, ASLEEP if sleeps else EVENT if second[1] is EVENT else COLLECTIVE]
    assert not rounds(first), "told once only"
    assert rounds(first, second) == is_deadlock


def in_call(*pending, **reached):
    """The answer of a rank that has used a GPU: the calls of group "w" that it is in, and the newest of each group."""
    calls = tuple(("w", number, (0, 1)) for number in pending)
    return COLLECTIVE._replace(what="call", pending=calls, reached=tuple(reached.items()))


@pytest.mark.parametrize(
    ("what", "first", "second", "in_vain"),
    [
        ("the other sleeps before it", in_call(3, w=3), ASLEEP._replace(reached=(("w", 2),)), True),
        ("the other has come, and a GPU may compute", in_call(3, w=3), in_call(3, w=3), False),
        ("one of its calls can end", in_call(2, 3, w=3), ASLEEP._replace(reached=(("w", 2),)), False),
        ("it is in none that is known", in_call(w=3), ASLEEP._replace(reached=(("w", 2),)), False),
        ("nobody knows where the other has come to", in_call(3, w=3), ASLEEP, False),
        ("the other is not in the group", in_call(3, w=3), ASLEEP._replace(reached=(("v", 2),)), False),
    ],
)
def test_on_a_gpu_only_a_call_that_another_waiting_rank_has_missed_cannot_end(what, first, second, in_vain):
    assert rounds([first, second], [first, second]) == in_vain


def test_ranks_on_gpus_that_have_missed_each_other_in_two_groups_cannot_go_on():
    first, second = (
        COLLECTIVE._replace(what="call", pending=((mine, 1, (0, 1)),), reached=((mine, 1), (others, 0)))
        for mine, others in (("v", "w"), ("w", "v"))
    )
    assert rounds([first, second], [first, second])


def test_those_that_have_ended_are_not_asked_for():
    assert rounds([COLLECTIVE, AT_WORK], [COLLECTIVE, AT_WORK], living={0})
    assert not StopDeadlock(0.0).is_proven(set(), 1.0, 0.0), "all have ended, and may take leave"


def test_a_network_is_given_time():
    assert not rounds([COLLECTIVE], [COLLECTIVE], quiet_s=1.5)
    assert rounds([COLLECTIVE], [COLLECTIVE], [COLLECTIVE], quiet_s=1.5)
    assert not rounds([COLLECTIVE], [COLLECTIVE._replace(used_s=6.0)], [COLLECTIVE._replace(used_s=6.0)], quiet_s=1.5)


def test_ranks_are_asked_again_when_all_have_answered_and_after_twice_the_time_that_took():
    stopping = StopDeadlock(0.0)
    assert not stopping.ask_again({0, 1}, 100.0), "none has answered"
    stopping.take(attached(AT_WORK), 100.0)
    assert not stopping.ask_again({0, 1}, 100.0), "one has not"
    stopping.take(attached(AT_WORK._replace(rank=1)), 103.0)
    assert not stopping.ask_again({0, 1}, 103.0)
    assert not stopping.ask_again({0, 1}, 308.0)
    assert stopping.ask_again({0, 1}, 309.0)
    assert not stopping.ask_again({0, 1}, 999.0), "not before they have answered that"


def test_ranks_that_take_their_time_are_not_asked_often():
    stopping, now, asked = StopDeadlock(0.0), 0.0, 0
    while now < 60:
        stopping.take(attached(AT_WORK), now)
        now += 0.01
        asked += stopping.ask_again({0}, now)
    assert 3 < asked < 50
