"""Stands between a launcher (SLURM, Ray) and one rank: starts it, passes requests on, records how it ended.

Started by its path, once per rank, as `python supervisor.py DIRECTORY`; needs nothing but the standard library, and of
labkit modules that need no more, so that it is there at once and does not fail with the rank. What it writes, and
where, is `reader`'s to read.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # The package's folder, in place of the script's own, where `ray` and `directory` are not what others import.
    sys.path[:] = [str(Path(__file__).parents[2]), *(path for path in sys.path if path != str(Path(__file__).parent))]

from labkit.launchers.environments import RankVariables, launcher_here
from labkit.launchers.run_directory.files import Folder, append, clock_off_s, free_reserve
from labkit.launchers.run_directory.growing import Lines
from labkit.launchers.run_directory.private import private
from labkit.rank.private_folder import remove_of
from labkit.system import host
from labkit.system.out_of_memory import OutOfMemoryKills

# A signal from the launcher. SLURM sends SIGTERM when it takes the machines away (preemption, `scancel`, the time
# limit, `scontrol requeue`), and SIGKILL only when its grace is over: KillWait, 30 s unless the cluster says otherwise,
# and a partition's GraceTime before it.
#
# What does not work: to pass the signal on, for Python then dies at once, without a last checkpoint; to end the rank
# before SLURM does, for the grace is not known here (GraceTime may be a partition's or a quality of service's); to
# leave the signal to this process, for SLURM sends it to the rank, too, and to whatever that has started.
#
# So ranks do not obey it (`rank_entry.outlive_the_launchers_signal`). They are asked to stop as the notebook asks,
# `labkit.Stopped` at a common step, and SLURM ends what goes on.
# Two cases are not the machines' loss, and there the rank is ended at once: another rank has failed, which its
# supervisor has noted in `failed.<attempt>` before srun could know; and "end" from the notebook.
#
# Signals that a user has asked SLURM for (`signal="USR1@60"`, before the time limit), or sends by `scancel -s`, are for
# the function's own handler. They come to every process of the job, and this one must not die of them. One that is
# ignored here would be ignored in the rank, too, so they are handled by doing nothing.
#
# Before a rank is ended so, it is asked where it is: it may be the one that the others waited for. The notebook cannot
# ask any more.
#
# What still fails: where `failed.<attempt>` is seen late, over a network, the others have the grace. And a job that
# ends within a GraceTime counts as done, and SLURM does not start it again: so the first rank's supervisor stays until
# SLURM has begun to take the machines, `STAY_S` at most.

ASKED_EVERY_S = 0.1
"""Time between two looks at what the notebook asks."""

STAY_S = 600.0
"""How long a job whose ranks have stopped when they were asked stays for SLURM to take its machines."""

STATE_EVERY_S = 2.0
"""Time between two questions to SLURM whether it has."""

NOT_SEEN = 66
"""Exit code where the directory cannot be seen."""

NOT_WRITTEN = 67
"""Exit code where nothing can be written there."""

WHERE_S = 1.0
"""How long a rank may take to answer where it is, before it is ended because another has failed."""

ENDED_EARLY = 68
"""Exit code where a rank has ended with 0 before its function had. With 0, the launcher would let the others wait."""

LAST_WORD_S = 10.0
"""How long it is tried to write how a rank ended. The reserve is freed for it; others may take that room first."""

START = "import labkit.rank.die_with_parent; from {} import main; main()"


class Supervisor:
    """Starts one rank, passes on to it what the notebook and the launcher ask, and records how it ended."""

    def __init__(self, directory: Path, rank: str, signals: list[int]) -> None:
        self._directory, self._rank, self._signals = directory, rank, signals
        self._launcher = launcher_here()
        self._asked, self._folder = Lines(directory / "asked"), Folder(directory)
        self._was_ended = self._was_asked = False
        """Whether the rank was ended from here; was asked to stop because the launcher takes the machine away."""
        self._child = self._start()

    def run(self) -> int:
        """Do as the notebook and the launcher ask until there is no rank any more; return the exit code."""
        awake, mine = os.pipe()
        for end in (awake, mine):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(mine)
        host.watch_children()  # a rank's end is noticed at once
        while True:
            self._obey(b" ".join(self._asked.new()).decode(errors="replace").split())
            if self._folder.look(self._outputs()) and not self._was_ended:
                print(f"rank {self._rank}: {self._folder.gone_in_words}; the rank is ended", flush=True)
                self._end()
            if self._signals:
                self._obey_the_launcher()
            if self._child.process.poll() is not None and (code := self._note_end()) is not None:
                return code
            select.select([awake], [], [], self._look_again_s())
            with contextlib.suppress(BlockingIOError):
                os.read(awake, 4096)

    def _start(self) -> Child:
        self._attempt = claim_attempt(self._directory, self._rank, self._launcher)
        self._asked.skip()
        base = self._directory / "ranks" / f"{self._rank}.{self._attempt}"
        arguments = [str(self._directory), self._rank, str(self._attempt)]
        return Child(base, "labkit.launchers.rank_entry", arguments)

    def _end(self) -> None:
        self._was_ended = True
        self._child.process.kill()

    def _obey(self, words: list[str]) -> None:
        for word in words:
            if word == "stacks":
                self._child.ask_for_stacks()
            elif word == "end":
                self._end()
            else:
                self._child.send(word)

    def _obey_the_launcher(self) -> None:
        if not self._was_asked:
            self._was_asked = True
            self._child.send("stop")
        if self._has_peer_failed() and self._child.has_said_where_it_is():
            self._child.process.kill()

    @property
    def _peer_failed(self) -> Path:
        return self._directory / f"failed.{self._attempt}"

    def _has_peer_failed(self) -> bool:
        return os.path.exists(self._peer_failed)

    def _note_end(self) -> int | None:
        """Record that the process has ended; return this one's exit code, or None if there is another process."""
        code = self._child.process.returncode
        from_outside = self._was_ended or bool(self._signals)
        is_early = not code and not from_outside and not self._child.has_done_its_part()
        if (code or is_early) and not from_outside:
            with contextlib.suppress(OSError):  # a full disk, say; the others then have the launcher's grace
                self._peer_failed.touch(0o600)
        append(self._child.records, self._child.end(self._rank, from_outside), LAST_WORD_S)
        free_reserve(self._child.records)
        if self._was_asked and not code and self._rank == "0":
            stay_for_the_launcher()
        return ENDED_EARLY if is_early else as_a_shell_has_it(code)

    def _outputs(self) -> list[Path]:
        """Return the files that the rank prints to."""
        return [self._child.output]

    def _look_again_s(self) -> float:
        """Return the time until the next look at what is asked, in s."""
        return ASKED_EVERY_S


def main(directory: Path, kind: type[Supervisor] = Supervisor) -> int:
    """Start and follow one rank; return an exit code, as a shell has it."""
    rank, signals = begin()
    if not is_seen(directory, rank):
        return NOT_SEEN
    try:
        return kind(directory, rank, signals).run()
    except OSError as error:
        return cannot_write(directory, rank, error)


def as_a_shell_has_it(code: int) -> int:
    """Return an exit code without a sign: of a process that a signal has ended, 128 more than the signal's number."""
    return 128 - code if code < 0 else code


def begin() -> tuple[str, list[int]]:
    """Tie this process to its launcher; return the rank, and a list that will hold the signals that come."""
    host.die_with_parent()
    launcher, signals = launcher_here(), []
    taken = {signal.SIGTERM}
    for number in {*host.signals_for_ranks, *taken}:
        signal.signal(number, (lambda number, _: signals.append(number)) if number in taken else lambda *_: None)
    # The rank, which inherits this, would die of a question for its stacks that comes before it knows the answer.
    host.hold_back_stacks_signal()
    return str(launcher.number("rank")), signals


def is_seen(directory: Path, rank: str) -> bool:
    """Whether this machine sees the directory; if not, say so where the launcher writes."""
    try:
        os.stat(directory / "run.json")
    except OSError as error:
        where = f"{directory} cannot be seen on {host.node()}"
        print(f"rank {rank}: {where} ({error.strerror}); every node must see it", flush=True)
        return False
    return True


def cannot_write(directory: Path, rank: str, error: OSError) -> int:
    """Say where the launcher writes that this machine cannot write into the directory; return the exit code."""
    print(f"rank {rank}: {directory} cannot be written on {host.node()}: {error}", flush=True)
    return NOT_WRITTEN


def stay_for_the_launcher() -> None:
    """Wait until SLURM has begun to take the machines: a job that ends before is not started again."""
    if "SLURM_JOB_ID" not in os.environ:
        return  # on Ray the notebook sees to it
    until_s = time.monotonic() + STAY_S
    command = ["squeue", "-h", "-o", "%T", "-j", os.environ["SLURM_JOB_ID"]]
    while time.monotonic() < until_s:
        try:
            answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout
        except (OSError, subprocess.TimeoutExpired):
            return  # nobody to ask
        if answer.split() != ["RUNNING"]:
            return
        time.sleep(STATE_EVERY_S)


class Child:
    """A rank's process."""

    def __init__(self, base: Path, module: str, arguments: list[str]) -> None:
        self.records, self.output = Path(f"{base}.records"), Path(f"{base}.out")
        kept = Path(__file__).parents[2]  # where this package lies
        path = os.pathsep.join(filter(None, [str(kept), os.environ.get("PYTHONPATH")]))
        self._memory_kills = OutOfMemoryKills()
        self._where_asked: tuple[float, int] | None = None
        """When the process was asked where it is, and how long its records were then."""
        with open(self.output, "ab", opener=private) as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", START.format(module), *arguments],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env={**os.environ, "PYTHONPATH": path},
            )

    def send(self, word: str) -> None:
        """Pass a word on. A process that has just ended does not receive it."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(f"{word}\n".encode())
            self.process.stdin.flush()

    def ask_for_stacks(self) -> None:
        """Have the process write where it stands, and say what else it knows."""
        host.ask_for_stack(self.process.pid)
        self.send("details")

    def has_said_where_it_is(self) -> bool:
        """Ask where the process is, the first time; return whether it has answered, or has had the time to."""
        if self._where_asked is None:
            self._where_asked = time.monotonic(), self.records.stat().st_size
            self.ask_for_stacks()
        asked_s, length = self._where_asked
        return b'["Answered"' in self._recorded(length) or time.monotonic() > asked_s + WHERE_S

    def has_done_its_part(self) -> bool:
        """Whether the process has reported what its function returned, or that it has stopped."""
        recorded = self._recorded()
        return b'["Result"' in recorded or b'["Stopped"' in recorded

    def _recorded(self, since: int = 0) -> bytes:
        try:
            with open(self.records, "rb") as file:
                file.seek(since)
                return file.read()
        except OSError:
            return b""

    @property
    def is_ready(self) -> bool:
        """Whether the process has reported that it waits for work, or has waited."""
        return b'["Ready"' in self._recorded()

    def end(self, rank: str, was_ended: bool) -> list[Any]:
        """Return the record of how the process ended; `was_ended` is whether that was done from outside."""
        code = self.process.returncode
        remove_of(self.process.pid)  # if it was killed
        out_of_memory = self._memory_kills.seen() if code == -host.kill_signal and not was_ended else ""
        at_s = time.time() - clock_off_s(self.records.parents[1], self.records)
        return ["Exit", int(rank), code, out_of_memory, was_ended, at_s]


def claim_attempt(directory: Path, rank: str, launcher: RankVariables) -> int:
    """Claim the files of this attempt, and return its number, which SLURM counts, or the notebook on Ray."""
    attempt = launcher.attempt()
    while True:
        with contextlib.suppress(FileExistsError):
            os.close(os.open(directory / "ranks" / f"{rank}.{attempt}.records", os.O_CREAT | os.O_EXCL, 0o600))
            return attempt
        attempt += 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
