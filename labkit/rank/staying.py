"""What a rank that stays for other jobs does around each. Runs in the rank's process.

A rank that does one job and ends needs none of this. One that stays keeps modules, with their state, and handlers, as
the notebook's kernel does. What each launch sets (folder, environment, path, arguments, settings, random states) is put
back after it, for cells. What cells put into `__main__` only cells see.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import random
import sys
from collections.abc import Iterator

import torch

from labkit.protocol import modules
from labkit.protocol.job import Surroundings
from labkit.rank import device, process_group, settings
from labkit.system import host

PASSES = 8
"""Of the garbage collector at most, one after the other."""


def collect_garbage() -> None:
    """Free what nobody refers to, cycles included, before this returns.

    One pass is not enough. The collector does not see what C++ refers to: of a cycle that has a loss, say, it frees the
    loss, and with it autograd's graph; only then FSDP2's hooks, which the graph had, and their network are garbage. So
    passes go on until one finds nothing.
    """
    for _ in range(PASSES):
        if not gc.collect():
            break


def give_memory_back() -> None:
    """Free what nobody refers to, cycles included, and give it back to the system.

    By itself glibc keeps what was freed for later; the next job would use that, and its own peak would seem lower.
    """
    collect_garbage()
    torch.cuda.empty_cache()
    host.give_memory_back()


def begin_in(surroundings: Surroundings) -> None:
    """Make the notebook's folder and environment this process's own, and what else a new process has.

    Raises OSError if the working folder of this machine's notebook is gone.
    """
    if surroundings.environment is None:
        with contextlib.suppress(OSError):
            os.chdir(surroundings.folder)
    else:
        _set_environment(surroundings.environment)
        os.chdir(surroundings.folder)
    multiprocessing.set_start_method(None, force=True)  # a script may choose one, once
    torch.set_grad_enabled(True)
    if torch.get_default_device().type != "cpu":
        torch.set_default_device(None)


def _set_environment(environment: dict[str, str]) -> None:
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update(environment)


class State:
    """What a launch sets in this process, as it is before."""

    def __init__(self) -> None:
        numpy = sys.modules.get("numpy")
        self._environment, self._path, self._arguments = dict(os.environ), list(sys.path), list(sys.argv)
        self._folder = None
        with contextlib.suppress(FileNotFoundError):  # removed by a job
            self._folder = os.getcwd()
        self._streams, self._settings = (sys.stdin, sys.stdout, sys.stderr), settings.of_this_process()
        self._random = random.getstate(), torch.get_rng_state(), numpy.random.get_state() if numpy else None
        self._cudas = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None

    def put_back(self) -> None:
        """Have it so again."""
        _set_environment(self._environment)
        sys.path[:], sys.argv[:] = self._path, self._arguments
        with contextlib.suppress(OSError):
            os.chdir(self._folder or "/")
        sys.stdin, sys.stdout, sys.stderr = self._streams
        settings.apply(self._settings)
        pythons, torchs, numpys = self._random
        random.setstate(pythons)
        torch.set_rng_state(torchs)
        if numpys is not None:
            sys.modules["numpy"].random.set_state(numpys)
        if self._cudas is not None:
            torch.cuda.set_rng_state_all(self._cudas)


_new_bytes: int | None = None
"""The resident memory of this process before its first job."""


@contextlib.contextmanager
def around(is_cell: bool) -> Iterator[int]:
    """Return the context of a job, a cell's or a launch's.

    Peak memory is measured anew in it; it gives how much earlier jobs have left.
    """
    global _new_bytes
    if _new_bytes is None:
        _new_bytes = host.resident_bytes()
    if is_cell:
        yield _begin_to_measure(_new_bytes)
        return
    modules.forget_edited()
    before = State()
    try:
        yield _begin_to_measure(_new_bytes)
    finally:
        process_group.leave()
        if loaded := sys.modules.get("torch.utils.data._utils.signal_handling"):
            # It sets its handler for a dead worker process once, and believes that it is still there.
            vars(loaded)["_SIGCHLD_handler_set"] = False
        before.put_back()


def _begin_to_measure(new_bytes: int) -> int:
    left_bytes = max(0, host.resident_bytes() - new_bytes)
    host.forget_peak()
    device.forget_peak()
    return left_bytes
