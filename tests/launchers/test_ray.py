"""Runs on a real Ray cluster, of nodes on this machine that are added, killed and drained meanwhile."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import psutil
import pytest
import torch

import labkit
from labkit.launchers.ray import driver
from labkit.launchers.ray.attempt import Attempt
from labkit.launchers.ray.orders import Orders
from tests.conftest import LONG_S, end_of, wait_for_step, wait_until
from tests.support import elsewhere, workloads

REPOSITORY = Path(__file__).parents[2]
ON_RAY = "on 2 nodes of Ray (127.0.0.2, 127.0.0."


@pytest.fixture
def launch(ray_cluster, tmp_path):
    """Launch on Ray, one rank a node unless it is said otherwise, in the background."""

    def launch(fn, *args, world_size=2, stall_s=None, **options):
        options = {"placement": "STRICT_SPREAD", "folder": tmp_path / "my runs, 100%", **options}
        on = labkit.Ray(ray_cluster.address, world_size, **options)
        return labkit.launch(fn, *args, on=on, wait=False, live=False, stall_s=stall_s)

    return launch


@pytest.mark.spawns
def test_a_run_is_seen_live_and_equals_a_local_one_bit_for_bit(launch, tmp_path):
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "lies_there.py").write_text("VALUE = 7\n")
    environment = {"working_dir": str(tmp_path / "project"), "env_vars": {"GIVEN": "yes"}}
    run = launch(elsewhere.fit_where_it_lies, tmp_path / "go", runtime_env=environment)
    wait_for_step(run, 9)
    assert (run.status, run.states) == ("running", ["running"] * 2)
    assert run.notice.startswith(ON_RAY)
    (tmp_path / "go").touch()
    run.wait(LONG_S)
    assert (run.status, run.states) == ("finished", ["finished"] * 2)
    local = labkit.launch(elsewhere.fit_and_show, live=False)
    for rank, ((value, folder, given), weights, place, gpus) in enumerate(run.results):
        assert (value, given) == (7, "yes")
        assert folder not in (os.getcwd(), str(tmp_path / "project")), "Ray has taken it along"
        assert all(torch.equal(a, b) for a, b in zip(weights, local.results[rank][0], strict=True))
        assert (place["rank"], place["local_rank"], place["world_size"], place["sum"]) == (rank, 0, 2, 2)
        assert place["heavy"] == []
        assert all(address.startswith("127.") for address in place["listening"])
        assert gpus in (None, ""), "Ray has no GPUs here"
    assert run.history["loss"].tolist() == local.history["loss"].tolist()
    assert [f"hello from {rank}\n" in output for rank, output in enumerate(run.output)] == [True, True]
    with pytest.raises(ValueError, match="is a run under Ray, which ended with its notebook"):
        labkit.attach(run.folder)


@pytest.mark.spawns
def test_the_notebooks_folder_comes_along_without_its_runs_and_its_size_is_said(launch, tmp_path, monkeypatch):
    project = tmp_path / "project"
    (project / "labkit-runs" / "before").mkdir(parents=True)
    with open(project / "labkit-runs" / "before" / "large", "wb") as file:
        file.truncate(600 << 20)  # more than Ray takes
    (project / "lies_there.py").write_text("VALUE = 7\n")
    (project / "lesson.ipynb").write_text("{}")
    monkeypatch.chdir(project)
    found = []
    for _ in range(2):
        run = launch(elsewhere.list_folder, runtime_env={"working_dir": "."}, folder="labkit-runs")
        run.wait(LONG_S)
        assert "; 0.0 MB of " in run.notice
        found += run.results
        (project / "lesson.ipynb").write_text("saved again")
    assert {tuple(names) for _, names in found} == {("lies_there.py",)}
    assert len({Path(folder).name for folder, _ in found}) == 1, "one package, sent once"


# What cannot be


@pytest.mark.spawns
def test_ranks_wait_for_a_node_and_fail_when_it_is_lost(launch, ray_cluster):
    run = launch(workloads.spin, world_size=3, cpus_per_rank=2, grow_s=600)  # a node may take long to begin
    wait_until(lambda: "more than" in run.notice or run.over.is_set())
    assert (run.status, run.states) == ("queued", ["queued"] * 3)
    assert run.notice.startswith(
        "waits for 3 ranks, each with 2 CPU, each on a node of its own; more than the cluster has: 4 CPU on 2 nodes. "
        "It may grow for"
    )
    number = ray_cluster.add()
    wait_for_step(run, 1)
    assert run.notice.startswith("on 3 nodes of Ray (127.0.0.2, ")
    ray_cluster.kill(number)
    error = end_of(run)
    assert re.match(r"Ray has lost the node of rank \d \(127\.0\.0\.\d+\)\n", str(error)), error
    assert f"(127.0.0.{number + 2})" in str(error)
    assert "With max_restarts=" in error.cause
    assert run.status == "failed"


@pytest.mark.spawns
def test_what_can_never_be_placed_fails_with_what_there_is(launch):
    error = end_of(launch(workloads.fit, world_size=3, grow_s=0))
    assert str(error).startswith("Ray can never place 3 ranks, each with 1 CPU, each on a node of its own")
    assert error.cause.startswith("The cluster has 4 CPU on 2 nodes, and did not grow within grow_s=0 s. Ask for less")


@pytest.mark.spawns
@pytest.mark.parametrize("listens", [False, True])
def test_an_address_where_no_cluster_answers_is_refused_in_time(listens, tmp_path):
    if importlib.util.find_spec("ray") is None:
        pytest.skip("no Ray here: pip install ray")
    with socket.create_server(("127.0.0.2", 0)) as server:
        address = f"127.0.0.2:{server.getsockname()[1]}"
        if not listens:
            server.close()
        on = labkit.Ray(address, connect_s=20 if not listens else 4, folder=tmp_path)
        said = "nobody listens there" if not listens else "it has not answered within connect_s=4 s"
        with pytest.raises(RuntimeError, match=f"cannot be given to Ray at '{address}': {said}"):
            labkit.launch(workloads.fit, on=on, live=False)


def test_without_ray_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"labkit\.Ray needs Ray: pip install ray"):
        labkit.Ray()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"world_size": 0}, "world_size is a whole number of at least 1, got 0"),
        ({"placement": "pack"}, "placement is one of PACK, SPREAD, STRICT_PACK, STRICT_SPREAD, got 'pack'"),
        ({"cpus_per_rank": 0}, "a rank takes nothing, so Ray cannot place it"),
        ({"gpus_per_rank": -1}, "a rank takes a number of GPU that is at least 0, got -1"),
        ({"address": ""}, "address is 'auto', 'HOST:PORT' or 'ray://HOST:PORT', got ''"),
        ({"grow_s": "long"}, "grow_s is a number of seconds that is at least 0, got 'long'"),
    ],
)
def test_arguments_of_no_use_are_refused(options, said, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    with pytest.raises(ValueError, match=re.escape(said)):
        labkit.Ray(**options)


MISMATCH = """Version mismatch: The cluster was started with:
    Ray: 2.48.0
    Python: 3.12.9
This process on 10.0.0.1 was started with:
    Ray: 2.60.0
    Python: 3.11.7
"""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError(MISMATCH), r"the versions differ\. .*Python: 3\.12\.9.*pip install 'ray==2\.48\.0' here"),
        (ConnectionError("Could not find any running Ray instance.\nMore."), r"no cluster .* \(Could not .*ray start"),
        (ValueError("no such folder"), "ValueError: no such folder"),
    ],
)
def test_why_there_is_no_connection_is_said_with_what_to_do(error, said, monkeypatch):
    def init(**_):
        raise error

    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(init=init))
    with pytest.raises(driver.CannotConnectError) as refused:
        driver._connect(Orders("auto", 2, {"CPU": 1}, "PACK", 0, 0, 0, {}))
    assert re.search(said, str(refused.value), re.DOTALL)


@pytest.mark.parametrize(
    ("alive", "why", "said"),
    [
        (True, "…\nModuleNotFoundError: No module named 'labkit'\n", r"rank 1 could not begin: its node .* no labkit"),
        (True, "\x1b[36mRuntimeEnvSetupError\x1b[39m: pip failed", "rank 1 could not begin on its node .10.0.0.7."),
        (True, "The actor died: its worker was killed by SIGKILL", "rank 1 was taken away: its worker on Ray has died"),
        (False, "The actor died unexpectedly", "Ray has lost the node of rank 1 .10.0.0.7."),
    ],
)
def test_why_a_rank_was_lost_is_said(alive, why, said, monkeypatch):
    node = {"NodeID": "n", "Alive": alive, "NodeManagerAddress": "10.0.0.7"}
    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(nodes=lambda: [node]))
    place = types.SimpleNamespace(node="n")
    attempt = Attempt(None, 0, None, [place, place], None, None)
    found = attempt._loss(1, why)
    assert found.rank == 1
    assert re.match(said, found.headline)
    assert "\x1b" not in found.cause


# Failing


@pytest.mark.spawns
def test_a_rank_that_is_killed_is_named_on_ranks_of_its_own(launch, tmp_path):
    run = launch(elsewhere.fail, "SIGKILL", tmp_path / "go", placement="PACK")
    wait_until(lambda: len(run.history) == 2, LONG_S)
    (tmp_path / "go").touch()
    error = end_of(run)
    assert error.rank == 1
    assert "(SIGKILL)" in error.diagnosis.headline
    assert ", after logging step 0" in error.diagnosis.headline


# Beginning again


def kill_and_wait(nodes, process, rank):
    """Kill a process, and wait until a rank's is gone with it: while it lives, all ranks may come to their end."""
    victim = nodes.ranks()[rank]
    process.kill()
    psutil.wait_procs([victim], LONG_S)
    assert not victim.is_running()


@pytest.mark.wide
@pytest.mark.spawns
def test_killed_and_preempted_workers_begin_again_and_resume_bit_for_bit(launch, ray_cluster, tmp_path):
    run = launch(elsewhere.resume, tmp_path / "kept", tmp_path / "go", 12, (5, 7), max_restarts=3)
    wait_for_step(run, 5)
    kill_and_wait(ray_cluster, ray_cluster.ranks()[1], 1)
    (tmp_path / "go.5").touch()
    wait_until(lambda: run.attempt == 1, LONG_S)
    wait_for_step(run, 7)
    # As Ray does with a worker whose place somebody else is to have.
    kill_and_wait(ray_cluster, ray_cluster.holders()[0], 0)
    (tmp_path / "go.7").touch()
    assert end_of(run) is None
    assert (run.status, run.attempt) == ("finished", 2)
    elsewhere.check_it_equals_a_local_run(run, tmp_path / "kept by the local run")


@pytest.mark.wide
@pytest.mark.spawns
def test_on_a_node_that_is_drained_ranks_may_stop_together(launch, ray_cluster, tmp_path):
    number = ray_cluster.add()
    run = launch(elsewhere.save_when_stopped, tmp_path, world_size=3)
    wait_for_step(run, 5)
    ray_cluster.drain(number, 60)
    error = end_of(run)
    assert re.match(r"Ray takes the node of rank \d away\n", str(error)), error
    kept = [int((tmp_path / f"{rank}.0").read_text()) for rank in range(3)]
    assert len(set(kept)) == 1, "all have stopped at the same step"
    assert kept[0] > 5
    assert run.states == ["stopped"] * 3


@pytest.mark.spawns
def test_ranks_end_with_their_notebook(ray_cluster, tmp_path):
    script = f"""
        import labkit, os
        from tests.support import elsewhere
        on = labkit.Ray({ray_cluster.address!r}, folder={str(tmp_path)!r})
        run = labkit.launch(elsewhere.keep_logging, on=on, wait=False, live=False)
        while len(run.history) < 4:
            pass
        print("runs", flush=True)
        os.kill(os.getpid(), 9)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, timeout=LONG_S, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, b"runs\n")
    wait_until(lambda: not ray_cluster.processes())
