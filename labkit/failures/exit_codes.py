"""Exit codes as text."""

from __future__ import annotations

import signal


def in_words(code: int) -> str:
    """Return an exit code as text: "exit code 3", "SIGKILL", "exit code 137: SIGKILL, as a shell says it".

    Args:
        code: As in `multiprocessing.Process.exitcode`: negative for a signal.
    """
    if code < 0:
        return _signal_name(-code) or f"signal {-code}"
    name = _signal_name(code - 128)
    return f"exit code {code}: {name}, as a shell says it" if name else f"exit code {code}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return ""
