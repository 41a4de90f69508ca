"""What the user's variables were when a rank failed, briefly. Runs in the rank's own process.

The problem: to show a value is to call its `__repr__`, and that is code of its type's author: it may raise, take
minutes, print a million numbers, or never end; a tensor's on several ranks may even call a collective, which hangs.

What does not work: a time limit alone, for a thread that loops cannot be ended.

The solution: no method of a value is called, not even `__class__`. Python's and PyTorch's own types are described here,
by their exact type; of all others the type's name is given, and the fields if it is a dataclass or a named tuple. That
is done in a thread of its own, which is left behind after `LIMIT_S`: a GPU may be busy indefinitely.
"""

from __future__ import annotations

import contextlib
import re
import threading
import traceback
from collections.abc import Container, Iterable
from itertools import islice
from types import BuiltinFunctionType, FrameType, FunctionType, ModuleType
from typing import Any

import torch

from labkit.protocol.job import Job, RankHook
from labkit.protocol.modules import is_user_file
from labkit.protocol.text import cut_off, printable
from labkit.rank import failure
from labkit.rank.channels import Channel
from labkit.rank.worker import Worker

KIND = "variables"
"""What the notebook knows them by."""

LIMIT_S = 0.25
"""Time to describe all variables of all frames. The notebook waits for reports of other ranks a little longer."""

FRAMES, VARIABLES, CHARACTERS, ELEMENTS, DEPTH = 10, 40, 200, 8, 3
"""At most: frames, variables of each, characters of a description, elements of a container, containers in it."""

PLAIN = (int, float, complex, bool, type(None))
SHOWN_AS_WRITTEN = (*PLAIN, range, slice, torch.Size, torch.dtype, torch.device, Worker)
SECRET = re.compile(
    r"(api|access|private|secret|signing|account)_?key|passw|passphrase|pwd|secret|credential|bearer|cookie"
    r"|token$",
    re.I,
)
"""Names whose values are left out of reports. A secret elsewhere, in a URL say, is shown: it is your own report."""

LEFT_OUT = "left out: its name is a secret's"
UNINTERESTING = (ModuleType, FunctionType, BuiltinFunctionType, type)

Variables = tuple[tuple[str, str], ...]


class CaptureLocals(RankHook):
    """Sends the variables of the user's frames before a failure is reported."""

    def failed(self, error: BaseException, job: Job, channel: Channel) -> None:
        """Send what the variables were, frame by frame, as `events.Failure` has the frames."""
        frames = [frame for frame, _ in traceback.walk_tb(failure.below_own(error))]
        channel.attach(KIND, of_frames(reversed(frames[-failure.FRAMES :]), job.cells))


def of_frames(frames: Iterable[FrameType], cells: Container[str]) -> list[Variables]:
    """Return (name, description) of the local variables of each frame; () for those that are not the user's.

    The most recent frames come first. Never raises; what could not be described in time is missing.
    """
    given = list(frames)
    found: list[Variables] = [()] * len(given)
    mine = [index for index, frame in enumerate(given) if is_user_file(frame.f_code.co_filename, cells)][:FRAMES]

    def describe_all() -> None:
        for index in mine:
            shown = [
                (name, value)
                for name, value in given[index].f_locals.items()
                if not (name.startswith("__") or issubclass(type(value), UNINTERESTING))
            ]
            found[index] = tuple((name, named(name, value)) for name, value in shown[:VARIABLES])

    thread = threading.Thread(target=describe_all, name="labkit-variables", daemon=True)
    with contextlib.suppress(RuntimeError):  # there can be no more threads: that may be why the rank has failed
        thread.start()
        thread.join(LIMIT_S)
    return list(found)


def named(name: str, value: Any) -> str:
    """Return a variable's value in a few words, or that it is left out. Never raises."""
    try:
        text = printable(_named(name, value, 0))
    except Exception as error:  # labkit's own mistake, or memory has run out: the user's error is what counts
        text = f"could not be described ({type(error).__name__})"
    return cut_off(text, CHARACTERS)


def _named(name: Any, value: Any, depth: int) -> str:
    is_secret = type(name) is str and SECRET.search(name) and not issubclass(type(value), (*PLAIN, torch.Tensor))
    return LEFT_OUT if is_secret else describe(value, depth)


def describe(value: Any, depth: int = 0) -> str:
    """Return a value in a few words. Calls nothing that is not Python's, PyTorch's or NumPy's."""
    kind = type(value)
    if kind in SHOWN_AS_WRITTEN:
        return repr(value)
    if kind in (str, bytes):
        return repr(value[:100]) + (f"… ({len(value):,} characters)" if len(value) > 100 else "")
    if issubclass(kind, torch.Tensor):
        return _tensor(value)
    if kind in (list, tuple, set, frozenset, dict):
        return _container(value, kind, depth)
    if kind.__module__ == "numpy" and kind.__name__ == "ndarray":
        what = f"array {value.dtype} {list(value.shape)}"
        return what + (_statistics(torch.from_numpy(value.copy())) if value.dtype.kind in "biuf" else "")
    return _object(value, kind, depth)


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
    """Name a value's type; show the fields of a dataclass or a named tuple."""
    name, own = type.__getattribute__(kind, "__name__"), vars(kind)
    if issubclass(kind, tuple) and type(own.get("_fields")) is tuple:
        fields = dict(zip(own["_fields"], tuple.__iter__(value), strict=False))
    elif "__dataclass_fields__" in own and "__slots__" not in own:
        fields = object.__getattribute__(value, "__dict__")
    else:
        return f"a {name}"
    if depth >= DEPTH:
        return name
    parts = [f"{field}={_named(field, part, depth + 1)}" for field, part in islice(fields.items(), ELEMENTS)]
    return f"{name}({', '.join(parts)})"


def _tensor(value: torch.Tensor) -> str:
    kind = type(value)
    where = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} on {value.device}"
    if kind not in (torch.Tensor, torch.nn.Parameter) or value.device.type == "meta" or value.layout != torch.strided:
        return f"{kind.__name__} {where}"  # of a DTensor, say, even the least is found by a collective
    return where + _statistics(value.detach())


def _statistics(value: torch.Tensor) -> str:
    """Return ", min …, max …, mean …" of what is finite, the count of what is not; of few elements all of them."""
    if not value.numel() or value.is_complex():
        return ""
    if value.numel() <= ELEMENTS:
        return f": {', '.join(map(_number, value.flatten().tolist()))}"
    value = value.float() if value.element_size() < 4 else value  # of halves no mean can be taken, nor of bools
    nan, inf = int(value.isnan().sum()), int(value.isinf().sum())
    finite = value[value.isfinite()] if nan + inf else value
    parts = [f"{count:,} {what}" for count, what in ((nan, "NaN"), (inf, "Inf")) if count]
    if finite.numel():
        least, greatest = finite.aminmax()
        mean = finite.mean(dtype=torch.double).item()
        parts.insert(0, f"min {_number(least.item())}, max {_number(greatest.item())}, mean {mean:.4g}")
    return "".join(f", {part}" for part in parts)


def _number(value: float | bool) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
