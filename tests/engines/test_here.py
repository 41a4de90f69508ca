"""One rank in this very process: the same contract, and a debugger finds the reader's line. Starts no process."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
import traceback

import pytest
import torch
import torch.distributed as dist

import labkit
from labkit.engines.in_process import InProcessEngine


def launch(function, *args, **options):
    return labkit.launch(function, *args, on=labkit.Here(), live=False, **options)


def train(worker, steps):
    total = torch.ones(1)
    for _ in range(steps):
        dist.all_reduce(total)
        worker.log(loss=total.item())
    print("rank", worker.rank, "of", worker.world_size)
    return os.getpid(), torch.rand(1).item(), os.environ["RANK"], dist.get_backend()


def test_a_run_here_keeps_the_contract_in_this_very_process(capfd):
    run = launch(train, 5)
    pid, drawn, rank, backend = run.results[0]
    assert (pid, rank, backend) == (os.getpid(), "0", "gloo")
    assert (run.status, run.states, run.returned, run.world_size) == ("finished", ["finished"], [True], 1)
    assert run.history["loss"].tolist() == [1.0] * 5
    assert run.output == ["rank 0 of 1\n"]
    said = [line for line in capfd.readouterr().out.splitlines() if not line.startswith("[Gloo]")]  # PyTorch 2.8
    assert said == ["rank 0 of 1"], "seen at once, and once"
    assert drawn == launch(train, 1, seed=0).results[0][1], "seeded as any rank"
    assert run.peak_bytes[0] > 0


def test_it_leaves_the_process_as_it_was():
    handler, threads, environment = signal.getsignal(signal.SIGINT), torch.get_num_threads(), dict(os.environ)
    torch.manual_seed(5)
    random.seed(5)
    streams = sys.stdout, sys.stderr
    launch(train, 1)
    mine = torch.rand(1).item(), random.random()
    torch.manual_seed(5)
    random.seed(5)
    assert mine == (torch.rand(1).item(), random.random())
    assert (signal.getsignal(signal.SIGINT), torch.get_num_threads()) == (handler, threads)
    assert dict(os.environ) == environment
    assert (sys.stdout, sys.stderr) == streams
    assert not dist.is_initialized()


def fails(worker):
    batch = torch.zeros(3)
    worker.log(loss=1.0)
    raise ValueError(f"bad batch of {len(batch)}")


def test_a_failure_here_names_the_line_carries_variables_and_lets_a_debugger_in():
    with pytest.raises(labkit.WorkerFailed, match=r"rank 0 failed: ValueError: bad batch of 3") as failure:
        launch(fails)
    error = failure.value
    assert (error.rank, error.run.status, len(error.run.history)) == (0, "failed", 1)
    assert error.frames[0].variables["batch"] == "float32 [3] on cpu: 0, 0, 0"
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)  # where %debug begins
    assert frame.f_code.co_name == "fails"
    assert torch.equal(frame.f_locals["batch"], torch.zeros(3)), "its frames are alive"
    with pytest.raises(labkit.WorkerFailed) as again:
        error.run.wait()
    assert len(list(traceback.walk_tb(again.value.__traceback__))) < 10


def interrupted(*arguments):
    """The run of a launch that an interrupt has ended."""
    with pytest.raises(labkit.RunInterrupted) as interrupt:
        launch(*arguments)
    return interrupt.value.run


def stops(worker):
    time.sleep(0.2)
    try:
        for _ in range(1_000_000):
            worker.log(loss=1.0)
            if worker.stopping:
                continue
            signal.raise_signal(signal.SIGINT)
    except labkit.Stopped:
        return "kept"


def test_an_interrupt_asks_it_to_stop_and_what_it_returns_is_kept():
    run = interrupted(stops)
    assert (run.status, run.results) == ("stopped", ["kept"])
    assert labkit.runs[-1] is run


def waits(worker, interrupts):
    worker.log(loss=1.0)
    time.sleep(0.2)  # until the run has heard that it has begun
    for _ in range(interrupts):
        signal.raise_signal(signal.SIGINT)
    time.sleep(1e6)


def test_a_second_interrupt_ends_it_at_once():
    run = interrupted(waits, 2)
    assert (run.status, run.results, len(run.history)) == ("stopped", [None], 1)


def test_one_that_does_not_obey_is_interrupted_when_its_grace_is_over(monkeypatch):
    monkeypatch.setattr(InProcessEngine, "stop_grace_s", 0.1)
    run = interrupted(waits, 1)
    assert (run.status, run.stop_outcome) == ("stopped", "late")


def test_a_silence_ends_it_with_the_place_where_it_stood():
    with pytest.raises(labkit.WorkerFailed, match=r"stall_s\): rank 0 is in time.sleep at test_here.py, line"):
        launch(waits, 0, stall_s=0.3)


def test_watching_for_nan_works_here_too():
    def diverges(worker):
        for step in range(5):
            worker.log(loss=1.0 if step < 3 else float("nan"))

    with pytest.raises(labkit.WorkerFailed, match="FloatingPointError: loss is nan at step 3"):
        launch(diverges, watch="nan")


@pytest.mark.parametrize(
    ("world_size", "said"),
    [(1, None), (2, r"labkit.Here\(\) has 1 ranks, but world_size=2")],
)
def test_it_has_one_rank(world_size, said):
    if said is None:
        assert launch(train, 1, world_size=world_size).status == "finished"
        return
    with pytest.raises(ValueError, match=said):
        launch(train, 1, world_size=world_size)


def test_it_refuses_another_thread_and_a_process_that_is_in_a_group():
    caught = []

    def elsewhere():
        try:
            launch(train, 1)
        except RuntimeError as error:
            caught.append(str(error))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert "needs the main thread" in caught[0]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match="in a process group already"):
            launch(train, 1)
    finally:
        dist.destroy_process_group()


def test_ended_before_it_has_begun_it_does_not_stay():
    run = labkit.Run(InProcessEngine(), 1, "train")
    from tests.support.fake_engine import A_JOB

    run.start(A_JOB)
    assert run.stop().status == "stopped"
