"""`__main__` on a rank: the notebook, as in a script's process it is the script.

The problem. What pickles by name (`all_gather_object`, `torch.save`, rpc) and what looks names up asks
`sys.modules["__main__"]` for classes that were typed in cells; a rank's own `__main__` is a module of labkit.

The solution. A module that takes `__main__`'s place while a launched function runs. Its dict is the global namespace of
the functions that came with the call, so it has what they use. All else stays in the notebook.
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

import torch

from labkit.protocol import pickling
from labkit.protocol.job import Job

_FIRST = "labkit.rank.die_with_parent"
"""What a process that a rank spawns runs first."""


@functools.cache
def _spec_of_first() -> Any:
    return importlib.util.find_spec(_FIRST)


class NotebookMain(types.ModuleType):
    """Stands for the notebook's `__main__`; see above. It has one name of labkit's own, which no cell uses."""

    __slots__ = ("__labkit__",)

    __labkit__: Notebook

    def __reduce__(self) -> Any:
        raise TypeError("__main__ cannot be sent to another process")


class Notebook:
    """What a process knows of the notebook, and the module that stands for the notebook's `__main__` in it."""

    def __init__(self) -> None:
        self.received: dict[str, Any] = {}
        """What the notebook has sent, by its name there."""
        self.module = NotebookMain(pickling.MAIN)
        self.module.__labkit__ = self
        self.namespace = vars(self.module)
        """The global namespace of the notebook's functions."""
        self.namespace |= {"__builtins__": builtins, "__spec__": _spec_of_first()}

    # For `pickling`

    def known(self, name: str) -> Any:
        """Return what the notebook has sent under this name, or None."""
        return self.received.get(name)

    def receive(self, name: str, value: Any) -> None:
        """Take in what is called so in the notebook."""
        self.received[name] = value
        if "." not in name:
            self.namespace[name] = value

    def is_known(self, name: str, value: Any) -> bool:
        """Whether this very definition has come from the notebook, which thus has it."""
        return self.received.get(name) is value


def notebook_of(module: types.ModuleType) -> Notebook | None:
    """Return the notebook for which a module stands, or None."""
    return module.__labkit__ if isinstance(module, NotebookMain) else None


def the_notebook() -> Notebook | None:
    """Return the notebook for which `__main__` stands in this process, or None."""
    return notebook_of(sys.modules[pickling.MAIN])


def of(job: Job) -> contextlib.AbstractContextManager[Any]:
    """Return the context in which `__main__` is that of the job's notebook; a process with one job keeps it."""
    if job.settings is None:  # a cell's
        return contextlib.nullcontext()
    return in_place(Notebook().module, for_now=job.stays is not None)


@contextlib.contextmanager
def in_place(main: types.ModuleType, for_now: bool = True) -> Iterator[None]:
    """Have a module stand for `__main__`, for now or for good."""
    before = {name: sys.modules.get(name) for name in (pickling.MAIN, "__mp_main__")}
    sys.modules.update(dict.fromkeys(before, main))
    try:
        yield
    finally:
        for name, module in before.items() if for_now else ():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def unpack(message: pickling.Message, device: torch.device | None = None) -> Any:
    """Unpickle what the notebook has sent, into the `__main__` that there is now, and drop the message.

    What was on a GPU of the notebook's goes to `device`, or to one of the same number.
    """
    notebook = the_notebook()
    value = pickling.loads(message, notebook, device=device)
    if notebook is not None:
        message.clear()
    return value


def is_known(name: str, value: Any) -> bool:
    """Whether the notebook has this very definition, under this name."""
    notebook = the_notebook()
    return notebook is not None and notebook.is_known(name, value)
