"""What `labkit.system.macos` does by itself, tried on whatever system this is."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from labkit.system.macos import MacOS


@pytest.mark.spawns
def test_a_killed_child_is_waited_for_also_where_python_has_no_waitid(monkeypatch):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    child.kill()
    monkeypatch.delattr(os, "waitid", raising=False)
    MacOS().wait_for(child.pid)
    assert child.wait() == -9, "its exit code is left to others"


def test_threads_of_llvms_openmp_do_not_spin_unless_the_reader_wants_it(monkeypatch):
    monkeypatch.delenv("KMP_BLOCKTIME", raising=False)
    MacOS().set_start_environment()
    assert os.environ["KMP_BLOCKTIME"] == "0"
    monkeypatch.setenv("KMP_BLOCKTIME", "200")
    MacOS().set_start_environment()
    assert os.environ["KMP_BLOCKTIME"] == "200"
