"""Nothing is left behind: whatever ends, and however, soon no process, port, shared memory or temporary file of the
ranks is there: in twice the time that ranks take to start, five seconds on two idle cores. The folder in which those of
a killed notebook have met goes with the next launch. Linux finds all of them; elsewhere the docs say what holds."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import psutil
import pytest
from jupyter_client import KernelManager

from labkit.engines import rendezvous
from tests.conftest import LONG_S, command_of, lives, wait_until
from tests.support.tiers import few

pytestmark = [
    pytest.mark.spawns,
    pytest.mark.kernel,
    pytest.mark.skipif(sys.platform != "linux", reason="finds processes and shared memory as Linux shows them"),
]
MARKER = "LABKIT_ORPHANS_TRIAL"
LISTENS = "0A"
"""A socket's state, in /proc/net/tcp."""
APART = ("resource_tracker", "ipykernel_launcher")
"""What is neither a rank nor loads data; what forks a kernel's ranks is called like it."""

BUSY = """
import os, re, time, torch, labkit, torch.distributed as dist

def busy(worker):
    worker.log(loss=1.0)
    print(f"rank {worker.rank} goes on")
    if worker.rank == 1:
        dist.barrier()
    if worker.rank == 2:
        re.match(r"(a+)+$", "a" * 40 + "b")
    while worker.rank == 3:
        for batch in torch.utils.data.DataLoader(torch.zeros(1000, 8), num_workers=2):
            worker.log(loss=batch.sum().item())
    while True:
        worker.log(loss=0.0)
"""
"""Rank 0 logs for ever, 1 waits in a collective, 2 is in native code that keeps Python's lock, 3 loads data."""

STAND_BY = """
from labkit.engines import standby
standby.take(0)
standby.done({count})
while len(standby.pids()) < {count}:
    time.sleep(0.02)
"""

LAUNCH = """
run = labkit.launch(busy, world_size=4, wait=False)
while any("goes on" not in text for text in run.output):
    time.sleep(0.02)
print("left standing by:", len(standby.pids()))
"""


def listening():
    """The sockets on which anybody listens, as (address, inode): another program may get the same port later."""
    rows = [row.split() for of in ("tcp", "tcp6") for row in Path("/proc/net", of).read_text().splitlines()[1:]]
    return {(row[1], row[9]) for row in rows if row[3] == LISTENS}


def listening_of(process):
    """Those that a process holds."""
    held = set()
    for file in Path(f"/proc/{process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            held.add(os.readlink(file))
    return {(address, inode) for address, inode in listening() if f"socket:[{inode}]" in held}


class Trial:
    """All that one program has: found by a variable in the environment, or by the folder that it runs in where it was
    forked, whoever the parent is by then."""

    def __init__(self, folder, start_s):
        self.start_s = start_s
        self.folder = str(folder)
        self.mark = secrets.token_hex(8)
        self.temp = folder / "temp"
        self.temp.mkdir()
        self.environment = {
            **os.environ,
            MARKER: self.mark,
            "TMPDIR": str(self.temp),
            "LABKIT_STANDBY": "on",
            "IPYTHONDIR": str(folder / "ipython"),
            "MPLBACKEND": "agg",
        }
        self._seen = set()
        self._listening = set()
        self._shared = set()

    def processes(self):
        """Those that live, with their descendants."""
        found = set()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARKER) == self.mark or process.cwd() == self.folder:
                    found |= {process, *process.children(recursive=True)}
        return {process for process in found if lives(process.pid)}

    def look(self):
        """Note what there is, to be able to say later that it is gone."""
        now = self.processes()
        self._seen |= now
        for process in now:
            with contextlib.suppress(psutil.Error, OSError):
                self._listening |= listening_of(process)
                maps = Path(f"/proc/{process.pid}/maps").read_text()
                self._shared |= set(re.findall(r"/dev/shm/[^\s]+", maps))
        return now

    def left(self, apart_from=()):
        """What of it is still there."""
        apart = set(apart_from)
        processes = {p for p in self.processes() | self._seen if lives(p.pid) and p.is_running()} - apart
        pids = {str(process.pid) for process in self._seen}
        shared = {path for path in self._shared if os.path.exists(path)}
        shared |= {name for name in os.listdir("/dev/shm") if name.startswith("torch_") and name.split("_")[1] in pids}
        # PyTorch keeps its compiler's cache on purpose, and a DataLoader's worker that is killed leaves its socket.
        files = [
            str(path)
            for path in self.temp.rglob("*")
            if not str(path.relative_to(self.temp)).startswith(("torchinductor_", "pymp-"))
        ]
        sockets = (self._listening & listening()).difference(*map(listening_of, apart))
        return [*processes, *sockets, *shared, *files]

    def assert_nothing_is_left(self, apart_from=(), was_killed=False):
        """A process that is killed cannot remove the folder in which its ranks have met; the next to launch does."""
        deadline = time.monotonic() + 2 * self.start_s
        while left := self.left(apart_from):
            if was_killed:
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(tempfile, "tempdir", str(self.temp))
                    rendezvous.remove_left_behind.cache_clear()
                    rendezvous.remove_left_behind()
            assert time.monotonic() < deadline, f"left behind: {left}"
            time.sleep(0.05)

    def end(self):
        """After a test that failed."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()


@pytest.fixture
def trial(tmp_path, start_s):
    trial = Trial(tmp_path, start_s)
    yield trial
    trial.end()


def wait_for_ready(client):
    """Wait for a kernel; one that is slow to answer a client's heartbeat is taken for dead by it, and is not."""
    deadline = time.monotonic() + LONG_S
    while True:
        try:
            return client.wait_for_ready(timeout=LONG_S)
        except RuntimeError:
            if time.monotonic() > deadline:
                raise


def execute(client, code):
    """Run code in a kernel to its end and give what it printed."""
    printed = []
    reply = client.execute_interactive(
        textwrap.dedent(code), timeout=5 * LONG_S, output_hook=lambda m: printed.append(m["content"].get("text", ""))
    )
    assert reply["content"]["status"] == "ok", reply["content"]
    return "".join(printed)


def make_busy(client, trial):
    """Have ranks of every kind, and one that stands by, in a kernel; give all processes there are."""
    execute(client, BUSY)
    execute(client, STAND_BY.format(count=5))
    assert "left standing by: 1" in execute(client, LAUNCH)
    ranks_and_loaders = 5 + 2

    def all_there():
        started = [p for p in trial.look() if not any(word in command_of(p) for word in APART)]
        return len(started) >= ranks_and_loaders

    wait_until(all_there)


# A kernel


# One that is killed can do nothing more for its ranks: what they do themselves, from their beginning, must be enough.
@pytest.mark.parametrize("how", ["is restarted", pytest.param("is killed", marks=pytest.mark.cold)])
def test_no_rank_outlives_a_kernel_that(how, trial, tmp_path):
    kernel = KernelManager(kernel_name="python3", connection_file=str(tmp_path / "kernel.json"))
    log = open(tmp_path / "kernel.log", "w")  # noqa: SIM115 - a restarted kernel writes to it too
    kernel.start_kernel(cwd=tmp_path, env=trial.environment, stdout=log, stderr=log)
    client = kernel.blocking_client()
    client.start_channels()
    try:
        wait_for_ready(client)
        make_busy(client, trial)
        if how == "is killed":
            os.kill(kernel.provisioner.pid, signal.SIGKILL)
            trial.assert_nothing_is_left(was_killed=True)
        else:
            kernel.restart_kernel()
            wait_for_ready(client)
            new = psutil.Process(kernel.provisioner.pid)
            trial.assert_nothing_is_left(apart_from=[new, *new.children()])
            assert "42" in execute(client, "print(6 * 7)")
    finally:
        client.stop_channels()
        if kernel.has_kernel:
            kernel.shutdown_kernel(now=True)
        kernel.cleanup_resources()
        log.close()


# A script


SCRIPT = """
print("launching", flush=True)
run = labkit.launch(busy, world_size=2, wait=False, live=False)
while any("goes on" not in text for text in run.output):
    time.sleep(0.02)
print("busy", flush=True)
{then}
run.wait()
"""


@pytest.fixture
def script(trial, tmp_path):
    """Begin a program that launches two ranks, and does something then; it is ended with the test."""
    with contextlib.ExitStack() as stack:

        def begin(then=""):
            file = tmp_path / "script.py"
            file.write_text(BUSY + SCRIPT.format(then=then))
            options = {"cwd": tmp_path, "env": trial.environment, "stdout": subprocess.PIPE, "text": True}
            program = stack.enter_context(subprocess.Popen([sys.executable, file], start_new_session=True, **options))
            stack.callback(program.kill)
            assert program.stdout.readline() == "launching\n"
            return program

        yield begin


@pytest.mark.parametrize("share", few([0.0, 0.04, 0.15, 0.4, 0.8], lambda share: share == 0.15))
def test_no_rank_outlives_a_script_that_is_killed_while_it_starts_them(share, trial, script):
    """After so great a share of the time that starting takes here."""
    program = script()
    time.sleep(share * trial.start_s)
    trial.look()
    program.kill()
    program.wait()
    trial.assert_nothing_is_left(was_killed=True)


def test_nothing_is_left_when_the_whole_process_group_is_killed_at_once(trial, script):
    """Nobody survives who could tidy up: neither notebook nor ranks, nor multiprocessing's resource tracker."""
    program = script()
    assert program.stdout.readline() == "busy\n"
    assert len(trial.look()) >= 3
    os.killpg(program.pid, signal.SIGKILL)
    program.wait()
    trial.assert_nothing_is_left(was_killed=True)


def test_no_rank_outlives_a_script_that_is_killed_while_a_fork_of_it_goes_on(trial, script):
    """A pool's worker, say, which has copies of all that the script has open."""
    program = script("if not (pid := os.fork()): time.sleep(1000)\nprint(pid, flush=True)")
    assert program.stdout.readline() == "busy\n"
    fork = psutil.Process(int(program.stdout.readline()))
    try:
        assert len(trial.look()) >= 4
        program.kill()
        left = trial.processes() - {fork}
        wait_until(lambda: not any(lives(p.pid) and "resource_tracker" not in command_of(p) for p in left))
    finally:
        fork.kill()
