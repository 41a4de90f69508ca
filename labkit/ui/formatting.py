"""What the views say of a run: as text, and as HTML that needs no style sheet, no script and no network."""

from __future__ import annotations

from labkit.monitor import not_finite
from labkit.monitor.record import RunRecord

TAIL_LINES = 200
"""Lines of each rank's output that are shown, and kept with the notebook."""

WRAPPED = "white-space:pre-wrap;word-break:normal;overflow-wrap:anywhere"
"""Style of text in lines that may be too long; JupyterLab's own cuts words in two."""


def phase(run: RunRecord) -> str:
    """Return the run's status, in the words that the views use."""
    if run.status == "running" and run.stopping:
        return "stopping after this step"
    if run.status == "stopped" and run.interrupts:
        return "stopped by an interrupt"
    return "starting" if run.status == "running" and "starting" in run.states else run.status


def shortened(text: str, characters: int) -> str:
    """Return the beginning and the end of a text that is too long, of a path, say, of which the end tells most."""
    if len(text) <= characters:
        return text
    end = (characters - 1) * 2 // 3
    return f"{text[: characters - 1 - end]}…{text[len(text) - end :]}"


def rate(per_s: float) -> str:
    """Return a number per second with the digits that matter."""
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.3g}"


def remark(run: RunRecord) -> str:
    """Return which rank was the first to log a NaN or an Inf, in one line; "" if none has."""
    return str(not_finite.first(run.recorded) or "")


def plain(run: RunRecord) -> str:
    """Return how a run ended in plain ASCII, which any front end takes: for when its report cannot be shown."""
    said = repr(run) if run.error is None else f"{run!r}\n{run.error}"
    return said.encode("ascii", "backslashreplace").decode()
