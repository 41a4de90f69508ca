"""One agent per node, with the tests' own launcher: two nodes on this machine (`tests.support.agents`)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
from torch.utils.data import DataLoader

import labkit
from labkit.launchers import agent, start
from labkit.protocol import events
from tests.conftest import LONG_S, end_of, printed_by_a_notebook_that_is_killed, wait_for_step, wait_until
from tests.support import elsewhere, workloads
from tests.support.agents import Agents

pytestmark = pytest.mark.spawns

ROOT = Path(__file__).parents[2]


@pytest.fixture
def launch(tmp_path):
    """Launch on agents, in the background; whatever is launched is ended."""
    runs = []

    def launch(fn, *args, nodes=2, ranks_per_node=1, **options):
        on = Agents(nodes, ranks_per_node, folder=tmp_path / "runs")
        runs.append(labkit.launch(fn, *args, on=on, wait=False, live=False, **options))
        return runs[-1]

    yield launch
    for run in runs:
        run.stop(0)


def agents_of(run):
    return [psutil.Process(process.pid) for process in run.engine.launched.processes]


def test_ranks_of_nodes_equal_ranks_of_this_machine_bit_for_bit(launch):
    run = launch(workloads.fit, ranks_per_node=2).wait(LONG_S)
    local = labkit.launch(workloads.fit, world_size=4, live=False)
    for mine, other in zip(run.results, local.results, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))
    assert run.history["loss"].tolist() == local.history["loss"].tolist()


def test_a_rank_that_is_killed_on_another_node_is_named(launch, tmp_path):
    run = launch(elsewhere.die, tmp_path / "go", ranks_per_node=2)
    wait_for_step(run, 0)
    (tmp_path / "go").touch()
    error = end_of(run)
    assert error.rank == 3
    assert "(SIGKILL)" in error.diagnosis.headline


def test_an_agent_that_is_killed_ends_the_run_and_nothing_is_left(launch):
    run = launch(elsewhere.keep_logging)
    wait_for_step(run, 0)
    agents = agents_of(run)
    family = [*agents, *(child for agent in agents for child in agent.children(recursive=True))]
    agents[1].kill()
    assert "an agent has ended before its ranks" in str(end_of(run))
    wait_until(lambda: not any(process.is_running() for process in family))


def test_agents_and_ranks_end_with_the_notebook_that_is_killed(tmp_path):
    words = printed_by_a_notebook_that_is_killed(f"""
        from tests.support.agents import Agents
        run = labkit.launch(elsewhere.keep_logging, on=Agents(folder={str(tmp_path)!r}), wait=False, live=False)
        while set(run.history["rank"]) != {{0, 1}}:
            time.sleep(0.05)
        agents = [process.pid for process in run.engine.launched.processes]
        print(*agents, *run.history["pid"].astype(int).unique(), flush=True)
    """)
    pids = set(map(int, words))
    assert len(pids) == 4, "two agents, two ranks"
    wait_until(lambda: not any(map(psutil.pid_exists, pids)))


# SIGTERM, as SLURM sends it before it takes machines away


def load_until_stopped(worker, folder):
    """Train from a DataLoader whose workers are processes; keep the step as a last checkpoint does."""
    step = 0
    try:
        for _ in DataLoader(torch.arange(1_000_000.0), batch_size=4, num_workers=2):
            torch.distributed.barrier()
            step += 1
            worker.log(step, loss=1.0)
            time.sleep(0.01)
    except labkit.Stopped:
        Path(folder, f"{worker.rank}").write_text(str(step))
        raise


def return_late(worker, go):
    worker.log(loss=1.0)
    elsewhere.wait_for(go)
    return worker.rank


def sigterm(processes):
    for process in processes:
        process.send_signal(signal.SIGTERM)


def test_sigterm_to_every_process_lets_ranks_keep_the_same_step_while_dataloaders_have_workers(launch, tmp_path):
    run = launch(load_until_stopped, tmp_path)
    wait_for_step(run, 5)
    agents = agents_of(run)
    ranks = [child for agent in agents for child in agent.children(recursive=True)]
    assert len(ranks) >= 6, "two workers for each rank"
    sigterm([*ranks, *agents])
    wait_until(run.over.is_set, LONG_S)
    kept = [(tmp_path / str(rank)).read_text() for rank in (0, 1)]
    assert kept[0] == kept[1]
    assert run.failures == [None, None]


@pytest.mark.cold
def test_ranks_that_sigterm_ends_while_they_start_have_not_failed(launch):
    run = launch(workloads.log_once)
    wait_until(lambda: all(len(agent.children()) >= 2 for agent in agents_of(run)))  # a rank, and what tidies up
    agents = agents_of(run)
    sigterm([*(child for agent in agents for child in agent.children()), *agents])
    assert end_of(run).rank is None


def test_a_run_that_completes_at_sigterm_is_finished_and_not_run_again(launch, tmp_path):
    run = launch(return_late, tmp_path / "go")
    wait_for_step(run, 0)
    sigterm(agents_of(run))
    time.sleep(1)
    (tmp_path / "go").touch()
    run.wait(LONG_S)
    assert (run.status, run.results) == ("finished", [0, 1])
    environment = {**os.environ, "SLURM_RESTART_COUNT": "1"}
    again = start.command(sys.executable, run.folder, "0")
    assert subprocess.run(again, env=environment, check=False, timeout=LONG_S).returncode == 0
    assert not list(run.folder.glob("*.1.*")), "no second attempt"


class Terminated:
    """The engine of a node whose rank was sent SIGTERM while it started, before it could take that for a word."""

    world_size = 1

    def __init__(self, number, processes):
        pass

    def start(self, job):
        pass

    def close(self):
        pass

    def killed(self, rank):
        return False

    def poll(self, timeout_s):
        return [events.Exit(0, -signal.SIGTERM)]


@pytest.mark.parametrize("is_signalled", [True, False])
def test_a_rank_that_was_terminated_is_to_blame_unless_its_node_was_too_a_moment_later(is_signalled, monkeypatch):
    monkeypatch.setattr(agent, "NodeEngine", Terminated)
    node, told = agent.NodeAgent(0, []), []
    signalled = threading.Timer(0.3, node.note_signal if is_signalled else bool)
    signalled.start()
    node.run(None, None, told.extend, list)
    assert [event.ended for event in told] == [is_signalled]
