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

    Args:
        definitions: of the notebook, to be read when they are asked for.
        behind: the `__main__` until then, which is asked for what the notebook does not have.
        is_here: whether that is the notebook's own, in this process.
    """

    __slots__ = ("_behind", "_definitions", "_from_notebook", "_is_here", "_lock")

    def __init__(
        self,
        definitions: Definitions | None = None,
        behind: types.ModuleType | None = None,
        is_here: bool = False,
    ) -> None:
        super().__init__(pickling.MAIN)
        self._is_here = is_here
        self._definitions = definitions or Definitions({}, {})
        self._behind = behind
        self._from_notebook: dict[str, Any] = {}
        self._lock = threading.RLock()
        vars(self)["__builtins__"] = builtins
        vars(self)["__spec__"] = _spec_of_first()

    # For `pickling`

    @property
    def is_here(self) -> bool:
        """Whether this stands for `__main__` in the notebook's own process."""
        return self._is_here

    @property
    def notebook(self) -> types.ModuleType | None:
        """The notebook's `__main__` then."""
        return self._behind

    def known(self, name: str) -> Any:
        """Return what the notebook has sent under this name, or None."""
        return self._from_notebook.get(name)

    def receive(self, name: str, value: Any) -> None:
        """Take in what is called so in the notebook."""
        self._from_notebook[name] = value
        if "." not in name:
            vars(self)[name] = value

    def all_received(self) -> list[tuple[str, Any]]:
        """Return what the notebook has sent, with its names."""
        return list(self._from_notebook.items())

    def is_known(self, name: str, value: Any) -> bool:
        """Whether this very definition has come from the notebook, which thus has it."""
        return self._from_notebook.get(name) is value

    # For all others

    def __getattr__(self, name: str) -> Any:
        if name in self._definitions.entries:
            self.fetch([name])
        if name in vars(self):
            return vars(self)[name]
        if self._behind is not None and hasattr(self._behind, name):
            return getattr(self._behind, name)
        raise AttributeError(self._why_missing(name))

    def _why_missing(self, name: str) -> str:
        what = f"module '__main__' has no attribute {name!r}"
        kind = self._definitions.left_behind.get(name)
        return f"{what}: {left_behind(name, kind)}" if kind else what

    def fetch(self, names: Iterable[str]) -> None:
        """Have these definitions in the module's dict, and what they use, as far as the notebook has them.

        `ALL` stands for every one.
        """
        with self._lock:
            todo = list(names)
            if ALL in todo:
                todo = list(self._definitions.entries)
            while todo:
                name = todo.pop()
                entry = self._definitions.entries.get(name)
                if entry is None or name in vars(self):
                    continue
                vars(self)[name] = pickling.loads(pickling.Message(entry.pickled, []), main=self)
                todo += entry.uses

    @property
    def definitions(self) -> Definitions:
        """What the notebook has defined."""
        return self._definitions

    def __reduce__(self) -> Any:
        raise TypeError("__main__ cannot be sent to another process")


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
    main = NotebookMain(job.definitions, sys.modules[pickling.MAIN], is_here)
    return in_place(main, for_now=is_here or job.surroundings is not None)


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
    main = sys.modules[pickling.MAIN]
    if not isinstance(main, NotebookMain):
        return pickling.loads(message, device=device)
    value = pickling.loads(message, main, device=device)
    main.fetch(message.names)
    message.clear()
    return value


def finder(job: Job) -> Callable[[str], Any]:
    """Return what finds definitions of the notebook that has launched a job, for one that does not have them."""
    main = NotebookMain(job.definitions)
    return lambda name: functools.reduce(getattr, name.split("."), main)


def is_known(name: str, value: Any) -> bool:
    """Whether the notebook has this very definition, under this name."""
    main = sys.modules[pickling.MAIN]
    return isinstance(main, NotebookMain) and main.is_known(name, value)
