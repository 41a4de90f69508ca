"""Stands between a launcher (SLURM, torchrun, Ray) and one rank: starts it, passes requests on, records how it ended.

Started by its path, once per rank, as `python supervisor.py DIRECTORY`; needs nothing but the standard library, and of
labkit modules that need no more, so that it is there at once and does not fail with the rank. What it writes, and
where, is `reader`'s to read. That of a reserved rank, `labkit.session.supervisor`, is made of the same parts.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # The package's folder, in place of the script's own, where `ray` and `directory` are not what others import.
    sys.path[:] = [str(Path(__file__).parents[2]), *(path for path in sys.path if path != str(Path(__file__).parent))]

from labkit.launchers.run_directory.files import Folder, append, clock_off_s, free_reserve
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
# supervisor has noted in `failed.<attempt>` before srun or the agent could know; and "end" from the notebook.
#
# What still fails: where `failed.<attempt>` is seen late, over a network, the others have the grace. torchrun sends the
# same signal to restart its ranks and waits for them, so under it they are ended at once, as ever. And a job that ends
# within a GraceTime counts as done, and SLURM does not start it again: so the first rank's supervisor stays until SLURM
# has begun to take the machines, `STAY_S` at most.

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

LAST_WORD_S = 10.0
"""How long it is tried to write how a rank ended. The reserve is freed for it; others may take that room first."""

START = "import labkit.rank.die_with_parent; from {} import main; main()"


def main(directory: Path) -> int:
    """Run one rank, and return its exit code as a shell would."""
    rank, signals = begin()
    if not is_seen(directory, rank):
        return NOT_SEEN
    requests = Requests(directory)
    try:
        attempt = claim_attempt(directory, rank, is_elastic())
        requests.skip()
        arguments = [str(directory), rank, str(attempt)]
        child = Child(directory / "ranks" / f"{rank}.{attempt}", "labkit.launchers.rank_entry", arguments)
    except OSError as error:
        return cannot_write(directory, rank, error)
    peer_failed = directory / f"failed.{attempt}"
    folder = Folder(directory)
    was_ended = was_asked = False
    while child.process.poll() is None:
        if folder.look([child.output]):
            print(f"rank {rank}: {folder.gone_in_words}; the rank is ended", flush=True)
            was_ended = True
            child.process.kill()
        if signals and not was_asked and not is_elastic():
            was_asked = True
            child.send("stop")
        if signals and (is_elastic() or os.path.exists(peer_failed)):
            child.end_for_the_launcher()
        for word in requests.new():
            if word == "stacks":
                host.ask_for_stack(child.process.pid)
                child.send("details")
            elif word == "end":
                was_ended = True
                child.process.kill()
            else:
                child.send(word)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(ASKED_EVERY_S)
    code = child.process.returncode
    if code and not (was_ended or signals):
        with contextlib.suppress(OSError):  # a full disk, say; the others then have the launcher's grace
            peer_failed.touch(0o600)
    append(child.records, child.end(rank, was_ended or bool(signals)), LAST_WORD_S)
    free_reserve(child.records)
    if was_asked and not code and rank == "0":
        stay_for_the_launcher()
    return 128 - code if code < 0 else code


def begin() -> tuple[str, list[int]]:
    """Tie this process to its launcher; return the rank, and a list that will hold the signals that come."""
    host.die_with_parent()
    signals: list[int] = []
    for number in host.ending_signals:
        signal.signal(number, lambda number, _: signals.append(number))
    # The rank, which inherits this, would die of a question for its stacks that comes before it knows the answer.
    host.hold_back_stacks_signal()
    return os.environ.get("LABKIT_RANK") or os.environ["RANK" if is_elastic() else "SLURM_PROCID"], signals


def is_elastic() -> bool:
    """Whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


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


class Requests:
    """What the notebook asks, a word a line."""

    def __init__(self, directory: Path) -> None:
        self._asked = directory / "asked"
        self._read_bytes = 0

    def skip(self) -> None:
        """Pass over what has been asked so far."""
        self._read_bytes = self._asked.stat().st_size

    def new(self) -> list[str]:
        """Return the words since the last look."""
        try:
            with open(self._asked, "rb") as file:
                file.seek(self._read_bytes)
                words = file.read()
        except OSError:  # over a network not just now
            return []
        words = words[: words.rfind(b"\n") + 1]
        self._read_bytes += len(words)
        return words.decode(errors="replace").split()


class Child:
    """A rank's process."""

    def __init__(self, base: Path, module: str, arguments: list[str]) -> None:
        self.records, self.output = Path(f"{base}.records"), Path(f"{base}.out")
        kept = Path(__file__).parents[2]  # where this package lies
        path = os.pathsep.join(filter(None, [str(kept), os.environ.get("PYTHONPATH")]))
        self._memory_kills = OutOfMemoryKills()
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

    def end_for_the_launcher(self) -> None:
        """End the process, as torchrun does; under SLURM it does not obey SIGTERM, which comes to every process."""
        if is_elastic():
            self.process.terminate()
        else:
            self.process.kill()

    @property
    def is_ready(self) -> bool:
        """Whether the process has reported that it waits for work, or has waited."""
        try:
            return b'["Ready"' in self.records.read_bytes()
        except OSError:
            return False

    def end(self, rank: str, was_ended: bool) -> list[Any]:
        """Return the record of how the process ended; `was_ended` is whether that was done from outside."""
        code = self.process.returncode
        remove_of(self.process.pid)  # if it was killed
        out_of_memory = self._memory_kills.seen() if code == -host.kill_signal and not was_ended else ""
        at_s = time.time() - clock_off_s(self.records.parents[1], self.records)
        return ["Exit", int(rank), code, out_of_memory, was_ended, at_s]


def claim_attempt(directory: Path, rank: str, elastic: bool) -> int:
    """Claim the files of this attempt, and return its number.

    SLURM counts the attempts, and on Ray the notebook does. torchrun's agents count each for themselves, but the ranks
    of one attempt have the same store, at a port that no other attempt has.
    """
    counted = os.environ.get("LABKIT_ATTEMPT") or os.environ.get("SLURM_RESTART_COUNT", "0")
    attempt = int(counted) if not elastic else 0
    while True:
        if not elastic or _is_of_attempt(directory / f"attempt.{attempt}"):
            with contextlib.suppress(FileExistsError):
                os.close(os.open(directory / "ranks" / f"{rank}.{attempt}.records", os.O_CREAT | os.O_EXCL, 0o600))
                return attempt
        attempt += 1


def _is_of_attempt(path: Path) -> bool:
    """Whether this attempt is that of the ranks that have this one's store; it is theirs who ask first."""
    here = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        os.symlink(here, path)  # made as a whole, or not at all
    except FileExistsError:
        return os.readlink(path) == here
    return True


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
