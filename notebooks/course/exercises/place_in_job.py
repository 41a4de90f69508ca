"""Exercise: rank, local rank, world size and address, from the environment of any launcher."""

from __future__ import annotations

from course.exercises.base import Exercise
from course.exercises.trial import Trial
from course.launch_environments import ENVIRONMENTS, PLACES, first_host

EXERCISE = Exercise(
    lesson="15",
    title="Where am I?",
    statement="""
    Return where a process is, from its environment alone, whatever has started it: its rank, its local rank, the world
    size, and the host on which rank 0 is; three `int` and a `str`. A process that no launcher has started as a rank is
    rank 0 of 1, and its own host.

    It is tried with the eight environments of the table above. `first_host("gpu[07-08]")` is `"gpu07"`, as the first
    line of `scontrol show hostnames` would be.
    """,
    hints=(
        "A launcher may run inside another one's job, and a process then has the variables of both. Which of them has "
        "started it last?",
        "`RANK` first, then Open MPI's words, then SLURM's. mpirun starts its helpers by `srun`, and `srun torchrun` "
        "starts agents: their ranks inherit the `SLURM_PROCID` of the helper or the agent.",
        "`SLURM_NTASKS` says what the job may start; `SLURM_STEP_NUM_TASKS` is there only in what `srun` has started.",
        "Without a `MASTER_ADDR`, rank 0 of a step is on the first host of `SLURM_STEP_NODELIST`. `srun` may run "
        "elsewhere.",
    ),
    why="The launcher that started the process last knows its rank, so the innermost one is asked first; that of the "
    "cluster is asked last, and only in a step.",
    world_sizes=(),
    imports=("from course.launch_environments import first_host",),
    cases=tuple({"launcher": launcher} for launcher in ENVIRONMENTS),
)


@EXERCISE.reference
def place_in_job(environment):
    """Return (rank, local rank, world size, master address); `environment` is like `os.environ`."""
    if "RANK" in environment:  # torchrun, Ray Train
        names = "RANK", "LOCAL_RANK", "WORLD_SIZE"
    elif "OMPI_COMM_WORLD_RANK" in environment:
        names = "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"
    elif "SLURM_STEP_NUM_TASKS" in environment:
        names = "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"
    else:
        return 0, 0, 1, "localhost"
    rank, local_rank, world_size = (int(environment[name]) for name in names)
    address = environment.get("MASTER_ADDR") or first_host(environment["SLURM_STEP_NODELIST"])
    return rank, local_rank, world_size, address


@EXERCISE.trial
def trial(t: Trial, launcher: str) -> None:
    """Call it with a copy of an environment, and compare."""
    environment, expected = ENVIRONMENTS[launcher], PLACES[launcher]
    found = t.call(dict(environment))
    is_whole = isinstance(found, (tuple, list)) and len(found) == len(expected)
    t.require(is_whole, f"returned {found!r:.60}, expected (rank, local rank, world size, master address)")
    for what, value, right in zip(("rank", "local rank", "world size"), found, expected, strict=False):
        is_int = isinstance(value, int)
        t.require(is_int, f"the {what} is {value!r:.40}, expected an int: variables are texts")
        t.require(value == right, f"the {what} is {value}, expected {right}{_source(environment, value, what)}")
    address = found[3]
    t.require(isinstance(address, str) and address, f"the address is {address!r:.60}, expected a host's name")
    if expected.world_size > 1:  # alone, it needs nobody
        said = _source(environment, address, "address")
        t.require(address == expected.address, f"the address is {address!r:.60}, expected {expected.address!r}{said}")


def _source(environment: dict[str, str], value: object, what: str) -> str:
    """Say from which variable a wrong value is."""
    known = {
        "SLURM_PROCID": "the number of the task that `srun` has started, which is the launcher's helper",
        "SLURM_LOCALID": "of the task that `srun` has started, which is the launcher's helper",
        "SLURM_STEP_NUM_TASKS": "the tasks that `srun` has started, which are the launcher's helpers",
        "SLURM_NTASKS": "what `srun` would start; it has not started this process, and there is nobody else",
        "SLURM_LAUNCH_NODE_IPADDR": "where `srun` runs, and no rank",
        "SLURM_SRUN_COMM_HOST": "where `srun` runs, and no rank",
        "SLURM_STEP_NODELIST": "all nodes of the step; `first_host` gives the first",
        "SLURM_JOB_NODELIST": "all nodes of the job; `first_host` gives the first",
    }
    words = {"rank": "PROCID", "local rank": "LOCALID", "world size": "TASKS", "address": "NODE IPADDR COMM_HOST"}[what]
    for name, text in known.items():
        if environment.get(name) == str(value) and any(word in name for word in words.split()):
            return f": that is `{name}`, {text}"
    return ""
