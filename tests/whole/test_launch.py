"""The public contract of `labkit.launch` and `Run`, with real ranks."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from torch import nn

import labkit
from labkit import system
from labkit.engines.local import LocalEngine
from tests.conftest import LONG_S, lives
from tests.support import workloads

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


@pytest.fixture
def no_process_may_start(monkeypatch):
    def start(self, job):
        raise AssertionError("a process was started")

    monkeypatch.setattr(LocalEngine, "start", start)


# What a rank finds


@functools.cache
def placed():
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OMP_NUM_THREADS")
        return labkit.launch(workloads.where_am_i, world_size=2, live=False)


@pytest.mark.parametrize(
    ("allowed", "world_size", "expected"),
    [("", 2, 4), ("4", 2, 2), ("16", 2, 4), ("1", 2, 1), ("", 16, 1), ("4,2", 2, 4), ("many", 2, 4)],
)
def test_ranks_share_the_cores_or_what_the_environment_allows(monkeypatch, allowed, world_size, expected):
    monkeypatch.setattr(system.host, "cores", lambda: 8)
    monkeypatch.setenv("OMP_NUM_THREADS", allowed)
    assert system.threads(world_size) == expected


@pytest.mark.spawns
def test_every_rank_knows_its_place():
    run = placed()
    assert run.status == "finished"
    assert [r["rank"] for r in run.results] == [0, 1]
    for result in run.results:
        assert result["local_rank"] == result["rank"]
        assert result["world_size"] == 2
        assert result["device"] == "cpu"
        assert result["backend"] == "gloo"
        assert result["sum"] == 2
        assert result["threads"] == max(1, CORES // 2)
        assert result["environment"]["RANK"] == str(result["rank"])
        assert result["environment"]["MASTER_ADDR"] == "127.0.0.1"
    assert len({r["pid"] for r in run.results} | {os.getpid()}) == 3


@pytest.mark.spawns
def test_ranks_stay_light_and_on_loopback():
    for result in placed().results:
        assert result["heavy"] == [], "pandas, Plotly and the widgets are paid for in the notebook only"
        assert result["of_the_notebook"] == [], "and so is labkit's own part there, whichever wings take part"
        assert set(result["listening"]) <= {"127.0.0.1"}
        assert result["has_notebooks_main"], "the launching script is not run again"
        assert result["collects"], "garbage, which it does not while it imports"


@pytest.mark.spawns
@pytest.mark.check
def test_two_ranks_without_gpus_is_the_default():
    assert labkit.launch(lambda worker: worker.world_size, live=False).results == [2, 2]


@pytest.mark.spawns
def test_rank_r_is_seeded_with_seed_plus_r():
    first = labkit.launch(workloads.random_numbers, seed=5, live=False).results
    other = labkit.launch(workloads.random_numbers, seed=6, live=False).results
    assert first[0] != first[1]
    assert other[0] == first[1]


# What comes back


@pytest.mark.spawns
def test_ddp_logs_and_weights_equal_one_process():
    world_size = 3
    run = labkit.launch(workloads.fit, world_size=world_size, live=False)
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(20, 4 * world_size, 8, generator=torch.Generator().manual_seed(1))
    losses = []
    for batch in data:
        loss = model(batch).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert np.allclose(run.history.groupby("step")["loss"].mean(), losses, atol=1e-6)
    for result in run.results:
        for parameter, expected in zip(result, model.parameters(), strict=True):
            assert torch.allclose(parameter, expected, atol=1e-6)


# Bad arguments: an error before any process


def takes_steps(worker, steps, lr=0.1):
    """Two parameters of its own."""


def takes_seed(worker, seed=3):
    """A parameter that launch has too."""


LOCK = threading.Lock()


def uses_a_lock(worker):
    with LOCK:
        return worker.rank


uses_a_lock.__module__ = "__main__"  # as if typed in a cell: sent by value


@pytest.mark.usefixtures("no_process_may_start")
@pytest.mark.parametrize(
    ("arguments", "options", "kind", "said"),
    [
        (("train",), {}, TypeError, "takes a function to call on every rank, got a str"),
        ((takes_steps,), {}, TypeError, "missing a required argument: 'steps'"),
        ((takes_steps, 1, 2, 3), {}, TypeError, "too many positional arguments"),
        ((takes_steps, 1), {"epochs": 3}, TypeError, "unexpected keyword argument 'epochs'"),
        ((lambda: None, 1), {}, TypeError, "Its first parameter is the worker"),
        ((takes_seed,), {"seed": 4}, ValueError, "launch.. keeps seed=… for itself"),
        ((takes_steps, 1), {"world_size": 0}, ValueError, "world_size must be at least 1, got 0"),
        ((takes_steps, 1), {"world_size": True}, TypeError, "whole number"),
        ((takes_steps, 1), {"backend": "smoke"}, ValueError, "unknown backend 'smoke'"),
        ((takes_steps, 1), {"backend": "nccl"}, ValueError, "GPU of its own|not built"),
        ((takes_steps, 1), {"stall_s": 0}, ValueError, "stall_s is a number of seconds greater than 0"),
        ((takes_steps, 1), {"seed": 0.5}, TypeError, "seed is a whole number or None"),
        ((takes_steps, LOCK), {}, ValueError, r"argument 1 \(after the worker\) is a lock"),
        ((takes_steps, 1), {"lr": {"a": [LOCK]}}, ValueError, "argument lr=… is a dict, which .* '_thread.lock'"),
        ((uses_a_lock,), {}, ValueError, "'LOCK', which uses_a_lock uses, is a lock"),
        ((takes_steps, labkit.Run(LocalEngine(1), 1, "train")), {}, ValueError, "a Run stays in the notebook"),
    ],
)
def test_a_bad_argument_is_refused_before_any_process(arguments, options, kind, said):
    with pytest.raises(kind, match=said):
        labkit.launch(*arguments, **options)


# Waiting, stopping, time


@pytest.mark.spawns
def test_a_run_in_the_background_goes_on_and_can_be_stopped_at_a_common_step():
    run = labkit.launch(workloads.spin, wait=False, live=False)
    assert run.status == "running"
    with pytest.raises(TimeoutError, match="still going after 0.1 s"):
        run.wait(timeout_s=0.1)
    while len(run.history) < 50:
        time.sleep(0.05)
    assert run.status == "running"
    assert run.stop() is run
    assert (run.status, run.stop_outcome) == ("stopped", "")
    assert run.states == ["finished", "finished"]
    assert run.results[0] == run.results[1], "both ranks took equally many steps"
    # Each logs once more than it counts: the call that said "stop".
    steps = run.history.groupby("rank")["step"]
    assert steps.max().tolist() == run.results
    assert steps.count().tolist() == [steps_taken + 1 for steps_taken in run.results], "complete"
    assert 0 < run.history["time_s"].min() < LONG_S
    assert run.stop().status == "stopped", "stopping twice does nothing"
    assert run.wait() is run


@pytest.mark.spawns
def test_two_runs_at_once_do_not_meet():
    runs = [labkit.launch(workloads.fit, world_size=2, steps=n, wait=False, live=False) for n in (10, 15)]
    assert [run.wait().status for run in runs] == ["finished", "finished"]
    assert [len(run.history) for run in runs] == [20, 30]


@pytest.mark.spawns
def test_a_script_that_ends_takes_its_background_run_along(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("""
import time, labkit

def forever(worker):
    while True:
        time.sleep(0.1)
        worker.log(loss=1.0)

run = labkit.launch(forever, wait=False)
while not len(run.history):
    time.sleep(0.1)
print("ranks:", *run.engine.pids)
""")
    command = [sys.executable, script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=5 * LONG_S, check=False)
    assert done.returncode == 0, done.stderr
    (ranks,) = [line for line in done.stdout.splitlines() if line.startswith("ranks: ")]
    assert not any(lives(int(pid)) for pid in ranks.split()[1:])
