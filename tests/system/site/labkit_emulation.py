"""What labkit's modules would find on macOS or Windows. The rest of the process (torch, psutil, Python) stays on Linux.

Shown by it: every call of labkit's own that such a system lacks, wherever it stands, raises as it would there: a name
that a module has not, /proc, a file opened in the code page, `os.read` of a HANDLE, a store with libuv, psutil's
refusals, a parent's end of which nobody is told. With `uvlike.c` preloaded, gloo behaves as its libuv transport does.

Not shown: what torch, gloo, psutil, multiprocessing and Jupyter do differently there, and time. Pipes are Linux's, and
a process is ended by Linux's signals; spawned processes begin from a Linux Python; files may be removed while they are
open, and paths have no drive; the C library, OpenMP and numerics are this machine's; no GPU of a Mac.
"""

from __future__ import annotations

import builtins
import ctypes
import errno
import faulthandler
import io
import os
import platform
import select
import signal
import socket
import sys
import time
import types

WHAT = os.environ["LABKIT_EMULATE"]
MAC, WIN = WHAT == "darwin", WHAT == "win32"
assert MAC or WIN, f"LABKIT_EMULATE is darwin or win32, got {WHAT!r}"

PACKAGES = {"labkit", *os.environ.get("LABKIT_EMULATE_ALSO", "").split()}
"""Whose modules find the other system."""

HIDDEN = ("/proc", "/dev/", "/etc/", "/sys/") if WIN else ("/proc", "/dev/shm", "/etc/nsswitch.conf", "/sys/")

BETWEEN = {"pathlib", "io", "os", "contextlib", "genericpath", "posixpath", "codecs", "shutil", "tempfile", "json"}
"""Modules that open files for others."""


def asks_from_labkit() -> bool:
    """Whether a module of labkit's has made the call, if need be through Python's own."""
    frame = sys._getframe(2)
    for _ in range(12):
        top = frame.f_globals.get("__name__", "").partition(".")[0]
        if top not in BETWEEN and frame.f_globals.get("__file__") != __file__:
            return is_labkits(frame.f_globals)
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


def is_labkits(names: dict) -> bool:
    """Whether a module, by its names, is labkit's own or one of its programs."""
    if str(names.get("__name__", "")).partition(".")[0] in PACKAGES:
        return True
    return names.get("__name__") == "__main__" and "/labkit/" in str(names.get("__file__", ""))


def is_hidden(path) -> bool:
    """Whether there is no such file there."""
    try:
        text = os.fsdecode(os.fspath(path))
    except TypeError:
        return False
    return text.startswith(HIDDEN) and text != os.devnull


def hide(module, name):
    """Have a function find no file that Linux alone has."""
    real = getattr(module, name)

    def instead(path=".", *args, **options):
        if not isinstance(path, int) and is_hidden(path) and asks_from_labkit():
            raise FileNotFoundError(errno.ENOENT, f"No such file or directory on {WHAT}", str(path))
        return real(path, *args, **options)

    instead.__name__ = name
    setattr(module, name, instead)


for name in ("listdir", "readlink", "stat", "lstat", "scandir"):
    hide(os, name)
real_open = io.open


def open_there(file, mode="r", buffering=-1, encoding=None, *args, **options):
    """Open a file; in the code page, where Windows would."""
    if not isinstance(file, int) and is_hidden(file) and asks_from_labkit():
        raise FileNotFoundError(errno.ENOENT, f"No such file or directory on {WHAT}", str(file))
    if WIN and "b" not in mode and encoding in (None, "locale") and asks_from_labkit():
        encoding = "cp1252"
    return real_open(file, mode, buffering, encoding, *args, **options)


io.open = builtins.open = open_there


class There(types.ModuleType):
    """A module as labkit finds it there: some names are missing, some have another value."""

    def __init__(self, real, missing=(), **instead):
        super().__init__(real.__name__)
        vars(self).update(_real=real, _missing=frozenset(missing), _instead=instead)
        vars(self).update(__file__=getattr(real, "__file__", None), __spec__=real.__spec__)

    def __getattr__(self, name):
        here = vars(self)
        if name in here["_missing"]:
            raise AttributeError(f"module {here['_real'].__name__!r} has no attribute {name!r} on {WHAT}")
        return here["_instead"][name] if name in here["_instead"] else getattr(here["_real"], name)

    def __setattr__(self, name, value):
        setattr(vars(self)["_real"], name, value)

    def __delattr__(self, name):
        delattr(vars(self)["_real"], name)

    def __dir__(self):
        return [name for name in dir(vars(self)["_real"]) if name not in vars(self)["_missing"]]


class Library:
    """A C library without what Linux's has."""

    def __init__(self, library):
        self._library = library

    def __getattr__(self, name):
        if name in {"prctl", "__nss_configure_lookup", "malloc_trim"}:
            raise AttributeError(f"symbol not found on {WHAT}: {name}")
        return getattr(self._library, name)


def library(name=None, *args, **options):
    """Load a C library; without a name Windows has none to give."""
    if name is None and WIN:
        raise TypeError("argument of type 'NoneType' is not iterable")
    return Library(ctypes.CDLL(name, *args, **options))


OF_LINUX = (
    *("sched_getaffinity", "sched_setaffinity", "pidfd_open", "eventfd", "memfd_create", "splice", "copy_file_range"),
    *("posix_fadvise", "getrandom", "gettid"),
    *(("waitid", "P_PID", "WEXITED", "WNOWAIT", "P_ALL") if sys.version_info < (3, 13) else ()),
)
OF_POSIX = (
    *("fork", "forkpty", "getuid", "geteuid", "getgid", "getegid", "uname", "waitid", "P_PID", "WEXITED", "WNOWAIT"),
    *(
        "WNOHANG",
        "wait",
        "wait3",
        "wait4",
        "sysconf",
        "sysconf_names",
        "register_at_fork",
        "mkfifo",
        "killpg",
        "setsid",
    ),
    *("getsid", "setpgid", "getpgid", "nice", "getpriority", "chown", "lchown", "fchown", "fchmod", "O_NONBLOCK"),
    *("O_CLOEXEC", "O_DIRECTORY", "O_NOFOLLOW", "getloadavg", "openpty", "ttyname", "pread", "pwrite", "sync"),
    *("fdatasync", "statvfs", "posix_spawn", "ctermid", "confstr"),
    *(("set_blocking", "get_blocking") if sys.version_info < (3, 12) else ()),
)
SIGNALS = {"SIGABRT", "SIGFPE", "SIGILL", "SIGINT", "SIGSEGV", "SIGTERM", "SIG_DFL", "SIG_IGN"}
OF_POSIX_SIGNALS = (
    *("pthread_sigmask", "pthread_kill", "setitimer", "getitimer", "alarm", "pause", "sigwait", "siginterrupt"),
    *("sigpending", "ITIMER_REAL", "SIG_BLOCK", "SIG_UNBLOCK", "SIG_SETMASK", "sigtimedwait", "sigwaitinfo"),
    *("pidfd_send_signal", *(name for name in dir(signal) if name.startswith("SIG") and name not in SIGNALS)),
)
OF_CLOCKS = tuple(name for name in dir(time) if "clock_" in name or name.startswith("CLOCK_"))


def no_descriptor(*_):
    """Refuse: what multiprocessing's pipes have there is a HANDLE."""
    raise OSError(errno.EBADF, "Bad file descriptor: a HANDLE is none")


def no_symlink(*_, **__):
    """Refuse, as for a user who is no administrator."""
    raise OSError(22, "A required privilege is not held by the client [WinError 1314]")


def kill_no_question(pid, number):
    """End a process: there `os.kill` does nothing else, and a zero is no question but Ctrl-C."""
    if number == 0:
        raise SystemError(f"os.kill({pid}, 0) sends Ctrl-C to the processes of a console there")
    os.kill(pid, number)


def open_no_folder(path, flags, *args, **options):
    """Open a file; a folder cannot be opened there."""
    if os.path.isdir(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))
    return os.open(path, flags, *args, **options)


def select_sockets(readers, writers, others, timeout=None):
    """Wait for sockets; nothing else can be waited for there."""
    if not all(isinstance(each, socket.socket) for each in (*readers, *writers, *others)):
        raise OSError(10038, "An operation was attempted on something that is not a socket")
    return select.select(readers, writers, others, timeout)


if MAC:
    MODULES = {
        "ctypes": There(ctypes, CDLL=library),
        "sys": There(sys, platform="darwin"),
        "os": There(os, OF_LINUX),
        "signal": There(
            signal,
            ("SIGRTMIN", "SIGRTMAX", "SIGPWR", "SIGSTKFLT", "sigtimedwait", "sigwaitinfo", "pidfd_send_signal"),
        ),
        "platform": There(platform, system=lambda: "Darwin", machine=lambda: "arm64"),
        "select": There(select, ["epoll"]),
        "socket": There(socket, ["TCP_INFO", "AF_NETLINK", "AF_PACKET", "SO_PEERCRED"]),
        "time": There(time, ["CLOCK_BOOTTIME", "clock_settime"]),
    }
    GONE: set[str] = set()
else:
    MODULES = {
        "ctypes": There(ctypes, CDLL=library),
        "sys": There(sys, ["abiflags"], platform="win32"),
        "os": There(
            os,
            (*OF_LINUX, *OF_POSIX),
            name="nt",
            read=no_descriptor,
            symlink=no_symlink,
            open=open_no_folder,
            kill=kill_no_question,
        ),
        "signal": There(
            signal,
            OF_POSIX_SIGNALS,
            valid_signals=lambda: {getattr(signal, name) for name in SIGNALS if not name.startswith("SIG_")},
            CTRL_C_EVENT=0,
            CTRL_BREAK_EVENT=1,
        ),
        "platform": There(platform, system=lambda: "Windows", machine=lambda: "AMD64"),
        "select": There(select, ("poll", "epoll", "POLLIN", "POLLOUT"), select=select_sockets),
        "socket": There(socket, ["AF_UNIX", "TCP_INFO", "SO_PEERCRED"]),
        "faulthandler": There(faulthandler, ["register", "unregister"]),
        "time": There(time, (*OF_CLOCKS, "tzset", "pthread_getcpuclockid")),
    }
    GONE = {"fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "_posixsubprocess", "posix", "syslog"}


# What of torch, psutil and multiprocessing is not there


def without_pdeathsig(torchs):
    """PyTorch asks for no signal at a parent's end, and shares memory by files."""
    torchs._prctl_pr_set_pdeathsig = lambda _: None
    torchs.set_sharing_strategy("file_system")


def without_libuv(dist):
    """The wheel for Windows has no store with libuv."""
    if MAC:
        return
    real = dist.TCPStore

    class TCPStore(real):
        def __init__(self, host, port, world_size=None, is_master=False, *args, use_libuv=True, **options):
            if use_libuv:
                raise dist.DistStoreError("use_libuv was requested but PyTorch was built without libuv support")
            super().__init__(host, port, world_size, is_master, *args, use_libuv=False, **options)

    dist.TCPStore = TCPStore


def with_refusals(psutil):
    """macOS does not tell of other processes' memory in full; neither has all that Linux has."""
    if MAC:
        real = psutil.Process.memory_full_info

        def memory_full_info(self):
            if self.pid != os.getpid():
                raise psutil.AccessDenied(self.pid)
            return real(self)

        psutil.Process.memory_full_info = memory_full_info
    missing = ("cpu_affinity", "io_counters", "rlimit", "ionice") if MAC else ("rlimit", "num_fds", "terminal", "uids")
    for name in missing:
        if hasattr(psutil.Process, name):
            delattr(psutil.Process, name)


def spawning_by_default():
    """Have new processes be spawned where nobody has said how, as there."""
    import multiprocessing
    import multiprocessing.context

    default = multiprocessing.context._default_context
    default._default_context = multiprocessing.context._concrete_contexts["spawn"]
    default.get_all_start_methods = lambda: ["spawn"] if WIN else ["spawn", "fork", "forkserver"]
    multiprocessing.get_all_start_methods = default.get_all_start_methods


LATER = {
    "torch.multiprocessing": ("set_sharing_strategy", without_pdeathsig),
    "torch.distributed": ("DistStoreError", without_libuv),
    "psutil": ("Process", with_refusals),
}
"""What is changed once it is imported whole, as this name of it tells."""

real_import = builtins.__import__
has_spawn = False


def import_there(name, names=None, local=None, fromlist=(), level=0):
    """Import, as labkit's modules would there."""
    global has_spawn
    ours = is_labkits(names or {})
    if level == 0 and ours:
        if name in GONE:
            raise ModuleNotFoundError(f"No module named {name!r} on {WHAT}", name=name)
        if name in MODULES:
            return MODULES[name]
    module = real_import(name, names, local, fromlist, level)
    if ours or (names or {}).get("__name__") in ("__main__", "__mp_main__"):
        for later, (whole, change) in list(LATER.items()):
            if hasattr(sys.modules.get(later), whole):
                del LATER[later]
                change(sys.modules[later])
    if not has_spawn and hasattr(sys.modules.get("multiprocessing.context"), "_default_context"):
        has_spawn = True
        spawning_by_default()
    return module


builtins.__import__ = import_there
