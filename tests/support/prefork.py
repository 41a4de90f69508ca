"""Kernels and ranks that begin with torch imported: what tests use whose subject is not how a process begins.

Importing torch takes 2 to 4 s of a core, its sharding 2 s more, what a kernel draws with 1 s, and the suite starts over
a thousand processes: on two cores that was half of its time. So a process that has imported these, and has done nothing
else (no threads, no random number drawn), forks those that are asked for; its child waits until whoever asked is its
parent, takes over his environment, folder, signal mask and file descriptors, and goes on as if it had just been
started: multiprocessing's `spawn_main`, ipykernel's launcher, torchrun's agent. Those have such a process of their own.

What differs from a process that was really spawned: the seed of `hash()` is the same in all, memory is shared until
it is written to, and more modules are there than a user's process has imported. Tests about these start their processes
as everybody does. Linux only: elsewhere, and where LABKIT_PREFORK is "off", nothing is changed.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import importlib.util
import multiprocessing.util
import os
import pickle
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
MADV_COLLAPSE, HUGE_BYTES = 25, 2**21
IS_ON = sys.platform == "linux" and os.environ.get("LABKIT_PREFORK") != "off"
RANKS = (
    *("torch.nn.parallel", "labkit.rank.spawned"),
    # Half of the compiler, without which nothing is sharded or cut into stages.
    *("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.pipelining", "torch.distributed.tensor.parallel"),
    # A function that is tested lies in a module of tests, which a rank imports with it.
    *("pytest", "psutil"),
)
"""What ranks begin with."""

KERNELS = (
    *RANKS,
    # Not ipykernel.kernelapp: as it is imported it reads from the environment who its parent is.
    *("ipykernel.ipkernel", "ipywidgets", "pandas"),
    *("plotly.graph_objects", "torchvision"),
    "nbformat",  # whose schemas Plotly's widgets load, and a Jupyter server
)
"""What kernels begin with, and their ranks."""

THOSE_WHO_START_KERNELS = ("import jupyterlab.labapp", "import notebook.app", "-m jupyter_server")
KERNEL, RANK = "ipykernel_launcher", "import labkit.rank.die_with_parent"
AGENTS = ("-m torch.distributed.run",)
THOSE_WHO_START_RANKS = (
    *(*THOSE_WHO_START_KERNELS, KERNEL, *AGENTS),
    *("labkit.launchers import start", "/plain/", "/twins/", "-m tests.support.twins"),
)
"""Words of the command lines of what is forked: Jupyter's servers, kernels, torchrun's agents, a node's own, those who
stand before a rank there, and the scripts of lessons and twins."""

HIGH = 500
"""Descriptors from here on are nobody's target: those that arrive wait there until their own numbers are free."""

MOST = 253
"""So many descriptors can be sent at once (SCM_MAX_FD of Linux)."""

LONGEST = 4096
"""Room for a command line, of which a process is known to others."""

_prctl: Any = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


class Request(NamedTuple):
    """What a new process takes over from whoever asks for it."""

    argv: list[str]
    targets: list[int]
    """The numbers that the descriptors sent with it are to have."""

    environment: dict[str, str]
    folder: str
    mask: set[int]
    own_session: bool
    parent: int


class Forker:
    """The asking end: `fork` gives the pid of a new child of this process."""

    def __init__(self, sock: socket.socket, pid: int) -> None:
        self.pid = pid
        self._sock, self._lock = sock, threading.Lock()

    @classmethod
    def start(cls, imported: tuple[str, ...]) -> Forker:
        """Return one whose process imports these modules now; it ends with this one."""
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Not those of a job, by which a cluster's test knows what the job has left.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
        environment["GOMP_SPINCOUNT"] = "10000"  # as labkit.rank.die_with_parent, before torch is there
        # Under a name that stacks leave out, as they do that of `python -c`, by which multiprocessing spawns.
        code = f"exec(compile(open({__file__!r}).read(), '<string>', 'exec'))"
        command = [sys.executable, "-c", code, str(its.fileno()), *imported, " " * LONGEST]
        root = Path(__file__).parents[2]
        process = subprocess.Popen(command, pass_fds=[its.fileno()], env=environment, cwd=root)
        its.close()
        atexit.register(mine.close)
        _pids.add(process.pid)
        return cls(mine, process.pid)

    def fork(self, argv: list[str], fds: dict[int, int], own_session: bool = False, **taken_over: Any) -> int:
        """Return the pid of a new process that has these descriptors, {its number: ours}."""
        request = Request(
            argv,
            list(fds),
            taken_over.get("environment") or dict(os.environ),
            str(taken_over.get("folder") or os.getcwd()),
            signal.pthread_sigmask(signal.SIG_BLOCK, []),
            own_session,
            os.getpid(),
        )
        with self._lock:
            # Only meanwhile: other programs' orphans are init's, which asks for their exit codes.
            _prctl(PR_SET_CHILD_SUBREAPER, 1)
            try:
                socket.send_fds(self._sock, [pickle.dumps(tuple(request))], list(fds.values()))
                return int(self._sock.recv(64))
            finally:
                _prctl(PR_SET_CHILD_SUBREAPER, 0)


# The process that forks


def serve(sock: socket.socket) -> None:
    """Fork a process for each request, until nobody can ask any more. Returns only in the new processes."""
    gc.collect()
    gc.freeze()  # so that collecting there writes to no page that is shared
    while True:
        message, received, _, _ = socket.recv_fds(sock, 1 << 20, MOST)
        if not message:
            os._exit(0)
        request = Request(*pickle.loads(message))
        heard, said = os.pipe()
        between = os.fork()
        if between == 0:
            _fork_again(request, said)
            for end in (sock.fileno(), heard, said):
                os.close(end)
            _become(request, received)
        os.waitpid(between, 0)
        sock.send(os.read(heard, 64))
        for fd in (heard, said, *received):
            os.close(fd)


def _take_huge_pages() -> None:
    """Have what this process holds lie in pages of 2 MB: a fork, and its end, then take a quarter of the time.

    Both go through all pages of a process, 100,000 small ones where torch is imported, and a rank needs two forks.
    Linux 6.1 can do that on demand; elsewhere all stays as it is.
    """
    libc = ctypes.CDLL(None)
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, permissions, _, _, _, *name = line.split()
        if permissions == "rw-p" and name in ([], ["[heap]"]):
            start, end = (int(bound, 16) // HUGE_BYTES * HUGE_BYTES for bound in bounds.split("-"))
            if end > (start := start + HUGE_BYTES):
                libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_COLLAPSE)


def _fork_again(request: Request, said: int) -> None:
    """Return in a child whose parent is whoever asked: its own parent ends at once, and he is the next subreaper."""
    between, own_session = os.getpid(), os.pipe()
    pid = os.fork()
    if pid:
        os.read(own_session[0], 1)  # nobody may ask for its process group before that
        os.write(said, str(pid).encode())
        os._exit(0)
    if request.own_session:
        os.setsid()
    os.write(own_session[1], b".")
    for end in own_session:
        os.close(end)
    while (parent := os.getppid()) != request.parent:
        if parent != between:  # whoever asked has gone
            os._exit(1)
        time.sleep(0.001)


def _become(request: Request, received: list[int]) -> None:
    """Take over what whoever asked has given; then run what he asked for, and end."""
    import fcntl

    code = 1
    try:
        waiting = [fcntl.fcntl(fd, fcntl.F_DUPFD, HIGH) for fd in received]
        os.closerange(3, HIGH)
        for fd, target in zip(waiting, request.targets, strict=True):
            os.dup2(fd, target)
            os.close(fd)
        _be_known_as(request.argv)
        os.environ.clear()
        os.environ.update(request.environment)
        os.chdir(request.folder)
        tempfile.tempdir = None  # where it is, is in the environment
        random.seed()
        sys.modules["numpy"].random.seed()
        if threads := os.environ.get("OMP_NUM_THREADS"):  # is read as torch is imported
            sys.modules["torch"].set_num_threads(int(threads))
        sys.modules["__main__"] = types.ModuleType("__main__")
        # The first is the script's own folder's place.
        sys.path[:0] = ["", *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        if any(word in " ".join(request.argv) for word in THOSE_WHO_START_RANKS):
            _start_forker()
        signal.pthread_sigmask(signal.SIG_SETMASK, request.mask)
        sys.argv = request.argv
        code = _run(request)
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            _leave()
        os._exit(code)


def _be_known_as(argv: list[str]) -> None:
    """Write the command line to where Linux has it, for whoever looks for this process among others."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = map(int, fields[45:47])
    ctypes.memmove(start, "\0".join(argv).encode()[: end - start - 1].ljust(end - start, b"\0"), end - start)


def _run(request: Request) -> int:
    """Do what `python [OPTIONS] -c CODE`, `-m MODULE` or a script does, with the arguments behind it."""
    at = next(n for n, word in enumerate(request.argv) if n and (word in ("-c", "-m") or not word.startswith("-")))
    how, rest = request.argv[at], request.argv[at + 1 :]
    if how == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(rest[0], vars(sys.modules["__main__"]))
    elif how == "-m":
        sys.argv, sys.path[0] = rest, request.folder
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = [how, *rest], os.path.dirname(how)
        runpy.run_path(how, run_name="__main__")
    return 0


def _leave() -> None:
    """What the interpreter does at its end."""
    import atexit

    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()


def _start_forker() -> None:
    """Have a process of this one's own fork its ranks: they are to be its children, and without what it imports."""
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is in the parent's process group
        mine.close()
        serve(its)
    its.close()
    own = Forker(mine, pid)
    AS_EVERYBODY.update(_starters())
    _start_by(spawnv(lambda: own), fork_exec(lambda imported: own))


# Those who ask


def spawnv(forker: Callable[[], Forker]) -> Callable[..., int]:
    """Return what stands for `multiprocessing.util.spawnv_passfds`: ranks are forked, anything else is spawned."""

    def spawnv_passfds(path: Any, args: list[Any], passfds: Any) -> int:
        argv = [os.fsdecode(word) for word in args]
        if "--multiprocessing-fork" not in argv or len(passfds) > MOST - 3:
            return AS_EVERYBODY["spawnv_passfds"](path, args, passfds)
        numbers = [0, 1, 2, *sorted(map(int, passfds))]
        return forker().fork(argv, {number: number for number in numbers})

    return spawnv_passfds


def fork_exec(forker: Callable[[tuple[str, ...]], Forker]) -> Callable[..., int]:
    """Return what stands for `_posixsubprocess.fork_exec` in `subprocess.Popen`, which is given its arguments."""

    def fork_exec(args: list[Any], *others: Any) -> int:
        argv = [os.fsdecode(word) for word in args]
        words = " ".join(argv)
        if argv[0] != sys.executable or not any(word in words for word in (*THOSE_WHO_START_RANKS, RANK)):
            return AS_EVERYBODY["fork_exec"](args, *others)
        _, _, kept, folder, environment, stdin, _, _, stdout, _, stderr, _, error, _, own_session = others[:15]
        fds = {n: n if fd == -1 else fd for n, fd in enumerate((stdin, stdout, stderr))}
        has_kernels = any(word in words for word in (KERNEL, *THOSE_WHO_START_KERNELS))
        return forker(KERNELS if has_kernels else RANKS).fork(
            argv,
            fds | {fd: fd for fd in kept if fd != error},
            own_session,
            environment=environment and dict(os.fsdecode(line).split("=", 1) for line in environment),
            folder=folder,
        )

    return fork_exec


def _starters() -> dict[str, Callable[..., int]]:
    return {"spawnv_passfds": multiprocessing.util.spawnv_passfds, "fork_exec": vars(subprocess)["_fork_exec"]}


AS_EVERYBODY: dict[str, Callable[..., int]] = {}
"""How processes are started without this file; taken when it is first used."""


def _start_by(spawnv_passfds: Callable[..., int], fork_exec: Callable[..., int]) -> None:
    multiprocessing.util.spawnv_passfds = spawnv_passfds
    vars(subprocess)["_fork_exec"] = fork_exec


@functools.cache
def forker(imported: tuple[str, ...] = RANKS) -> Forker:
    """Return this process's own, started when it is first asked for."""
    return Forker.start(imported)


_pids: set[int] = set()


def pids() -> set[int]:
    """Those processes of this file that live as long as whoever started them."""
    return _pids


@contextlib.contextmanager
def in_use(is_on: bool = True, forker: Callable[..., Forker] = forker) -> Iterator[None]:
    """Have kernels and ranks that this process starts meanwhile begin with torch imported; or not, within such a time.

    A kernel's ranks begin as it does.
    """
    before = _starters()
    if not AS_EVERYBODY:
        AS_EVERYBODY.update(before)
    if is_on and IS_ON:
        _start_by(spawnv(forker), fork_exec(forker))
    else:
        _start_by(**AS_EVERYBODY)
    try:
        yield
    finally:
        _start_by(**before)


if __name__ == "__main__":
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    for name in sys.argv[2:-1]:
        importlib.import_module(name)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _take_huge_pages()
    serve(socket.socket(fileno=int(sys.argv[1])))
