"""What the notebook sends to a rank: the job, the cells that its tracebacks may name, and its numbers."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Cell(NamedTuple):
    """A cell of the notebook, so that a rank's traceback can show its lines."""

    title: str
    """As the reader knows it: "Cell In[3]"."""
    text: str


class Surroundings(Protocol):
    """What of the notebook's process a rank takes over before a job: its folder, path and environment, say."""

    def take_over(self) -> None:
        """Make the process that calls this so."""


class Job(NamedTuple):
    """Everything a rank must know to run the function; sent to it through a pipe once its process is up, or a file."""

    function: bytes
    """(function, args, kwargs), pickled by value."""
    world_size: int
    backend: str | None
    """None: the ranks find out."""
    cuda_devices: int | None
    """GPUs that the ranks of a machine share out; 0 means CPU, None those that a rank finds."""
    threads: int | None
    """CPU threads per rank; None: the cores that a rank finds, divided by the ranks there."""
    seed: int | None
    port: int
    """Of the notebook's rendezvous store, on loopback; 0 where the ranks make their own."""
    start_s: float
    """When the run was launched, as `time.time()`."""
    environment: dict[str, str]
    cells: dict[str, Cell]
    """The notebook's cells by the file names that tracebacks know them by."""
    reserved: bool = False
    """Whether the process stays when the job is done, for another one."""
    group: int | None = None
    """On reserved ranks: the number of the process group that stays from cell to cell. None: one of the job's own."""
    watch: str = ""
    """What ends the run: "nan", a logged value that is not finite; "": nothing."""
    surroundings: Surroundings | None = None
    """On reserved ranks: those of the notebook now; None leaves the process's own."""


class RankInfo(NamedTuple):
    """Where a rank is among the others."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    """Number of ranks on this machine."""
