"""A run ends, and names the cause, whatever fails at whichever place that touches a run's folder.

The places are found in the code: each function of these modules that calls the file system. A small run goes through
all of them, without processes; then again with a fault at each.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import errno
import io
import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import cloudpickle
import pytest

import labkit
from labkit.launchers import directory_engine, supervisor
from labkit.launchers.directory_engine import LaunchedEngine
from labkit.launchers.environments import SlurmVariables
from labkit.launchers.ray import mirror
from labkit.launchers.ray.mirror import NotebookSide, RankSide
from labkit.launchers.run_directory import directory as run_directory
from labkit.launchers.run_directory import files, growing, reader, sender
from labkit.launchers.run_directory.directory import RunDirectory
from labkit.launchers.run_directory.sender import FileSender
from labkit.protocol import events
from labkit.run import Run
from tests.launchers.test_directory_engine import Launcher, log
from tests.support.fake_engine import a_job
from tests.support.tiers import few

PACKAGE = str(Path(labkit.__file__).parent)
MODULES = [directory_engine, files, growing, mirror, reader, run_directory, sender, supervisor]

ENDS_S = 5.0
"""From a fault to the end of the run, besides what a machine that is busy takes."""

OF_OS = (
    *("open", "write", "read", "listdir", "scandir", "stat", "fstat", "unlink", "replace", "rename", "utime", "mkdir"),
    *("truncate", "symlink", "readlink", "chmod", "statvfs"),
)
OF_PATHS = {"read_bytes", "read_text", "write_bytes", "write_text", "touch", "exists", "glob", "stat", "mkdir", "chmod"}
"""What touches a file system, by its name."""

NOT_REACHED = {
    "directory.RunDirectory.note_stopped_by": "of a run that is stopped: tests/launchers/test_slurm_faults.py",
    "supervisor.Supervisor.run": "needs a process: tests/launchers/test_supervisor.py",
    "supervisor.Supervisor._has_peer_failed": "needs a process: tests/launchers/test_supervisor.py",
    "supervisor.Supervisor._note_end": "needs a process: tests/launchers/test_supervisor.py",
    "supervisor.Child.__init__": "needs a process",
    "supervisor.Child.has_said_where_it_is": "needs a process",
    "supervisor.Child._recorded": "needs a process",
    "sender.Output.write": "tests/launchers/test_full_disk.py",
    "mirror.RankSide.take": "of a session's jobs: tests/launchers/test_any_order.py",
    "mirror._end_of": "of a session's ranks",
    "mirror.NotebookSide._jobs": "of a session",
    "directory.RunDirectory.job": "the rank's",
    "directory.RunDirectory.open": "the rank's",
    "directory_engine.LaunchedEngine._last_sign_s": "of a rank that vanished",
    "files.is_missing": "of a session's folder that has gone",
    "files.was_cut": "of output without end, or not: tests/launchers/test_reader.py",
    "files._device_of_parents": "of a folder that has gone: tests/launchers/test_reader.py",
}


# Faults


class Fault:
    """Something that goes wrong at a place: each time, or the first times only."""

    def __init__(self, name, times=10**9, error=None, delay_s=0.0, garbles=False):
        self.name, self.times, self.error, self.delay_s, self.garbles = name, times, error, delay_s, garbles

    def __call__(self, call, *args, **kwargs):
        time.sleep(self.delay_s)
        if self.error is not None:
            raise OSError(self.error, os.strerror(self.error))
        found = call(*args, **kwargs)
        return b"\xff[" * (len(found) // 2) if self.garbles and isinstance(found, bytes) else found


FAULTS = [
    Fault("fails each time", error=errno.EIO),
    Fault("fails once", times=1, error=errno.ESTALE),
    Fault("is full for a while", times=5, error=errno.ENOSPC),
    Fault("is full", error=errno.ENOSPC),
    Fault("takes long", times=1, delay_s=0.5),
    Fault("garbles", garbles=True),
]


class Injection:
    """Stands between the modules and the file system: notes which function calls it, and has a fault at one of them."""

    def __init__(self, patch):
        self.reached = Counter()
        self.place, self.fault, self.met = "", None, 0
        self._lock = threading.Lock()
        opened = builtins.open
        for owner in (builtins, io):
            patch.setattr(owner, "open", lambda *args, **kwargs: self._opened(opened, args, kwargs))
        for name in OF_OS:
            patch.setattr(os, name, self._wrapped(getattr(os, name)))

    def _wrapped(self, call):
        return lambda *args, **kwargs: self.at(call, *args, **kwargs)

    def _opened(self, opened, args, kwargs):
        file = self.at(opened, *args, **kwargs)
        return File(file, self) if self._where() else file

    def _where(self):
        """The innermost function of the modules that is being called."""
        frame = sys._getframe(2)
        while frame is not None:
            name = frame.f_code.co_filename
            if name.startswith(PACKAGE):
                module = Path(name).stem
                known = any(module == each.__name__.rpartition(".")[2] for each in MODULES)
                return f"{module}.{frame.f_code.co_qualname.partition('.<locals>')[0]}" if known else ""
            frame = frame.f_back
        return ""

    def at(self, call, *args, **kwargs):
        where = self._where()
        if where:
            with self._lock:
                self.reached[where] += 1
                if where == self.place and self.fault is not None and self.met < self.fault.times:
                    self.met += 1
                    fault = self.fault
                else:
                    fault = None
            if fault is not None:
                return fault(call, *args, **kwargs)
        return call(*args, **kwargs)


class File:
    """A file that was opened at a place."""

    def __init__(self, file, injection):
        self._file, self._injection = file, injection

    def read(self, *args):
        return self._injection.at(self._file.read, *args)

    def write(self, data):
        return self._injection.at(self._file.write, data)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._file.close()

    def __getattr__(self, name):
        return getattr(self._file, name)

    def __iter__(self):
        return iter(self._file)


# A run without processes


class OnThreads(Launcher):
    """Ranks that are threads, each with what a supervisor does for it."""

    why = None

    def __init__(self, *args):
        super().__init__(*args)
        self.said = []
        self._threads = []

    def submit(self):
        for rank in range(self.world_size):
            self._threads.append(threading.Thread(target=self._supervise, args=(rank,), daemon=True))
            self._threads[-1].start()
        threading.Thread(target=self._wait, daemon=True).start()
        return {}

    def _wait(self):
        for thread in self._threads:
            thread.join()
        self.settle(0.1)

    def end(self):
        self.was_ended = True

    def _supervise(self, rank):
        path, code = self.directory.path, 0
        try:
            if not supervisor.is_seen(path, str(rank)):
                return
            attempt = supervisor.claim_attempt(path, str(rank), SlurmVariables())
            asked, folder = growing.Lines(path / "asked"), files.Folder(path)
            asked.skip()
        except OSError as error:
            supervisor.cannot_write(path, str(rank), error)
            return
        base = self.directory.file(rank, attempt, "records")
        try:
            self.directory.about()
            self.directory.write(f"rendezvous...{rank}.json", b"{}")
            self._be(rank, base)
        except (OSError, ValueError) as error:
            self.said.append(str(error))
            code = 1
        folder.look([base.with_suffix(".out")])
        asked.new()
        files.append(base, ["Exit", rank, code, False, False, time.time() - files.clock_off_s(path, base)], 0.3)
        files.free_reserve(base)
        files.has_exit(base)

    def _be(self, rank, records):
        with contextlib.suppress(OSError):  # what a function prints is not what is tried here
            records.with_suffix(".out").write_text(f"hello from {rank}\n" + "x" * 3000)
        mine = FileSender(records)
        mine.result_s = 0.3
        mine.clock_off_s = files.clock_off_s(self.directory.path, records)
        try:
            mine.send(events.Started(rank))
            for step in range(3):
                mine.send(log(rank, step))
            try:
                mine.send(events.Result(rank, cloudpickle.dumps(bytes(200_000 + rank))))
            except OSError as error:
                mine.send(events.Failure(rank, 0.0, "sending the result", str(error), str(error)))
        finally:
            mine.close()


class Mirrored(OnThreads):
    """Ranks whose folders are on nodes."""

    def submit(self):
        self._one_at_a_time = threading.Lock()
        self._side = NotebookSide(self.directory.path)
        self._side.begin()
        self._nodes = [self.directory.path.with_name(f"node{rank}") for rank in range(self.world_size)]
        self._sides = [RankSide(node, self._side.for_rank(rank)) for rank, node in enumerate(self._nodes)]
        return super().submit()

    def _supervise(self, rank):
        one = OnThreads(self.world_size, RunDirectory(self._nodes[rank]), {})
        thread = threading.Thread(target=one._supervise, args=(rank,), daemon=True)
        thread.start()
        until_s = None
        while until_s is None or time.monotonic() < until_s:
            with self._one_at_a_time:
                try:
                    pieces = self._sides[rank].news() if self._side.error is None else []
                except OSError as error:
                    self.said.append(str(error))
                    return
                self._side.take(pieces)
                self._sides[rank].take(self._side.news())
            if not (thread.is_alive() or pieces or self._sides[rank].is_failing) and until_s is None:
                until_s = time.monotonic() + 0.3
            time.sleep(0.01)
        self.said += one.said


@pytest.fixture
def quick(monkeypatch):
    for module, name, value in (
        (mirror, "UNREADABLE_S", 0.3),
        (reader, "SEEN_LATE_S", 0.3),
        (growing, "LINE_S", 0.3),
        (reader, "UNREADABLE_S", 0.3),
        (sender, "RETRY_S", 0.02),
        (sender, "SETTLED_S", 0.05),
        (sender, "LAST_TRIAL_S", 0.2),
        (files, "TRY_EVERY_S", 0.02),
        (files, "GONE_S", 0.2),
        (files, "LOOK_AT_FOLDER_S", 0.0),
        (files, "OUTPUT_BYTES", 2000),
        (files, "HEAD_BYTES", 100),
    ):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setenv("MASTER_ADDR", "here")
    monkeypatch.setenv("MASTER_PORT", "1")


def run_there(folder, kind):
    """Do the run; return it, or why it could not be started; and what its launcher was told."""
    launched = kind(2, RunDirectory(folder / "run"), {})
    run = Run(LaunchedEngine(launched), 2, "it")
    try:
        run.start(a_job())
        run.engine.ask_for_stacks()
        launched.directory.was_asked_to("stacks")
    except OSError as error:
        return str(error), launched
    if not run.over.wait(ENDS_S * 3):
        run.kill()
        launched.settle(0.0)
        return f"it goes on: {run.notice}", launched
    return run, launched


def functions_that_touch_files():
    found = set()
    for module in MODULES:
        tree = ast.parse(Path(module.__file__).read_text())

        def visit(node, within, module=module):
            for child in ast.iter_child_nodes(node):
                named = isinstance(child, (ast.FunctionDef, ast.ClassDef))
                visit(child, [*within, child.name] if named else within)
            if isinstance(node, ast.Call) and within:
                owner, _, name = ast.unparse(node.func).rpartition(".")
                if (
                    (owner == "os" and name in OF_OS)
                    or (owner != "os" and name in OF_PATHS)
                    or (owner, name) == ("", "open")
                ):
                    found.add(f"{module.__name__.rpartition('.')[2]}.{'.'.join(within)}")

        visit(tree, [])
    return found


def test_a_small_run_goes_through_every_function_that_touches_a_runs_folder(tmp_path, quick):
    with pytest.MonkeyPatch.context() as patch:
        injection = Injection(patch)
        for kind in (OnThreads, Mirrored):
            run, _ = run_there(tmp_path / kind.__name__, kind)
            assert (run.status, [len(result) for result in run.results]) == ("finished", [200_000, 200_001]), str(
                run.error
            )
    places = functions_that_touch_files()
    assert len(places) > 30
    left = places - set(injection.reached) - set(NOT_REACHED)
    assert not left, left
    assert not set(NOT_REACHED) - places, set(NOT_REACHED) - places


@pytest.mark.parametrize("fault", few(FAULTS, 3), ids=lambda fault: fault.name)
@pytest.mark.parametrize("kind", [OnThreads, Mirrored])
def test_a_run_ends_and_says_why_whatever_fails_at_whichever_place(tmp_path, quick, kind, fault, capsys):
    table = []
    with pytest.MonkeyPatch.context() as patch:
        injection = Injection(patch)
        run_there(tmp_path / "well", kind)
        places = sorted(place for place in injection.reached if not place.startswith("directory_engine.new_directory"))
        for number, place in enumerate(places):
            injection.place, injection.fault, injection.met = place, fault, 0
            began_s = time.monotonic()
            run, launched = run_there(tmp_path / str(number), kind)
            injection.fault = None
            took_s = time.monotonic() - began_s
            said = run if isinstance(run, str) else f"{run.error or ''} {' '.join(run.warnings)} {run.results!r:.0}"
            said += " ".join(launched.said) + "".join(capsys.readouterr())
            well = not isinstance(run, str) and run.status == "finished" and None not in run.results
            named = fault.error is None or os.strerror(fault.error) in said
            if not (well or named) or took_s > ENDS_S * 6:
                table.append(f"{place}: {took_s:.1f} s, {injection.met} times: {said:.300}")
    assert not table, "\n".join(table)
