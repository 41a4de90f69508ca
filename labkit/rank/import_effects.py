"""Modules on reserved ranks: imported once, by whichever job comes first. What that means for the jobs after it.

The problem. A module that sets up logging, adds a folder to `sys.path` or replaces `print` does so when it is
imported. After the job such settings are put back, and in the next one the module is there, and its settings are not.
And a module that was edited stays as it was imported.

What does not work. To import all of the reader's modules again for each job: many cannot be imported twice (a registry
refuses a name that it has), and some take long.

The solution. Whatever changes while a module is imported belongs to the module: it is noted, and changed again when a
job begins. Modules whose files have changed since are forgotten, with those that have something of them; they are then
imported anew by whoever needs them. What still fails: what a module changes in a thread of its own, or when it is used.
"""

from __future__ import annotations

import contextlib
import importlib._bootstrap
import importlib.util
import linecache
import os
import sys
import threading
import types
from collections.abc import Mapping
from typing import Any, NamedTuple

from labkit.protocol import modules
from labkit.rank import settings
from labkit.rank.settings import Setting

NOT_OF_MODULES = (
    *("arguments", "cores", "random states", "remote calls", "signal handlers", "streams and hooks", "threads"),
    "working folder",
)
"""Settings of a process and a job, whatever is imported there."""


class _Change(NamedTuple):
    """What an import has changed."""

    name: str
    before: Any
    after: Any


_changes: list[_Change] = []


def watch(all_settings: Mapping[str, Setting]) -> None:
    """Note from now on what modules change when they are imported, in the main thread."""
    watched = {name: setting for name, setting in all_settings.items() if name not in NOT_OF_MODULES}
    bootstrap: Any = importlib._bootstrap
    load, is_loading = bootstrap._load_unlocked, False

    def load_and_note(spec: Any) -> Any:
        nonlocal is_loading
        if is_loading or threading.current_thread() is not threading.main_thread():
            return load(spec)
        is_loading, before = True, settings.read(watched)
        try:
            return load(spec)
        finally:
            is_loading = False
            after = settings.read(watched)
            _changes.extend(_Change(n, before[n], after[n]) for n in before if n in after and before[n] != after[n])
            if isinstance(spec.origin, str) and modules.is_readers(os.path.abspath(spec.origin)):
                modules.of_reader()  # which keeps the stamps of their files

    # Python leaves frames of this file out of the traceback of an import that fails.
    load_and_note.__code__ = load_and_note.__code__.replace(co_filename="<frozen importlib._bootstrap>")
    bootstrap._load_unlocked = load_and_note
    modules.of_reader()


def do_again(all_settings: Mapping[str, Setting]) -> None:
    """Change again what imports have changed in earlier jobs."""
    for name, before, after in _changes:
        setting = all_settings[name]
        now = setting.get()
        if (wanted := _merged(now, before, after)) != now:
            setting.set(wanted)


def _merged(now: Any, before: Any, after: Any) -> Any:
    """Return what a setting is when the same is changed in it that has led from `before` to `after`."""
    if isinstance(now, dict):
        changed = {name: value for name, value in after.items() if name not in before or before[name] != value}
        return {**{name: value for name, value in now.items() if name in after or name not in before}, **changed}
    if isinstance(now, list):
        added = [each for each in after if each not in before and each not in now]
        return [*added, *now] if after[:1] == added[:1] else [*now, *added]
    return after


def forget_edited() -> None:
    """Forget the reader's modules whose files have changed since they were imported, and those that use them."""
    own = modules.of_reader()
    edited = {name for name, each in own.items() if modules.stamp(each.file) not in (None, each.stamp)}
    if not edited:
        return
    dropped = set(edited)
    while more := {name for name in own.keys() - dropped if _uses(sys.modules.get(name), dropped)}:
        dropped |= more
    for name in edited:
        # Python compares a compiled file's time in seconds.
        with contextlib.suppress(OSError, NotImplementedError):
            os.remove(importlib.util.cache_from_source(own[name].file))
    importlib.invalidate_caches()
    linecache.checkcache()
    for name in dropped:
        sys.modules.pop(name, None)


def _uses(module: types.ModuleType | None, others: set[str]) -> bool:
    """Whether a module's variables are other modules, or defined there."""
    values = list(vars(module).values()) if module is not None else []
    return any(
        (value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)) in others
        for value in values
    )
