"""Runs under torch's elastic launcher, on this machine; where there are two agents, both are here."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import psutil
import pytest
import torch

import labkit
from labkit.launchers.launcher_job import SUPERVISOR
from labkit.rank.private_folder import remove_left_behind
from tests.conftest import LONG_S, command_of, end_of, lives, wait_for_step, wait_until
from tests.support import elsewhere, workloads

pytestmark = pytest.mark.spawns

REPOSITORY = str(Path(__file__).parents[2])


@pytest.fixture
def launch(tmp_path):
    """Launch under torchrun, in the background."""

    def launch(fn, *args, stall_s=None, **options):
        on = labkit.Torchrun(folder=tmp_path / "my runs, 100%", **options)
        return labkit.launch(fn, *args, on=on, wait=False, live=False, stall_s=stall_s)

    return launch


def ranks_of(run):
    """The processes of the ranks, by rank."""
    found = {}
    for process in psutil.Process(run.engine.launched._process.pid).children(recursive=True):
        command = command_of(process)
        if "labkit.launchers.rank_entry" in command:
            found[int(command.split()[-2])] = process
    return found


def free_endpoint():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"127.0.0.1:{probe.getsockname()[1]}"


@contextlib.contextmanager
def agent_elsewhere(notice):
    """The agent that a notice says to start on another machine; afterwards it and its ranks have ended."""
    what, command = notice.split("\n")
    assert what == "start on 1 other machine:"
    setting, *words = shlex.split(command)
    environment = dict(os.environ, **dict([setting.split("=", 1)]))
    agent = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield agent
    finally:
        for process in [*psutil.Process(agent.pid).children(recursive=True)] if agent.poll() is None else []:
            process.kill()
        agent.kill()
        agent.wait()


def test_a_run_is_seen_live_and_equals_a_local_one_bit_for_bit(launch, tmp_path):
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    go = tmp_path / "go"
    run = launch(elsewhere.fit_and_show, go)
    wait_for_step(run, 9)
    assert (run.status, run.states, run.notice) == ("running", ["running"] * 2, "")
    agent = psutil.Process(run.engine.launched._process.pid).net_connections("tcp")
    assert [c for c in agent if c.status == psutil.CONN_LISTEN] == []
    go.touch()
    run.wait(LONG_S)
    assert (run.status, run.states) == ("finished", ["finished"] * 2)
    local = labkit.launch(elsewhere.fit_and_show, live=False)
    for rank, (weights, place, _) in enumerate(run.results):
        assert all(torch.equal(a, b) for a, b in zip(weights, local.results[rank][0], strict=True))
        assert (place["rank"], place["local_rank"], place["world_size"], place["sum"]) == (rank, rank, 2, 2)
        assert place["heavy"] == []
        assert set(place["listening"]) <= {"127.0.0.1"}
    assert run.history["loss"].tolist() == local.history["loss"].tolist()
    assert [f"hello from {rank}\n" in output for rank, output in enumerate(run.output)] == [True, True]
    assert {number: signal.getsignal(number) for number in handlers} == handlers, "the agent would take them"


@pytest.mark.cold  # a process that is forked takes no notice of sitecustomize
def test_a_rank_whose_clock_is_off_is_named_and_its_times_are_the_notebooks(launch, tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(
        "import os, time\nreal, off_s = time.time, -7200 * (os.environ.get('RANK') == '0')\n"
        "time.time = lambda: real() + off_s\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])))
    run = launch(elsewhere.raise_on_one)
    error = end_of(run)
    assert error.rank == 1
    assert run.warnings == [
        f"the clock of {os.uname().nodename} is 7,200 s behind the notebook's; times from there are corrected"
    ]
    assert run.warnings[0] in run.notice
    assert run.warnings[0] in str(error)
    assert run.history["time_s"].between(0, run.elapsed_s + 1).all()
    assert 0 < run.elapsed_s < LONG_S


def test_a_killed_worker_restarts_and_resumes_bit_for_bit(launch, tmp_path):
    run = launch(elsewhere.resume, tmp_path / "kept", tmp_path / "go", 12, (5, 7), max_restarts=3)
    wait_for_step(run, 5)
    ranks_of(run)[1].kill()
    (tmp_path / "go.5").touch()
    wait_until(lambda: run.attempt == 1, LONG_S)
    wait_for_step(run, 7)
    ranks_of(run)[0].kill()
    (tmp_path / "go.7").touch()
    assert end_of(run) is None
    assert (run.status, run.attempt) == ("finished", 2)
    elsewhere.check_it_equals_a_local_run(run, tmp_path / "kept by the local run")


def test_two_agents_share_a_run_restart_together_and_stop_together(launch, tmp_path):
    endpoint = free_endpoint()
    run = launch(
        elsewhere.resume, tmp_path / "kept", tmp_path / "go", 10**6, (5,),
        nodes=2, ranks_per_node=1, max_restarts=2, rdzv_endpoint=endpoint,
    )  # fmt: skip
    assert run.status == "queued"
    with agent_elsewhere(run.notice) as agent:
        wait_for_step(run, 5)
        assert (run.status, run.notice) == ("running", "")
        (mine,) = ranks_of(run).values()
        mine.kill()
        (tmp_path / "go.5").touch()
        wait_until(lambda: run.attempt == 1, LONG_S)
        wait_for_step(run, 7)
        run.stop()
        assert (run.status, run.states) == ("stopped", ["stopped"] * 2)
        assert agent.wait(LONG_S) == 0


def test_stop_while_another_machine_is_waited_for(launch):
    run = launch(workloads.fit, nodes=2, rdzv_endpoint=free_endpoint(), stall_s=0.1)
    assert run.status == "queued"
    assert f"--rdzv-endpoint={run.engine.launched._on.rdzv_endpoint}" in run.notice
    time.sleep(0.5)
    assert run.status == "queued", "waiting for others is no hang"
    run.stop()
    assert (run.status, run.error) == ("stopped", None)


def test_stuck_ranks_under_an_agent_are_ended_as_others_are(launch):
    run = launch(workloads.stuck)
    wait_until(lambda: len(run.history) == 2, LONG_S)
    run.stop(grace_s=1)
    assert (run.status, run.states, run.stop_outcome) == ("stopped", ["ended"] * 2, "late")


def test_a_rank_that_is_ended_because_another_has_failed_gets_one_sigterm(launch, tmp_path):
    """As under torchrun alone: a script's own handler, which takes a checkpoint say, is not called into again."""

    def counts_signals(worker, file):
        came = []
        signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
        if worker.rank == 0:
            worker.log(loss=1.0)
            raise ValueError("bad batch")
        while not came:
            time.sleep(0.01)
        time.sleep(2)  # others may come
        Path(file).write_text(str(len(came)))

    run = launch(counts_signals, str(tmp_path / "signals"), ranks_per_node=2)
    with pytest.raises(labkit.WorkerFailed, match="rank 0 failed: ValueError: bad batch"):
        run.wait(LONG_S)
    assert (tmp_path / "signals").read_text() == "1"


def test_an_agent_that_dies_says_so(launch):
    run = launch(workloads.spin)
    wait_for_step(run, 1)
    run.engine.launched._process.kill()
    error = end_of(run)
    assert error.rank is None
    assert str(error).startswith("torchrun was ended by SIGKILL, and its ranks with it")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends the agent with the notebook")
def test_nothing_is_left_when_the_notebook_is_killed(tmp_path):
    script = f"""
        import labkit
        from tests.support import elsewhere
        on = labkit.Torchrun(folder={str(tmp_path)!r}, max_restarts=3)
        run = labkit.launch(elsewhere.fit_and_show, {str(tmp_path / "never")!r}, on=on, wait=False, live=False)
        while len(run.history) < 20:
            pass
        print("runs", flush=True)
        run.wait()
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as notebook:
        assert notebook.stdout.readline() == "runs\n"
        family = psutil.Process(notebook.pid).children(recursive=True)
        names = [command_of(process) for process in family]
        assert sum("supervisor.py" in name for name in names) >= 2
        assert sum("labkit.launchers.rank_entry" in name for name in names) == 2
        notebook.kill()
    wait_until(lambda: not any(lives(process.pid) for process in family))
    remove_left_behind(Path(tempfile.gettempdir()))  # as the next notebook does


# Without processes


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"nodes": 0}, "nodes is a whole number of at least 1, got 0"),
        ({"ranks_per_node": "2"}, "ranks_per_node is a whole number of at least 1, got '2'"),
        ({"max_restarts": -1}, "max_restarts is a whole number of at least 0, got -1"),
        ({"nodes": 2}, "2 machines need a rendezvous: give rdzv_endpoint='HOST:PORT'"),
        ({"rdzv_endpoint": "node1"}, "rdzv_endpoint is HOST:PORT, got 'node1'"),
    ],
)
def test_arguments_of_no_use(arguments, said):
    with pytest.raises(ValueError, match=said):
        labkit.Torchrun(**arguments)


@pytest.mark.parametrize(("gpus", "ranks"), [(0, 2), (1, 1), (4, 4)])
def test_there_are_as_many_ranks_as_gpus_unless_it_is_said(monkeypatch, gpus, ranks):
    monkeypatch.setattr("labkit.launchers.torchrun.usable_gpus", lambda: gpus)
    assert labkit.Torchrun().world_size == ranks
    assert labkit.Torchrun(ranks_per_node=3).world_size == 3


def test_a_port_that_is_taken_or_elsewhere_is_refused(launch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ValueError, match=f"something listens at {endpoint} already; give another port"):
            launch(workloads.fit, nodes=2, rdzv_endpoint=endpoint)
    for endpoint in ("192.0.2.1:29500", "no-such-host.invalid:29500"):
        with pytest.raises(ValueError, match=f"rdzv_endpoint='{endpoint}' is no address of this machine"):
            launch(workloads.fit, nodes=2, rdzv_endpoint=endpoint)


def test_the_command_for_other_machines_can_be_typed_there(tmp_path):
    on = labkit.Torchrun(2, 4, "node1:29500", max_restarts=3, folder=tmp_path)
    words = shlex.split(on.command(SUPERVISOR, tmp_path / "a run"))
    assert words[0] == "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
    assert words[1:4] == [sys.executable, "-m", "torch.distributed.run"]
    assert {"--nnodes=2", "--nproc-per-node=4", "--max-restarts=3", "--rdzv-endpoint=node1:29500"} <= set(words)
    assert words[-1] == str(tmp_path / "a run")
