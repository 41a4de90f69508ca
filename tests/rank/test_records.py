import threading
import time

import numpy as np
import pytest
import torch

from labkit.protocol.job import RankInfo
from labkit.rank.log_batcher import LogBatcher, number
from labkit.rank.worker import Worker
from tests.conftest import LONG_S, wait_until
from tests.support.fake_engine import KeptChannel


def batcher_of(interval_s, send):
    """Return rank 2's batcher, with another interval."""
    return type("Batcher", (LogBatcher,), {"interval_s": interval_s})(2, send, 0.0)


def calls(sent):
    """The log calls that were sent, one by one: (names, step, values)."""
    return [
        (log.names, step, log.values[i * len(log.names) : (i + 1) * len(log.names)].tolist())
        for log in sent
        for i, step in enumerate(log.steps)
    ]


def test_the_rest_of_a_burst_is_sent_without_another_call():
    sent = []
    logs = batcher_of(0.05, sent.append)
    start = time.monotonic()
    for step in range(1000):
        logs.add(step, ("loss",), [step])
    took_s = time.monotonic() - start
    wait_until(lambda: len(calls(sent)) == 1000)
    logs.close()
    assert [step for _, step, _ in calls(sent)] == list(range(1000))
    assert len(sent) <= 3 + took_s / 0.05, "few: at intervals, by the caller or by the thread in the background"


@pytest.fixture
def now_s(monkeypatch):
    """A clock that is set by hand."""
    now_s = [100.0]
    monkeypatch.setattr("labkit.rank.log_batcher.time.time", lambda: now_s[0])
    return now_s


def test_a_call_after_a_pause_is_sent_at_once(now_s):
    sent = []
    logs = batcher_of(60, sent.append)
    for step, its_names in enumerate([("loss",), ("loss",), ("accuracy",)]):
        logs.add(step, its_names, [0.0])
        assert len(calls(sent)) == step + 1, "nothing waits, should the rank be killed now"
        now_s[0] += 61
    logs.close()


def test_quick_calls_are_sent_at_intervals(now_s):
    sent = []
    logs = batcher_of(60, lambda log: sent.append((now_s[0], log)))
    names = ("loss",), ("accuracy",)
    for step in range(10_000):
        now_s[0] += 0.02
        logs.add(step, names[step % len(names)], [0.0])
    logs.close()
    assert len({at_s for at_s, _ in sent}) == 1 + 3 + 1, "the first alone, then one each minute of 200 s, then the rest"
    assert [step for _, log in sent for step in log.steps] == list(range(10_000))
    assert {log.names for _, log in sent} == set(names)


def test_calls_from_several_threads_are_all_sent():
    sent = []
    logs = batcher_of(0.001, sent.append)

    def add(names):
        for step in range(2000):
            logs.add(step, names, [step] * len(names))

    threads = [threading.Thread(target=add, args=(names,)) for names in [("a",), ("b", "c")]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    logs.close()
    for names in [("a",), ("b", "c")]:
        mine = [(step, values) for found, step, values in calls(sent) if found == names]
        assert mine == [(step, [step] * len(names)) for step in range(2000)]


@pytest.fixture
def logging_rank():
    """A worker whose log calls wait to be sent, and what has been sent."""
    channel = KeptChannel()
    batcher = batcher_of(LONG_S, channel.send)
    yield Worker(RankInfo(2, 2, 4, 4), torch.device("cpu"), batcher, channel), batcher, channel.sent
    batcher.close()


@pytest.mark.parametrize(
    "step",
    [2**63, -(2**63) - 1, 10**5000, np.uint64(2**63)],
    ids=["too great", "too small", "of 5,000 digits", "unsigned"],
)
def test_a_step_beyond_64_bits_is_refused_on_the_readers_line_and_the_rest_is_kept(logging_rank, step):
    worker, batcher, sent = logging_rank
    for loss in range(50):
        worker.log(loss=loss)
    with pytest.raises(OverflowError):
        worker.log(step=step, loss=1.0)
    for edge in (-(2**63), 2**63 - 1):
        worker.log(step=edge, loss=0.5)
    batcher.close()
    assert [step for _, step, _ in calls(sent)] == [*range(50), -(2**63), 2**63 - 1]


def test_a_rank_that_has_no_whole_batch_expects_no_step_and_says_what_to_do(logging_rank):
    with pytest.raises(ValueError, match="rank 2 expects 0 steps: with 4 ranks no whole batch is left"):
        logging_rank[0].expect(0)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"rank": 1}, "labkit fills in the column 'rank' itself"),
        ({}, "nothing to log"),
        ({"step": 1.5, "loss": 1}, "a step is a whole number, got 1.5"),
    ],
)
def test_a_call_without_a_value_of_its_own_or_a_whole_step_is_refused_with_the_rank(logging_rank, values, said):
    worker, *_ = logging_rank
    with pytest.raises((TypeError, ValueError), match=f"rank 2: .*{said}"):
        worker.log(**values)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (3, 3.0),
        (0.5, 0.5),
        (float("inf"), float("inf")),
        (True, 1.0),
        (np.float32(0.25), 0.25),
        (np.int64(7), 7.0),
        (np.array([[2.5]]), 2.5),
        (torch.tensor(0.25), 0.25),
        (torch.tensor([4]), 4.0),
        (torch.tensor([[0.5]], dtype=torch.bfloat16, requires_grad=True), 0.5),
    ],
)
def test_a_logged_value_may_be_any_one_number(value, expected):
    found = number("loss", value, rank=0)
    assert type(found) is float
    assert found == expected


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("0.5", r"a str \('0.5'\)"),
        (None, r"a NoneType \(None\)"),
        ([1.0], r"a list \(\[1.0\]\)"),
        (1j, "a complex"),
        (torch.tensor([1.0, 2.0]), r"a Tensor of shape \(2,\)"),
        (torch.empty(0), r"a Tensor of shape \(0,\)"),
        (np.zeros((2, 3)), r"a ndarray of shape \(2, 3\)"),
        (torch.tensor(1j), "a Tensor"),  # .item() gives a complex, which is no float
        (np.array(["0.5"]), r"a ndarray of shape \(1,\)"),
    ],
)
def test_anything_else_is_refused_with_rank_name_and_what_was_found(value, said):
    with pytest.raises(TypeError, match=rf"rank 2: worker.log\(loss=…\) takes one number, got {said}"):
        number("loss", value, rank=2)
