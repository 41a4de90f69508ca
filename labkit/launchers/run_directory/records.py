"""Records as they are written into a run's directory: an event a line, as JSON."""

from __future__ import annotations

import base64
import binascii
import json
import re
from array import array
from collections.abc import Callable
from typing import Any, NamedTuple, get_args

from labkit.protocol import events
from labkit.system.out_of_memory import OutOfMemory

CUT = b"\x18\n"
"""Ends a line that could not be written to its end, and that comes again as a whole."""


def encoded(kind: str, *fields: Any) -> bytes:
    """Return the line of a record; its fields are as JSON has them."""
    return (json.dumps([kind, *fields]) + "\n").encode()


def plain(value: Any) -> Any:
    """Return a record's field as JSON knows it."""
    if isinstance(value, bytes | bytearray | memoryview):
        return {"bytes": base64.b64encode(value).decode()}
    return {value.typecode: value.tolist()} if isinstance(value, array) else value


_KINDS: dict[str, Any] = {kind.__name__: kind for kind in events.Event.__args__ if kind is not events.Change}


class Stored(NamedTuple):
    """Stands in a record for a large value, which has a file of its own."""

    name: str
    size: int


def decoded(line: bytes) -> Any:
    """Return the event of a record, with large values as `Stored`. Raises ValueError if it is none."""
    try:
        kind, *values = json.loads(line)
        found = _KINDS[kind](*map(_rich, values))
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError, binascii.Error) as error:
        raise ValueError(f"no record: {error}") from error
    if not all(fits(value) for fits, value in zip(_CHECKS[kind], found, strict=True)) or not _is_consistent(found):
        raise ValueError(f"not what a {kind} is made of")
    return found


def _rich(value: Any) -> Any:
    if isinstance(value, dict):
        ((kind, content),) = value.items()
        if kind == "file":
            name, size = content
            if not re.fullmatch(r"\d+\.\d+\.\d+\.blob", name) or type(size) is not int or size < 0:
                raise ValueError(f"{name!r} is no file of a rank")
            return Stored(name, size)
        return base64.b64decode(content, validate=True) if kind == "bytes" else array(kind, content)
    return tuple(map(_rich, value)) if isinstance(value, list) else value


_FITS: dict[str, Callable[[Any], bool]] = {
    "int": lambda value: type(value) is int and abs(value) < 1 << 64,
    "bool": lambda value: type(value) is bool,
    "float": lambda value: type(value) is float or (type(value) is int and abs(value) < 1 << 64),
    "str": lambda value: type(value) is str,
    "OutOfMemory": lambda value: value in get_args(OutOfMemory),
    "bytes": lambda value: type(value) in (bytes, Stored),
    "Message | bytes": lambda value: type(value) in (bytes, Stored),
    "array[int]": lambda value: isinstance(value, array) and value.typecode == "q",
    "array[float]": lambda value: isinstance(value, array) and value.typecode == "d",
    "tuple[str, ...]": lambda value: type(value) is tuple and all(type(each) is str for each in value),
    "tuple[tuple[str, int, str], ...]": lambda value: (
        type(value) is tuple and all(type(each) is tuple and [*map(type, each)] == [str, int, str] for each in value)
    ),
}
"""By a field's annotation, whether a value is of its type."""

_CHECKS = {
    name: [_FITS[getattr(hint, "__forward_arg__", hint)] for hint in kind.__annotations__.values()]
    for name, kind in _KINDS.items()
}


def _is_consistent(event: events.Event) -> bool:
    """Whether the columns of a batch of log calls are of one length."""
    if not isinstance(event, events.Log):
        return True
    calls = len(event.steps)
    return bool(calls and event.names) and len(event.times_s) == calls and len(event.values) == calls * len(event.names)
