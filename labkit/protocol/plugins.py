"""The plugins that take part in runs. The core imports none of them; it asks here for those that are there.

A plugin is a package in `labkit.plugins`, which lists them; it takes part by functions in its own `__init__`, which
says what it does, and imports the rest when that is needed. These are all there are; what no plugin has the core does
without:

    companion(asked)        what it puts beside a run, a `labkit.monitor.companion.Companion`, or None. It hears the
                            run's events, may change its job, and says more of a failure or a wait
    rank_hooks()            what it does in each rank, a `labkit.protocol.job.RankHooks` from the plugin's `hooks`
    rank_begins()           prepares a rank's process, before it has any work, and
    rank_waits()            uses the time while it has none
    history(world_size)     what takes in the log calls of so many ranks,
    asking(run)             its part of the live view, and
    search_output(…, words) the lines of output with certain words in them, each with its ranks
    remark(history)         what is to be said of the values, and marked in the chart: `name`, `said`, `mark(…)`
    stacks(run)             where a run's ranks stand just now
    unsendable(fn, …)       which value of a call cannot be pickled, why, and what to do, in words
    print_lines(run, …)     what prints how a run goes, where nobody watches it, and
    summarize(run)          what it has come to, by MIME type

Of several that could do the same, the first does.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

ROOMS = ("labkit.trackers", "labkit.trace", "labkit.debugger")
"""Rooms that take part in runs as the plugins do."""


@functools.cache
def names() -> list[str]:
    """Return the plugins that are there, as modules, in the order in which they are asked."""
    if not importlib.util.find_spec("labkit.plugins"):
        return []
    listed = (f"labkit.plugins.{name}" for name in importlib.import_module("labkit.plugins").NAMES)
    return [name for name in (*listed, *ROOMS) if importlib.util.find_spec(name)]


@functools.cache
def those_with(function: str) -> list[Callable[..., Any]]:
    """Return the functions of this name in the plugins that are there."""
    found = map(importlib.import_module, names())
    return [getattr(plugin, function) for plugin in found if hasattr(plugin, function)]


def first(function: str, *args: Any) -> Any:
    """Return what the first plugin returns that has a function of this name and returns anything; else None."""
    return next((found for call in those_with(function) if (found := call(*args)) is not None), None)
