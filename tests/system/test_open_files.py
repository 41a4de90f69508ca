"""A process may have so many files open (`ulimit -n`), and each rank takes some of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import psutil
import pytest

from labkit.engines import spawn
from labkit.system import host
from tests.conftest import LONG_S

resource = pytest.importorskip("resource", reason="only POSIX has such limits")


class Limits:
    """Stands for `resource`: what the system allows."""

    RLIMIT_NOFILE, RLIM_INFINITY = resource.RLIMIT_NOFILE, resource.RLIM_INFINITY

    def __init__(self, soft, hard, most=10**9):
        self.now, self._most = (soft, hard), most

    def getrlimit(self, kind):
        return self.now

    def setrlimit(self, kind, limits):
        if limits[0] > self._most:
            raise ValueError("not allowed to raise maximum limit")
        self.now = limits


INFINITY = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("limits", "allowed", "soft"),
    [
        (Limits(256, 4096), 500, 500),  # no further than is needed
        (Limits(256, INFINITY), 500, 500),
        (Limits(1024, 4096), 1024, 1024),  # never lowered
        (Limits(INFINITY, INFINITY), 500, INFINITY),
        (Limits(64, 256), 256, 256),
        (Limits(256, INFINITY, most=300), 256, 256),
    ],
)
def test_the_limit_is_raised_as_far_as_is_needed_and_allowed(limits, allowed, soft, monkeypatch):
    monkeypatch.setitem(sys.modules, "resource", limits)
    assert host.raise_open_files_limit(500) == allowed
    assert limits.now[0] == soft


def test_ranks_for_which_there_are_not_files_enough_are_refused_with_the_limit_the_need_and_the_cure(monkeypatch):
    monkeypatch.setattr(psutil.Process, "num_fds", lambda self: 48)
    monkeypatch.setattr(host, "raise_open_files_limit", lambda needed: min(needed, 256))
    spawn.allow_open_files(14)
    with pytest.raises(OSError, match="^15 ranks need 260 open files") as refused:
        spawn.allow_open_files(15)
    for said in ("12 for each rank and 80 besides", "no more than 256 (`ulimit -Hn`), enough for 14", "LimitNOFILE="):
        assert said in str(refused.value)


LIMITED = """
import glob, json, os, resource, sys, tempfile, time
import psutil
import labkit, torch
from labkit.engines import spawn

def train(worker):
    worker.log(loss=1.0)
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]

def left():
    children = [c.cmdline() for c in psutil.Process().children() if c.status() != psutil.STATUS_ZOMBIE]
    return [c for c in children if "resource_tracker" not in " ".join(c)]

if __name__ == "__main__":
    process, (_, hard) = psutil.Process(), resource.getrlimit(resource.RLIMIT_NOFILE)
    few = process.num_fds() + 16
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
    raised = labkit.launch(train, world_size=2, live=False).results
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    before, said = process.num_fds(), []
    for allowed in (spawn.allow_open_files, lambda ranks: None):  # also where more is needed than is reckoned with
        spawn.allow_open_files = allowed
        try:
            labkit.launch(train, world_size=8, live=False)
        except OSError as error:
            said.append(error)  # IPython keeps the last one, too, and with it all that its frames hold
    deadline = time.monotonic() + float(sys.argv[1])
    while (left() or process.num_fds() > before) and time.monotonic() < deadline:
        time.sleep(0.05)
    files = [path for path in glob.glob(os.path.join(tempfile.gettempdir(), "*")) if "torchinductor" not in path]
    print(json.dumps([few, raised, list(map(str, said)), left(), process.num_fds() - before, files]))
"""


@pytest.mark.wide
@pytest.mark.spawns
def test_under_a_low_limit_ranks_start_as_long_as_it_may_be_raised_and_then_a_launch_leaves_nothing(tmp_path):
    (tmp_path / "temporary").mkdir()
    (tmp_path / "limited.py").write_text(LIMITED)
    environment = {**os.environ, "TMPDIR": str(tmp_path / "temporary")}
    done = subprocess.run(
        [sys.executable, "limited.py", str(LONG_S)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=4 * LONG_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    few, raised, said, processes, files, temporary = json.loads(done.stdout.splitlines()[-1])
    assert min(raised) > few, "a launch that needed more has raised it, for its ranks, too"
    assert said[0].startswith("8 ranks need ")
    assert "Too many open files" in said[1]
    assert (processes, temporary) == ([], [])
    assert files <= 0, "the launch before may still have had one open when the count began"
