"""What of the notebook's settings its ranks take over: PyTorch's and Python's for the whole process, logging, warnings.

In a script these stand at the top, and each rank runs them. In a notebook they were made by some cell, long ago. So
they travel with the job, and a rank sets those that differ from its own. `labkit.rank.on_ranks` is a table of all that
a rank has of the notebook.
"""

from __future__ import annotations

import contextlib
import decimal
import importlib
import locale
import logging
import operator
import os
import socket
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.multiprocessing

from labkit.protocol import modules
from labkit.system import host

_UNREADABLE = (AttributeError, RuntimeError)
"""What PyTorch raises for an attribute that it does not have yet, or no more beside a newer one that is in use."""


class Setting(NamedTuple):
    """One thing that holds for a whole process."""

    get: Callable[[], Any]
    set: Callable[[Any], Any]


def _attribute(name: str) -> Setting:
    """Return the setting that is an attribute of something in `torch`."""
    owner, _, last = name.rpartition(".")
    find = operator.attrgetter(owner)
    return Setting(lambda: getattr(find(torch), last), lambda value: setattr(find(torch), last, value))


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _set_deterministic(flags: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(flags[0], warn_only=flags[1])


def _default_device() -> str:
    return str(torch.get_default_device())


def _set_default_device(name: str) -> None:
    device = torch.device(name)
    torch.set_default_device(None if device.type == "cpu" else device)


_PRINTED = ("precision", "threshold", "edgeitems", "linewidth", "sci_mode")


def _print_options() -> dict[str, Any]:
    return {name: getattr(torch._tensor_str.PRINT_OPTS, name) for name in _PRINTED}


def _numpys(get: str, set: str) -> Setting:
    """Return the setting for which NumPy has these functions, as far as it consists of plain values."""

    def read() -> dict[str, Any]:
        numpy = sys.modules.get("numpy")
        given = {} if numpy is None else getattr(numpy, get)()
        return {name: value for name, value in given.items() if isinstance(value, (int, float, str, type(None)))}

    def write(options: Mapping[str, Any]) -> None:
        if options and "numpy" in sys.modules:
            getattr(sys.modules["numpy"], set)(**options)

    return Setting(read, write)


PYTORCHS = {
    "default type": Setting(torch.get_default_dtype, torch.set_default_dtype),
    "default device": Setting(_default_device, _set_default_device),
    "gradients": Setting(torch.is_grad_enabled, torch.set_grad_enabled),
    "threads of backward passes": Setting(
        torch.autograd.is_multithreading_enabled, torch.autograd.set_multithreading_enabled
    ),
    "anomaly detection": Setting(torch.is_anomaly_enabled, torch.set_anomaly_enabled),
    "deterministic algorithms": Setting(_deterministic, _set_deterministic),
    "uninitialized memory": _attribute("utils.deterministic.fill_uninitialized_memory"),
    "matrix product precision": Setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    **{
        name: _attribute(f"backends.{name}")
        for name in (
            *("cudnn.enabled", "cudnn.benchmark", "cudnn.deterministic", "cudnn.allow_tf32"),
            *("cuda.matmul.allow_tf32", "cuda.matmul.allow_fp16_reduced_precision_reduction"),
            "cuda.matmul.allow_bf16_reduced_precision_reduction",
            # Of PyTorch 2.9 and newer, which will have them in place of `allow_tf32`.
            *("fp32_precision", "cuda.matmul.fp32_precision", "cudnn.conv.fp32_precision", "cudnn.rnn.fp32_precision"),
        )
    },
    "flash attention": Setting(torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    "memory-efficient attention": Setting(
        torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp
    ),
    "plain attention": Setting(torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    "sharing strategy": Setting(torch.multiprocessing.get_sharing_strategy, torch.multiprocessing.set_sharing_strategy),
    "printed tensors": Setting(_print_options, lambda options: torch.set_printoptions(**options)),
    "printed arrays": _numpys("get_printoptions", "set_printoptions"),
}
"""By what a reader would call it, in an order in which they can be set."""


# Of Python, its standard library and NumPy


def _decimal_context() -> dict[str, Any]:
    context = decimal.getcontext()
    return {name: getattr(context, name) for name in ("prec", "rounding", "Emin", "Emax", "capitals", "clamp")}


def _set_decimal_context(options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        setattr(decimal.getcontext(), name, value)


def _time_zone() -> tuple[str | None, Any]:
    return os.environ.get("TZ"), (time.tzname, time.timezone, time.altzone)


def _set_time_zone(zone: tuple[str | None, Any]) -> None:
    if zone[0] is not None:  # on Ray, whose nodes have an environment of their own
        os.environ["TZ"] = zone[0]
    time.tzset()


PYTHONS = {
    "recursion limit": Setting(sys.getrecursionlimit, sys.setrecursionlimit),
    "switch interval": Setting(sys.getswitchinterval, sys.setswitchinterval),
    "file mode mask": Setting(host.umask, os.umask),
    "sockets' time limit": Setting(socket.getdefaulttimeout, socket.setdefaulttimeout),
    "locale": Setting(lambda: locale.setlocale(locale.LC_ALL), lambda name: locale.setlocale(locale.LC_ALL, name)),
    "decimal numbers": Setting(_decimal_context, _set_decimal_context),
    "NumPy's floating-point errors": _numpys("geterr", "seterr"),
}
"""Likewise."""

if hasattr(time, "tzset"):
    PYTHONS["time zone"] = Setting(_time_zone, _set_time_zone)


# Classes that `torch.load` may make without `weights_only=False`


def safe_classes() -> list[Any]:
    """Return what the reader has given `torch.serialization.add_safe_globals`. Libraries do so as they are imported."""
    return [each for each in torch.serialization.get_safe_globals() if not modules.is_library(_module_of(each))]


def set_safe_classes(given: list[Any]) -> None:
    """Have these, and those of libraries, be all that is allowed."""
    own = safe_classes()
    others = [each for each in torch.serialization.get_safe_globals() if each not in own]
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals([*others, *given])


def _module_of(given: Any) -> str:
    """Return the top package of a class or a function, or of one with the name that it has in files."""
    one = given[0] if isinstance(given, tuple) else given
    return str(one.__module__).partition(".")[0]


def _names_of_safe_classes() -> list[tuple[str, str]]:
    found = [each[0] if isinstance(each, tuple) else each for each in safe_classes()]
    return [(each.__module__, each.__qualname__) for each in found]


def allow_to_load(settings: Mapping[str, Any]) -> None:
    """Let `torch.load` make objects of the classes that it may in the notebook, whose own are in `__main__` by now."""
    for module_of, name in settings.get(CLASSES, ()):
        with contextlib.suppress(Exception):  # of a library that is not here
            module = sys.modules.get(module_of) or importlib.import_module(module_of)
            torch.serialization.add_safe_globals([operator.attrgetter(name)(module)])


# Warnings


def _warning_filters() -> list[tuple[Any, ...]]:
    """Return the filters, with the categories' names: to load a class could take seconds."""
    filters: Any = warnings.filters
    return [(action, text, (kind.__module__, kind.__qualname__), *rest) for action, text, kind, *rest in filters]


def _set_warning_filters(filters: list[tuple[Any, ...]]) -> None:
    found = []
    for action, message, (module_of, name), module, line in filters:
        try:
            category = operator.attrgetter(name)(sys.modules[module_of])
        except (KeyError, AttributeError):  # of a library that this process has not loaded, or of a cell
            continue
        found.append((action, message, category, module, line))
    put_in_place(found)


def put_in_place(filters: list[Any]) -> None:
    """Make these the warning filters."""
    warnings.filters[:] = filters  # type: ignore[index]
    with warnings.catch_warnings():  # which has Python ask them anew, also of what it has shown
        pass


# Logging


class Handler(NamedTuple):
    """What writes the lines of one logger."""

    to: str
    """ "stdout", "stderr", or the path of a file."""
    level: int
    format: str
    dates: str | None
    style: str


class Logger(NamedTuple):
    """How one logger was set up."""

    level: int = logging.NOTSET
    propagates: bool | None = None
    """None, here and below: as the logger's library has it."""
    is_disabled: bool | None = None
    handlers: tuple[Handler, ...] = ()


class Logging(NamedTuple):
    """How `logging` was set up."""

    disabled: int
    """The level below and at which all is left out."""
    loggers: dict[str, Logger]
    """By name; the root's is ""."""


def loggers() -> dict[str, logging.Logger]:
    """Return all loggers, by name; the root's is ""."""
    named = logging.root.manager.loggerDict.copy()
    return {"": logging.root, **{name: one for name, one in named.items() if isinstance(one, logging.Logger)}}


def _logging() -> Logging:
    found = {}
    for name, logger in loggers().items():
        described = Logger(logger.level)
        if name.partition(".")[0] not in sys.modules or name == "__main__":  # a library sets up its own
            described = Logger(logger.level, logger.propagate, logger.disabled, _handlers(logger))
        if described not in (Logger(), Logger(0, True, False)) or not name:
            found[name] = described
    return Logging(logging.root.manager.disable, found)


def _handlers(logger: logging.Logger) -> tuple[Handler, ...]:
    return tuple(_described(each) for each in logger.handlers if not isinstance(each, logging.NullHandler))


def _described(handler: logging.Handler) -> Handler:
    """Say what a handler does; of one that is neither a stream's nor a file's, what a stream's does at its level."""
    to = "stderr"
    if isinstance(handler, logging.FileHandler):
        to = handler.baseFilename
    elif isinstance(handler, logging.StreamHandler):
        stream = handler.stream
        to = "stdout" if stream is sys.stdout or "stdout" in str(getattr(stream, "name", "")) else "stderr"
    formatter = handler.formatter
    text, dates = getattr(formatter, "_fmt", None), getattr(formatter, "datefmt", None)
    kind_of_style = type(getattr(formatter, "_style", None))
    style = next((style for style, (kind, _) in logging._STYLES.items() if kind is kind_of_style), "%")
    return Handler(to, handler.level, text if isinstance(text, str) else "%(message)s", dates, style)


def _set_logging(state: Logging) -> None:
    logging.disable(state.disabled)
    for name, given in state.loggers.items():
        logger = logging.getLogger(name) if name else logging.root
        logger.setLevel(given.level)
        if given.propagates is not None:
            logger.propagate, logger.disabled = given.propagates, bool(given.is_disabled)
        there = _handlers(logger)
        for described in given.handlers:
            if described not in there and (handler := _handler(described)):
                logger.addHandler(handler)


def _handler(described: Handler) -> logging.Handler | None:
    handler: logging.Handler
    if described.to in ("stdout", "stderr"):
        handler = logging.StreamHandler(getattr(sys, described.to))
    else:
        try:
            handler = logging.FileHandler(described.to)
        except OSError:  # on another machine, say
            return None
    handler.setLevel(described.level)
    handler.setFormatter(logging.Formatter(described.format, described.dates, described.style))  # type: ignore[arg-type]
    return handler


ALL = {
    **PYTORCHS,
    **PYTHONS,
    "warning filters": Setting(_warning_filters, _set_warning_filters),
    "logging": Setting(_logging, _set_logging),
}


CLASSES = "classes for torch.load"


def of_this_process() -> dict[str, Any]:
    """Return this process's settings, as plain values, by name."""
    return {**read(ALL), CLASSES: _names_of_safe_classes()}


def take_over(settings: Mapping[str, Any]) -> None:
    """Make them this process's own. A setting that this process does not have, or does not take, stays as it is."""
    for name, value in settings.items():
        setting = ALL.get(name)
        with contextlib.suppress(Exception):  # of another PyTorch, say
            if setting is not None and setting.get() != value:
                setting.set(value)


def read(settings: Mapping[str, Setting]) -> dict[str, Any]:
    """Return those of the settings that can be read, by name."""
    found = {}
    for name, setting in settings.items():
        try:
            found[name] = setting.get()
        except _UNREADABLE:
            continue
    return found
