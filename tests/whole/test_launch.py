"""The public contract of `labkit.launch` and `Run`, with real ranks."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import psutil
import pytest
import torch
from torch import nn

import labkit
from labkit import system
from labkit.engines.local import LocalEngine
from labkit.protocol.packing import pack, unpack
from tests.conftest import LONG_S, lives, start_of, wait_until
from tests.support import workloads

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


@pytest.fixture
def no_process_may_start(monkeypatch):
    def start(self, job):
        raise AssertionError("a process was started")

    monkeypatch.setattr(LocalEngine, "start", start)


# What a rank finds


@functools.cache
def placed(world_size):
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OMP_NUM_THREADS")
        return labkit.launch(workloads.where_am_i, world_size=world_size, live=False)


@pytest.mark.parametrize(
    ("allowed", "world_size", "expected"),
    [("", 2, 4), ("4", 2, 2), ("16", 2, 4), ("1", 2, 1), ("", 16, 1), ("4,2", 2, 4), ("many", 2, 4)],
)
def test_ranks_share_the_cores_or_what_the_environment_allows(monkeypatch, allowed, world_size, expected):
    monkeypatch.setattr(system.host, "cores", lambda: 8)
    monkeypatch.setenv("OMP_NUM_THREADS", allowed)
    assert system.threads(world_size) == expected


@pytest.mark.spawns
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_rank_knows_its_place(world_size):
    run = placed(world_size)
    assert run.status == "finished"
    assert [r["rank"] for r in run.results] == list(range(world_size))
    for result in run.results:
        assert result["local_rank"] == result["rank"]
        assert result["world_size"] == world_size
        assert result["device"] == "cpu"
        assert result["backend"] == "gloo"
        assert result["sum"] == world_size
        assert result["threads"] == max(1, CORES // world_size)
        assert result["environment"]["RANK"] == str(result["rank"])
        assert result["environment"]["MASTER_ADDR"] == "127.0.0.1"
    assert len({r["pid"] for r in run.results} | {os.getpid()}) == world_size + 1


@pytest.mark.spawns
def test_ranks_stay_light_and_on_loopback():
    run = placed(2)
    for result in run.results:
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
def test_the_function_and_all_it_uses_travel_by_value():
    offset = 10
    table = {"a": torch.arange(3)}

    class Scale:
        def __init__(self, factor):
            self.factor = factor

        def __call__(self, value):
            return self.factor * value + offset

    def helper(rank):
        return Scale(3)(rank)

    def work(worker, first, *rest, key=None):
        return helper(worker.rank), first, rest, key, table["a"] + worker.rank, Scale

    run = labkit.launch(work, 1, "two", key=[3], world_size=2, live=False)
    for rank, (scaled, first, rest, key, tensor, kind) in enumerate(run.results):
        assert (scaled, first, rest, key) == (3 * rank + 10, 1, ("two",), [3])
        assert torch.equal(tensor, torch.arange(3) + rank)
        assert kind is Scale, "a class that comes back is the one that was sent"


@pytest.mark.spawns
def test_seeds_differ_by_rank_and_repeat_by_run():
    first = labkit.launch(workloads.random_numbers, seed=5, live=False).results
    again = labkit.launch(workloads.random_numbers, seed=5, live=False).results
    other = labkit.launch(workloads.random_numbers, seed=6, live=False).results
    assert first == again
    assert first[0] != first[1]
    assert other[0] == first[1], "rank r is seeded with seed + r"


# What comes back


@pytest.mark.spawns
@pytest.mark.parametrize("world_size", [2, 3])
def test_ddp_logs_and_weights_equal_one_process(world_size):
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


@pytest.mark.spawns
def test_history_has_a_row_per_log_call():
    def work(worker):
        for i in range(3):
            worker.log(loss=i + worker.rank, lr=0.1)
        worker.log(step=100, accuracy=torch.tensor(0.5))
        worker.log(loss=np.float32(9))

    history = labkit.launch(work, live=False).history
    assert list(history.columns) == ["rank", "step", "time_s", "loss", "lr", "accuracy"]
    for rank, rows in history.groupby("rank"):
        assert rows["step"].tolist() == [0, 1, 2, 100, 3], "explicit steps do not disturb the count"
        assert rows["loss"].dropna().tolist() == [rank, rank + 1, rank + 2, 9]
        assert rows["accuracy"].isna().tolist() == [True, True, True, False, True]
        assert rows["time_s"].is_monotonic_increasing
        assert 0 < rows["time_s"].iloc[0] < LONG_S


@pytest.mark.spawns
def test_output_is_labelled_by_rank_and_never_glued():
    run = labkit.launch(workloads.talk, live=False)
    for rank, text in enumerate(run.output):
        lines = text.split("\n")
        assert [line for line in lines if line.startswith("out")] == [f"out {rank} {i}" for i in range(200)]
        assert [line for line in lines if line.startswith("err")] == [f"err {rank} {i}" for i in range(200)]
        assert f"native {rank}" in lines
        assert "unfinished" in lines


@pytest.mark.spawns
def test_much_output_and_large_results_arrive():
    def work(worker):
        for i in range(200_000):
            print(f"line {i:06d} " + "x" * 40)
        return torch.full((10_000_000,), float(worker.rank))  # 40 MB

    run = labkit.launch(work, live=False)
    assert [result.mean().item() for result in run.results] == [0, 1]
    for text in run.output:
        assert text.startswith("… 190,000 earlier lines were dropped …")
        assert "line 199999" in text


@pytest.mark.spawns
def test_peak_memory_is_the_ranks_own():
    def work(worker):
        torch.ones(50_000_000 if worker.rank else 1)  # 200 MB

    run = labkit.launch(work, live=False)
    assert run.peak_bytes[1] - run.peak_bytes[0] > 150e6
    assert run.peak_device_bytes == [0, 0]


@pytest.mark.spawns
def test_as_many_log_calls_as_ranks_can_make_arrive_complete_in_order_and_in_bounded_memory():
    calls = 300_000

    def work(worker):
        start = time.monotonic()
        for step in range(calls):
            worker.log(step, loss=float(step))
        return calls / (time.monotonic() - start)

    labkit.launch(workloads.fit, live=False).history  # noqa: B018 - imports all that a history needs
    kernel = psutil.Process()
    before = kernel.memory_info().rss
    run = labkit.launch(work, wait=False, live=False)
    greatest = before
    while not run.over.wait(0.05):
        greatest = max(greatest, kernel.memory_info().rss)
    run.wait()
    # Step, time and value take 24 bytes; records on their way come on top, up to a bound of their own.
    assert greatest - before < 2 * calls * 40 + 50e6
    for rank in range(2):
        mine = run.recorded.frame().query("rank == @rank")
        assert np.array_equal(mine["step"], np.arange(calls)), f"rank {rank}: complete and in order"
        assert np.array_equal(mine["loss"], np.arange(calls))
    print(f"log calls per second and rank: {[round(rate) for rate in run.results]}")


# Failing


# Bad arguments: an error before any process


def takes_steps(worker, steps, lr=0.1):
    """Two parameters of its own."""


def takes_seed(worker, seed=3):
    """A parameter that launch has too."""


async def asynchronous(worker):
    """Not a function that a rank can call."""


LOCK = threading.Lock()


def uses_a_lock(worker):
    with LOCK:
        return worker.rank


uses_a_lock.__module__ = "__main__"  # as if typed in a cell: sent by value


def uses_it_indirectly(worker):
    return uses_a_lock(worker)


uses_it_indirectly.__module__ = "__main__"


@pytest.mark.usefixtures("no_process_may_start")
@pytest.mark.parametrize(
    ("arguments", "options", "kind", "said"),
    [
        (("train",), {}, TypeError, "takes a function to call on every rank, got a str"),
        ((asynchronous,), {}, TypeError, "async function"),
        ((takes_steps,), {}, TypeError, "missing a required argument: 'steps'"),
        ((takes_steps, 1, 2, 3), {}, TypeError, "too many positional arguments"),
        ((takes_steps, 1), {"epochs": 3}, TypeError, "unexpected keyword argument 'epochs'"),
        ((lambda: None, 1), {}, TypeError, "Its first parameter is the worker"),
        ((takes_seed,), {"seed": 4}, ValueError, "launch.. keeps seed=… for itself"),
        ((takes_steps, 1), {"world_size": 0}, ValueError, "world_size must be at least 1, got 0"),
        ((takes_steps, 1), {"world_size": -2}, ValueError, "at least 1, got -2"),
        ((takes_steps, 1), {"world_size": 2.0}, TypeError, "whole number of ranks, got 2.0"),
        ((takes_steps, 1), {"world_size": "2"}, TypeError, "whole number of ranks, got '2'"),
        ((takes_steps, 1), {"world_size": True}, TypeError, "whole number"),
        ((takes_steps, 1), {"backend": "smoke"}, ValueError, "unknown backend 'smoke'; this PyTorch knows gloo"),
        ((takes_steps, 1), {"backend": "nccl"}, ValueError, "GPU of its own|not built"),
        ((takes_steps, 1), {"backend": 1}, TypeError, "backend is a name"),
        ((takes_steps, 1), {"stall_s": 0}, ValueError, "stall_s is a number of seconds greater than 0"),
        ((takes_steps, 1), {"stall_s": "5"}, ValueError, "stall_s is a number of seconds"),
        ((takes_steps, 1), {"seed": 0.5}, TypeError, "seed is a whole number or None"),
        ((takes_steps, 1), {"name": 7}, TypeError, "name is a text"),
        ((takes_steps, 1), {"live": "yes"}, TypeError, "live is True, False or None"),
        ((takes_steps, LOCK), {}, ValueError, r"argument 1 \(after the worker\) is a lock"),
        ((takes_steps, 1), {"lr": {"a": [LOCK]}}, ValueError, "argument lr=… is a dict, which .* '_thread.lock'"),
        ((uses_a_lock,), {}, ValueError, "'LOCK', which uses_a_lock uses, is a lock"),
        ((uses_it_indirectly,), {}, ValueError, "'LOCK', which uses_a_lock uses, is a lock"),
    ],
)
def test_a_bad_argument_is_refused_before_any_process(arguments, options, kind, said):
    with pytest.raises(kind, match=said):
        labkit.launch(*arguments, **options)


def sets_a_flag(worker):
    torch.backends.cudnn.deterministic = True


sets_a_flag.__module__ = "__main__"


def test_a_function_may_use_modules_of_a_type_of_their_own():
    assert type(torch.backends.cudnn) is not type(torch)
    (sent,) = unpack(pack((sets_a_flag,)))
    assert sent is not sets_a_flag, "by value"
    assert sent.__globals__["torch"] is torch
    assert unpack(pack(torch.backends.cudnn)) is torch.backends.cudnn


@pytest.mark.spawns
def test_a_gpu_that_has_gone_since_the_notebook_counted_is_told_by_rank(monkeypatch):
    counted = torch.cuda.is_available() + 7
    monkeypatch.setattr(torch.cuda, "device_count", lambda: counted)
    said = (
        r"rank \d failed while starting: RuntimeError: rank \d finds \d GPUs where the notebook found \d: .*restart the"
    )
    with pytest.raises(labkit.WorkerFailed, match=said):
        labkit.launch(workloads.fit, world_size=4, backend="gloo", live=False)


def deal_out(worker, samples):
    """Train on a data set that may be too small for all ranks."""
    sampler = torch.utils.data.DistributedSampler(range(samples), drop_last=True)
    loader = torch.utils.data.DataLoader(range(samples), 2, sampler=sampler, drop_last=True)
    worker.log(loss=1.0)
    worker.expect(len(loader))
    return len(loader)


@pytest.mark.spawns
def test_more_ranks_than_samples_is_told_by_rank_and_loses_nothing():
    assert labkit.launch(deal_out, 8, world_size=3, live=False).results == [1, 1, 1]
    with pytest.raises(labkit.WorkerFailed, match="rank . expects 0 steps: with 3 ranks no whole batch") as error:
        labkit.launch(deal_out, 2, world_size=3, live=False)
    assert len(error.value.run.history) >= 1


@pytest.mark.spawns
def test_a_run_cannot_be_sent_and_says_so():
    run = labkit.launch(lambda worker: None, world_size=1, live=False)
    with pytest.raises(ValueError, match="a Run stays in the notebook"):
        labkit.launch(lambda worker: run.status, live=False)


# Waiting, stopping, time


@pytest.mark.cold
@pytest.mark.spawns
def test_a_run_in_the_background_goes_on_and_can_be_stopped_at_a_common_step():
    start = time.monotonic()
    run = labkit.launch(workloads.spin, wait=False, live=False)
    launched_s = time.monotonic() - start
    assert run.status == "running"
    with pytest.raises(TimeoutError, match="still going after 0.1 s"):
        run.wait(timeout_s=0.1)
    while len(run.history) < 50:
        time.sleep(0.05)
    assert launched_s < start_of(run), "before the ranks began"
    assert run.status == "running"
    assert run.stop() is run
    assert (run.status, run.stop_outcome) == ("stopped", "")
    assert run.states == ["finished", "finished"]
    assert run.results[0] == run.results[1], "both ranks took equally many steps"
    # Each logs once more than it counts: the call that said "stop".
    steps = run.history.groupby("rank")["step"]
    assert steps.max().tolist() == run.results
    assert steps.count().tolist() == [steps_taken + 1 for steps_taken in run.results], "complete"
    assert run.stop().status == "stopped", "stopping twice does nothing"
    assert run.wait() is run


@pytest.mark.spawns
@pytest.mark.parametrize("kept", [True, False], ids=["late", "lost"])
def test_a_run_ends_though_another_thread_was_told_how_its_ranks_ended(kept, monkeypatch):
    """The system tells a process's end once; whichever thread asks first has it, a moment before all know."""
    run = labkit.launch(workloads.stuck, "lock", wait=False, live=False)
    waitpid, pids = os.waitpid, run.engine.pids

    def slow(pid, options):
        if pid not in pids:
            return waitpid(pid, options)
        if options != os.WNOHANG:  # who waits comes after who only has a look, and before that one knows
            time.sleep(0.2)
            return waitpid(pid, options)
        told = waitpid(pid, options)
        if told[0]:
            time.sleep(0.5)
        return told if kept else (0, 0)

    wait_until(lambda: len(run.history) == 2)
    monkeypatch.setattr(os, "waitpid", slow)
    run.ask_to_stop(grace_s=0.1)
    run.wait(timeout_s=LONG_S)
    assert run.status == "stopped"
    assert len(run.history) == 2


@pytest.mark.spawns
def test_a_run_that_is_still_starting_can_be_stopped():
    run = labkit.launch(workloads.spin, wait=False, live=False)
    run.stop()
    assert run.status == "stopped"
    assert run.results == [None, None]
    assert len(run.history) == 0


@pytest.mark.spawns
def test_two_runs_at_once_do_not_meet():
    runs = [labkit.launch(workloads.fit, world_size=2, steps=n, wait=False, live=False) for n in (10, 15)]
    assert [run.wait().status for run in runs] == ["finished", "finished"]
    assert [len(run.history) for run in runs] == [20, 30]


@pytest.mark.spawns
def test_a_run_outlives_the_thread_that_launched_it():
    runs = []

    def launch():
        runs.append(labkit.launch(workloads.fit, wait=False, live=False))

    thread = threading.Thread(target=launch)
    thread.start()
    thread.join()
    assert runs[0].wait().status == "finished"


# Scripts and terminals


def run_script(tmp_path, text, **options):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(text))
    return subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=5 * LONG_S,
        check=False,
        cwd=tmp_path,
        **options,
    )


@pytest.mark.spawns
def test_a_plain_script_needs_no_guard_and_shows_short_lines(tmp_path):
    done = run_script(
        tmp_path,
        """
        import labkit

        def train(worker):
            for step in range(50):
                worker.log(loss=1 / (1 + step))
            print("hello from", worker.rank)
            return worker.rank

        print(labkit.launch(train, world_size=2).results)
        """,
    )
    assert done.returncode == 0, done.stderr
    assert "[rank 1] hello from 1" in done.stdout
    assert "train: finished · 2 ranks · step 49 · loss 0.02" in done.stdout
    assert "█" in done.stdout, "the curve, drawn in text"
    assert done.stdout.count("[0, 1]") == 1, "the script runs once"


@pytest.mark.spawns
def test_a_script_that_ends_takes_its_background_run_along(tmp_path):
    done = run_script(
        tmp_path,
        """
        import time, labkit

        def forever(worker):
            while True:
                time.sleep(0.1)
                worker.log(loss=1.0)

        run = labkit.launch(forever, wait=False)
        while not len(run.history):
            time.sleep(0.1)
        print("ranks:", *run.engine.pids)
        """,
    )
    assert done.returncode == 0, done.stderr
    (ranks,) = [line for line in done.stdout.splitlines() if line.startswith("ranks: ")]
    assert not any(lives(int(pid)) for pid in ranks.split()[1:])


@pytest.mark.spawns
def test_multithreaded_work_before_a_launch_does_not_hang_it(tmp_path):
    done = run_script(
        tmp_path,
        """
        import torch, labkit
        for _ in range(3):
            torch.randn(1500, 1500) @ torch.randn(1500, 1500)
        print(labkit.launch(lambda worker: (torch.randn(900, 900) @ torch.randn(900, 900)).shape[0]).results)
        """,
    )
    assert "[900, 900]" in done.stdout, done.stderr
