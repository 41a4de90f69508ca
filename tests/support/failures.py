"""Ways to fail, each on one rank while the others wait in a collective; for the tests and for the benchmark."""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

import labkit


class CannotBeSent(Exception):  # noqa: N818
    """An exception that pickle refuses."""

    def __init__(self, message):
        super().__init__(message)
        self.lock = threading.Lock()


class Bomb:
    """Fails to unpickle on one rank."""

    def __init__(self, rank):
        self.rank = rank

    def __reduce__(self):
        return _explode, (self.rank,)


def _explode(rank):
    if int(os.environ["RANK"]) == rank:
        raise RuntimeError("unpacking failed")
    return rank


class DyingData(torch.utils.data.Dataset):
    """Data whose loader process ends without a word."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index == 17:
            os._exit(7)
        return torch.ones(2)


def raises(worker):
    raise ValueError("bad batch")


def raises_what_cannot_be_sent(worker):
    raise CannotBeSent("bad batch")


def sys_exit(worker):
    sys.exit(3)


def os_exit(worker):
    os._exit(3)


def is_killed(worker):
    os.kill(os.getpid(), signal.SIGKILL)


def segmentation_fault(worker):
    import ctypes

    ctypes.string_at(0)


def returns_early(worker):
    return "early"


def other_collective(worker):
    return dist.all_reduce(torch.ones(100_000))  # the others reduce a tensor of one element


def cannot_send_result(worker):
    return threading.Lock()


def prints_much(worker):
    line = "x" * 99 + "\n"
    for _ in range(100):
        sys.stdout.write(line * 10_000)
    raise ValueError("bad batch")


def logs_much(worker):
    for step in range(1_000_000):
        worker.log(step, much=step)
    worker.log(failed_s=time.time())
    raise ValueError("bad batch")


def loader_dies(worker):
    for _ in torch.utils.data.DataLoader(DyingData(), batch_size=4, num_workers=1):
        pass


def cannot_connect(worker):
    """A request of the reader's own, in the words in which communication libraries say that a rank is gone."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    urllib.request.urlopen(f"http://127.0.0.1:{port}", timeout=60)


def waits_for_a_disk(worker):
    """As a read of a file that does not come: neither at work nor in a collective."""
    reading, _writing = os.pipe()
    os.read(reading, 1)


def takes_long_steps(worker):
    while True:
        until_s = time.monotonic() + 2
        while time.monotonic() < until_s:
            torch.ones(100, 100) @ torch.ones(100, 100)
        worker.log(total=0.0)


class Row(NamedTuple):
    """What must be said of one way to fail."""

    fails: object
    """Called on the failing rank."""
    said: str
    """In the error's first line, a regular expression; {rank} stands for the rank."""
    cause: str = ""
    """In the cause, as it is: the reader's line, say."""
    others: object = None
    """Called on the other ranks meanwhile; None: they wait in a collective."""


ROWS = {
    "raises": Row(raises, "rank {rank} failed: ValueError: bad batch", 'raise ValueError("bad batch")'),
    "raises what cannot be pickled": Row(
        raises_what_cannot_be_sent, "rank {rank} failed: .*bad batch", 'raise CannotBeSent("bad batch")'
    ),
    "sys.exit": Row(sys_exit, "rank {rank} failed: SystemExit: 3", "sys.exit(3)"),
    "os._exit": Row(os_exit, r"rank {rank} .*\(exit code 3\)"),
    "SIGKILL": Row(is_killed, r"rank {rank} .*\(SIGKILL\)", "Its memory was seen to peak at"),
    "segmentation fault": Row(segmentation_fault, r"rank {rank} .*\(SIGSEGV\)", "ctypes.string_at(0)"),
    "returns early": Row(
        returns_early,
        r"rank {rank} returned while (rank \d was|ranks [\d, and]+ were) still in "
        r"(all_reduce #6 \(float32 \[1\]\)|a collective)",
        "all_reduce",
    ),
    "other collective": Row(
        other_collective,
        r"ranks met in all_reduce with tensors of different sizes or types, call #6 of the default group: .*"
        r"rank {rank} is in all_reduce #6 \(float32 \[100000\]\)|"
        r"ranks met in different collectives: .*rank.* all_reduce at failures.py|"
        r"ranks met in all_reduce at failures.py, line \d+ with tensors of different sizes; rank \d noticed",
        "all_reduce",
    ),
    "function cannot be unpacked": Row(None, "rank {rank} failed while receiving the function: .*unpacking failed"),
    "result cannot be sent": Row(
        cannot_send_result, "rank {rank} failed while sending the result: ValueError", "returned a lock"
    ),
    "prints 100 MB": Row(prints_much, "rank {rank} failed: ValueError: bad batch", 'raise ValueError("bad batch")'),
    "logs a million points": Row(logs_much, "rank {rank} failed: ValueError: bad batch", "raise ValueError"),
    "DataLoader worker dies": Row(
        loader_dies, r"rank {rank} failed: (RuntimeError: DataLoader worker|Connection|EOF)", "in loader_dies"
    ),
    "cannot connect elsewhere, the others have returned": Row(
        cannot_connect, "rank {rank} failed: urllib.error.URLError: .*refused", "urlopen", others=returns_early
    ),
    "raises while the others wait for a disk": Row(
        raises, "rank {rank} failed: ValueError: bad batch", "raise ValueError", others=waits_for_a_disk
    ),
    "raises while the others take steps of 2 s": Row(
        raises, "rank {rank} failed: ValueError: bad batch", "raise ValueError", others=takes_long_steps
    ),
}


def work(worker, row, rank, mark, bomb=None):
    """Reduce a number each step; at step 5 one rank makes the file `mark`, and fails while the others wait for it."""
    total = torch.ones(1)
    for step in range(100):
        if step == 5 and worker.rank == rank and ROWS[row].fails is not None:
            time.sleep(0.2)  # a log call that follows another within 0.1 s waits to be sent with those to come
            worker.log(failed_s=time.time())
            mark.touch()  # the log call may be lost with the process
            return ROWS[row].fails(worker)
        if step == 5 and worker.rank != rank and ROWS[row].others is not None:
            return ROWS[row].others(worker)
        dist.all_reduce(total)
        worker.log(total=total.item())
    return None


class Outcome(NamedTuple):
    """What came of one trial."""

    error: labkit.WorkerFailed
    after_s: float
    """Seconds from the failure until the error was raised."""


def trial(row, world_size, rank, on=None):
    """Launch one way to fail and catch its error; on a session's ranks, or on new ones."""
    bomb = Bomb(rank) if ROWS[row].fails is None else None
    with tempfile.TemporaryDirectory() as folder:
        mark = Path(folder) / "failing"
        try:
            run = labkit.launch(work, row, rank, mark, bomb, world_size=world_size, live=False, on=on)
        except labkit.WorkerFailed as error:
            return Outcome(error, time.time() - failed_s(error.run, rank, mark))
    raise AssertionError(f"{row} did not fail: {run}")


def failed_s(run, rank, mark):
    """Return when a rank failed: it had made the file `mark`, unless its function had not begun."""
    if not mark.exists():
        return run.start_s + run.failures[rank].time_s
    noted_s = [mark.stat().st_mtime]
    if "failed_s" in run.history:
        noted_s.append(run.history["failed_s"].max())  # of a row that goes on for a while before it fails
    return max(noted_s)
