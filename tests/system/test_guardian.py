"""Where no system kills a process at its parent's end, a program beside the notebook does: `labkit.system.guardian`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest

from labkit.system import guardian, host
from tests.conftest import LONG_S, wait_until
from tests.support.repository import ROOT
from tests.support.tiers import few
from tests.system import emulation

pytestmark = pytest.mark.spawns

KILL = host.kill_signal

SLEEPER = "import time; time.sleep(1000)"

NOTEBOOK = f"""
import subprocess, sys, time
from labkit.system import guardian

sleepers = [subprocess.Popen([sys.executable, "-c", {SLEEPER!r}]) for _ in range(3)]
for sleeper in sleepers[:2]:
    guardian.guard(sleeper.pid)
guardian.unguard(sleepers[1].pid)
print(*(sleeper.pid for sleeper in sleepers), guardian._guardian.pid, flush=True)
time.sleep(1000)
"""
"""Guards its first sleeper, no longer its second, and never its third."""

RANKS = """
import ctypes, os, time
import labkit

def holds_the_lock(worker):
    worker.log(pid=os.getpid())
    time.sleep(0.2)  # until that has been sent
    ctypes.PyDLL(None).sleep(1000)

if __name__ == "__main__":
    labkit.standby.off()
    run = labkit.launch(holds_the_lock, world_size=2, live=False, wait=False)
    while len(run.history) < 2:
        time.sleep(0.05)
    time.sleep(1)
    print(*run.pids, flush=True)
    time.sleep(1000)
"""


def lives(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def killed(*command, **options):
    """Run a program that prints numbers of processes, kill it, and return them."""
    with subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True, **options) as notebook:
        pids = [int(pid) for pid in notebook.stdout.readline().split()]
        os.kill(notebook.pid, KILL)
    return pids


def test_what_is_guarded_ends_with_a_notebook_that_is_killed_and_nothing_else_does():
    guarded, let_go, never, program = killed("-c", NOTEBOOK, cwd=ROOT)
    try:
        wait_until(lambda: not lives(guarded) and not lives(program), LONG_S)
        assert lives(let_go)
        assert lives(never)
    finally:
        for pid in (let_go, never):
            os.kill(pid, KILL)


def test_the_guardian_goes_when_it_guards_nothing():
    with subprocess.Popen([sys.executable, "-c", SLEEPER]) as sleeper:
        guardian.guard(sleeper.pid)
        program = guardian._guardian.pid
        assert lives(program)
        guardian.unguard(sleeper.pid)
        assert not lives(program)
        sleeper.kill()


def test_a_family_ends_with_its_elder():
    child = f"subprocess.Popen([sys.executable, '-c', {SLEEPER!r}])"
    tree = f"import subprocess, sys, time; print({child}.pid, flush=True); time.sleep(1000)"
    notebook = f"""
import subprocess, sys, time
from labkit.system import guardian
elder = subprocess.Popen([sys.executable, "-c", {tree!r}], stdout=subprocess.PIPE, text=True)
child = elder.stdout.readline().strip()
guardian.guard(elder.pid, family=True)
print(elder.pid, child, flush=True)
time.sleep(1000)
"""
    pids = killed("-c", notebook, cwd=ROOT)
    wait_until(lambda: not any(map(lives, pids)), LONG_S)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems are emulated on Linux")
@pytest.mark.parametrize("system", few(emulation.EMULATED, 2))
def test_ranks_whose_native_code_keeps_pythons_lock_end_with_a_killed_notebook(system, tmp_path):
    """They do not notice that their inbox has closed. Where they met stays: the next notebook removes it, on a system
    with locks."""
    (tmp_path / "ranks.py").write_text(RANKS)
    ranks = killed("ranks.py", cwd=tmp_path, env={**emulation.environment(system), "TMPDIR": str(tmp_path)})
    try:
        wait_until(lambda: not any(map(lives, ranks)), LONG_S)
    finally:
        for pid in filter(lives, ranks):
            os.kill(pid, signal.SIGKILL)


def test_a_guardian_that_was_killed_is_replaced_with_all_that_it_guarded():
    with (
        subprocess.Popen([sys.executable, "-c", SLEEPER]) as one,
        subprocess.Popen([sys.executable, "-c", SLEEPER]) as two,
    ):
        guardian.guard(one.pid)
        guardian._guardian.kill()
        guardian._guardian.wait()
        guardian.guard(two.pid)
        guardian._guardian.stdin.close()  # as if this process were gone
        wait_until(lambda: not lives(one.pid) and not lives(two.pid), LONG_S)
        guardian._guardian.wait(LONG_S)
    guardian._guardian = None
    guardian._guarded.clear()
