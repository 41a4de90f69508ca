"""`__main__` on a rank: the notebook, as in a script's process it is the script.

The problem. What pickles by name (`all_gather_object`, `torch.save`, rpc) and what looks names up (`get_type_hints`)
asks `sys.modules["__main__"]` for classes that were typed in cells; a rank's own `__main__` is a module of labkit. To
send every cell's definitions by value and unpickle them in each rank would take longer than many a launch.

The solution. A module that takes `__main__`'s place while a launched function runs. Its dict is the global namespace of
the functions that came with the call, so it has what they use. The notebook's other definitions are there as pickles,
each of which is read when somebody asks for its name. Data that the function does not use stay in the notebook; who
asks for them here is told so.

What still fails: `vars(__main__)` and `dir()` list only what has been asked for.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import importlib.util
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from labkit.protocol import pickling
from labkit.protocol.definitions import Definitions
from labkit.protocol.job import Job
from labkit.protocol.reducing import ALL

_FIRST = "labkit.rank.die_with_parent"
"""What a process that a rank spawns runs first."""


@functools.cache
def _spec_of_first() -> Any:
    return importlib.util.find_spec(_FIRST)


class NotebookMain(types.ModuleType):
    """Stands for the notebook's `__main__`; see above.

    It has one name of labkit's own, which no cell uses: a method `fetch` here would be taken for the reader's function.
    """

    __slots__ = ("__labkit__",)

    __labkit__: Notebook

    def __getattr__(self, name: str) -> Any:
        return self.__labkit__.find(name)

    def __reduce__(self) -> Any:
        raise TypeError("__main__ cannot be sent to another process")


class Notebook:
    """What a process knows of the notebook, and the module that stands for the notebook's `__main__` in it.

    Args:
        definitions: of the notebook, to be read when they are asked for.
        behind: the `__main__` until then, which is asked for what the notebook does not have.
        is_here: whether that is the notebook's own, in this process.
    """

    def __init__(
        self,
        definitions: Definitions | None = None,
        behind: types.ModuleType | None = None,
        is_here: bool = False,
    ) -> None:
        self.definitions = definitions or Definitions({}, {})
        self.behind, self.is_here = behind, is_here
        self.received: dict[str, Any] = {}
        """What the notebook has sent, by its name there."""
        self._lock = threading.RLock()
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

    # For who asks the module

    def find(self, name: str) -> Any:
        """Return what is called so in the notebook, and not in the module yet. Raises AttributeError."""
        if name in self.definitions.entries:
            self.fetch([name])
        if name in self.namespace:
            return self.namespace[name]
        if self.behind is not None and hasattr(self.behind, name):
            return getattr(self.behind, name)
        what = f"module '__main__' has no attribute {name!r}"
        kind = self.definitions.left_behind.get(name)
        raise AttributeError(f"{what}: {left_behind(name, kind)}" if kind else what)

    def fetch(self, names: Iterable[str]) -> None:
        """Have these definitions in the module, and what they use, as far as the notebook has them.

        `ALL` stands for every one.
        """
        with self._lock:
            todo = list(names)
            if ALL in todo:
                todo = list(self.definitions.entries)
            while todo:
                name = todo.pop()
                entry = self.definitions.entries.get(name)
                if entry is None or name in self.namespace:
                    continue
                self.namespace[name] = pickling.loads(pickling.Message(entry.pickled, []), main=self)
                todo += entry.uses


def notebook_of(module: types.ModuleType) -> Notebook | None:
    """Return the notebook for which a module stands, or None."""
    return module.__labkit__ if isinstance(module, NotebookMain) else None


def the_notebook() -> Notebook | None:
    """Return the notebook for which `__main__` stands in this process, or None."""
    return notebook_of(sys.modules[pickling.MAIN])


def left_behind(name: str, kind: str) -> str:
    """Say that a value has not come along."""
    return (
        f"{name} is a {kind} in the notebook, and data come along only where the launched function names them; "
        "pass it as an argument"
    )


def of(job: Job, is_here: bool = False) -> contextlib.AbstractContextManager[Any]:
    """Return the context in which `__main__` is that of the job's notebook; a process with one job keeps it."""
    if job.definitions is None:
        return contextlib.nullcontext()
    notebook = Notebook(job.definitions, sys.modules[pickling.MAIN], is_here)
    return in_place(notebook.module, for_now=is_here or job.isolation is not None)


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
        notebook.fetch(message.names)
        message.clear()
    return value


def finder(job: Job) -> Callable[[str], Any]:
    """Return what finds definitions of the notebook that has launched a job, for one that does not have them."""
    notebook = Notebook(job.definitions)
    return lambda name: functools.reduce(getattr, name.split("."), notebook.module)


def is_known(name: str, value: Any) -> bool:
    """Whether the notebook has this very definition, under this name."""
    notebook = the_notebook()
    return notebook is not None and notebook.is_known(name, value)
