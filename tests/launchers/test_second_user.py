"""Nobody else on the machine reads, changes or runs anything of a run. Another user tries all its doors meanwhile."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

import labkit
from tests.conftest import LONG_S, wait_until
from tests.support.cluster import DAEMONS
from tests.support.second_user import Doors, try_all

AS_ROOT = sys.platform == "linux" and os.geteuid() == 0

pytestmark = [
    pytest.mark.spawns,
    pytest.mark.cold,  # a fork has its forker's environment, by which processes are found here
    pytest.mark.skipif(not AS_ROOT, reason="to become another user, these tests must run as root, on Linux"),
]

REACHABLE = {
    r"spawn_main": "gloo: a rank listens for the others on loopback, as PyTorch has no "
    "other transport for it. Whoever connects when all have joined is given nothing: see .github/SECURITY.md",
    r"^\d+ srun ": "SLURM's own, which asks munge who connects",
}
"""The processes at which another user can connect, and why that must be so."""


@pytest.fixture
def place(monkeypatch):
    """A folder in which everybody may make files, as /tmp is; the tests' own would be closed to others anyhow."""
    made = Path(tempfile.mkdtemp(prefix="second-user-", dir="/tmp"))
    made.chmod(0o1777)
    (made / "tmp").mkdir()
    (made / "tmp").chmod(0o1777)
    monkeypatch.setenv("TMPDIR", str(made / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(made / "tmp"))
    yield made
    psutil.Popen(["rm", "-rf", str(made)]).wait()


def add_until(worker, go):
    """Sum over the ranks until a file is there; then once more."""
    group = dist.new_group()  # through the store, while it is attacked
    is_over = torch.zeros(1)
    while not is_over:
        total = torch.ones(1)
        dist.all_reduce(total)
        worker.log(total=total.item())
        time.sleep(0.02)
        is_over.fill_(os.path.exists(go))  # one rank may see the file a moment before the other
        dist.all_reduce(is_over, dist.ReduceOp.MAX)
    dist.barrier(group)
    last = torch.tensor([float(worker.rank + 1)])
    dist.all_reduce(last, group=dist.new_group())
    return last.item()


def doors_of(place):
    """Those of the notebook, here this process, and of all that it has had started."""
    processes = [psutil.Process()]
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.name() not in DAEMONS and process.environ().get("TMPDIR") == str(place / "tmp"):
                processes.append(process)
    return Doors.of(processes, [*place.glob("labkit-*"), *(place / "tmp").glob("labkit-rendezvous-*")])


def assert_closed(doors, place):
    """Nothing can be read, changed or run, and only what must be reachable can be reached."""
    assert any("/labkit-rendezvous-" in path for path in doors.files), "where the ranks meet is among what is tried"
    mark = place / "executed"
    found = try_all(doors, mark)
    assert found["store"] == []
    assert found["read"] == []
    assert found["changed"] == []
    assert found["socket"] == []
    reasons = [next((why for what, why in REACHABLE.items() if re.search(what, each)), "") for each in found["reached"]]
    assert all(reasons), found["reached"]
    assert len(reasons) >= 2, "of each rank what must be is found, so nothing else can have been overlooked"
    assert not mark.exists(), "what another user has left was run"


def attacked(place, **where):
    """Launch, have another user try all doors, and return the run, which must not have noticed."""
    go = place / "tmp" / "go"
    run = labkit.launch(add_until, str(go), live=False, wait=False, **where)
    try:
        wait_until(lambda: run.over.is_set() or len(run.history) > 4, LONG_S)
        assert not run.over.is_set(), str(run.error)
        assert_closed(doors_of(place), place)
        go.touch()
        run.wait(LONG_S)
    finally:
        run.kill()
    assert (run.status, run.results) == ("finished", [3.0, 3.0]), str(run.error)
    return run


def test_of_a_local_run(place):
    attacked(place)


# What a group shares
