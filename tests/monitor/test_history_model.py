"""Whatever ranks log, the history has it as a plain list would. Examples are drawn by hypothesis; starts no process."""

from __future__ import annotations

import math
import os
import pickle
import time
import warnings

import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.monitor import not_finite as finding
from labkit.monitor.history import FEW
from labkit.monitor.state import RunState
from labkit.protocol.job import RankInfo
from labkit.rank.channels import Channel
from labkit.rank.log_batcher import LogBatcher
from labkit.rank.worker import Worker
from tests.conftest import LONG_S

LONG = bool(os.environ.get("LABKIT_LONG"))
settings.register_profile("labkit", deadline=None, database=None, derandomize=not LONG)
settings.load_profile("labkit")

NAMES = ["loss", "accuracy", "samples", "lr", "a/b", "Größe", ""]
STEPS = st.one_of(st.none(), st.integers(-3, 12), st.integers(-(2**63), 2**63 - 1))
VALUES = st.dictionaries(st.sampled_from(NAMES), st.one_of(st.floats(), st.integers(-5, 5)), min_size=1)


def script(ranks):
    """What happens, one thing after the other: calls of a rank, what it has collected is sent, a rank goes back."""
    rank = st.integers(0, ranks - 1)
    return st.lists(
        st.one_of(
            st.tuples(st.just("log"), rank, STEPS, VALUES),
            st.tuples(st.just("send"), rank),
            st.tuples(st.just("back"), rank, st.integers(-3, 12)),
        ),
        max_size=25,
    )


class Batcher(LogBatcher):
    """Sends when it is told to."""

    interval_s = LONG_S


class Model:
    """Ranks that log, the history that takes it in, and the same as a list for each rank."""

    def __init__(self, ranks):
        self.history = RunState(ranks, 0.0, 0.0).recorded
        self.calls = [[] for _ in range(ranks)]
        self.given = [0] * ranks
        self.workers, self.batchers = [], []
        for rank in range(ranks):
            channel = Channel(None, 0)
            channel.send = lambda log: self.history.add(pickle.loads(pickle.dumps(log)))
            batcher = Batcher(rank, channel.send, time.time())
            self.batchers.append(batcher)
            self.workers.append(Worker(RankInfo(rank, rank, ranks, ranks), torch.device("cpu"), batcher, channel))

    def log(self, rank, step, values):
        self.workers[rank].log(step, **values)
        if step is None:
            step, self.given[rank] = self.given[rank], self.given[rank] + 1
        self.calls[rank].append((step, {name: float(value) for name, value in values.items()}))

    def send(self, rank):
        self.batchers[rank].flush()

    def back(self, rank, step):
        """As after a restart: what the rank has logged has arrived."""
        self.send(rank)
        self.history.go_back(rank, step)
        first = next((at for at, (of, _) in enumerate(self.calls[rank]) if of >= step), len(self.calls[rank]))
        del self.calls[rank][first:]

    def close(self):
        for batcher in self.batchers:
            batcher.close()


def run(ranks, happens):
    model = Model(ranks)
    try:
        for what, *about in happens:
            getattr(model, what)(*about)
    finally:
        model.close()
    return model


def expected(calls, names):
    """The frame of a list of calls for each rank."""
    rows = [
        (rank, step, *(values.get(name, math.nan) for name in names))
        for rank, of_rank in enumerate(calls)
        for step, values in of_rank
    ]
    frame = pd.DataFrame(rows, columns=["rank", "step", *names])
    return frame.astype({"rank": "int64", "step": "int64", **dict.fromkeys(names, "float64")})


def same(one, other):
    return one == other or (math.isnan(one) and math.isnan(other))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("ranks", [1, 3, FEW + 1])
def test_the_history_equals_a_list_of_the_calls_whatever_is_logged_sent_and_looked_at(ranks):
    @settings(max_examples=1000 if LONG else 60 if ranks < FEW else 25)
    @given(script(ranks))
    def check(happens):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model = run(ranks, happens)
            history, calls = model.history, model.calls
            frame = history.frame()
            history.drawn(), finding.first(history), [history.mean_curve(name) for name in history.names]
        names = list(frame.columns[3:])
        assert names == history.names
        assert set(names) == {name for of_rank in calls for _, values in of_rank for name in values}
        pd.testing.assert_frame_equal(frame.drop(columns="time_s"), expected(calls, names), check_exact=True)
        for rank, of_rank in enumerate(calls):
            progress = history.progress(rank)
            assert progress.steps == len(of_rank)
            assert progress.last_step == (of_rank[-1][0] if of_rank else None)
            last = {name: value for _, values in of_rank for name, value in values.items()}
            assert set(progress.last) == set(last)
            assert all(same(progress.last[name], value) for name, value in last.items())
        for name in names:
            for rank, of_rank in enumerate(calls):
                of_name = [(step, values[name]) for step, values in of_rank if name in values]
                steps, given_out = (column.tolist() for column in history.curve(name, rank))
                assert steps == [step for step, _ in of_name]
                assert all(same(found, value) for found, (_, value) in zip(given_out, of_name, strict=True))

    check()
