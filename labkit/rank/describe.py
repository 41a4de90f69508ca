"""What the user's variables were when a rank failed, briefly. Runs in the rank's own process.

The problem: to show a value is to call its `__repr__`, and that is code of its type's author: it may raise, take
minutes, print a million numbers, or never end; a tensor's on several ranks may even call a collective, which hangs.

What does not work: a time limit alone, for a thread that loops cannot be ended.

The solution: no method of a value is called, not even `__class__`. Python's and PyTorch's own types are described here,
by their exact type; of all others the type's name is given, and the fields if it is a dataclass or a named tuple. That
is done in a thread of its own, which is left behind after `LIMIT_S`: a GPU may be busy indefinitely.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Container, Iterable
from itertools import islice
from types import BuiltinFunctionType, FrameType, FunctionType, ModuleType
from typing import Any

import torch

from labkit.protocol.modules import is_user_file
from labkit.protocol.text import printable
from labkit.rank.worker import Worker

LIMIT_S = 0.25
"""Time to describe all variables of all frames. The notebook waits for reports of other ranks a little longer."""

FRAMES, VARIABLES, CHARACTERS, ELEMENTS, DEPTH = 10, 40, 200, 8, 3
"""At most: frames, variables of each, characters of a description, elements of a container, containers in it."""

SHOWN_AS_WRITTEN = (bool, float, complex, type(None), range, slice, torch.Size, torch.dtype, torch.device, Worker)
SECRET = re.compile(
    r"(api|access|private|secret|signing|account)_?key|passw|passphrase|pwd|secret|credential|bearer|cookie"
    r"|token$",
    re.I,
)
"""Names whose values are left out of reports. A secret elsewhere, in a URL say, is shown: it is your own report."""

LEFT_OUT = "left out: its name is a secret's"
PLAIN = (int, float, complex, bool, type(None))
UNINTERESTING = (ModuleType, FunctionType, BuiltinFunctionType, type)

Variables = tuple[tuple[str, str], ...]


def of_frames(frames: Iterable[FrameType], cells: Container[str]) -> list[Variables]:
    """Return (name, description) of the local variables of each frame; () for those that are not the user's.

    The most recent frames come first. Never raises; what could not be described in time is missing.
    """
    given = list(frames)
    found: list[Variables] = [()] * len(given)
    mine = [index for index, frame in enumerate(given) if is_user_file(frame.f_code.co_filename, cells)][:FRAMES]

    def describe_all() -> None:
        for index in mine:
            found[index] = tuple(_described(given[index].f_locals))

    thread = threading.Thread(target=describe_all, name="labkit-variables", daemon=True)
    try:
        thread.start()
        thread.join(LIMIT_S)
    except RuntimeError:  # there can be no more threads: that may be why the rank has failed
        return found
    return list(found)


def _described(values: dict[str, Any]) -> Iterable[tuple[str, str]]:
    shown = [
        (name, value)
        for name, value in values.items()
        if not (name.startswith("__") or name == "_" or issubclass(type(value), UNINTERESTING))
    ]
    for name, value in shown[:VARIABLES]:
        yield name, named(name, value)
    if len(shown) > VARIABLES:
        yield "…", f"{len(shown) - VARIABLES} more"


def named(name: str, value: Any) -> str:
    """Return a variable's value in a few words, or that it is left out. Never raises."""
    try:
        text = printable(_named(name, value, 0))
    except Exception as error:  # labkit's own mistake, or memory has run out: the user's error is what counts
        text = f"could not be described ({type(error).__name__})"
    return text if len(text) <= CHARACTERS else text[: CHARACTERS - 1] + "…"


def _named(name: Any, value: Any, depth: int) -> str:
    if (
        type(name) is str
        and SECRET.search(name)
        and type(value) not in PLAIN
        and not issubclass(type(value), torch.Tensor)
    ):
        return LEFT_OUT
    return describe(value, depth)


def describe(value: Any, depth: int = 0) -> str:
    """Return a value in a few words. Calls nothing that is not Python's, PyTorch's or NumPy's."""
    kind = type(value)
    if kind in SHOWN_AS_WRITTEN:
        return repr(value)
    if kind is int:
        return repr(value) if value.bit_length() < 200 else f"an int of {value.bit_length()} bits"
    if kind is str:
        return _text(value)
    if kind in (bytes, bytearray):
        return f"{kind.__name__} of length {len(value)}"
    if issubclass(kind, torch.Tensor):
        return _tensor(value)
    if kind in (list, tuple, set, frozenset, dict):
        return _container(value, kind, depth)
    if (numpy := sys.modules.get("numpy")) is not None:
        if kind is numpy.ndarray:
            return _array(value)
        if issubclass(kind, numpy.generic) and kind.__module__ == "numpy":
            return repr(value.item()) if value.nbytes <= 16 else kind.__name__
    return _object(value, kind, depth)


def _text(value: str) -> str:
    text = repr(value[:100])
    return text if len(value) <= 100 else f"{text}… ({len(value):,} characters)"


def _container(value: Any, kind: type, depth: int) -> str:
    if depth >= DEPTH:
        return f"{kind.__name__} of {len(value)}"
    if kind is dict:
        pairs = islice(value.items(), ELEMENTS)
        parts = [f"{describe(key, DEPTH)}: {_named(key, element, depth + 1)}" for key, element in pairs]
    else:
        parts = [describe(element, depth + 1) for element in islice(value, ELEMENTS)]
    if len(value) > len(parts):
        parts.append(f"… {len(value)} in all")
    left, right = "[]" if kind is list else "()" if kind is tuple else "{}"
    return f"{left}{', '.join(parts)}{right}"


def _object(value: Any, kind: type, depth: int) -> str:
    name = type.__getattribute__(kind, "__name__")
    if depth >= DEPTH:
        return name
    own = vars(kind)
    if issubclass(kind, tuple) and type(own.get("_fields")) is tuple:
        fields = list(zip(own["_fields"], tuple.__iter__(value), strict=False))
    elif "__dataclass_fields__" in own:
        there = object.__getattribute__(value, "__dict__") if "__slots__" not in own else {}
        fields = [(field, there[field]) for field in own["__dataclass_fields__"] if field in there]
    elif issubclass(kind, torch.nn.Module):
        return f"{name}, {_parameters(value):,} parameters"
    else:
        return f"a {name}"
    return f"{name}({', '.join(f'{field}={_named(field, part, depth + 1)}' for field, part in fields[:ELEMENTS])})"


def _parameters(module: torch.nn.Module) -> int:
    """Count a network's parameters, without calling its methods."""
    seen: dict[int, int] = {}
    left = [module]
    while left:
        there = object.__getattribute__(left.pop(), "__dict__")
        seen |= {id(p): p.numel() for p in there.get("_parameters", {}).values() if p is not None}
        left += [child for child in there.get("_modules", {}).values() if child is not None]
    return sum(seen.values())


def _array(value: Any) -> str:
    if value.dtype.kind not in "biuf":
        return f"array {value.dtype} {list(value.shape)}"
    return f"array {value.dtype} {list(value.shape)}{_statistics(torch.from_numpy(value.copy()))}"


def _tensor(value: torch.Tensor) -> str:
    kind = type(value)
    where = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} on {value.device}"
    if kind not in (torch.Tensor, torch.nn.Parameter) or value.device.type == "meta" or value.layout != torch.strided:
        return f"{kind.__name__} {where}"  # of a DTensor, say, even the least is found by a collective
    return where + _statistics(value.detach())


@torch.no_grad()
def _statistics(value: torch.Tensor) -> str:
    """Return ", min …, max …, mean …" of what is finite, the count of what is not; of few elements all of them."""
    if not value.numel() or value.is_complex() or value.is_quantized:
        return ""
    if value.numel() <= ELEMENTS:
        elements = ", ".join(
            f"{each:.4g}" if value.is_floating_point() else str(each) for each in value.flatten().tolist()
        )
        return f": {elements}"
    if value.dtype is torch.bool:
        return f", {int(value.sum()):,} of {value.numel():,} True"
    if not value.is_floating_point():
        return f", min {int(value.min())}, max {int(value.max())}, mean {float(value.double().mean()):.4g}"
    value = value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
    nan, inf = int(value.isnan().sum()), int(value.isinf().sum())
    finite = value[value.isfinite()] if nan + inf else value
    parts = [f"{count:,} {what}" for count, what in ((nan, "NaN"), (inf, "Inf")) if count]
    if finite.numel():
        least, greatest = finite.aminmax()
        parts.insert(0, f"min {float(least):.4g}, max {float(greatest):.4g}, mean {float(finite.mean()):.4g}")
    return "".join(f", {part}" for part in parts)
