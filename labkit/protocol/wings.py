"""The wings that take part in runs. The core imports none of them; it asks here for those that are there.

A wing takes part by its name in `WINGS` and by functions in its own `__init__`, which says what it does, and imports
the rest when that is needed. These are all there are; what no wing has the core does without:

    check(asked, gpus)   raises TypeError or ValueError for arguments of `labkit.launch` that are of no use
    companion(asked)     what it puts beside a run, a `labkit.monitor.companion.Companion`, or None. It hears the run's
                         events, may change its job, and says more of a failure or a wait
    rank_hooks()         what it does in each rank, a `labkit.protocol.job.RankHooks` from the wing's `hooks`
    rank_begins()        prepares a rank's process, before it has any work
    take_ranks(count)    processes that are ready to be a run's ranks, and
    ranks_done(count)    hears when they have ended
    history(world_size)  what takes in the log calls of so many ranks, and
    asking(run)          its part of the live view
    remark(history)      what is to be said of the values, and marked in the chart: has `name`, `said` and `mark(…)`
    charts_are_ready()   whether a chart can be drawn without an import; begins it where nobody has
    diagnose(ranks, …)   which rank of a run that failed was the first to fail, and why, and
    outcome(rank)        what became of each of the others
    stacks(run)          where a run's ranks stand just now
    unsendable(fn, …)    which value of a call cannot be pickled, why, and what to do, in words
    print_lines(run, …)  what prints how a run goes, where nobody watches it, and
    summarize(run)       what it has come to, by MIME type
    picture(figure)      a Plotly figure as a PNG, for where no browser draws

Of several that could do the same, the first does.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

WINGS = (
    "labkit.arguments",  # what `launch` cannot do, refused before a rank exists
    "labkit.reruns",  # a cell that is run again
    "labkit.tracking",  # the run's curves elsewhere, too: log_to=…
    "labkit.tracing",  # what every rank did when: trace=…
    "labkit.debugging",  # breakpoint() and input() in a rank
    "labkit.root_cause",  # which rank failed first
    "labkit.stacks",  # where ranks stand; what a silence says
    "labkit.collectives",  # in which collective ranks missed each other
    "labkit.stopping",  # a stop at a common step, in a grace by the run's own pace
    "labkit.in_vain",  # a stop that waits for nothing that cannot come
    "labkit.variables",  # what variables were when a rank failed
    "labkit.name_service",  # connections by address, without a name server
    "labkit.as_script",  # code of scripts, DataLoaders and optimizers in a rank
    "labkit.standby",  # ranks spawned ahead
    "labkit.not_finite",  # the first NaN or Inf
    "labkit.many",  # more ranks than can be drawn one by one
    "labkit.report",  # lines and a summary, for who does not watch
    "labkit.ahead",  # what the first chart needs, imported while ranks start
    "labkit.png",  # charts as pictures, where nobody watches
)


@functools.cache
def those_with(name: str) -> list[Callable[..., Any]]:
    """Return the functions of this name in the wings that are there."""
    found = [importlib.import_module(wing) for wing in WINGS if importlib.util.find_spec(wing)]
    return [getattr(wing, name) for wing in found if hasattr(wing, name)]


def first(name: str, *args: Any) -> Any:
    """Return what the first wing returns that has a function of this name and returns anything; else None."""
    return next((found for call in those_with(name) if (found := call(*args)) is not None), None)


def hooks_modules() -> list[str]:
    """Return the modules that a rank imports with its job, so that one that has none yet can do so ahead."""
    there = [wing for wing in WINGS if importlib.util.find_spec(wing)]
    return [f"{wing}.hooks" for wing in there if importlib.util.find_spec(f"{wing}.hooks")]
