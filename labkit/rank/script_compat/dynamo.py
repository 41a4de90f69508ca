"""torch._dynamo is imported in a rank when something compiles, not when the first optimizer is made.

The problem. `import torch` leaves torch._dynamo, half of the compiler, alone; but every optimizer and every
DistributedDataParallel imports it, only to tell a compiler that is not there to keep out. That is 900 modules: nearly
half of the processor time that a rank takes to its first step, and a fifth of the memory that it has for itself.

What does not work. No setting keeps torch from it (TORCHDYNAMO_DISABLE imports all the same). importlib's LazyLoader
loads at the first attribute, and optimizers ask for one at each step.

The solution. A module that stands in for torch._dynamo answers those questions as the real one does while nothing has
been compiled. Whatever else is asked of it, the import of any module below it included, imports the real one, which is
from then on what everybody finds. A PyTorch that asks other questions thus imports it as ever: later at most, never
wrongly.

What still imports it: torch.compile, FSDP's `fully_shard`, pipelines, and whatever else needs it.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import threading
import types
from collections.abc import Sequence
from typing import Any

NAME = "torch._dynamo"

_lock = threading.Lock()


def defer_import() -> None:
    """Let torch._dynamo be imported when it is needed. For ranks: called before the reader's function."""
    if NAME not in sys.modules:
        sys.meta_path.insert(0, _AlreadyImported())
        sys.modules[NAME] = _StandIn()


class _StandIn(types.ModuleType):
    """What `import torch._dynamo` finds until the real one is needed."""

    def __init__(self) -> None:
        super().__init__(NAME)
        # By vars(self), here and below: to set an attribute is to need the real module.
        vars(self).update(utils=_Utils(), trace_rules=_TraceRules(), _kept_out=[])

    def graph_break(self, *_: Any, **__: Any) -> None:
        """Do nothing: nothing is being compiled."""

    def disable(self, fn: Any = None, recursive: bool = True, **options: Any) -> Any:
        """Return `fn` as torch's own optimizers want it: kept from the compiler, once there is one."""
        if fn is None or options != {"wrapping": False}:
            return _real().disable(fn, recursive, **options)
        self._kept_out.append((fn, recursive))

        def call(*args: Any, **kwargs: Any) -> Any:
            # Called by whoever took it before the real one was imported; all others find what `_real` has put there.
            kept_out = getattr(fn, "__dynamo_disable", call)
            return (fn if kept_out is call else kept_out)(*args, **kwargs)

        return call

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # asked of any module: by inspect, warnings, pickle
            raise AttributeError(f"module {NAME!r} has no attribute {name!r} yet")
        return getattr(_real(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        # Python's import sets __spec__ and the like; and, once it has imported a module below, that one's name.
        vars(self)[name] = value
        if not name.startswith("__"):
            setattr(_real(), name, value)

    def __dir__(self) -> list[str]:
        return dir(_real())


class _Utils:
    """What DistributedDataParallel asks of torch._dynamo.utils."""

    def get_optimize_ddp_mode(self) -> str:
        """Return the default: to change it is to import the real module."""
        return "ddp_optimizer"

    def __getattr__(self, name: str) -> Any:
        return getattr(_real().utils, name)


class _TraceRules:
    """What destroy_process_group asks of torch._dynamo.trace_rules."""

    def clear_lru_cache(self) -> None:
        """Do nothing: nothing has been traced."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_real().trace_rules, name)


def _real() -> Any:
    """Import the real module if that has not been done, and return it."""
    with _lock:
        stand_in = sys.modules.get(NAME)
        if isinstance(stand_in, _StandIn):
            del sys.modules[NAME]
    real = importlib.import_module(NAME)
    if isinstance(stand_in, _StandIn):
        for fn, recursive in stand_in._kept_out:
            fn.__dynamo_disable = real.disable(fn, recursive, wrapping=False)
    return real


class _AlreadyImported(importlib.abc.MetaPathFinder):
    """Keeps a module from being imported twice.

    `import torch._dynamo.config` asks the stand-in for its `__path__`; the real package is imported then, and with it
    the very module that Python goes on to look for.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find the modules below torch._dynamo that are there already."""
        if fullname.startswith(f"{NAME}.") and fullname in sys.modules:
            return importlib.machinery.ModuleSpec(fullname, _AsItIs(sys.modules[fullname]))
        return None


class _AsItIs(importlib.abc.Loader):
    """Loads a module by leaving it as it is."""

    def __init__(self, module: types.ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Return the module."""
        return self._module

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing but give it its own spec back."""
        if module.__spec__ is not self._spec:
            module.__spec__ = self._spec
