"""# SBATCH: an exhibit of the museum of pitfalls."""

from __future__ import annotations

import re

import labkit
from course.pitfalls.base import Exhibit

EXHIBIT = Exhibit(
    wing="well_known",
    title="# SBATCH",
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
    kind="wrong, in silence",
)


def options_of(script):
    return re.findall(r"^#SBATCH\s+(\S+)", script, re.MULTILINE)


@EXHIBIT.broken
def space_in_sbatch():
    script = labkit.Slurm(nodes=2, ranks_per_node=1).script(["python", "train.py"], "train", "log")
    return options_of(script.replace("#SBATCH", "# SBATCH"))


@EXHIBIT.symptom
def symptom(seen):
    return seen == []


@EXHIBIT.right
def right():
    """With a space it is a comment like any other, and the job gets what the cluster gives
    by default."""
    script = labkit.Slurm(nodes=2, ranks_per_node=1).script(["python", "train.py"], "train", "log")
    found = options_of(script)
    assert {"--nodes=2", "--ntasks-per-node=1"} <= set(found)
    return found
