"""Former names of arguments and functions: using one raises an error with today's name."""

from __future__ import annotations

from collections.abc import Iterable

FORMER = {
    "launch": {"timeout_s": "stall_s"},
    "compare": {"timeout_s": "stall_s", "name": "metric"},
    "Session.run": {"timeout_s": "stall_s"},
    "Session.values": {"timeout_s": "stall_s"},
    "%%ranks": {"--timeout": "--stall"},
    "Torchrun": {"nnodes": "nodes", "nproc_per_node": "ranks_per_node"},
    "labkit.engines.standby": {"memory": "unique_bytes"},
    "labkit.profiling": {"memory": "tensor_bytes"},
    "labkit.scaling": {"memory": "predict_memory"},
}
"""Today's names by former ones, of each call or module."""


def renamed(where: str, names: Iterable[str]) -> str:
    """Return the message for the first former name among these; "" if there is none."""
    former = FORMER.get(where, {})
    return next((f"{where} has no {name}: it is called {former[name]} now" for name in names if name in former), "")


def refuse(call: str, names: Iterable[str], may_be_others: bool = False) -> None:
    """Raise TypeError for arguments by these names that a call does not have: for a former name, with today's.

    Args:
        call: as `FORMER` has it.
        names: of the arguments that were given besides those that the call has.
        may_be_others: whether other names are somebody else's: the launched function's, say.
    """
    names = list(names)
    if said := renamed(call, names):
        raise TypeError(said)
    if names and not may_be_others:
        raise TypeError(f"{call}() got an unexpected keyword argument {names[0]!r}")
