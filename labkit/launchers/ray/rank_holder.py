"""The actor that holds one rank on its node: starts its supervisor, and carries what both ends of the run write.

The problem: a rank must be asked for its stacks, stopped and killed also while it sits in native code, and must not
take its node's word down with it. What does not work: to run the function in the actor itself, whose end Ray tells
late and in words of its own, and whose signals are Ray's.

So the rank is a process of its own with the supervisor that SLURM's ranks have, and a run directory on its node. Each
ends with the one before: actor, supervisor, rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

from labkit.launchers.environments import without_launchers
from labkit.launchers.ray.mirror import BLOCK_BYTES, Piece, RankSide
from labkit.launchers.ray.placement import Place
from labkit.launchers.run_directory.files import CLOCK
from labkit.launchers.run_directory.private import private

LOOK_EVERY_S = 0.02
"""Time between two looks at what the rank has written."""

ANSWER_S = 1.0
"""How long the notebook's question for news may stay unanswered while there is none."""

TURN_S = 5.0
"""How long a call waits for the one before it, which may have been lost with a connection."""

PREFIX = "labkit-rank-"
"""Of the name of a rank's directory on its node."""


class Update(NamedTuple):
    """What a rank has to say."""

    pieces: list[Piece]
    exit_code: int | None = None
    """Of its supervisor, once all that it wrote has been taken."""
    wrote: str = ""
    """What the supervisor itself wrote, in the end: nothing, unless it could not begin."""


class RankHolder:
    """Holds one rank. Ray calls its methods, several at once."""

    def __init__(
        self, place: Place, world_size: int, attempt: int, supervisor: str, has_folder: bool, pieces: list[Piece]
    ) -> None:
        self._directory = _new_directory()
        self._lives = _remove_once_gone(self._directory)
        self._side = RankSide(self._directory, [_as_here(piece, has_folder) for piece in pieces])
        self._lock, self._asking = threading.Lock(), threading.Lock()
        self._turns, self._taken = threading.Condition(), 0
        self._answered_s = 0.0
        self._clock_ahead_s = float("inf")
        self._number, self._last = 0, Update([])
        """The newest answer, kept until the next question says that it has arrived."""
        environment = without_launchers(os.environ)
        environment.pop("PYTHONBREAKPOINT", None)  # Ray's own processes'
        environment |= {
            "LABKIT_RANK": str(place.rank),
            "LABKIT_LOCAL_RANK": str(place.local_rank),
            "LABKIT_WORLD_SIZE": str(world_size),
            "LABKIT_LOCAL_WORLD_SIZE": str(place.local_world_size),
            "LABKIT_ATTEMPT": str(attempt),
            "LABKIT_NODE_ADDRESS": _address(),
            "LABKIT_RANK_FOLDER": str(self._directory),
        }
        self._process: subprocess.Popen[bytes] | None = None
        started = threading.Event()
        command = [sys.executable, str(Path(__file__).parents[2] / supervisor), str(self._directory)]
        # The supervisor ends with the thread that starts it: this one lives as long as it does.
        threading.Thread(target=self._mind, args=(command, environment, started), daemon=True).start()
        started.wait()

    def _mind(self, command: list[str], environment: dict[str, str], started: threading.Event) -> None:
        try:
            with open(self._directory / "supervisor.out", "ab", opener=private) as output:
                self._process = subprocess.Popen(
                    command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
                )
        finally:
            started.set()
        self._process.wait()

    def news(self, number: int, now_s: float) -> Update:
        """Return what the rank has written since the answer before this number; wait a while for it.

        Asked for the same number again, as where the connection was lost for a while, the answer is the same. `now_s`
        is when that was asked, as `time.time()` of the notebook's machine.
        """
        if number > 1:  # the first was asked before there was anybody to answer
            self._compare_clocks(now_s)
        with self._asking:
            if number != self._number:
                self._number, self._last = number, self._new()
            return self._last

    def _compare_clocks(self, now_s: float) -> None:
        """Have the rank's processes know how far this machine's clock is ahead of the notebook's.

        That is the least that was seen: what a question takes is added to it.
        """
        ahead_s = time.time() - now_s
        if ahead_s < self._clock_ahead_s - 1.0:
            self._clock_ahead_s = ahead_s
            with contextlib.suppress(OSError):
                (self._directory / CLOCK).write_text(f"{ahead_s}", encoding="utf-8")

    def _new(self) -> Update:
        assert self._process is not None, "the supervisor could not be started"
        deadline = time.monotonic() + ANSWER_S
        if sum(len(piece.data) for piece in self._last.pieces) < BLOCK_BYTES:  # else there is more
            time.sleep(max(0.0, self._answered_s + LOOK_EVERY_S - time.monotonic()))  # a rank that logs on and on
        while True:
            code = self._process.poll()  # before the look: what was written until then is seen by it
            with self._lock:
                pieces = self._side.news()
            self._answered_s = time.monotonic()
            if pieces or self._answered_s > deadline:
                return Update(pieces)
            if code is not None and not self._side.is_failing:
                wrote = (self._directory / "supervisor.out").read_text(errors="replace", encoding="utf-8")
                return Update([], code, wrote.strip()[-2000:])
            time.sleep(LOOK_EVERY_S)

    def take(self, number: int, pieces: list[Piece], then_leave: bool = False) -> None:
        """Write down what the notebook has to say. Ray may begin calls in any order: they take their turns by number.

        `then_leave` tells the supervisor that the launcher takes the machine away: it asks its rank to stop, or ends it
        at once if another rank has failed.
        """
        with self._turns:
            self._turns.wait_for(lambda: self._taken >= number - 1, TURN_S)
            with self._lock:
                self._side.take(pieces)
            if then_leave and self._process is not None:
                self._process.send_signal(signal.SIGTERM)
            self._taken = max(self._taken, number)
            self._turns.notify_all()

    def close(self) -> None:
        """End what is left, and let go of the directory."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._directory, ignore_errors=True)


def _as_here(piece: Piece, has_folder: bool) -> Piece:
    """Have ranks that Ray has given a working folder stay in it, not look for the notebook's."""
    if not has_folder or not piece.name.endswith("run.json"):
        return piece
    about = json.loads(piece.data) | {"cwd": os.getcwd()}
    return piece._replace(data=json.dumps(about).encode())


def _new_directory() -> Path:
    """Make a directory where Ray keeps what is temporary."""
    parent = tempfile.gettempdir()
    with contextlib.suppress(Exception):  # Ray's own, and not for others: wherever it is not, any place does
        from ray._private.worker import _global_node

        parent = _global_node.get_session_dir_path()
    return Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))


def _remove_once_gone(directory: Path) -> int:
    """Have a directory removed once this process is gone, also if Ray kills it; return what to hold open until then."""
    reading, writing = os.pipe()
    # A rank may still write as it ends. In the background, for Ray kills what is a child of this process.
    remove = 'cat <&3; for trial in 1 2 3; do rm -rf -- "$0" && break; sleep 1; done'
    script = f"exec 3<&0; ({remove}) >/dev/null 2>&1 &"
    subprocess.run(["sh", "-c", script, str(directory)], stdin=reading, start_new_session=True, check=False)
    os.close(reading)
    return writing


def _address() -> str:
    import ray

    return ray.util.get_node_ip_address()
