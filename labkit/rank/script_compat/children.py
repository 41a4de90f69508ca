"""The processes that a rank starts, a DataLoader's workers above all: what they are sent.

The problem. From Python 3.14 on such a process is no fork of the rank: it comes from a server (`forkserver`). What it
is given is pickled, and a function or a class then travels by the name of its module. What was typed in a cell is in
`__main__`, which in the new process is another; a lambda has no name. A forked worker, too, sends its batches so.

The solution. Such things travel by value, and a process that has received one sends so from then on; one that is not
forked begins with a `__main__` of its own for it. After a job the server is ended (`labkit.rank.main.end_children`):
the next one may have another environment, and print elsewhere.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import multiprocessing
import pickle
import sys
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any

from labkit.protocol.packing import DEFINITIONS, MAIN, RECEIVED, Pickler, found_as, take_in
from labkit.rank.notebook_main import new_main


def prepare() -> None:
    """Have what is typed in cells travel to those processes.

    They begin as a script's do; this one was spawned, and would spawn its own, too. As in a script nothing has been
    chosen yet: it may call `set_start_method`, once.
    """
    multiprocessing.set_start_method(None, force=True)
    multiprocessing.set_forkserver_preload(["torch.utils.data"])
    send_by_value()


def send_by_value() -> None:
    """Have what has no name elsewhere travel by value from this process, by multiprocessing's pipes and queues."""
    pickler: Any = ForkingPickler
    pickler.reducer_override = _reduce


@contextlib.contextmanager
def sending_by_name() -> Iterator[None]:
    """Have it travel as ever for now: a script's `__main__` can be imported."""
    del ForkingPickler.reducer_override
    try:
        yield
    finally:
        send_by_value()


def _reduce(_: Any, value: Any) -> Any:
    if isinstance(value, BaseProcess):
        reduced: Any = value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        make, args, *rest = reduced
        return (_begin, (make, args), *rest)
    if isinstance(value, type) or type(value) in DEFINITIONS:
        name = value.__qualname__
        if value.__module__ in (MAIN, "__mp_main__") or "<" in name:  # a lambda; made inside a function
            file = io.BytesIO()
            pickler = Pickler(file, shares=True)
            pickler.dump([value, pickler.met])
            return _receive, (found_as(value), file.getvalue())
    return NotImplemented


def _begin(make: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Have this new process take what comes by value into a `__main__` of its own; return its `Process`."""
    send_by_value()
    gc.enable()  # which `die_with_parent` has turned off
    sys.modules.update(dict.fromkeys((MAIN, "__mp_main__"), new_main()))
    return make(*args)


def _receive(name: str, pickled: bytes) -> Any:
    """Return what is called so in this process's own `__main__`, as in a fork it is; else what was sent."""
    send_by_value()
    main: Any = sys.modules[MAIN]
    top = name.partition(".")[0]
    if top and top in vars(main):
        return functools.reduce(getattr, name.split("."), main)
    value, met = pickle.loads(pickled)
    if RECEIVED in vars(main):
        take_in(vars(main), met)
    return value
