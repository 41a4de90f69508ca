"""Faults at every place where code reads, writes, waits for or ends something; the places are found in the code itself.

`Instrumented` puts itself between each such call and what it calls, in this process and in those that it forks. A
place is a call by its name in a function; a new one is there without anybody listing it.

    with Instrumented(local, channels) as code:
        code.arm(place, "rank", Raises(OSError))
        …                      # run something
        code.effective_s()     # when the fault first took effect, in whichever process
"""

from __future__ import annotations

import ast
import fcntl
import functools
import inspect
import os
import tempfile
import time
from types import CodeType, FunctionType, ModuleType
from typing import NamedTuple

READS = {
    *("recv", "recv_bytes", "receive", "poll", "has_come", "get", "get_nowait", "read", "read_output", "loads", "take"),
    "killed",
}
WRITES = {"put", "send", "_send", "send_bytes", "write", "say", "flush", "dumps", "send_job"}
OTHERS = {"wait", "join", "kill", "close", "ask_to_stop", "ask_for_stacks"}
CALLS = READS | WRITES | OTHERS
NO_PLACES = ("'", '"', "os.environ.", "sys.modules.")
"""How calls begin that only look like one: a text's `join`, a dictionary's `get`."""

AT = "__at__"
"""The name by which instrumented code finds this module."""


class Place(NamedTuple):
    """A call in a function."""

    module: str
    function: str
    call: str
    number: int
    """Of the calls that look alike there."""

    def __str__(self):
        again = f" ({self.number + 1})" if self.number else ""
        return f"{self.module.removeprefix('labkit.')}: {self.function}: {self.call}{again}"

    @property
    def name(self):
        return self.call.rpartition(".")[2]


# What goes wrong there


class Raises:
    """Raises an error each time."""

    def __init__(self, kind):
        self.kind = kind

    def __call__(self, place, call, args, kwargs):
        raise self.kind(f"injected at {place}")

    def __repr__(self):
        return f"raises {self.kind.__name__}"


class Delays:
    """Takes long, once a process."""

    def __init__(self, seconds):
        self.seconds, self._left = seconds, set()

    def __call__(self, place, call, args, kwargs):
        if (os.getpid(), place) not in self._left:
            self._left.add((os.getpid(), place))
            time.sleep(self.seconds)
        return call(*args, **kwargs)

    def __repr__(self):
        return f"takes {self.seconds} s longer"


class Ends:
    """Finds the end of what it reads, or nobody who reads what it writes."""

    def __call__(self, place, call, args, kwargs):
        if place.name in WRITES:
            raise BrokenPipeError(f"injected at {place}")
        if place.name in ("read", "read_output"):
            return b""
        raise EOFError(f"injected at {place}")

    def __repr__(self):
        return "ends"


class Garbles:
    """Has other bytes in the place of those that are read or written, each time."""

    def __call__(self, place, call, args, kwargs):
        if place.name in WRITES:
            return call(*map(_garbage, args), **kwargs)
        return _garbage(call(*args, **kwargs))

    def __repr__(self):
        return "garbles"


def _garbage(value):
    if isinstance(value, (bytes, bytearray, memoryview)) and len(value):
        return (b"injected garbage " * (len(value) // 17 + 1))[: len(value)]
    return ["injected garbage" for _ in value] if isinstance(value, list) else value


def has_bytes(place):
    """Whether there is something to garble."""
    return place.name in ("read", "read_output", "recv_bytes", "receive", "write", "send_bytes")


# Places


class _Wrapping(ast.NodeTransformer):
    """Puts `__at__(place, called)` in the place of what is called."""

    def __init__(self, module):
        self.module, self.places = module, []
        self._within = []

    def _enter(self, node, inner):
        self._within.append((node.name, inner))
        self.generic_visit(node)
        self._within.pop()
        return node

    def visit_ClassDef(self, node):
        return self._enter(node, "")

    def visit_FunctionDef(self, node):
        return self._enter(node, ".<locals>")

    def visit_Call(self, node):
        self.generic_visit(node)
        function = ".".join(
            name + (inner if n + 1 < len(self._within) else "") for n, (name, inner) in enumerate(self._within)
        )
        called = ast.unparse(node.func).replace(f"{AT}(", "(")
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if not function or name not in CALLS or called.startswith(NO_PLACES):
            return node
        alike = sum((each.function, each.call) == (function, called) for each in self.places)
        self.places.append(Place(self.module, function, called, alike))
        at = ast.Call(
            ast.Name(AT, ast.Load()), [ast.Constant(len(self.places) - 1), ast.Constant(self.module), node.func], []
        )
        return ast.copy_location(ast.Call(at, node.args, node.keywords), node)


@functools.cache
def _wrapped(module: ModuleType) -> tuple[list[Place], dict[str, CodeType]]:
    wrapping = _Wrapping(module.__name__)
    tree = ast.fix_missing_locations(wrapping.visit(ast.parse(inspect.getsource(module))))
    codes, left = {}, [compile(tree, module.__file__, "exec")]
    while left:
        code = left.pop()
        codes.setdefault(code.co_qualname, code)
        left += [const for const in code.co_consts if isinstance(const, CodeType)]
    return wrapping.places, codes


def places(*modules: ModuleType) -> list[Place]:
    """Return all places of these modules."""
    return [place for module in modules for place in _wrapped(module)[0]]


def _functions(owner, module):
    for value in list(vars(owner).values()):
        if isinstance(value, type) and value.__module__ == module and value is not owner:
            yield from _functions(value, module)
        for function in (
            value,
            getattr(value, "fget", None),
            getattr(value, "__func__", None),
            getattr(value, "__wrapped__", None),
        ):
            if isinstance(function, FunctionType) and function.__module__ == module:
                yield function


class Instrumented:
    """Some modules while each place in them may have a fault: in this process, the "notebook", or a fork, a "rank"."""

    def __init__(self, *modules: ModuleType):
        self._modules = modules
        self._codes = []
        self._pid = os.getpid()
        self._faults = {}
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in __exit__
        fcntl.fcntl(self._log, fcntl.F_SETFL, os.O_APPEND)  # several processes write there
        self._is_recording = False

    def __enter__(self):
        for module in self._modules:
            found, codes = _wrapped(module)
            vars(module)[AT] = functools.partial(self._at, found)
            for function in _functions(module, module.__name__):
                new = codes.get(function.__qualname__)
                if new is not None and new.co_freevars == function.__code__.co_freevars:
                    self._codes.append((function, function.__code__))
                    function.__code__ = new
        return self

    def __exit__(self, *_):
        for function, code in self._codes:
            function.__code__ = code
        for module in self._modules:
            del vars(module)[AT]
        self._log.close()

    def _at(self, found, index, module, call):
        place, side = found[index], "notebook" if os.getpid() == self._pid else "rank"
        fault = self._faults.get((place, side)) or self._faults.get((None, None))
        if fault is None and not self._is_recording:
            return call

        def at_place(*args, **kwargs):
            self._note(place, side)
            return call(*args, **kwargs) if fault is None else fault(place, call, args, kwargs)

        return at_place

    def _note(self, place, side):
        line = "\t".join([str(time.monotonic()), side, *map(str, tuple(place))])
        os.write(self._log.fileno(), f"{line}\n".encode())

    def _noted(self):
        size = os.fstat(self._log.fileno()).st_size
        for line in os.pread(self._log.fileno(), size, 0).decode().splitlines():
            at_s, side, *names, number = line.split("\t")
            yield float(at_s), Place(*names, int(number)), side

    def arm(self, place: Place | None, side: str | None, fault) -> None:
        """Have this fault at a place on a side, "notebook" or "rank", and no other; with None and None everywhere."""
        self._faults = {(place, side): fault}
        self._log.truncate(0)

    def disarm(self) -> None:
        """Have no fault any more."""
        self._faults = {}

    def effective_s(self) -> float | None:
        """Return when the fault first took effect, as `time.monotonic()`; None if it has not."""
        return min((at_s for at_s, _, _ in self._noted()), default=None)

    def reached(self, do) -> set[tuple[Place, str]]:
        """Return the places, with their sides, that something comes to."""
        self.disarm()
        self._log.truncate(0)
        self._is_recording = True
        try:
            do()
        finally:
            self._is_recording = False
        return {(place, side) for _, place, side in self._noted()}
