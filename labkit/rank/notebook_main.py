"""`__main__` on a rank: the notebook, as in a script's process it is the script.

What pickles by name (`all_gather_object`, `torch.save`, rpc) and what looks names up asks `sys.modules["__main__"]` for
classes that were typed in cells; a rank's own `__main__` is a module of labkit. So another takes its place while a
launched function runs. Its dict is the global namespace of the functions that came with the call, so it has what they
use. All else stays in the notebook.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import importlib.util
import sys
import types
from collections.abc import Iterator
from typing import Any

from labkit.protocol.job import Job
from labkit.protocol.packing import MAIN, RECEIVED

_FIRST = "labkit.rank.die_with_parent"
"""What a process that a rank spawns runs first."""


@functools.cache
def _spec_of_first() -> Any:
    return importlib.util.find_spec(_FIRST)


def new_main(module: types.ModuleType | None = None) -> types.ModuleType:
    """Return a module that can stand for the notebook's `__main__`; nothing has come from there yet."""
    main = module or types.ModuleType(MAIN)
    vars(main).update({RECEIVED: {}, "__builtins__": builtins, "__spec__": _spec_of_first()})
    return main


def of(job: Job) -> contextlib.AbstractContextManager[Any]:
    """Return the context in which `__main__` is that of the job's notebook; a process with one job keeps it."""
    if job.settings is None:  # a cell's
        return contextlib.nullcontext()
    return in_place(new_main(), for_now=job.stays is not None)


@contextlib.contextmanager
def in_place(main: types.ModuleType, for_now: bool = True) -> Iterator[None]:
    """Have a module stand for `__main__`, for now or for good."""
    before = {name: sys.modules.get(name) for name in (MAIN, "__mp_main__")}
    sys.modules.update(dict.fromkeys(before, main))
    try:
        yield
    finally:
        for name, module in before.items() if for_now else ():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
