"""Every way to fail of `tests.support.failures`, on real ranks: who is blamed, what is said, what is kept, how soon."""

from __future__ import annotations

import functools
import re
import statistics
import sys

import pytest

import labkit
from labkit.monitor import memory
from labkit.system.out_of_memory import OutOfMemoryKills
from tests.failures.messages import assert_as_kept, said_in
from tests.support import failures, fake_system
from tests.support.failures import ROWS, trial
from tests.support.tiers import few

SESSION_RANKS = 4

FAILING_RANK = {2: 1, 3: 0, 4: 2}
"""By world size; `tests/benchmarks/failures.py` tries every rank, many times."""

KILLS = {"os._exit", "SIGKILL", "segmentation fault", "other collective"}
"""Rows that end processes."""

RACES = {"other collective", "DataLoader worker dies", "returns early"}
"""Rows of which one of several true things is said, as ranks or a DataLoader's processes notice first."""


AFTER: list[float] = []
"""Time from each failure on new ranks to its error, as a share of what this machine takes to start some."""


COLD = ["raises", "SIGKILL", "function cannot be unpacked"]
"""Rows that two ranks fail also if they begin as a reader's do."""

LONG = ["prints 100 MB", "logs a million points", "raises while the others take steps of 2 s"]
"""Rows that take seconds."""

ANYWHERE = [(row, place, size) for place in ("reserved ranks", "new ranks") for size in (3, 2, 4) for row in ROWS]
PLACES = [
    *few(ANYWHERE, lambda case: case[1:] == ("reserved ranks", 3) and case[0] not in LONG),
    *(pytest.param(row, "cold ranks", 2, marks=pytest.mark.cold) for row in COLD),
    *(pytest.param(row, "cold ranks", 3, marks=[pytest.mark.cold, pytest.mark.long]) for row in ROWS),
]


@pytest.mark.spawns
@pytest.mark.parametrize(("row", "where", "world_size"), PLACES)
def test_the_rank_that_failed_is_named_and_what_had_arrived_is_kept(row, where, world_size, start_s, request):
    rank = FAILING_RANK[world_size]
    on = request.getfixturevalue("ranks") if where == "reserved ranks" else None
    pids = on.pids if on else []
    error, after_s = trial(row, world_size, rank, on)
    if on is None:
        AFTER.append(after_s / start_s)
    # Of two ranks that meet in different collectives neither is wrong.
    assert error.rank == rank or (row == "other collective" and world_size == 2)
    diagnosis, run = error.diagnosis, error.run
    assert re.match(ROWS[row].said.format(rank=rank), diagnosis.headline)
    assert "\n" not in diagnosis.headline
    assert ROWS[row].cause in error.cause
    assert str(error).startswith(f"{diagnosis.headline}\n\n{error.cause}")
    assert [line.split()[:2] for line in diagnosis.others] == [
        ["rank", str(other)] for other in range(world_size) if other != error.rank
    ]
    assert not any("\n" in line for line in diagnosis.others)
    assert on or after_s <= 2 * start_s

    assert run.status == "failed"
    assert run.error is error
    of_others = "early" if ROWS[row].others is failures.returns_early else None
    assert [result for other, result in enumerate(run.results) if other != rank] == [of_others] * (world_size - 1)
    assert run.results[rank] == ("early" if row == "returns early" else None)
    if ROWS[row].fails is not None:
        common = run.history.dropna(subset="total")
        for other in range(world_size):
            steps = common.loc[common["rank"] == other, "step"].tolist()
            assert steps == list(range(len(steps)))
            # A mismatch aborts every rank in C++, also between two batches of log calls.
            assert len(steps) == 5 or row == "other collective", f"of rank {other}"
    if on and row not in KILLS:
        # The others', who take no notice; gloo's transport of macOS gives them none.
        ended = ROWS[row].others not in (None, failures.returns_early) or sys.platform != "linux"
        kept = [rank] if ended else range(world_size)
        assert [on.pids[r] for r in kept] == [pids[r] for r in kept], "who fails by an exception keeps its process"
    if on and world_size == 3 and row not in RACES:
        assert_as_kept(row, said_in(error))
    if row == "logs a million points":
        assert run.history["much"].count() == 1_000_000
    if row == "prints 100 MB":
        assert run.output[rank].splitlines()[-1] == "x" * 99
        assert run.output[rank].startswith("… 990,000 earlier lines were dropped …")


@pytest.fixture
def counts(tmp_path, monkeypatch):
    """A cgroup and a machine that have killed nothing because memory ran out so far."""
    monkeypatch.setattr(memory, "OutOfMemoryKills", functools.partial(OutOfMemoryKills, fake_system.v2(tmp_path)))
    return tmp_path


def dies(worker, how, counts, **kills):
    """Log; then have the system count what it has killed, and end the last rank while the others wait for it."""
    worker.log(loss=1.0)
    if worker.rank == worker.world_size - 1:
        fake_system.count(counts, **kills)
        failures.ROWS[how].fails(worker)
    failures.dist.barrier()


@pytest.mark.spawns
def test_a_rank_killed_while_its_cgroup_is_out_of_memory_is_said_to_be(counts):
    with pytest.raises(labkit.WorkerFailed) as failure:
        labkit.launch(dies, "SIGKILL", counts, cgroup=1, host=1, world_size=2, live=False)
    error = failure.value
    assert str(error).startswith(
        "rank 1 was killed by the system: out of memory (SIGKILL), after logging step 0 or later"
    )
    peak = re.search(r"Its memory was seen to peak at (\d+\.\d+) GiB\.", error.cause)
    assert 0.05 < float(peak.group(1)) < 8, "torch alone takes 0.2"
    assert len(error.diagnosis.others) == 1
    assert "memory" not in error.diagnosis.others[0], "the victim was not killed"


def test_errors_come_in_a_fraction_of_the_time_that_ranks_take_to_start():
    """Of all trials above; the median of those that ran, if only some were chosen."""
    assert statistics.median(AFTER or [0.0]) <= 0.5, sorted(AFTER)
