"""What of the notebook's settings its ranks take over: thirteen, of PyTorch, NumPy, warnings and logging.

In a script these stand at the top, and each rank runs them. In a notebook they were made by some cell, long ago. So
they travel with the job, and a rank sets those that differ from its own. `labkit.rank.on_ranks` is a table of all that
a rank has of the notebook.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch


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


_PRINTED = ("precision", "threshold", "edgeitems", "linewidth", "sci_mode")


def _print_options() -> dict[str, Any]:
    return {name: getattr(torch._tensor_str.PRINT_OPTS, name) for name in _PRINTED}


def _numpys_print_options() -> dict[str, Any]:
    given = sys.modules["numpy"].get_printoptions() if "numpy" in sys.modules else {}
    return {name: value for name, value in given.items() if isinstance(value, (int, float, str, type(None)))}


def _set_numpys_print_options(options: Mapping[str, Any]) -> None:
    if options and "numpy" in sys.modules:
        sys.modules["numpy"].set_printoptions(**options)


def _warning_filters() -> list[tuple[Any, ...]]:
    """Return the filters, with the categories' names: to load a class could take seconds."""
    filters: Any = warnings.filters
    return [(action, text, (kind.__module__, kind.__qualname__), *rest) for action, text, kind, *rest in filters]


def _set_warning_filters(filters: list[tuple[Any, ...]]) -> None:
    found: list[Any] = []
    for action, message, (module_of, name), module, line in filters:
        try:
            category = operator.attrgetter(name)(sys.modules[module_of])
        except (KeyError, AttributeError):  # of a library that this process has not loaded, or of a cell
            continue
        found.append((action, message, category, module, line))
    warnings.filters[:] = found  # type: ignore[index]
    with warnings.catch_warnings():  # which has Python ask them anew, also of what it has shown
        pass


def _levels() -> dict[str, int]:
    """Return the levels of loggers, by name; the root's is "".

    Not the root's default, which on reserved ranks would undo what an imported module has set up.
    """
    named = logging.root.manager.loggerDict.copy()
    levels = {name: logger.level for name, logger in named.items() if isinstance(logger, logging.Logger)}
    levels |= {"": logging.root.level} if logging.root.level != logging.WARNING else {}
    return {name: level for name, level in levels.items() if level}


def _set_levels(levels: Mapping[str, int]) -> None:
    if "" in levels:
        logging.basicConfig()  # as a cell has done: lines go to stderr
    for name, level in levels.items():
        logging.getLogger(name or None).setLevel(level)


ALL = {
    "default type": Setting(torch.get_default_dtype, torch.set_default_dtype),
    "deterministic algorithms": Setting(_deterministic, _set_deterministic),
    "matrix product precision": Setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "anomaly detection": Setting(torch.is_anomaly_enabled, torch.set_anomaly_enabled),
    **{
        name: _attribute(f"backends.{name}")
        for name in ("cudnn.enabled", "cudnn.benchmark", "cudnn.deterministic", "cudnn.allow_tf32")
    },
    "cuda.matmul.allow_tf32": _attribute("backends.cuda.matmul.allow_tf32"),
    "printed tensors": Setting(_print_options, lambda options: torch.set_printoptions(**options)),
    "printed arrays": Setting(_numpys_print_options, _set_numpys_print_options),
    "warning filters": Setting(_warning_filters, _set_warning_filters),
    "logging levels": Setting(_levels, _set_levels),
}
"""By what a user would call it, in an order in which they can be set."""


def of_this_process() -> dict[str, Any]:
    """Return this process's settings, as plain values, by name."""
    found = {}
    for name, setting in ALL.items():
        # Of another PyTorch, or one in which a newer attribute is in use.
        with contextlib.suppress(AttributeError, RuntimeError):
            found[name] = setting.get()
    return found


def apply(settings: Mapping[str, Any]) -> None:
    """Make them this process's own. A setting that this process does not have, or does not take, stays as it is."""
    for name, value in settings.items():
        setting = ALL.get(name)
        with contextlib.suppress(Exception):  # of another PyTorch, say
            if setting is not None and setting.get() != value:
                setting.set(value)
