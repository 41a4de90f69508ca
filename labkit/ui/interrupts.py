"""What the notebook's ■ button ends: the launch that is waited for, and at the second time the cell.

An interrupt stops a launch, which then returns what it has, so that the cell can go on with that. A loop of launches
goes on, too, with the next one. So the second interrupt within an execution of a cell ends the cell: at once, or, where
both came during one launch, whose run is to be returned, at the next.
"""

from __future__ import annotations

from labkit.monitor.record import RunRecord
from labkit.ui import kernel

_execution: kernel.Execution | None = None
_count = 0
"""Interrupts during launches of that execution."""


def said() -> str:
    """Return what an interrupt has done, and what another one would do."""
    key = "■" if kernel.has_kernel() else "Ctrl-C"
    return f"{key} has ended this launch; the cell goes on, and {key} again ends it"


def _counted() -> int:
    global _execution, _count
    if (now := kernel.this_execution()) is None or now != _execution:
        _execution, _count = now, 0
    return _count


def check_cell_goes_on() -> None:
    """Raise KeyboardInterrupt where the cell has been told to end. Called before a launch."""
    if _counted() >= 2:
        raise KeyboardInterrupt("this cell's last launch was interrupted twice")


def note(run: RunRecord) -> None:
    """Note a launch that is over; raise KeyboardInterrupt if an earlier one of this cell was interrupted, too."""
    global _count
    if run.interrupts and kernel.shell() is not None:
        earlier = _counted()
        _count = earlier + run.interrupts
        if earlier:
            raise KeyboardInterrupt("two launches of this cell were interrupted")
