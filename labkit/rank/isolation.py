"""What a job on reserved ranks must not see of the jobs before it, put back between them. Runs in the rank's process.

A rank that does one job and ends needs none of this. On reserved ranks a launched function finds torch, Python and the
process as a fresh rank would: random states, threads, default type and device, environment, working folder, signal
handlers and the other `_SETTINGS`. Modules stay imported, and what their import has changed stays so (`imports`). It
does see what has no owner: what was written into modules, what cells put into `__main__`, CUDA's memory pool, threads
that were left running, and how often `torch.distributed.rpc` was begun and ended, by which PyTorch's ranks meet: one
that is new, among others that have used it before, waits for them in vain. And PyTorch has remote references (`RRef`)
only until `rpc` is ended for the first time in a process.
"""

from __future__ import annotations

import builtins
import contextlib
import gc
import logging
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from labkit.protocol import modules
from labkit.rank import device, settings
from labkit.rank import import_effects as imports
from labkit.rank import reserved_group as rank_group
from labkit.rank.main import RankTask
from labkit.rank.settings import Setting
from labkit.system import host

PASSES = 8
"""Of the garbage collector at most, one after the other."""


def collect_garbage() -> None:
    """Free what nobody refers to, cycles included, before this returns.

    One pass is not enough. The collector does not see what C++ refers to: of a cycle that has a loss, say, it frees the
    loss, and with it autograd's graph; only then FSDP2's hooks, which the graph had, and their network are garbage. So
    passes go on until one finds nothing.
    """
    until_s = time.monotonic() + 1.0
    for _ in range(PASSES):
        if not _collect_once(until_s):
            break


def _collect_once(until_s: float) -> int:
    """Let the garbage collector pass once, in this thread; return how much it has found.

    `gc.collect()` returns at once, without a word, while another thread collects; and that one may be half done, for
    freeing a tensor lets other threads run.
    """
    done: list[int] = []
    found = 0

    def note(phase: str, info: dict[str, int]) -> None:
        if info["generation"] == 2:
            done.append(threading.get_ident())

    gc.callbacks.append(note)
    try:
        while threading.get_ident() not in done:  # called while this very thread collects, it would try for ever
            found = gc.collect()
            if time.monotonic() > until_s:
                break
            time.sleep(0)  # lets the other thread go on
    finally:
        gc.callbacks.remove(note)
    return found


_left: list[weakref.ref[torch.Tensor]] = []
"""The tensors that were there when the last job had ended."""


def left_tensors() -> list[torch.Tensor]:
    """Return the tensors that earlier jobs in this process, cells among them, have left and that are still there."""
    return [tensor for each in _left if (tensor := each()) is not None]


@dataclass(frozen=True)
class Isolation:
    """What a rank that stays does around each job; see `labkit.protocol.job.ProcessIsolation`."""

    folder: str
    """The notebook's working folder."""
    environment: dict[str, str] | None = None
    """The notebook's, which a process that it started now would inherit; None for ranks on other machines, which may
    not have the folder either."""

    def take_over(self) -> None:
        """Make them this process's own. Raises OSError if the working folder of this machine's notebook is gone."""
        if self.environment is None:
            _set_folder(self.folder)
        else:
            _set_environment(self.environment)
            os.chdir(self.folder)

    def around(self, is_cell: bool) -> contextlib.AbstractContextManager[int]:
        """Return the context in which this process does the job."""
        return _around(is_cell)

    def join(self, part: RankTask) -> tuple[device.Settled, dist.Store]:
        """Return where the rank computes, and the store of its process group."""
        joined = rank_group.join(part)
        if part.job.group is None:  # cells have what imports have changed
            imports.do_again(_SETTINGS)
        return joined

    def keep_group(self) -> bool:
        """Keep the process group of a launch that has ended well for the next one, if it may be; return whether."""
        return rank_group.keep()

    def give_memory_back(self) -> None:
        """Free what nobody refers to, cycles included, and give it back to the system.

        By itself glibc keeps what was freed for later; the next job would use that, and its own peak would seem lower.
        """
        collect_garbage()
        torch.cuda.empty_cache()
        host.give_memory_back()
        _left[:] = [weakref.ref(each) for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]


def _set_environment(environment: dict[str, str]) -> None:
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update(environment)


def _folder() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:  # removed by the job
        return None


def _set_folder(folder: str | None) -> None:
    with contextlib.suppress(OSError):
        os.chdir(folder or "/")


def _signal_handlers() -> dict[int, Any]:
    return {number: handler for number in signal.valid_signals() if (handler := signal.getsignal(number)) is not None}


def _set_signal_handlers(handlers: dict[int, Any]) -> None:
    host.cancel_alarm()
    for number, handler in handlers.items():
        if signal.getsignal(number) is not handler:
            with contextlib.suppress(OSError, ValueError):
                signal.signal(number, handler)
    if loaded := sys.modules.get("torch.utils.data._utils.signal_handling"):
        # It sets its handler for a dead worker process once, and believes that it is still there.
        vars(loaded)["_SIGCHLD_handler_set"] = False


class _Logger(NamedTuple):
    level: int = logging.NOTSET
    propagates: bool = True
    is_disabled: bool = False
    handlers: tuple[logging.Handler, ...] = ()


def _loggers() -> dict[str, _Logger]:
    """Return how each logger is set up that is no library's, by name."""
    return {
        name: _Logger(one.level, one.propagate, one.disabled, tuple(one.handlers))
        for name, one in settings.loggers().items()
        if not modules.is_library(name.partition(".")[0])
    }


def _set_loggers(state: dict[str, _Logger]) -> None:
    for name in _loggers():
        logger, before = logging.getLogger(name or None), state.get(name, _Logger())  # the job's own: as new
        logger.setLevel(before.level)
        logger.propagate, logger.disabled = before.propagates, before.is_disabled
        logger.handlers[:] = before.handlers


def _set_builtins(names: dict[str, Any]) -> None:
    for name in vars(builtins).keys() - names.keys():
        delattr(builtins, name)
    for name, value in names.items():
        if getattr(builtins, name, None) is not value:
            setattr(builtins, name, value)


def _random_states() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    return (
        random.getstate(),
        torch.get_rng_state(),
        torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None,
        numpy.random.get_state() if numpy else None,
    )


def _set_random_states(states: tuple[Any, ...]) -> None:
    random.setstate(states[0])
    torch.set_rng_state(states[1])
    if states[2] is not None:
        torch.cuda.set_rng_state_all(states[2])
    if states[3] is not None:
        sys.modules["numpy"].random.set_state(states[3])


def _hooks() -> tuple[Any, ...]:
    return sys.stdin, sys.stdout, sys.stderr, sys.excepthook, threading.excepthook


def _set_hooks(hooks: tuple[Any, ...]) -> None:
    sys.stdin, sys.stdout, sys.stderr, sys.excepthook, threading.excepthook = hooks


def _can_call_remotely() -> bool:
    rpc: Any = sys.modules.get("torch.distributed.rpc")
    return bool(rpc and rpc.is_available() and rpc.api._is_current_rpc_agent_set())


def _end_remote_calls(_: bool) -> None:
    if _can_call_remotely():  # in a group that is no more
        sys.modules["torch.distributed.rpc"].shutdown(graceful=False)


_SETTINGS: dict[str, Setting] = {
    "environment": Setting(lambda: dict(os.environ), _set_environment),
    "working folder": Setting(_folder, _set_folder),
    "module path": Setting(lambda: list(sys.path), lambda path: sys.path.__setitem__(slice(None), path)),
    "arguments": Setting(lambda: list(sys.argv), lambda given: sys.argv.__setitem__(slice(None), given)),
    "signal handlers": Setting(_signal_handlers, _set_signal_handlers),
    "streams and hooks": Setting(_hooks, _set_hooks),
    "warning filters": Setting(lambda: list(warnings.filters), settings.put_in_place),
    "loggers": Setting(_loggers, _set_loggers),
    "logging": Setting(lambda: logging.root.manager.disable, logging.disable),
    "built-in functions": Setting(lambda: dict(vars(builtins)), _set_builtins),
    "garbage collector": Setting(gc.isenabled, lambda on: gc.enable() if on else gc.disable()),
    "start method": Setting(
        lambda: multiprocessing.get_start_method(allow_none=True),
        lambda method: multiprocessing.set_start_method(method, force=True),
    ),
    "threads": Setting(torch.get_num_threads, torch.set_num_threads),
    **settings.PYTHONS,
    **settings.PYTORCHS,
    "classes for torch.load": Setting(settings.safe_classes, settings.set_safe_classes),
    "remote calls": Setting(_can_call_remotely, _end_remote_calls),
    "random states": Setting(_random_states, _set_random_states),
}
"""By what a reader would call it. What is read is what is set; nothing is set that is as it should be."""

if hasattr(os, "sched_getaffinity"):
    _SETTINGS["cores"] = Setting(lambda: os.sched_getaffinity(0), lambda cores: os.sched_setaffinity(0, cores))

State = dict[str, Any]


def capture() -> State:
    """Return what a job may change, as it is now."""
    return settings.read(_SETTINGS)


def restore(state: State) -> None:
    """Put back what was captured."""
    for name, value in state.items():
        setting = _SETTINGS[name]
        if name == "random states" or setting.get() != value:  # tensors do not compare as one
            setting.set(value)


_fresh: State | None = None
"""The state of this process before its first job."""


@contextlib.contextmanager
def isolated(fresh: State) -> Iterator[None]:
    """Do something in the `fresh` state of a process that has done nothing, then put back the state that cells left."""
    cells = capture()
    restore(fresh)
    try:
        yield
    finally:
        restore(cells)


_fresh_bytes = 0
"""Its resident memory then."""


@contextlib.contextmanager
def _around(is_cell: bool) -> Iterator[int]:
    """Return the context of a job: that of a cell is what cells have left, any other is as good as new.

    Peak memory is measured anew in it; it gives how much earlier jobs have left.
    """
    global _fresh, _fresh_bytes
    if _fresh is None:
        _fresh = capture()
        _fresh_bytes = host.resident_bytes()
        imports.watch(_SETTINGS)
    if not is_cell:
        imports.forget_edited()
    with contextlib.nullcontext() if is_cell else isolated(_fresh):
        left_bytes = max(0, host.resident_bytes() - _fresh_bytes)
        host.forget_peak()
        device.forget_peak()
        try:
            yield left_bytes
        finally:
            if not is_cell:
                rank_group.leave_unless_kept()
