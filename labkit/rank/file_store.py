"""Where the ranks of a job meet, here in a file; a script finds the store at `MASTER_PORT`, too."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import torch.distributed as dist

from labkit.rank import ports

if TYPE_CHECKING:
    from labkit.protocol.job import Job, RankInfo

JOIN_S = 60.0
"""How long a rank waits for the others of its machine."""

LOOK_S = (0.0002, 0.01)
"""Least and greatest time between two looks for what is waited for …"""

LOOK_SHARE = 8
"""… which become rarer with the time that has been waited."""


RENDEZVOUS = timedelta(seconds=300)
"""How long ranks of several machines wait for each other."""


def rendezvous(job: Job, info: RankInfo) -> dist.Store:
    """Return the store through which the ranks of a job meet."""
    address, port = "127.0.0.1", job.port
    if (url := urlsplit(job.store)).scheme == "tcp":
        address, port = str(url.hostname), int(url.port or 0)
        store = _open_tcp_store(address, port, info.rank == 0)
    else:
        store = LocalFileStore(job.store)
    # With the third, nobody starts ranks once more (Lightning would).
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="labkit")
    serve_master_port(store)
    return store


def _open_tcp_store(address: str, port: int, is_master: bool) -> dist.Store:
    """Return the store of ranks on several machines. Ranks that come before the one that opens it try again."""
    if not is_master:
        return dist.TCPStore(address, port, timeout=RENDEZVOUS)
    listener = ports.listen(address, port).detach()  # by itself PyTorch would listen on every interface
    return dist.TCPStore(address, port, None, True, RENDEZVOUS, wait_for_workers=False, master_listen_fd=listener)


# A script's own way there

_create_store: Callable[..., dist.Store] | None = None
"""PyTorch's own function, once it has been replaced."""

_master: tuple[int, str, int, dist.Store] | None = None
"""This process, and what stands at which address in it."""


def serve_master_port(store: dist.Store) -> None:
    """Have a store be found at `MASTER_ADDR:MASTER_PORT` in this process, by `env://` as by `tcp://`.

    `rpc.init_rpc` meets so, where PyTorch would have rank 0 open a store for the whole network. A process that is
    started here opens its own as ever: the port is free.
    """
    global _create_store, _master
    _master = (os.getpid(), os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), store)
    if _create_store is None:
        torchs: Any = importlib.import_module("torch.distributed.rendezvous")
        _create_store, torchs._create_c10d_store = torchs._create_c10d_store, _find_or_create_store


def _find_or_create_store(hostname: str, port: int, *args: Any, **options: Any) -> dist.Store:
    assert _create_store is not None
    if _master is not None and _master[:3] == (os.getpid(), hostname, port):
        return _master[3]
    return _create_store(hostname, port, *args, **options)


# The store

_kept: list[LocalFileStore] = []
"""Those whose files are there. A native store that ends while its folder is being removed ends the process with it; and
what PyTorch still refers to would be without its methods here."""


def pause_s(waited_s: float) -> float:
    """Return how long to wait until the next look for something that has been waited for so long, both in s."""
    least_s, greatest_s = LOOK_S
    return min(max(least_s, waited_s / LOOK_SHARE), greatest_s)


def exchange(store: dist.Store, key: str, mine: str, info: RankInfo) -> list[str]:
    """Tell the other ranks something through their store, and return what each has told, once all have."""
    keys = [f"{key}/{rank}" for rank in range(info.world_size)]
    store.set(keys[info.rank], mine)
    return [told.decode() for told in store.multi_get(keys)]


class LocalFileStore(dist.Store):
    """PyTorch's `FileStore`, that looks more often for what it waits for, and fails at once when its folder is gone.

    The first process that opens it makes the file. `timeout_s` is how long it waits for a key.
    """

    timeout: timedelta  # as PyTorch has it

    def __init__(self, path: str, timeout_s: float = JOIN_S) -> None:
        super().__init__()
        self._path, self._folder = path, os.path.dirname(path)
        if not os.path.isdir(self._folder):
            raise self._gone()
        self.in_native_code = dist.FileStore(path, -1)
        """The same store without Python; it waits in steps of 10 ms."""
        _kept[:] = [*(store for store in _kept if os.path.exists(store._path)), self]
        for store in (self, self.in_native_code):
            store.set_timeout(timedelta(seconds=timeout_s))
        self.in_native_code.add("labkit/opened", 1)  # which makes the file: to look into none is to wait for it

    def _there(self) -> dist.FileStore:
        if not os.path.exists(self._path):  # PyTorch would wait for it, for minutes
            raise self._gone()
        return self.in_native_code

    def _gone(self) -> dist.DistStoreError:
        return dist.DistStoreError(f"the ranks can no longer meet: {self._folder} is gone, as when their run is over")

    def set(self, key: str, value: Any) -> None:
        """Set a key."""
        self._there().set(key, value)

    def get(self, key: str) -> bytes:
        """Return a key's value, waiting until it is there."""
        self.wait([key])
        return self._there().get(key)

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which begins as 0; return the sum."""
        return self._there().add(key, amount)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """Set a key if it has the expected value; return the value that it has then."""
        return self._there().compare_set(key, expected, desired)

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are there."""
        return self._there().check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there."""
        limit_s = (timeout or self.timeout).total_seconds()
        began = time.monotonic()
        while not self.check(keys):
            waited_s = time.monotonic() - began
            if waited_s > limit_s > 0:
                missing = [key for key in keys if not self.check([key])]
                raise dist.DistStoreError(f"not there after {limit_s:g} s: {', '.join(missing)}")
            time.sleep(pause_s(waited_s))

    def delete_key(self, key: str) -> bool:
        """Delete a key."""
        return self._there().delete_key(key)

    deleteKey = delete_key  # noqa: N815 - as PyTorch's native code calls it

    def clone(self) -> LocalFileStore:
        """Return another store in the same file."""
        return LocalFileStore(self._path, self.timeout.total_seconds())
