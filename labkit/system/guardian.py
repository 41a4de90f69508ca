"""Ends what a notebook has started once the notebook is gone, where the system has no signal for that (macOS, Windows).

The problem: a kernel that is killed runs no exit handler, and a rank whose native code keeps Python's lock does not
notice that its inbox has closed; torchrun's agent has no inbox at all. Linux kills a process at its parent's end.
What does not work: a process group, for a shell's Ctrl-C goes to it too; a thread, which ends with the notebook.
What is done: a program beside the notebook reads from a pipe whose other end only the notebook has. Each line names a
process, or one that has ended; at the pipe's end the program kills what is left. It is there while it guards any.
What still fails: a process that the notebook has forked, not spawned, keeps the pipe open; and who kills the guardian
too is alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading

GONE_S = 5.0
"""How long the guardian may take to end once it guards nothing."""

_lock = threading.Lock()
_guarded: dict[int, str] = {}
"""By process, how it is named to the guardian."""

_guardian: subprocess.Popen[bytes] | None = None
_pid = 0
"""Whose guardian it is: a fork has none."""


def guard(pid: int, family: bool = False) -> None:
    """Have a process killed when this one has gone; with `family`, whatever it has started, too."""
    global _guardian, _pid
    with _lock:
        if _guardian is None or _pid != os.getpid() or _guardian.poll() is not None:
            _guardian = subprocess.Popen(
                [sys.executable, os.path.abspath(__file__)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                # The interrupt that a terminal sends to the notebook is not for it.
                start_new_session=True,
                creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
            )
            if _pid != os.getpid():
                _guarded.clear()
            _pid = os.getpid()
            for line in _guarded.values():  # of one that somebody has killed
                _tell(line)
        _guarded[pid] = f"{'*' if family else '+'}{pid}"
        _tell(_guarded[pid])


def unguard(pid: int) -> None:
    """Forget a process that has ended: its number may be another's soon."""
    global _guardian
    with _lock:
        if _guardian is None or _pid != os.getpid() or pid not in _guarded:
            return
        del _guarded[pid]
        _tell(f"-{pid}")
        if not _guarded:
            guardian, _guardian = _guardian, None
            assert guardian.stdin is not None
            with contextlib.suppress(OSError):
                guardian.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                guardian.wait(GONE_S)


def _tell(line: str) -> None:
    assert _guardian is not None
    assert _guardian.stdin is not None
    with contextlib.suppress(OSError):  # somebody has killed it
        _guardian.stdin.write(f"{line}\n".encode())
        _guardian.stdin.flush()


def main() -> None:
    """Read who is to be guarded until the notebook is gone; then kill those."""
    guarded: dict[int, bool] = {}
    for line in sys.stdin.buffer:
        kind, pid = line[:1], int(line[1:])
        if kind == b"-":
            guarded.pop(pid, None)
        else:
            guarded[pid] = kind == b"*"
    for pid, with_family in guarded.items():
        for each in [pid, *(_descendants(pid) if with_family else [])]:
            with contextlib.suppress(OSError):
                os.kill(each, getattr(signal, "SIGKILL", signal.SIGTERM))


def _descendants(pid: int) -> list[int]:
    import psutil

    with contextlib.suppress(psutil.Error):
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    return []


if __name__ == "__main__":
    main()
