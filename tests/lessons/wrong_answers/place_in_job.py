"""Wrong answers to `place_in_job`, and a piece of what each must be told."""

from course.exercises.place_in_job import place_in_job
from tests.support.wrong_answers import told


@told("that is `SLURM_LAUNCH_NODE_IPADDR`, where `srun` runs, and no rank")
def address_of_srun(environment):
    """On the login node."""
    *numbers, address = place_in_job(environment)
    return (*numbers, environment.get("MASTER_ADDR") or environment.get("SLURM_LAUNCH_NODE_IPADDR", address))


@told("that is `SLURM_NTASKS`, what `srun` would start")
def tasks_of_the_job(environment):
    """Nobody has started them."""
    rank, local_rank, world_size, address = place_in_job(environment)
    if "RANK" not in environment and "OMPI_COMM_WORLD_RANK" not in environment:
        world_size = int(environment.get("SLURM_NTASKS", world_size))
    return rank, local_rank, world_size, address


@told("that is `SLURM_STEP_NODELIST`, all nodes of the step")
def all_nodes(environment):
    """Not the first."""
    *numbers, address = place_in_job(environment)
    return (*numbers, environment.get("MASTER_ADDR") or environment.get("SLURM_STEP_NODELIST", address))


@told("the local rank is 5, expected 1")
def rank_for_local_rank(environment):
    """Right on the first node."""
    rank, _, world_size, address = place_in_job(environment)
    return rank, rank, world_size, address


@told("that is `SLURM_LOCALID`, of the task that `srun` has started")
def half_of_torchruns(environment):
    """Rank and world size are torchrun's."""
    rank, local_rank, world_size, address = place_in_job(environment)
    return rank, int(environment.get("SLURM_LOCALID", local_rank)), world_size, address


@told("that is `SLURM_PROCID`, the number of the task that `srun` has started, which is the launcher's helper")
def slurm_first(environment):
    """Right for srun alone."""
    if "SLURM_PROCID" in environment:
        names = "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"
        rank, local_rank, world_size = (int(environment[name]) for name in names)
        return rank, local_rank, world_size, environment.get("MASTER_ADDR") or place_in_job(environment)[3]
    return place_in_job(environment)


@told("the world size is 8, expected 1: that is `SLURM_NTASKS`, what `srun` would start")
def rank_of_the_batch_script(environment):
    """The script has a SLURM_PROCID, and no step."""
    if "SLURM_PROCID" in environment and not {"RANK", "OMPI_COMM_WORLD_RANK"} & set(environment):
        numbers = (int(environment[name]) for name in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"))
        return (*numbers, place_in_job(environment)[3])
    return place_in_job(environment)
