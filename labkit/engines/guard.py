"""Stands between a launcher (SLURM, torchrun) and one rank: starts it, passes on what the notebook asks, tells its end.

Started by its path, once per rank, as `python guard.py FOLDER`; needs nothing but the standard library, so that it is
there at once and does not fail with the rank. What it writes, and where, is `folder`'s to read.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ASKED_EVERY_S = 0.1
"""Time between two looks at what the notebook asks."""

STACKS_SIGNAL: Any = getattr(signal, "SIGUSR2", None)
"""As `worker` has it."""

START = "import labkit.engines.birth; from labkit.engines.remote import main; main()"


def main(folder: Path) -> int:
    """Run one rank, and give its exit code as a shell would."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the launcher
    elastic = "TORCHELASTIC_RUN_ID" in os.environ
    rank = os.environ["RANK" if elastic else "SLURM_PROCID"]
    told = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: told.append(number))
    if not (folder / "job.pkl").exists():
        print(f"rank {rank}: {folder} cannot be seen on {os.uname().nodename}; every node must see it", flush=True)
        return 66
    attempt = _attempt(folder, rank, elastic)
    base = folder / "ranks" / f"{rank}.{attempt}"
    kept = Path(__file__).parents[2]  # where this package lies
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(kept), os.environ.get("PYTHONPATH")]))}
    asked = folder / "asked"
    heard = asked.stat().st_size
    # The rank, which inherits this, would die of a question for its stacks that comes before it knows the answer.
    signal.pthread_sigmask(signal.SIG_BLOCK, {STACKS_SIGNAL})
    with open(f"{base}.out", "ab") as output:
        child = subprocess.Popen(
            [sys.executable, "-c", START, str(folder), rank, str(attempt)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env=environment,
        )
    starved_before = out_of_memory_kills()
    assert child.stdin is not None
    while child.poll() is None:
        if told:
            child.terminate()
        with contextlib.suppress(OSError), open(asked, "rb") as file:
            file.seek(heard)
            words = file.read()
            words = words[: words.rfind(b"\n") + 1]
            heard += len(words)
            for word in words.split():
                if word == b"stacks":
                    child.send_signal(STACKS_SIGNAL)
                elif word == b"end":
                    told.append(signal.SIGKILL)
                    child.kill()
                else:
                    child.stdin.write(word + b"\n")
                    child.stdin.flush()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(ASKED_EVERY_S)
    code, ended_s = child.returncode, time.time()
    starved = code == -signal.SIGKILL and not told and out_of_memory_kills() > starved_before
    with open(f"{base}.records", "a") as records:
        # In a line of its own, even if the rank was ended while it wrote one.
        records.write("\n" + json.dumps(["Exit", int(rank), code, starved, bool(told), ended_s]) + "\n")
    return 128 - code if code < 0 else code


def _attempt(folder: Path, rank: str, elastic: bool) -> int:
    """Claim the files of this attempt.

    SLURM counts the attempts. torchrun's agents count each for themselves, but the ranks of one attempt meet at the
    same port, which no other attempt has.
    """
    attempt = int(os.environ.get("SLURM_RESTART_COUNT", 0)) if not elastic else 0
    while True:
        if not elastic or _is_of_attempt(folder / f"attempt.{attempt}"):
            with contextlib.suppress(FileExistsError):
                os.close(os.open(folder / "ranks" / f"{rank}.{attempt}.records", os.O_CREAT | os.O_EXCL, 0o600))
                return attempt
        attempt += 1


def _is_of_attempt(path: Path) -> bool:
    """Whether this attempt is that of the ranks that meet where this one does; it is theirs who ask first."""
    here = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        os.symlink(here, path)  # made as a whole, or not at all
    except FileExistsError:
        return os.readlink(path) == here
    return True


def out_of_memory_kills() -> int:
    """Count the processes that Linux has ended for want of memory."""
    try:
        with open("/proc/vmstat") as counters:
            return next((int(line.split()[1]) for line in counters if line.startswith("oom_kill ")), 0)
    except OSError:
        return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
