"""Sessions on a real SLURM of two nodes: reserved ranks that outlive runs, nodes and the notebook."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import labkit
from labkit.session import cluster_reserve, view
from tests.conftest import LONG_S, end_of, wait_for_step, wait_until
from tests.support import elsewhere, workloads

pytestmark = pytest.mark.cluster

REPOSITORY = str(Path(__file__).parents[2])


@pytest.fixture(scope="module")
def slurm(shared_slurm):
    """Not idle between these tests: a session is on it."""
    return shared_slurm


@pytest.fixture(scope="module")
def kept(slurm, tmp_path_factory):
    """One session for all tests that leave it working."""
    on = labkit.Slurm(2, 1, folder=tmp_path_factory.mktemp("kept"), time="00:30:00")
    with labkit.Session(on=on) as session:
        yield session
    wait_until(lambda: not slurm.jobs() and not slurm.processes())


@pytest.fixture
def ranks(kept, slurm):
    """The session, idle, and no rank of it new."""
    slurm.resume()  # should the test before have failed
    assert not kept.over, kept.why_over
    kept.wait(LONG_S)
    kept.run("1;")
    return kept


def launch(session, fn, *args, **options):
    return labkit.launch(fn, *args, on=session, live=False, **options)


def begin(session, fn, *args, **options):
    run = launch(session, fn, *args, wait=False, **options)
    wait_until(lambda: run.over.is_set() or set(run.states) == {"running"}, LONG_S)
    return run


def job_of(session):
    return session._reserve.launched.job_id


# Launching


def test_launches_follow_each_other_in_the_same_processes_and_equal_a_local_one_bit_for_bit(ranks, slurm):
    before = slurm.jobs()
    runs = [launch(ranks, workloads.fit, name=name) for name in ("first", "second")]
    local = labkit.launch(workloads.fit, live=False)
    for run in runs:
        assert (run.status, run.states) == ("finished", ["finished"] * 2)
        assert run.history["loss"].tolist() == local.history["loss"].tolist()
        assert all(torch.equal(a, b) for a, b in zip(run.results[1], local.results[1], strict=True))
    assert [run.name for run in runs] == ["first", "second"]
    assert runs[1].notice == f"SLURM job {job_of(ranks)} on node[1-2]"
    assert launch(ranks, elsewhere.pid).results == launch(ranks, elsewhere.pid).results == ranks.pids
    assert slurm.jobs() == before == [job_of(ranks)]


# Cells


def test_cells_keep_their_variables_and_print_what_they_print(ranks, capsys):
    ranks.run("x = torch.arange(3.) + rank\nprint('set')")
    ranks.run("dist.all_reduce(x)\nx", only=None)
    printed = capsys.readouterr().out.splitlines()  # of either rank first
    assert sorted(printed[:2]) == [f"[rank {rank}] set" for rank in range(2)]
    assert sorted(printed[2:]) == [f"[rank {rank}] tensor([1., 3., 5.])" for rank in range(2)]
    launch(ranks, workloads.fit)
    ranks.run("y = rank", only=[1])
    assert ranks.values("'y' in globals()") == [False, True]
    assert ranks.values("float(x.sum())") == [9.0, 9.0]
    ranks.run("dist.all_reduce(x)")


def test_a_failing_cell_names_its_line_and_a_dead_rank_costs_the_others_nothing(ranks, capsys):
    ranks.run("kept = rank")
    with pytest.raises(labkit.WorkerFailed) as failure:
        ranks.run("\nif rank == 1:\n    raise ValueError('bad batch')", title="Cell In[7]")
    assert "Cell In[7], line 3, in <cell>" in failure.value.cause
    assert failure.value.diagnosis.others == ["rank 0 ran the cell to its end"]
    assert ranks.values("kept") == [0, 1]
    with pytest.raises(labkit.WorkerFailed) as failure:
        ranks.run("import os\nif rank == 1:\n    os.kill(os.getpid(), 9)\ndist.barrier()")
    assert failure.value.rank == 1
    assert "(SIGKILL)" in failure.value.diagnosis.headline
    assert failure.value.diagnosis.others[-1] == "so rank 1 is replaced: its variables are gone"
    capsys.readouterr()
    assert ranks.values("globals().get('kept')") == [0, None]
    assert "rank 1 is new (its process had ended: SIGKILL): its variables are gone" in capsys.readouterr().out


# Another notebook


def in_another_notebook(script):
    """Run a script in a process of its own, and return what it prints."""
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=LONG_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_restarted_kernel_finds_the_ranks_their_variables_and_what_is_going_on(ranks, slurm, tmp_path):
    ranks.run("z = 10 + rank\ndef f():\n    raise KeyError('z')", title="Cell In[3]")
    pids = ranks.pids
    said = in_another_notebook(f"""
        import labkit
        ranks = labkit.attach({job_of(ranks)})
        print(ranks.pids)
        print(ranks.values("z"))
        try:
            ranks.run("f()", only=[0])
        except labkit.WorkerFailed as error:
            print("Cell In[3], line 3, in f" in error.cause)
        ranks.run("dist.barrier()")
    """)
    assert said == [str(pids), "[10, 11]", "True"]
    run = begin(ranks, elsewhere.fit_and_show, tmp_path / "go", name="mine")
    wait_for_step(run, 9)
    said = in_another_notebook(f"""
        import labkit, pathlib
        ranks = labkit.attach({str(ranks.folder)!r})
        print(ranks.busy_with)
        try:
            labkit.launch(print, on=ranks, live=False)
        except RuntimeError as error:
            print("run 'mine' holds these ranks" in str(error))
        pathlib.Path({str(tmp_path / "go")!r}).touch()
        ranks.last.wait(60)
        print(ranks.last.history.groupby("rank")["step"].count().tolist())
        ranks.wait(60)
        print(ranks.values("z"))
    """)
    assert said == ["mine", "True", "[20, 20]", "[10, 11]"]
    assert end_of(run) is None
    assert slurm.jobs() == [job_of(ranks)]
    assert labkit.attach(ranks.folder).last.name == "%ranks z"


# Nodes


def test_the_view_says_where_the_ranks_are_and_how_long_they_may_stay(ranks):
    job, left = ranks.notices
    assert job == f"SLURM job {job_of(ranks)} on node[1-2]"
    assert left.endswith(" min left of its time limit")
    assert view._headline(ranks._facts()).endswith(f" if nothing runs on them · {job} · {left}")
    assert [each.where for each in ranks.ranks] == [
        f"node{rank + 1}, process {pid}" for rank, pid in enumerate(ranks.pids)
    ]
    assert [each.state for each in ranks.ranks] == ["idle", "idle"]
    assert ranks.idle_left_s <= ranks.idle_s


def test_a_node_that_is_lost_ends_the_run_with_its_name_and_the_session_goes_on(ranks, slurm, capsys):
    ranks.run("kept = 1")
    run = begin(ranks, workloads.spin)
    slurm.update(NodeName="node2", State="DOWN", Reason="fan is broken")
    error = end_of(run)
    assert error.rank is None
    assert str(error).startswith(f"SLURM job {job_of(ranks)} lost a node: node2 is down (fan is broken)")
    assert ranks.wait(LONG_S).over is False
    wait_until(lambda: {each.state for each in ranks.ranks} == {"queued"}, LONG_S)
    slurm.update(NodeName="node2", State="RESUME")
    capsys.readouterr()
    assert ranks.values("globals().get('kept')") == [None, None]
    assert "ranks 0 and 1 are new" in (said := capsys.readouterr().out)
    assert "node2 is down (fan is broken)" in said
    assert launch(ranks, workloads.fit).status == "finished"


@pytest.mark.wide
def test_a_node_that_crashes_is_named_though_slurm_does_not_know_yet(ranks, slurm, monkeypatch):
    monkeypatch.setattr(cluster_reserve, "KILL_S", 1.0)
    run = begin(ranks, workloads.spin)
    slurm.kill_node("node2")
    try:
        error = end_of(run)
        assert error.rank is None
        assert str(error).startswith("node2, where rank 1 ran, does not answer")
        assert "rank 0 lost its connection as a consequence" in str(error)
        wait_until(lambda: "waits" in " ".join(ranks.notices), LONG_S)
    finally:
        slurm.start_node("node2")
    assert launch(ranks, workloads.fit).status == "finished"


# The end


@pytest.fixture
def small(slurm, tmp_path):
    """Make a session of one rank, which is over at the end."""
    made = []

    def make(**options):
        own = {name: options.pop(name) for name in ("idle_s",) if name in options}
        made.append(labkit.Session(on=labkit.Slurm(1, 1, folder=tmp_path, **options), **own))
        return made[-1]

    yield make
    for session in made:
        session.close()
        wait_until(lambda: job_of(session) not in slurm.jobs())  # noqa: B023


@pytest.mark.wide
def test_an_idle_session_gives_its_nodes_back_by_itself(small, slurm):
    session = small(idle_s=1.5)
    assert launch(session, workloads.sleep_and_return, 2.5).results == [0], "who works is not idle"
    session.ended.wait(LONG_S)
    assert session.why_over == "nothing had run on them for 1.5 s (idle_s)"
    wait_until(lambda: job_of(session) not in slurm.jobs())
    with pytest.raises(RuntimeError, match="these ranks are gone, and their variables with them: nothing had run"):
        session.run("1")


def test_closing_stops_what_runs_and_ends_the_job(small, slurm):
    session = small()
    run = begin(session, workloads.spin, False)
    session.close()
    assert run.status == "stopped"
    assert session.why_over == "they were closed"
    assert session.ranks == session.pids == []
    wait_until(lambda: job_of(session) not in slurm.jobs())
    assert "COMPLETED" in slurm.run("squeue", "-h", "-t", "all", "-o", "%T", "-j", job_of(session))
    again = labkit.attach(session.folder)
    assert (again.over, again.why_over, again.last.status) == (True, "they were closed", "stopped")


@pytest.mark.wide
def test_a_node_that_is_not_given_back_ends_the_session(small, slurm):
    session = small(requeue=False, nodelist="node1", exclusive=False)
    run = begin(session, workloads.spin, False)
    slurm.run("scancel", job_of(session))
    error = end_of(run)
    assert str(error).startswith(f"SLURM job {job_of(session)} was cancelled from outside (CANCELLED)")
    session.ended.wait(LONG_S)
    assert session.why_over.startswith(f"SLURM job {job_of(session)} was cancelled from outside (CANCELLED)")


@pytest.mark.wide
def test_a_rank_that_cannot_start_ends_the_session_and_says_why(small, slurm, tmp_path):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "import os, sys\n"
        'if "labkit.session.rank_entry" in " ".join(sys.orig_argv):\n'
        '    print("no memory left", flush=True)\n'
        "    os._exit(5)\n"
    )
    session = small(setup=f"export PYTHONPATH={tmp_path / 'site'}")
    error = end_of(launch(session, workloads.fit, wait=False))
    assert error.rank == 0
    assert "(exit code 5)" in error.diagnosis.headline
    session.ended.wait(LONG_S)
    assert session.why_over == "rank 0 died (exit code 5) before it was ready; it wrote: no memory left"
