"""After every test: no child process, no open port, no temporary file left. No process from a test that is not marked,
and no skips where they are forbidden.

No test may depend on how fast the machine is: tests wait for events, for `LONG_S` at most, and compare times with what
this machine was just seen to take (`start_of`).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import multiprocessing
import multiprocessing.util
import os
import re
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import psutil
import pytest
import torch

import labkit
from labkit.engines.rendezvous import PREFIX
from tests.support import cluster, prefork, programs, ray_nodes, workloads
from tests.support.cluster import DAEMONS
from tests.support.order import FILE_S
from tests.support.repository import ROOT

# Standby ranks are meant to outlive a run; only the tests that are about them switch them on.
os.environ["LABKIT_STANDBY"] = "off"

# A folder of our own for temporary files, so that what other programs leave meanwhile is not taken for ours.
os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
if multiprocessing.parent_process() is None:  # not in a rank, which imports this with the function of a test
    os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="labkit-tests-")
    atexit.register(shutil.rmtree, tempfile.tempdir, ignore_errors=True)


# Of this process, its kernels and the ranks here. Their networks are tiny, and threads that wait for each other take
# several times as long, and compute several times as much, where others compute too.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"

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


def wait_until(condition, deadline_s=LONG_S):
    """Wait for something, but not for ever; what it looked at is said where it did not come."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > deadline:
            seen = inspect.getclosurevars(condition).nonlocals if inspect.isfunction(condition) else {}
            notices = [notice for one in seen.values() if (notice := getattr(one, "notice", ""))]
            raise AssertionError(f"not within {deadline_s} s: {seen} {notices}")
        time.sleep(0.02)


def end_of(run):
    """Wait until a run on a cluster is over, but not for ever; give its error."""
    assert run.over.wait(LONG_S), f"{run} goes on: {run.states}, {run.notice}"
    return run.error


def printed_by_a_notebook_that_is_killed(code):
    """Run code, and kill the process at its end, as a kernel may be; return the words that it has printed."""
    before = "import os, time, labkit\nfrom tests.support import elsewhere\n"
    command = [sys.executable, "-c", f"{before}{textwrap.dedent(code)}\nos.kill(os.getpid(), 9)"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=LONG_S, check=False)
    assert done.returncode == -signal.SIGKILL
    return done.stdout.split()


def start_of(run):
    """Seconds from the launch until every rank had logged: what this machine takes, just now, to start ranks.

    Other times are compared with it. On two idle cores it is about 2.5 s for two ranks.
    """
    return float(run.history.groupby("rank")["time_s"].min().max())


@pytest.fixture(scope="session")
def start_s():
    """Seconds that this machine takes to start two ranks as a reader's begin: a yardstick where ranks are forked."""
    with prefork.in_use(False):
        return start_of(labkit.launch(workloads.log_once, live=False))


def wait_for_step(run, step):
    """Wait until every rank has logged this step."""

    def there():
        assert not run.over.is_set(), str(run.error)
        last = [run.progress(rank)[0].last_step for rank in range(run.world_size)]
        return all(at is not None and at >= step for at in last)

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


@pytest.fixture(scope="module")
def ranks(request):
    """Reserved ranks for the tests of a module: two, or as many as its `SESSION_RANKS`."""
    with shared_session(getattr(request.module, "SESSION_RANKS", 2)) as session:
        yield session


def rank_processes() -> list[psutil.Process]:
    """Children of this process, without those that live as long as it does: multiprocessing's own resource tracker, and
    the daemons of `tests.support.cluster`, the nodes of `tests.support.ray_nodes`; without the ranks of sessions that
    tests share, and without what forks them."""
    children = []
    shared = {pid for session in SHARED for pid in session.pids}
    shared |= ray_nodes.family() | prefork.pids()
    for child in psutil.Process().children(recursive=True):
        if child.pid in shared:
            continue
        try:
            command = " ".join(child.cmdline())
            lasts = "resource_tracker" in command or child.name() in DAEMONS
            if not lasts and child.status() != psutil.STATUS_ZOMBIE:
                children.append(child)
        except psutil.NoSuchProcess:
            continue
    return children


def listening_ports() -> set[int]:
    """The ports at which this process listens. Asked of its own sockets: psutil reads the tables of all of the
    system's, which takes longer than most tests."""
    ports = set()
    for descriptor in map(int, os.listdir("/dev/fd")):
        with contextlib.suppress(OSError):  # closed meanwhile
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as sock:
                is_tcp = sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM
                if is_tcp and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    ports.add(sock.getsockname()[1])
    return ports


def temporary_files() -> set[str]:
    folder = Path(tempfile.gettempdir())
    patterns = ("labkit-*", "pytorch-errorfile-*", "torch_*", "torchelastic_*")
    return {str(path) for pattern in patterns for path in folder.glob(pattern)}


@pytest.fixture(autouse=True, scope="module")
def how_processes_begin(request):
    """Kernels and ranks begin with torch imported; in a module, or a test, that is marked `cold`, as a user's do."""
    with prefork.in_use(not request.node.get_closest_marker("cold")):
        yield


@pytest.fixture(autouse=True)
def how_this_tests_processes_begin(request):
    is_cold = request.node.get_closest_marker("cold")
    with prefork.in_use(False) if is_cold else contextlib.nullcontext():
        yield


@pytest.fixture(autouse=True)
def nothing_is_left_behind(request):
    if request.node.get_closest_marker("browser"):  # JupyterLab lives on; its own fixture looks when it has ended
        yield
        return
    ports, files = listening_ports(), temporary_files()
    spawns = may_spawn(request.node)  # what may not has no processes to leave
    mine = {p.pid for p in rank_processes()} if spawns else set()
    yield
    deadline = time.monotonic() + LONG_S
    while time.monotonic() < deadline:
        left = [p for p in rank_processes() if p.pid not in mine] if spawns else []
        markers = [name for name in ("kernel", "notebook") if request.node.get_closest_marker(name)]
        if markers:
            # A kernel that is killed cannot remove where its ranks met; Jupyter kills each that takes seconds to end.
            for folder in {Path(path) for path in temporary_files() - files if PREFIX in path}:
                shutil.rmtree(folder, ignore_errors=True)
        new_ports, new_files = listening_ports() - ports, temporary_files() - files
        if not (left or new_ports or new_files):
            return
        time.sleep(0.05)
    assert not left, f"processes left behind: {left}"
    assert not new_ports, f"ports still open: {new_ports}"
    assert not new_files, f"temporary files left: {new_files}"


@pytest.fixture(scope="session")
def shared_slurm():
    """One SLURM for all tests; `slurm` for those that begin and end with nothing to do on it."""
    with cluster.running() as found:
        yield found


@pytest.fixture
def slurm(shared_slurm):
    """A cluster with nothing to do, which has nothing to do afterwards either."""
    yield shared_slurm
    deadline = time.monotonic() + LONG_S  # what is over takes its leave
    while ((jobs := shared_slurm.jobs()) or shared_slurm.processes()) and time.monotonic() < deadline:
        time.sleep(0.05)
    # What is left is ended, so that it fails this test and none of the next.
    for job in jobs:
        shared_slurm.run("scancel", job)
    left = []
    for process in shared_slurm.processes():
        with contextlib.suppress(psutil.Error):
            left.append(shlex.join(process.cmdline()))
            process.kill()
    wait_until(lambda: not shared_slurm.jobs() and not shared_slurm.processes())
    wait_until(shared_slurm.resume)
    assert not jobs, "jobs were left behind"
    assert not left, "processes were left behind"


_rays = contextlib.ExitStack()
_ray: list[ray_nodes.RayNodes] = []


@pytest.fixture
def ray_cluster(request):
    """One Ray cluster for tests that run one after the other (`pytest_xdist_make_scheduler`): two nodes with nothing to
    do, which have nothing to do afterwards either. Idle, it takes a twentieth of a core, so it goes with the last."""
    assert of_ray(request.node.nodeid), "where a test needs Ray, its name is to say so"
    if why := ray_nodes.missing():
        pytest.skip(why)
    if not _ray:
        _ray.append(_rays.enter_context(ray_nodes.running()))
    (shared,) = _ray
    shared.have(2)
    yield shared
    wait_until(lambda: not shared.processes())
    shared.have(2)
    wait_until(lambda: shared.state() == {"nodes": 2, "free": 2 * ray_nodes.CPUS, "actors": 0})


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem):
    if _ray and (nextitem is None or not of_ray(nextitem.nodeid)):
        _ray.clear()
        _rays.close()


def of_ray(nodeid: str) -> bool:
    """Whether a test may need Ray, by its name."""
    return re.search(r"/test_ray\.py::|_on_(a_)?ray_|\[ray\]$", nodeid) is not None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Tests run file by file; those that need Ray after each other, for a cluster takes half a minute to begin; lessons
    on whichever worker comes to them."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            is_lesson = "::test_a_lesson_runs_headless" in nodeid
            return "ray" if of_ray(nodeid) else nodeid if is_lesson else super()._split_scope(nodeid)

    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 12 MB."""
    (tmp_path / "disk").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=12m", "labkit-test", str(tmp_path / "disk")]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here ({done.stderr.strip()}): run as root, in a container that may")
    yield tmp_path / "disk"
    subprocess.run(["umount", "--lazy", str(tmp_path / "disk")], check=True)


def pytest_collection_modifyitems(config, items):
    left = {"long", "wide"} if not os.environ.get("LABKIT_WIDE") else {"long"}
    if not os.environ.get("LABKIT_LONG"):
        out = [item for item in items if any(item.get_closest_marker(name) for name in left)]
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if item not in set(out)]
    if getattr(config.option, "dist", "no") == "loadfile" or hasattr(config, "workerinput"):
        # The files that take longest first, so that no worker is left with one of them while the others have nothing.
        items.sort(key=lambda item: (-FILE_S.get(item.path.name, float("inf")), item.path))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    # A pattern for what an environment, the oldest, is not expected to have.
    without = os.environ.get("LABKIT_ALLOWED_SKIPS") or "(?!)"
    allowed = hasattr(report, "wasxfail") or item.get_closest_marker("gpu") or re.search(without, str(report.longrepr))
    if report.skipped and not allowed and os.environ.get("LABKIT_FORBID_SKIPS"):
        report.outcome = "failed"
        report.longrepr = f"skipped, where skips are forbidden: {report.longrepr}"


# What a test may do

SPAWNING = {"spawns", "kernel", "cluster", "browser", "notebook"}
"""The markers of tests that start processes."""


def may_spawn(item) -> bool:
    return any(item.get_closest_marker(name) for name in SPAWNING)


_started: list[str] = []
"""The processes that this one has started during a test."""


def _noted(owner, name, what):
    """Have a function that starts a process say so."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def noted(*arguments, **options):
        _started.append(what(*arguments, **options))
        return original(*arguments, **options)

    setattr(owner, name, noted)


_noted(subprocess.Popen, "__init__", lambda self, args, *_, **__: f"subprocess {args!r:.200}")
_noted(multiprocessing.util, "spawnv_passfds", lambda path, args, _: f"multiprocessing {args!r:.200}")
_noted(prefork.Forker, "fork", lambda self, argv, *_, **__: f"a fork for {argv!r:.200}")
_noted(os, "fork", lambda: "a fork")
_noted(os, "posix_spawn", lambda path, *_, **__: f"{path}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    _started.clear()
    if why := programs.why_skipped(item):
        pytest.skip(why)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    result = yield
    assert may_spawn(item) or not _started, (
        f"starts processes, but has none of the markers {sorted(SPAWNING)}: {_started}"
    )
    return result


def pytest_configure(config):
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell has begun this in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
