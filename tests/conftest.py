"""After every test: no child process, no open port, no temporary file left. And no skips where they are forbidden."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path

import psutil
import pytest

import labkit
from tests.cluster import DAEMONS

# Standby ranks are meant to outlive a run; only the tests that are about them switch them on.
os.environ["LABKIT_STANDBY"] = "off"

# A folder of our own for temporary files, so that what other programs leave meanwhile is not taken for ours.
os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="labkit-tests-")
atexit.register(shutil.rmtree, tempfile.tempdir, ignore_errors=True)


LONG_S = 120
"""How long what is started elsewhere may take at most: ranks import torch, and this machine may be busy."""


def lives(pid: int) -> bool:
    """Whether a process is there and has not ended; one whose end nobody has asked for yet has ended too."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def command_of(process: psutil.Process) -> str:
    """The command line of a process; "" if it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def wait_until(condition, deadline_s=30):
    """Wait for something, but not for ever."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {deadline_s} s"
        time.sleep(0.02)


def end_of(run):
    """Wait until a run on a cluster or under torchrun is over, but not for ever; give its error."""
    assert run.over.wait(LONG_S), f"{run} goes on: {run.states}, {run.notice}"
    return run.error


def wait_for_step(run, step):
    """Wait until every rank has logged this step."""

    def there():
        assert not run.over.is_set(), str(run.error)
        return all((run.progress(rank)[0].last_step or 0) >= step for rank in range(run.world_size))

    wait_until(there, LONG_S)


SHARED: list[labkit.Session] = []
"""Sessions that several tests share; one of their ranks may be replaced in a test."""


@contextlib.contextmanager
def shared_session(world_size):
    """A session for several tests, ended after the last of them."""
    with labkit.Session(world_size) as session:
        SHARED.append(session)
        yield session
        SHARED.remove(session)


def rank_processes() -> list[psutil.Process]:
    """Children of this process, without those that live as long as it does: multiprocessing's own resource tracker, and
    the daemons of `tests.cluster`; and without the ranks of sessions that tests share."""
    children = []
    shared = {pid for session in SHARED for pid in session.pids}
    for child in psutil.Process().children(recursive=True):
        if child.pid in shared:
            continue
        try:
            lasts = "resource_tracker" in " ".join(child.cmdline()) or child.name() in DAEMONS
            if not lasts and child.status() != psutil.STATUS_ZOMBIE:
                children.append(child)
        except psutil.NoSuchProcess:
            continue
    return children


def listening_ports() -> set[int]:
    return {c.laddr.port for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN}


def temporary_files() -> set[str]:
    folder = Path(tempfile.gettempdir())
    patterns = ("labkit-*", "pytorch-errorfile-*", "torch_*", "torchelastic_*")
    return {str(path) for pattern in patterns for path in folder.glob(pattern)}


@pytest.fixture(autouse=True)
def nothing_is_left_behind(request):
    if request.node.get_closest_marker("browser"):  # JupyterLab lives on; its own fixture looks when it has ended
        yield
        return
    ports, files = listening_ports(), temporary_files()
    mine = {p.pid for p in rank_processes()}
    yield
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        left = [p for p in rank_processes() if p.pid not in mine]
        new_ports, new_files = listening_ports() - ports, temporary_files() - files
        if not (left or new_ports or new_files):
            return
        time.sleep(0.05)
    assert not left, f"processes left behind: {left}"
    assert not new_ports, f"ports still open: {new_ports}"
    assert not new_files, f"temporary files left: {new_files}"


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    if report.skipped and not hasattr(report, "wasxfail") and os.environ.get("LABKIT_FORBID_SKIPS"):
        report.outcome = "failed"
        report.longrepr = f"skipped, where skips are forbidden: {report.longrepr}"
