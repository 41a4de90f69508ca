"""Nobody else on the machine reads, changes or runs anything of a run: whom its files, ports and sockets let in."""

from __future__ import annotations

import os
import stat
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

import labkit
from tests.conftest import wait_for_step

pytestmark = [
    pytest.mark.spawns,
    pytest.mark.cold,  # a fork has its forker's files and sockets, too
    pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's"),
]


def reduce_until(worker, go):
    """Sum over the ranks, in a group that they make themselves, until a file is there."""
    group = dist.new_group()
    is_over = torch.zeros(1)
    while not is_over:
        time.sleep(0.02)
        is_over.fill_(os.path.exists(go))  # one rank may see the file a moment before the other
        dist.all_reduce(is_over, dist.ReduceOp.MAX, group)
        worker.log(loss=0.0)


def listening(process):
    """The addresses at which a process listens."""
    return [each.laddr for each in process.net_connections("inet") if each.status == psutil.CONN_LISTEN]


def files_of(process):
    """The files and sockets of a process: open, mapped in shared memory, or named."""
    mapped = [
        line.split()[5] for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines() if "/dev/shm" in line
    ]
    sockets = [each.laddr for each in process.net_connections("unix") if each.laddr]
    return [*(each.path for each in process.open_files()), *mapped, *sockets]


def is_closed(name):
    """Whether a file is its owner's alone, by its own mode or by that of a folder above it."""
    path = Path(name)
    return any(not stat.S_IMODE(each.stat().st_mode) & 0o077 for each in (path, *path.parents))


def test_a_run_on_this_machine_lets_no_other_user_in(monkeypatch):
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        os.chmod(place, 0o1777)  # as /tmp: everybody may look in it and make files
        monkeypatch.setattr(tempfile, "tempdir", place)
        before = set(files_of(psutil.Process())), listening(psutil.Process())
        run = labkit.launch(reduce_until, f"{place}/go", live=False, wait=False)
        try:
            wait_for_step(run, 3)
            ranks = [psutil.Process(pid) for pid in run.pids]
            files = {name for process in [psutil.Process(), *ranks] for name in files_of(process)} - before[0]
            files |= {str(path) for path in Path(place).rglob("*")}
            assert any("labkit-rendezvous-" in name for name in files), "where the ranks meet is among them"
            assert [
                name for name in files if name.startswith("@") or os.path.exists(name) and not is_closed(name)
            ] == []
            assert listening(psutil.Process()) == before[1], "the notebook opens no port"
            for rank in ranks:
                assert {address.ip for address in listening(rank)} == {"127.0.0.1"}, "gloo: see .github/SECURITY.md"
        finally:
            Path(place, "go").touch()
            run.wait()
