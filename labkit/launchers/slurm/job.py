"""A job on a SLURM cluster: submitted by `sbatch`, followed by `squeue`, ended by `scancel`."""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from labkit.launchers import job_events
from labkit.launchers.launcher_job import END_S, SETTLE_S, LauncherJob, RanksSeen
from labkit.launchers.run_directory.directory import RunDirectory
from labkit.launchers.slurm import endings
from labkit.launchers.slurm.commands import COMMAND_S, SlurmError, advice, seconds, slurm
from labkit.launchers.slurm.queue import GOING, WAITING, JobState, state_of, why_it_waits
from labkit.protocol.pages import help_hint

LOOK_AT_JOB_S = (0.5, 5.0)
"""Least and greatest time between two questions to SLURM, each one `squeue` for one job, or two while it waits.

They become rarer while nothing changes. When ranks begin or end, which their files tell, SLURM is asked at once."""

SEEN_LATE_S = 60.0
"""How long what ranks wrote in a job that ended well may take to be seen over a network's file system."""

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
        script: Callable[[Sequence[str], str, str], str] | None = None,
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
        self._nodes = ""
        """Those that the job had, when it had all of them."""
        self._known = threading.Event()
        self._closed, self._look_now = threading.Event(), threading.Event()
        self._cancelling: threading.Thread | None = None

    def submit(self) -> dict[str, Any]:
        """Write the batch script and give it to `sbatch`. Raises RuntimeError with what SLURM says."""
        assert self._script is not None
        command = [self._python, str(self.supervisor), str(self.directory.path)]
        output = str(self.directory.path / "slurm.out").replace("%", "%%")  # sbatch's sign for its own names
        script = self._script(command, self.about["name"], output)
        self.directory.write("job.sbatch", script.encode())
        try:
            answer = slurm("sbatch", "--parsable", str(self.directory.path / "job.sbatch"))
        except SlurmError as error:
            shutil.rmtree(self.directory.path)
            raise RuntimeError(
                f"SLURM did not take the job: {error}{advice(str(error))}\n{help_hint('slurm')}"
            ) from None
        self.job_id = answer.strip().partition(";")[0]
        self.follow()
        return {"job": self.job_id}

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

    def ranks_have_begun(self) -> None:
        """See where the job is."""
        self.look()

    def ranks_have_ended(self) -> None:
        """See what SLURM makes of it."""
        self.look()

    def look(self) -> None:
        """See what SLURM says of the job, now."""
        self._look_now.set()

    def wait_until_known(self) -> None:
        """Wait until SLURM has said how the job is, but not for ever."""
        self._known.wait(COMMAND_S)

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
            self.settle(SEEN_LATE_S if state.state == "COMPLETED" else SETTLE_S)
            return True
        elif changed or state.state == "SUSPENDED":
            suspended = " and suspended" if state.state == "SUSPENDED" else ""
            self.emit(job_events.Notice(-1, f"SLURM job {self.job_id} on {state.nodes}{suspended}"))
        return False
