"""Kernels and ranks that begin with torch imported: what tests use whose subject is not how a process begins.

Importing torch takes 2 to 4 s of a core, and the suite starts over a thousand processes: on two cores that was half
of its time. So a process that has imported it, and has done nothing else (no threads, no random number drawn), forks
those that are asked for; its child waits until whoever asked is its parent, takes over his environment, folder,
signal mask and file descriptors, and goes on as if it had just been started: multiprocessing's `spawn_main`, or
ipykernel's launcher.

What differs from a process that was really spawned: the seed of `hash()` is the same in all, memory is shared until
it is written to, and modules that only ranks import are there in kernels too. Tests about these start their processes
as everybody does. Linux only: elsewhere, and where LABKIT_PREFORK is "off", nothing is changed.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing.util
import os
import pickle
import random
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
IS_ON = sys.platform == "linux" and os.environ.get("LABKIT_PREFORK") != "off"
HIGH = 500
"""Descriptors from here on are nobody's target: those that arrive wait there until their own numbers are free."""

_prctl = ctypes.CDLL(None).prctl
_AS_EVERYBODY: dict[str, Callable[..., Any]] = {}


class Request(NamedTuple):
    """What a new process takes over from whoever asks for it."""

    argv: list[str]
    targets: list[int]
    """The numbers that the descriptors sent with it are to have."""

    environment: dict[str, str]
    folder: str
    mask: set[int]
    is_kernel: bool
    parent: int


class Forker:
    """The asking end: `fork` gives the pid of a new child of this process."""

    def __init__(self, sock: socket.socket, pid: int) -> None:
        self.pid = pid
        self._sock, self._lock = sock, threading.Lock()

    @classmethod
    def start(cls) -> Forker:
        """Return one whose process imports torch now; it ends with this one."""
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {**os.environ, "GOMP_SPINCOUNT": "10000"}  # as labkit.rank.die_with_parent, before torch is there
        # Under a name that stacks leave out, as they do that of `python -c`, by which multiprocessing spawns.
        code = f"exec(compile(open({__file__!r}).read(), '<string>', 'exec'))"
        command = [sys.executable, "-c", code, str(its.fileno())]
        root = Path(__file__).parent.parent
        process = subprocess.Popen(command, pass_fds=[its.fileno()], env=environment, cwd=root)
        its.close()
        return cls(mine, process.pid)

    def fork(self, argv: list[str], fds: dict[int, int], is_kernel: bool = False, **taken_over: Any) -> int:
        """Return the pid of a new process that has these descriptors, {its number: ours}."""
        request = Request(
            argv,
            list(fds),
            taken_over.get("environment", dict(os.environ)),
            str(taken_over.get("folder") or os.getcwd()),
            signal.pthread_sigmask(signal.SIG_BLOCK, []),
            is_kernel,
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
        message, received, _, _ = socket.recv_fds(sock, 1 << 20, 64)
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


def _fork_again(request: Request, said: int) -> None:
    """Return in a child whose parent is whoever asked: its own parent ends at once, and he is the next subreaper."""
    between, own_session = os.getpid(), os.pipe()
    pid = os.fork()
    if pid:
        os.read(own_session[0], 1)  # nobody may ask for its process group before that
        os.write(said, str(pid).encode())
        os._exit(0)
    if request.is_kernel:
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
        os.environ.clear()
        os.environ.update(request.environment)
        os.chdir(request.folder)
        random.seed()
        sys.modules["numpy"].random.seed()
        sys.modules["__main__"] = types.ModuleType("__main__")
        if request.is_kernel:
            _start_forker()
        signal.pthread_sigmask(signal.SIG_SETMASK, request.mask)
        sys.argv = request.argv
        code = _run(request)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            _leave()
        os._exit(code)


def _run(request: Request) -> int:
    if request.is_kernel:
        # As `python -m ipykernel_launcher -f FILE`.
        at = request.argv.index("-m")
        sys.argv = [request.argv[at + 1], *request.argv[at + 2 :]]
        sys.path[0] = request.folder
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        return 0
    # As `python -c "from multiprocessing.spawn import spawn_main; …" --multiprocessing-fork`.
    at = request.argv.index("-c")
    sys.argv = ["-c", *request.argv[at + 2 :]]
    exec(request.argv[at + 1], vars(sys.modules["__main__"]))
    return 0


def _leave() -> None:
    """What the interpreter does at its end."""
    import atexit

    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()


def _start_forker() -> None:
    """Have a process of this kernel's own fork its ranks: they are to be its children, and without what it imports."""
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    kernel = os.getpid()
    pid = os.fork()
    if pid == 0:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != kernel:
            os._exit(0)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is in the kernel's process group
        mine.close()
        serve(its)
    its.close()
    own = Forker(mine, pid)
    multiprocessing.util.spawnv_passfds = spawnv(lambda: own, multiprocessing.util.spawnv_passfds)


# Those who ask


def spawnv(forker: Callable[[], Forker], otherwise: Callable[..., int]) -> Callable[..., int]:
    """Return what stands for `multiprocessing.util.spawnv_passfds`: ranks are forked, anything else is spawned."""

    def spawnv_passfds(path: Any, args: list[Any], passfds: Any) -> int:
        argv = [os.fsdecode(word) for word in args]
        if "--multiprocessing-fork" not in argv:
            return otherwise(path, args, passfds)
        numbers = [0, 1, 2, *sorted(map(int, passfds))]
        return forker().fork(argv, {number: number for number in numbers})

    return spawnv_passfds


class Kernel:
    """As much of a `subprocess.Popen` as Jupyter's kernel managers ask for."""

    stdin = stdout = stderr = None

    def __init__(self, forker: Forker, command: list[str], options: dict[str, Any]) -> None:
        fds = {0: os.open(os.devnull, os.O_RDONLY), 1: 1, 2: 2}
        for number, name in ((1, "stdout"), (2, "stderr")):
            if options.get(name) is not None:
                fds[number] = options[name] if isinstance(options[name], int) else options[name].fileno()
        environment = {**(options.get("env") or os.environ), "JPY_PARENT_PID": str(os.getpid())}
        self.pid = forker.fork(command, fds, is_kernel=True, environment=environment, folder=options.get("cwd"))
        os.close(fds[0])
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, None while it goes on."""
        return self._ask(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int | None:
        """Return the exit code when there is one."""
        return self._ask(0)

    def _ask(self, how: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, how)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)


_forker: Forker | None = None


def forker() -> Forker:
    """Return this process's own, started when it is first asked for."""
    global _forker
    if _forker is None:
        _forker = Forker.start()
    return _forker


def pids() -> set[int]:
    """Those processes of this file that live as long as whoever started them."""
    return {_forker.pid} if _forker else set()


@contextlib.contextmanager
def in_use(is_on: bool = True) -> Iterator[None]:
    """Have kernels and ranks that this process starts meanwhile begin with torch imported; or not, within such a time.

    A kernel's ranks begin as it does.
    """
    from jupyter_client.provisioning import local_provisioner

    if not _AS_EVERYBODY:
        _AS_EVERYBODY["launch_kernel"] = local_provisioner.launch_kernel
        _AS_EVERYBODY["spawnv_passfds"] = multiprocessing.util.spawnv_passfds
    starters = {
        (local_provisioner, "launch_kernel"): lambda command, **options: Kernel(forker(), command, options),
        (multiprocessing.util, "spawnv_passfds"): spawnv(forker, _AS_EVERYBODY["spawnv_passfds"]),
    }
    before = {(owner, name): getattr(owner, name) for owner, name in starters}
    for (owner, name), starter in starters.items():
        setattr(owner, name, starter if is_on and IS_ON else _AS_EVERYBODY[name])
    try:
        yield
    finally:
        for (owner, name), starter in before.items():
            setattr(owner, name, starter)


if __name__ == "__main__":
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    import torch.nn.parallel  # noqa: E402, F401

    import labkit.rank.main  # noqa: E402, F401

    signal.signal(signal.SIGINT, signal.default_int_handler)
    serve(socket.socket(fileno=int(sys.argv[1])))
