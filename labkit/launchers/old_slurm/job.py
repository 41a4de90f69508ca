"""A job on a SLURM cluster: submitted by `sbatch`, followed by `squeue`, ended by `scancel`."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from labkit.launchers import job_events
from labkit.launchers.launcher_job import END_S, SETTLE_S, LauncherJob, RanksSeen
from labkit.launchers.old_slurm import endings, options
from labkit.launchers.old_slurm.commands import COMMAND_S, SCRIPT, SlurmError, advice, job_of, seconds, slurm
from labkit.launchers.old_slurm.queue import GOING, WAITING, JobState, state_of, why_it_waits
from labkit.launchers.run_directory.directory import RunDirectory
from labkit.protocol import events
from labkit.protocol.pages import help_hint

LOOK_AT_JOB_S = (0.5, 5.0)
"""Least and greatest time between two questions to SLURM, each one `squeue` for one job, or two while it waits.

They become rarer while nothing changes. When ranks begin or end, which their files tell, SLURM is asked at once."""

SEEN_LATE_S = 60.0
"""How long what ranks wrote in a job that ended well may take to be seen over a network's file system."""

LATE_S = 20.0
"""How long a job that SLURM may have taken, though sbatch has not said so, is looked for."""

UNSURE = re.compile(
    "answer|timed out|time-?out|unable to contact|communication|connection|try again|zero bytes|code -",
    re.IGNORECASE,
)
"""What sbatch says where SLURM may have taken the job, or may yet."""

WITHDRAWN = "withdrawn"
"""In a run's folder: its job, should SLURM have it after all, is not to run."""

CANCELLED_S = 1.0
"""How long SLURM may take to cancel a job before its ranks are told to end without it."""


class SlurmJob(LauncherJob):
    """One job, followed in a thread of its own."""

    kind = "slurm"
    outlives_notebook = True

    def __init__(
        self,
        world_size: int,
        directory: RunDirectory,
        about: dict[str, Any],
        python: str = sys.executable,
        script: Callable[[Sequence[str], str, str, str], str] | None = None,
    ) -> None:
        """Take the interpreter on the nodes, and what returns the batch script: `Slurm.script`."""
        super().__init__(world_size, directory, about)
        self._python, self._script = python, script
        self.job_id = ""
        self._state = JobState("", "", "", "")
        self._looked_s = 0.0
        self._silent_since_s: float | None = None
        self._error = ""
        """What SLURM answered last, if that was an error; since when that is so."""
        self._launched_in = ""
        """The job in which this process itself runs, if it has launched this one."""
        self._nodes = ""
        """Those that the job had, when it had all of them."""
        self._known = threading.Event()
        self._closed, self._look_now = threading.Event(), threading.Event()
        self._cancelling: threading.Thread | None = None

    def submit(self) -> dict[str, Any]:
        """Write the batch script and give it to `sbatch`. Raises RuntimeError with what SLURM says."""
        assert self._script is not None
        path = self.directory.path
        command = [self._python, str(self.supervisor), str(path)]
        output = str(path / "slurm.out").replace("%", "%%")  # sbatch's sign for its own names
        withdrawn = f"test ! -e {shlex.quote(str(path / WITHDRAWN))} || exit 0  # its notebook has given it up"
        script = self._script(command, self.about["name"], output, withdrawn)
        self.directory.write(SCRIPT, script.encode())
        try:
            answer = slurm("sbatch", "--parsable", *options.read_back(script), str(path / SCRIPT))
            numbers = re.findall(r"^(\d+)(?:;\S*)?$", answer, re.MULTILINE)  # a site may have sbatch print more
            if not numbers:
                raise SlurmError(f"sbatch answered {answer[-200:]!r}")
            found = numbers[-1]
        except SlurmError as error:
            is_unsure = UNSURE.search(str(error)) is not None
            found, why_not = self._look_for_it(LATE_S if is_unsure else 0.0)
            if not found:
                raise self._not_taken(error, why_not if is_unsure else "") from None
            self.emit(events.Warned(-1, "sbatch", f"SLURM has job {found}, though sbatch said: {error}"))
        self._launched_in = os.environ.get("SLURM_JOB_ID", "")
        self.follow(found)
        return {"job": found}

    def _look_for_it(self, for_s: float) -> tuple[str, str]:
        """Return the number of the job that SLURM has taken though `sbatch` failed; or "", and what was seen instead.

        The problem: sbatch gives up after a while, and the controller, which is merely slow, starts the job. What does
        not work: to believe sbatch. So the job is looked for, for a while if sbatch did not refuse it outright. What
        still fails: a controller that takes the job later than that. Its batch script then ends by itself.
        """
        deadline = time.monotonic() + for_s
        while True:
            try:
                found, why_not = job_of(self.directory.path), f"squeue did not list it within {for_s:g} s"
            except SlurmError as error:
                found, why_not = "", f"squeue said: {error}"
            if found or time.monotonic() > deadline:
                return found, why_not
            time.sleep(LOOK_AT_JOB_S[0])

    def _not_taken(self, error: SlurmError, unsure: str) -> RuntimeError:
        """Return what to raise for a job that SLURM has refused; `unsure` is why it may have taken it nevertheless."""
        if unsure:
            with contextlib.suppress(OSError):
                self.directory.write(WITHDRAWN, b"")
                self.directory.ask("end")
            return RuntimeError(
                f"it is not known whether SLURM has taken the job: {error}; {unsure}. Should SLURM start it later, it "
                f"ends at once: it was withdrawn, in {self.directory.path}\n{help_hint('slurm')}"
            )
        shutil.rmtree(self.directory.path, ignore_errors=True)
        return RuntimeError(f"SLURM did not take the job: {error}{advice(str(error))}\n{help_hint('slurm')}")

    def follow(self, job_id: str = "") -> None:
        """Begin to watch the job."""
        self.is_started = True
        self.job_id = job_id or self.job_id
        self.emit(job_events.Notice(-1, f"SLURM job {self.job_id}", queued=True))
        threading.Thread(target=self._watch, name="labkit-slurm", daemon=True).start()

    # Ending it

    def end(self) -> None:
        """Cancel the job, in the background: SLURM may take its time to answer."""
        self.was_ended = True
        self.end_is_due()
        self._cancelling = threading.Thread(target=self._cancel, name="labkit-scancel", daemon=True)
        self._cancelling.start()

    def end_now(self) -> None:
        """Cancel the job, and wait until SLURM has taken notice. Warns if it cannot be reached."""
        self.was_ended = True
        self.end_is_due()
        if error := self._cancel():
            warnings.warn(
                f"SLURM job {self.job_id} may still run ({error}); scancel {self.job_id} ends it", stacklevel=2
            )

    def _cancel(self) -> str:
        """Return why the job could not be cancelled; "" if it was."""
        # By itself SLURM grants the ranks its grace, which is for a last checkpoint: they are told that there is none.
        # SLURM is told first, lest it count the job as failed; but not if it takes long, or cannot be reached.
        late = threading.Timer(CANCELLED_S, self._tell_the_ranks)
        late.daemon = True
        late.start()
        try:
            slurm("scancel", self.job_id)
        except SlurmError as error:
            self.emit(job_events.Notice(-1, f"SLURM job {self.job_id} could not be cancelled: {error}"))
            self._closed.wait(LOOK_AT_JOB_S[0])
            self.was_ended = False  # to be tried again
            return str(error)
        finally:
            late.cancel()
            self._tell_the_ranks()
            self._look_now.set()
        return ""

    def _tell_the_ranks(self) -> None:
        with contextlib.suppress(OSError):  # a full disk, or no directory any more: it is SLURM's to end them
            self.directory.ask("end")

    # What SLURM says of it

    def look(self) -> None:
        """See what SLURM says of the job, now."""
        self._look_now.set()

    def wait_until_known(self, patience_s: float = COMMAND_S) -> None:
        """Wait until SLURM has said how the job is, but not for ever."""
        self._known.wait(patience_s)

    @property
    def silent_s(self) -> float:
        """How long SLURM has not answered, in s."""
        since_s = self._silent_since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    @property
    def time_left_s(self) -> float:
        """What is left of the job's time limit, in s; infinite where it has none."""
        return seconds(self._state.left) - (time.monotonic() - self._looked_s)

    def interruption(self) -> job_events.JobEnded:
        """Return why SLURM has taken the nodes away, though it will give some again."""
        return endings.interruption(self.job_id, self._nodes)

    def ending(self, seen: RanksSeen) -> job_events.JobEnded | None:
        """Return why the job ended, if that is no rank's doing; or that nobody knows whether it has."""
        if self._over_at_s is None:  # nobody is waited for any longer
            was_told = self.does_not_end
            patience_s = END_S if was_told else self.silent_s
            found = endings.unconfirmed(self.job_id, self._state, self._error, was_told, patience_s)
            self.emit(job_events.Notice(-1, f"{found.headline}. {found.cause}"))  # also where a run was to be stopped
            return found
        return endings.ending(self.job_id, self._state, seen, self.directory.path, self._python, self.was_ended)

    def close(self) -> None:
        """Stop watching, but not before SLURM has heard that the job is to be cancelled."""
        if self._cancelling is not None and not self.is_over:
            self._cancelling.join(END_S)
        self._closed.set()
        self._look_now.set()

    def _watch(self) -> None:
        pause_s = LOOK_AT_JOB_S[0]
        while not self._closed.is_set():
            self._look_now.clear()
            try:
                state = state_of(self.job_id)
            except SlurmError as error:
                self._error = str(error)
                self._silent_since_s = self._silent_since_s or time.monotonic()
                waits = self._state.state in {*WAITING, ""}
                self.emit(job_events.Notice(-1, f"SLURM job {self.job_id}: {error}", queued=waits))
            else:
                self._error, self._silent_since_s = "", None
                changed, self._state = state.state != self._state.state, state
                self._looked_s = time.monotonic()
                self._nodes = state.nodes if state.state == "RUNNING" else self._nodes
                is_over = self._take(state, changed)
                self._known.set()
                if is_over:
                    return
                if changed or state.state == "COMPLETING":
                    pause_s = LOOK_AT_JOB_S[0]
            if self._look_now.wait(pause_s):
                self._closed.wait(0.1)  # SLURM learns of a rank's end only after its files have told
                pause_s = LOOK_AT_JOB_S[0]
            pause_s = min(1.2 * pause_s, LOOK_AT_JOB_S[1])

    def _take(self, state: JobState, changed: bool) -> bool:
        """Have the notebook told what SLURM has answered; return whether the job is over."""
        if state.state in WAITING:
            waiting = why_it_waits(self.job_id, state)
            if not self._look_now.is_set():  # else ranks have begun meanwhile
                self.emit(job_events.Notice(-1, waiting, queued=True))
        elif state.state not in GOING:
            if state.state == "FORGOTTEN":
                text = f"SLURM job {self.job_id}: {state.reason}. What its folder holds is shown"
                self.emit(events.Warned(-1, "slurm", text))
            self.settle(SEEN_LATE_S if state.state == "COMPLETED" else SETTLE_S)
            return True
        elif changed or state.state == "SUSPENDED":
            suspended = " and suspended" if state.state == "SUSPENDED" else ""
            self.emit(job_events.Notice(-1, f"SLURM job {self.job_id} on {state.nodes}{suspended}{self._own_nodes}"))
        return False

    @property
    def _own_nodes(self) -> str:
        """That the nodes are the job's own, if it was launched within a job."""
        outer = self._launched_in
        return f": nodes of its own, not those of job {outer}, in which it was launched" if outer else ""
