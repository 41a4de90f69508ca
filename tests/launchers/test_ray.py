"""Runs on a real Ray cluster, of nodes on this machine that are added and killed meanwhile."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
from pathlib import Path

import pytest
import torch

import labkit
from tests.conftest import LONG_S, end_of, printed_by_a_notebook_that_is_killed, wait_for_step, wait_until
from tests.support import elsewhere, workloads


@pytest.fixture
def launch(ray_cluster):
    """Launch on Ray, one rank a node unless it is said otherwise, in the background."""

    def launch(fn, *args, nodes=2, stall_s=None, **options):
        on = labkit.Ray(nodes, address=ray_cluster.address, **{"placement": "STRICT_SPREAD", **options})
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
    assert re.fullmatch(r"on 2 nodes of Ray \(127\.0\.0\.\d+, 127\.0\.0\.\d+\)", run.notice)
    (tmp_path / "go").touch()
    run.wait(LONG_S)
    assert (run.status, run.states) == ("finished", ["finished"] * 2)
    local = labkit.launch(elsewhere.fit_and_show, live=False)
    for rank, ((value, folder, given), weights, place, gpus) in enumerate(run.results):
        assert (value, given) == (7, "yes")
        assert folder not in (os.getcwd(), str(tmp_path / "project")), "Ray has taken it along"
        assert all(torch.equal(a, b) for a, b in zip(weights, local.results[rank][0], strict=True))
        assert (place["rank"], place["local_rank"], place["world_size"], place["sum"]) == (rank, 0, 2, 2)
        assert all(address.startswith("127.") for address in place["listening"])
        assert gpus in (None, ""), "Ray has no GPUs here"
    assert run.history["loss"].tolist() == local.history["loss"].tolist()
    assert [f"hello from {rank}\n" in output for rank, output in enumerate(run.output)] == [True, True]


@pytest.mark.spawns
def test_ranks_wait_for_a_node_and_fail_when_it_is_lost(launch, ray_cluster):
    run = launch(workloads.spin, nodes=3, cpus_per_node=2)
    wait_until(lambda: "waits on Ray" in run.notice or run.over.is_set(), LONG_S)
    assert (run.status, run.states) == ("queued", ["queued"] * 3)
    assert run.notice.startswith("waits on Ray for 3 × 2 CPU; free: ")
    number = ray_cluster.add()
    wait_for_step(run, 1)
    ray_cluster.kill(number)
    error = end_of(run)
    assert re.match(rf"Ray has lost rank \d, on node 127\.0\.0\.{number + 2}\n", str(error)), error
    assert re.search("node has died|node was|actor is temporarily unavailable", error.cause), error.cause
    assert run.status == "failed"


def die_once(worker, marker):
    worker.log(loss=1.0)
    if worker.rank == 1 and not Path(marker).exists():
        Path(marker).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    torch.distributed.barrier()
    return worker.rank


@pytest.mark.spawns
def test_all_ranks_begin_again_when_one_is_killed(launch, tmp_path):
    run = launch(die_once, tmp_path / "killed", max_restarts=1)
    assert end_of(run) is None
    assert (run.status, run.attempt, run.results) == ("finished", 1, [0, 1])


@pytest.mark.spawns
def test_ranks_end_with_their_notebook(ray_cluster):
    words = printed_by_a_notebook_that_is_killed(f"""
        on = labkit.Ray(2, address={ray_cluster.address!r})
        run = labkit.launch(elsewhere.keep_logging, on=on, wait=False, live=False)
        while len(run.history) < 4:
            time.sleep(0.1)
        print(*run.history["pid"].astype(int).unique(), flush=True)
    """)
    pids = list(map(int, words))
    assert pids
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


@pytest.mark.spawns
def test_an_address_where_no_cluster_answers_is_refused(ray_cluster):
    on = labkit.Ray(address="127.0.0.2:1")
    with pytest.raises(RuntimeError, match=r"no Ray cluster answers at '127.0.0.2:1'"):
        labkit.launch(workloads.fit, on=on, live=False)


def test_without_ray_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"labkit\.Ray needs Ray: pip install ray"):
        labkit.Ray()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"nodes": 0}, "nodes is a whole number of at least 1, got 0"),
        ({"cpus_per_node": 0}, "a node takes CPUs, GPUs or both, got none"),
    ],
)
def test_arguments_of_no_use_are_refused(options, said, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    with pytest.raises(ValueError, match=re.escape(said)):
        labkit.Ray(**options)
