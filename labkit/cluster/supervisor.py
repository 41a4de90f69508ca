"""Stands between a launcher (SLURM, torchrun) and one rank: starts it, passes on what the notebook asks, tells its end.

Started by its path, once per rank, as `python supervisor.py FOLDER`; needs nothing but the standard library, so that
it is there at once and does not fail with the rank. What it writes, and where, is `run_directory`'s to read.

In the folder of a session the rank stays, and does one job after another. One that dies, or that is ended with its run,
is replaced here by a new process, while the launcher sees nothing of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ASKED_EVERY_S = 0.1
"""Time between two looks at what the notebook asks."""

SESSION_ASKED_EVERY_S = (0.02, 0.25)
"""Least and greatest time between two looks in a session. They become rarer with the time since the last word …"""

REST_SHARE = 500
"""… so that after a minute a look comes every 0.12 s."""

IDLE_EVERY_S = 0.5
"""Time between two looks whether the session is idle."""

LEAVE_S = 3.0
"""How long a rank that is told to leave may take."""

END_CHARACTERS = 4096
"""Of a rank's records, in which its last is looked for."""

STACKS_SIGNAL: Any = getattr(signal, "SIGUSR2", None)
"""As `rank.signals` has it."""

START = "import labkit.rank.die_with_parent; from labkit.cluster.{} import main; main()"


def main(folder: Path) -> int:
    """Run one rank, and give its exit code as a shell would."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the launcher
    elastic = "TORCHELASTIC_RUN_ID" in os.environ
    rank = os.environ["RANK" if elastic else "SLURM_PROCID"]
    told: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: told.append(number))
    if not (folder / "run.json").exists():
        print(f"rank {rank}: {folder} cannot be seen on {os.uname().nodename}; every node must see it", flush=True)
        return 66
    # The rank, which inherits this, would die of a question for its stacks that comes before it knows the answer.
    signal.pthread_sigmask(signal.SIG_BLOCK, {STACKS_SIGNAL})
    if (folder / "jobs").is_dir():
        return Reserved(folder, rank, told).mind()
    attempt = _attempt(folder, rank, elastic)
    words = Words(folder)
    words.skip()
    child = Child(folder / "ranks" / f"{rank}.{attempt}", "rank_entry", [str(folder), rank, str(attempt)])
    while child.process.poll() is None:
        if told:
            child.process.terminate()
        for word in words.new():
            if word == "stacks":
                child.process.send_signal(STACKS_SIGNAL)
            elif word == "end":
                told.append(signal.SIGKILL)
                child.process.kill()
            else:
                child.say(word)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(ASKED_EVERY_S)
    _append(child.records, child.end(rank, bool(told)))
    code = child.process.returncode
    return 128 - code if code < 0 else code


class Words:
    """What the notebook asks, a word a line."""

    def __init__(self, folder: Path) -> None:
        self._asked = folder / "asked"
        self._heard = 0

    def skip(self) -> None:
        """Pass over what has been asked so far."""
        self._heard = self._asked.stat().st_size

    def new(self) -> list[str]:
        """Return the words since the last look."""
        try:
            with open(self._asked, "rb") as file:
                file.seek(self._heard)
                words = file.read()
        except OSError:  # over a network not just now
            return []
        words = words[: words.rfind(b"\n") + 1]
        self._heard += len(words)
        return words.decode().split()


class Child:
    """A rank's process."""

    def __init__(self, base: Path, module: str, arguments: list[str]) -> None:
        self.records = Path(f"{base}.records")
        kept = Path(__file__).parents[2]  # where this package lies
        path = os.pathsep.join(filter(None, [str(kept), os.environ.get("PYTHONPATH")]))
        self._starved_before = out_of_memory_kills()
        with open(f"{base}.out", "ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", START.format(module), *arguments],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env={**os.environ, "PYTHONPATH": path},
            )

    def say(self, word: str) -> None:
        """Pass a word on. A process that has just ended does not hear it."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(f"{word}\n".encode())
            self.process.stdin.flush()

    @property
    def is_ready(self) -> bool:
        """Whether the process has said that it waits for work, or has waited."""
        return b'["Ready"' in self.records.read_bytes()

    def end(self, rank: str, ended: bool) -> list[Any]:
        """Return the record of how the process ended; `ended` is whether it was ended from outside."""
        code = self.process.returncode
        starved = code == -signal.SIGKILL and not ended and out_of_memory_kills() > self._starved_before
        return ["Exit", int(rank), code, starved, ended, time.time()]


class Reserved:
    """Minds one rank of a session, whatever process it is just now."""

    def __init__(self, folder: Path, rank: str, told: list[int]) -> None:
        self._folder, self._rank, self._told = folder, rank, told
        self._words = Words(folder)
        self._idle_s: float | None = json.loads((folder / "run.json").read_text())["session"]["idle_s"]
        self._job = ""
        """The newest job that this rank was given."""
        self._newest = ("", [""])
        """The newest job of the session, and the ranks that have a part in it."""
        self._killed = False
        self._leave_at_s = float("inf")
        self._heard_s = self._busy_s = self._looked_s = time.monotonic()
        """When a word came last, when a job was going on last, and when that was looked at."""
        self._child = self._start()

    def mind(self) -> int:
        """Do as the notebook says until the session is over; return the exit code."""
        awake, mine = os.pipe()
        for end in (awake, mine):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(mine)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # a rank's end is noticed at once
        while True:
            words = self._words.new()
            for position, word in enumerate(words):
                self._heard_s = self._busy_s = time.monotonic()
                self._do(word, words[position + 1 :])
            if self._told:
                self._child.process.terminate()
            if time.monotonic() > self._leave_at_s + LEAVE_S:
                self._child.process.kill()
            if (code := self._child.process.poll()) is not None and not self._replace():
                return 0 if code == 0 or self._leave_at_s < float("inf") else 128 - code if code < 0 else code
            self._end_if_idle()
            least_s, greatest_s = SESSION_ASKED_EVERY_S
            pause_s = min(max(least_s, (time.monotonic() - self._heard_s) / REST_SHARE), greatest_s)
            select.select([awake], [], [], pause_s)
            with contextlib.suppress(BlockingIOError):
                os.read(awake, 4096)

    def _do(self, word: str, later: list[str]) -> None:
        kind, _, rest = word.partition(":")
        number, _, ranks = rest.partition(":")
        if kind == "job":
            self._newest = (number, ranks.split(","))
            if self._rank in ranks.split(","):
                given_up = any(each.startswith(f"kill:{number}:") for each in later)
                self._take_up(number, given_up)
        elif kind == "kill":
            if number == self._job and self._rank in ranks.split(",") and not has_exit(self._records_of(number)):
                self._killed = True
                self._child.process.kill()
        elif word == "stacks":
            self._child.process.send_signal(STACKS_SIGNAL)
        elif word == "stop":
            self._child.say(word)
        elif word == "end":
            self._told.append(signal.SIGKILL)
            self._child.process.kill()
        elif word in ("leave", "idle"):
            self._leave_at_s = time.monotonic()
            self._child.say("leave")

    def _take_up(self, number: str, given_up: bool) -> None:
        """Give the process a job, unless another of this rank has begun it before, or nobody waits for it any more."""
        records = self._records_of(number)
        if given_up or records.exists():
            self._never_ends(records)
        else:
            self._job = number
            self._child.say(f"job:{number}")

    def _replace(self) -> bool:
        """Tell how the process ended, and start another; return whether there is one. None is if it cannot start."""
        ended = self._killed or bool(self._told)
        end = self._child.end(self._rank, ended)
        was_ready = self._child.is_ready
        _append(self._child.records, end)
        leaves = bool(self._told) or self._leave_at_s < float("inf")
        records = self._records_of(self._job) if self._job else None
        again = was_ready and not ended and not leaves and records is not None and not records.exists()
        if records is not None and not again and not has_exit(records):
            _append(records, [*end[:4], ended or leaves, end[5]])
        if leaves or not (was_ready or self._killed):
            return False
        self._killed = False
        self._child = self._start()
        if again:  # it died before it knew of the job
            self._child.say(f"job:{self._job}")
        return True

    def _start(self) -> Child:
        """Start a process under the next number that this rank has not had."""
        number = 0
        while True:
            base = self._folder / "ranks" / f"{self._rank}.{number}"
            try:
                os.close(os.open(f"{base}.records", os.O_CREAT | os.O_EXCL, 0o600))
                break
            except FileExistsError:
                self._never_ends(Path(f"{base}.records"))
                number += 1
        child = Child(base, "reserved", [str(self._folder), self._rank, str(number)])
        node = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
        _append(child.records, ["Process", int(self._rank), child.process.pid, node])
        return child

    def _never_ends(self, records: Path) -> None:
        """Say that a process is gone that could not be seen to end: its node was lost, or taken away."""
        if not has_exit(records):
            _append(records, ["Exit", int(self._rank), -9, False, True, time.time(), True])

    def _records_of(self, job: str) -> Path:
        return self._folder / "jobs" / job / "ranks" / f"{self._rank}.0.records"

    def _end_if_idle(self) -> None:
        """End the session if nothing has run on it for `idle_s`, whether its notebook is there or not."""
        now = time.monotonic()
        if self._rank != "0" or self._idle_s is None or now < self._looked_s + IDLE_EVERY_S:
            return
        self._looked_s = now
        number, ranks = self._newest
        if number:
            files = [self._folder / "jobs" / number / "ranks" / f"{rank}.0.records" for rank in ranks]
            if not all(map(has_exit, files)):
                self._busy_s = now
                return
            self._newest = ("", [])  # it is over, which need not be looked at again
        if not self._child.is_ready:
            self._busy_s = now
        if now > self._busy_s + self._idle_s and self._leave_at_s == float("inf"):
            with open(self._folder / "asked", "a") as asked:
                asked.write("idle\n")
            self._busy_s = now


def _append(records: Path, event: list[Any]) -> None:
    # In a line of its own, even if the rank was ended while it wrote one.
    with open(records, "a") as file:
        file.write("\n" + json.dumps(event) + "\n")


def has_exit(records: Path) -> bool:
    """Whether a rank's last event is there."""
    try:
        with open(records, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - END_CHARACTERS))
            return any(line.startswith(b'["Exit"') for line in file.read().splitlines())
    except OSError:
        return False


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
