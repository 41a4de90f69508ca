"""Functions launched on reserved ranks: a run like any other, on processes that stay."""

from __future__ import annotations

import gc
import os
import signal
import threading

import pytest
import torch
import torch.distributed as dist

import labkit
from tests.conftest import LONG_S, lives, wait_for_step, wait_until
from tests.support import workloads

SESSION_RANKS = 3

pytestmark = pytest.mark.spawns


def launch(fn, *arguments, on, **options):
    return labkit.launch(fn, *arguments, on=on, live=False, **options)


def pid(worker):
    return os.getpid()


# A run like any other


def test_launch_after_launch_has_the_results_of_one_process_on_the_same_processes(ranks):
    pids = ranks.pids
    runs = [launch(workloads.fit, on=ranks) for _ in range(2)]
    alone = labkit.launch(workloads.fit, world_size=3, live=False)
    for run in runs:
        assert run.status == "finished"
        assert run.states == ["finished"] * 3
        assert len(run.history) == 60
        for mine, theirs in zip(run.results, alone.results, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True)), "bit for bit"
    assert launch(pid, on=ranks).results == pids == ranks.pids


def test_a_smaller_world_size_takes_the_first_ranks(ranks):
    assert launch(pid, on=ranks, world_size=2).results == ranks.pids[:2]
    assert [r["world_size"] for r in launch(workloads.where_am_i, on=ranks, world_size=1).results] == [1]
    with pytest.raises(ValueError, match=r"world_size=4, but this session has 3 ranks; reserve more"):
        launch(pid, on=ranks, world_size=4)
    assert launch(pid, on=ranks).results == ranks.pids


def test_a_second_run_is_refused_with_who_holds_the_ranks_and_waiting_helps(ranks):
    first = launch(workloads.spin, on=ranks, wait=False)
    wait_for_step(first, 3)
    with pytest.raises(RuntimeError, match=r"run 'spin' holds these ranks, for \d+ s now. Wait for it \(run.wait"):
        launch(pid, on=ranks)
    with pytest.raises(RuntimeError, match="run 'spin' holds these ranks"):
        ranks.run("1")
    assert ranks.busy_with == "spin"
    first.stop()
    assert launch(pid, on=ranks).results == ranks.pids
    assert first.status == "stopped"
    assert len(set(first.results)) == 1, "all at one step"


def test_what_cannot_be_launched_holds_no_ranks(ranks):
    with pytest.raises(ValueError, match="cannot be sent"):
        launch(lambda worker, lock: None, threading.Lock(), on=ranks)
    with pytest.raises(TypeError, match="cannot be called"):
        launch(pid, 1, 2, on=ranks)
    assert ranks.busy_with == ""


def test_cells_and_launches_take_turns_and_variables_stay(ranks, capsys):
    ranks.run("x = torch.ones(1) * rank")
    assert launch(pid, on=ranks).results == ranks.pids
    ranks.run("dist.all_reduce(x)\nx.item()")
    assert capsys.readouterr().out == "".join(f"[rank {rank}] 3.0\n" for rank in range(3))
    assert launch(pid, on=ranks).results == ranks.pids  # which closes the port of the cells' process group


# Failing and being ended


def test_ranks_that_are_stuck_are_ended_with_their_run_and_replaced_and_the_next_launch_says_so(ranks):
    before = ranks.pids
    run = launch(workloads.go_astray, "waits elsewhere", on=ranks, wait=False)
    wait_for_step(run, 0)
    run.stop(0.1)
    assert run.status == "stopped"
    after = launch(pid, on=ranks, wait=False)
    assert after.wait(LONG_S).results == ranks.pids
    assert not set(ranks.pids) & set(before)
    assert not any(map(lives, before))


def test_a_new_rank_is_announced_and_forgotten_once_it_is_there():
    with labkit.Session(2) as ranks:
        launch(pid, on=ranks)
        os.kill(ranks.pids[1], signal.SIGKILL)
        ranks._reserve.processes[1].wait_for_exit()
        run = launch(workloads.spin, on=ranks, wait=False)
        assert run.notice == "rank 1 is new (its process had ended: SIGKILL): the launch waits until it is ready"
        wait_for_step(run, 1)
        assert run.notice == ""
        run.stop()


def test_a_group_that_a_failed_rank_still_refers_to_does_not_keep_the_others_waiting(ranks):
    def fail(worker):
        import sys

        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        sys.modules["torch"].kept_by_a_test = model, dist.group.WORLD
        if worker.rank == 1:
            raise ValueError("bad batch")
        dist.barrier()

    pids = ranks.pids
    with pytest.raises(labkit.WorkerFailed, match="rank 1 failed: ValueError: bad batch"):
        launch(fail, on=ranks)
    assert ranks.pids == pids, "each got an error and went on"
    assert launch(workloads.fit, on=ranks).status == "finished"


def count_in_a_module(worker):
    import json

    json.counted = getattr(json, "counted", 0) + 1
    return json.counted


def test_after_a_restart_ranks_have_new_processes_new_modules_and_no_variables(capsys):
    with labkit.Session(2) as ranks:
        before = ranks.pids
        ranks.run("x = torch.ones(1)")
        assert [launch(count_in_a_module, on=ranks).results for _ in range(2)] == [[1, 1], [2, 2]]
        run = launch(workloads.spin, on=ranks, wait=False)
        with pytest.raises(RuntimeError, match="run 'spin' holds these ranks"):
            ranks.restart()
        assert ranks.pids == before
        run.stop()
        ranks.restart()
        assert not any(map(lives, before))
        assert not set(ranks.pids) & set(before)
        capsys.readouterr()
        assert ranks.values("'x' in globals()") == [False, False]
        assert capsys.readouterr().out == "", "nothing is said of what was asked for"
        assert launch(count_in_a_module, on=ranks).results == [1, 1]
        ranks.run("x = torch.ones(1)\ndist.all_reduce(x)")
        assert ranks.values("x.item()") == [2.0, 2.0]
    with pytest.raises(RuntimeError, match="these ranks are gone"):
        ranks.restart()


# The end of the ranks


def test_nothing_is_left_when_a_session_ends():
    with labkit.Session(2) as ranks:
        pids = ranks.pids
        run = launch(workloads.spin, on=ranks, wait=False)
        wait_for_step(run, 1)
    assert run.over.is_set()
    assert run.status == "stopped"
    assert not any(map(lives, pids))
    assert ranks.over
    ranks.close()
    for use in (lambda: ranks.run("1"), lambda: launch(pid, on=ranks)):
        with pytest.raises(RuntimeError, match="these ranks are gone, and their variables with them: they were closed"):
            use()


def test_a_session_that_nobody_refers_to_ends_its_ranks():
    ranks = labkit.Session(1)
    pids = ranks.pids
    launch(pid, on=ranks)
    del ranks
    gc.collect()
    wait_until(lambda: not any(map(lives, pids)))
