"""Wrong answers to `mended_line`, and a piece of what each must be told."""

from course.batch_scripts import SCRIPTS
from course.exercises.mended_line import mended_line
from tests.support.wrong_answers import told


def _with(letter, *found):
    """The right lines, but for one script."""
    return lambda script: found if script == letter else mended_line(script)


@told("SLURM may place 8 tasks on 2 nodes as it likes")
def eight_tasks(script):
    """Seven on one node and one on the other, perhaps."""
    return _with("A", 3, "#SBATCH --ntasks=8")(script)


@told("srun: error: Unable to create step for job 4711: More processors requested than permitted")
def an_agent_for_each_gpu(script):
    """Ranks of ranks."""
    return _with("D", 7, SCRIPTS["D"].splitlines()[6].replace("torchrun", "srun --ntasks=8 torchrun"))(script)


@told("rank 1 looks for port 20001, and rank 0 listens on another, 20000")
def a_port_for_each_rank(script):
    """No longer random, and still not the same."""
    return _with("E", 6, "srun bash -c 'MASTER_PORT=$((20000 + SLURM_PROCID)) python train.py'")(script)


@told("SLURM signals the tasks, which end at once")
def as_it_was(script):
    """Nothing mended in F."""
    return _with("F", 6, "#SBATCH --signal=USR1@300")(script)


@told("returned a str, expected (number, line)")
def line_only(script):
    """Half of the answer."""
    return mended_line(script)[1]
