"""# SBATCH."""

import re
from pathlib import Path

import labkit
from course.pitfalls.base import Exhibit, Expected

EXHIBIT = Exhibit(
    wing="well_known",
    title="The options of a job script",
    story="""
    A [job
    script](https://github.com/LambdaLabsML/distributed-training-guide/blob/main/03-job-launchers/job.sbatch)
    of a guide by Lambda had `# SBATCH`, with a space. `sbatch` takes lines that begin with
    `#SBATCH`. Below is the script that `labkit.Slurm` writes for two nodes, read by that rule,
    with a space put in. Which options are found?
    """,
    choices=(
        "all of them",
        "none",
    ),
    shows=2,
    gives=[],
    expects=Expected(
        "--nodes=2 and --ntasks-per-node=1 among them",
        lambda found: {"--nodes=2", "--ntasks-per-node=1"} <= set(found),
    ),
)


def options_of(script):
    return re.findall(r"^#SBATCH\s+(\S+)", script, re.MULTILINE)


@EXHIBIT.broken
def space_in_sbatch():
    script = labkit.Slurm(nodes=2, ranks_per_node=1).script("train", Path("log"))
    return options_of(script.replace("#SBATCH", "# SBATCH"))


@EXHIBIT.right
def right():
    """With a space the line is an ordinary comment, and the job gets the cluster's defaults."""
    script = labkit.Slurm(nodes=2, ranks_per_node=1).script("train", Path("log"))
    return options_of(script)
