"""Minds one reserved rank on a cluster: does for a session what `labkit.launchers.supervisor` does for a run.

The rank stays, and does one job after another. One that dies, or that is ended with its run, is replaced here by a new
process, while the launcher sees nothing of it. What is read and written, and where, is in `directory`.

Started by its path, as `python supervisor.py DIRECTORY`; imports nothing but the standard library and the other
supervisor, whose package is as light.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    # The package's folder, in place of the script's own, where `ray` and `directory` are not what others import.
    sys.path[:] = [str(Path(__file__).parents[2]), *(path for path in sys.path if path != str(Path(__file__).parent))]

from labkit.launchers.run_directory.files import append, clock_off_s, free_reserve, has_exit
from labkit.launchers.supervisor import (
    LAST_WORD_S,
    Child,
    Supervisor,
    as_a_shell_has_it,
    main,
    stay_for_the_launcher,
)
from labkit.system import host

ASKED_EVERY_S = (0.02, 0.25)
"""Least and greatest time between two looks at what the notebook asks. They become rarer with the time since the last
word …"""

REST_SHARE = 500
"""… so that after a minute a look comes every 0.12 s."""

IDLE_EVERY_S = 0.5
"""Time between two looks whether the session is idle."""

LEAVE_S = 3.0
"""How long a rank that is told to leave may take."""


class SessionSupervisor(Supervisor):
    """Keeps one rank of a session, whatever process it is just now."""

    def __init__(self, directory: Path, rank: str, signals: list[int]) -> None:
        self._idle_s: float | None = json.loads((directory / "run.json").read_text(encoding="utf-8"))["session"][
            "idle_s"
        ]
        self._job = ""
        """The newest job that this rank was given."""
        self._newest = ("", [""])
        """The newest job of the session, and the ranks that have a part in it."""
        self._was_killed = False
        """Whether the process was ended with its run, and not with the session."""
        self._leave_at_s = float("inf")
        self._word_s = self._busy_s = self._looked_s = time.monotonic()
        """When a word came last, when a job was going on last, and when that was looked at."""
        super().__init__(directory, rank, signals)

    def _obey(self, words: list[str]) -> None:
        for position, word in enumerate(words):
            self._word_s = self._busy_s = time.monotonic()
            self._obey_word(word, words[position + 1 :])
        self._end_if_idle()
        if time.monotonic() > self._leave_at_s + LEAVE_S:
            self._child.process.kill()

    def _look_again_s(self) -> float:
        least_s, greatest_s = ASKED_EVERY_S
        return min(max(least_s, (time.monotonic() - self._word_s) / REST_SHARE), greatest_s)

    def _note_end(self) -> int | None:
        code = self._child.process.returncode
        return None if self._replace() else self._exit_code(code)

    def _obey_word(self, word: str, later: list[str]) -> None:
        kind, _, rest = word.partition(":")
        number, _, ranks = rest.partition(":")
        if kind == "job":
            self._newest = (number, ranks.split(","))
            if self._rank in ranks.split(","):
                given_up = any(each.startswith(f"kill:{number}:") for each in later)
                self._take_up(number, given_up)
        elif kind == "kill":
            if number == self._job and self._rank in ranks.split(",") and not has_exit(self._records_of(number)):
                self._was_killed = True
                self._child.process.kill()
        elif word == "stacks":
            self._child.ask_for_stacks()
        elif word == "stop":
            self._child.send(word)
        elif word == "end":
            self._end()
        elif word in ("leave", "idle"):
            self._leave_at_s = time.monotonic()
            self._child.send("leave")

    def _obey_the_launcher(self) -> None:
        """End the process; but under SLURM let a job that is going on stop. See `labkit.launchers.supervisor`."""
        records = self._records_of(self._job)
        is_at_it = bool(self._job) and os.path.exists(records) and not has_exit(records)
        if is_at_it and not self._launcher.restarts_ranks:
            if not self._was_asked:
                self._was_asked = True
                # Whoever reads this knows that what ends now has not ended by itself.
                append(records, ["Interrupted", int(self._rank)])
                self._child.send("stop")
        else:
            self._child.end_for_the_launcher(self._launcher)

    def _exit_code(self, code: int) -> int:
        if self._signals and not self._launcher.restarts_ranks:
            if self._rank == "0":
                stay_for_the_launcher()
            return 0  # else SLURM counts the job as failed
        if code == 0 or self._leave_at_s < float("inf"):
            return 0
        return as_a_shell_has_it(code)

    def _take_up(self, number: str, given_up: bool) -> None:
        """Give the process a job, unless another of this rank has begun it before, or nobody waits for it any more."""
        records = self._records_of(number)
        if given_up or os.path.exists(records):
            self._never_ends(records)
        else:
            if self._was_killed:  # it ends with the job before, and this one is its successor's
                self._child.process.wait()
                self._replace()
            self._job = number
            self._child.send(f"job:{number}")

    def _replace(self) -> bool:
        """Record how the process ended, and start another; return whether there is one. None is if it cannot start."""
        goes = self._was_ended or bool(self._signals)
        end = self._child.end(self._rank, self._was_killed or goes)
        was_ready = self._child.is_ready
        append(self._child.records, end, LAST_WORD_S)
        leaves = goes or self._leave_at_s < float("inf")
        records = self._records_of(self._job) if self._job else None
        again = was_ready and not (self._was_killed or leaves) and records is not None and not os.path.exists(records)
        if records is not None and not again and not has_exit(records):
            append(records, [*end[:4], self._was_killed or leaves, end[5]], LAST_WORD_S)
            free_reserve(records)
        if leaves or not (was_ready or self._was_killed):
            return False
        self._was_killed = False
        self._child = self._start()
        if again:  # it died before it knew of the job
            self._child.send(f"job:{self._job}")
        return True

    def _start(self) -> Child:
        """Start a process under the next number that this rank has not had."""
        number = 0
        while True:
            base = self._directory / "ranks" / f"{self._rank}.{number}"
            try:
                os.close(os.open(f"{base}.records", os.O_CREAT | os.O_EXCL, 0o600))
                break
            except FileExistsError:
                self._never_ends(Path(f"{base}.records"))
                number += 1
        child = Child(base, "labkit.session.rank_entry", [str(self._directory), self._rank, str(number)], self._signals)
        node = os.environ.get("SLURMD_NODENAME") or host.node()
        append(child.records, ["Process", int(self._rank), child.process.pid, node])
        return child

    def _never_ends(self, records: Path) -> None:
        """Record that a process is gone that could not be seen to end: its node was lost, or taken away."""
        if not has_exit(records):
            at_s = time.time() - clock_off_s(self._directory, records)
            append(records, ["Exit", int(self._rank), -9, "", True, at_s, True], LAST_WORD_S)
            free_reserve(records)

    def _outputs(self) -> list[Path]:
        """Return the files that the process prints to."""
        return [self._child.output, *([self._records_of(self._job).with_suffix(".out")] if self._job else [])]

    def _records_of(self, job: str) -> Path:
        return self._directory / "jobs" / job / "ranks" / f"{self._rank}.0.records"

    def _end_if_idle(self) -> None:
        """End the session if nothing has run on it for `idle_s`, whether its notebook is there or not."""
        now = time.monotonic()
        if self._rank != "0" or self._idle_s is None or now < self._looked_s + IDLE_EVERY_S:
            return
        self._looked_s = now
        number, ranks = self._newest
        if number:
            files = [self._directory / "jobs" / number / "ranks" / f"{rank}.0.records" for rank in ranks]
            if not all(map(has_exit, files)):
                self._busy_s = now
                return
            self._newest = ("", [])  # it is over, which need not be looked at again
        if not self._child.is_ready:
            self._busy_s = now
        if now > self._busy_s + self._idle_s and self._leave_at_s == float("inf"):
            with contextlib.suppress(OSError):  # a full disk, say; it is tried again
                with open(self._directory / "asked", "a", encoding="utf-8") as asked:
                    asked.write("idle\n")
                self._busy_s = now


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), SessionSupervisor))
