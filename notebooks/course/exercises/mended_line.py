"""Exercise: six batch scripts with a wrong line each."""

from __future__ import annotations

from course.batch_scripts import SCRIPTS, symptom
from course.exercises.base import Exercise
from course.exercises.trial import Trial

EXERCISE = Exercise(
    lesson="15",
    title="What is wrong in this script?",
    statement="""
    Each of the scripts A to F is for two nodes with four GPUs each, and eight ranks, and has one wrong
    line. Their `train.py` is not the lesson's: it finds its place by what torchrun or `srun` has set,
    needs `MASTER_PORT`, and handles no signal.

    Return, for a script's letter, the number of that line and the line as it should be. Your line is
    put in its place, and the script is run in bash, where `srun`, `torchrun` and `python` only note
    how they were called. Most have more than one right line.
    """,
    hints=(
        "A and D: how many processes start, and on which node? B and E: who replaces `$…` by a value: the batch "
        "script, once, or a shell in every task? C: who is `localhost`? F: to whom does SLURM send the signal?",
        "What differs by task goes in single quotes, `srun bash -c '…'`; what all must see alike is exported "
        "before `srun`.",
        "With `--rdzv-backend=c10d --rdzv-endpoint=$MASTER_ADDR:$MASTER_PORT` nobody needs a `--node-rank`. For `B:`, "
        "see `--signal` in `man sbatch`.",
    ),
    why="A batch script runs once, on the first node; only what follows `srun` runs in every task.",
    world_sizes=(),
    imports=(),
    cases=tuple({"script": letter} for letter in SCRIPTS),
)


@EXERCISE.reference
def mended_line(script):
    """Return (number of the wrong line, the line as it should be) of the script "A", "B", … or "F"."""
    return {
        "A": (3, "#SBATCH --ntasks-per-node=4"),
        "B": (
            7,
            "srun torchrun --nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d"
            " --rdzv-endpoint=$MASTER_ADDR:$MASTER_PORT train.py",
        ),
        "C": (5, "export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)"),
        "D": (
            7,
            "srun torchrun --nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d"
            " --rdzv-endpoint=$MASTER_ADDR:$MASTER_PORT train.py",
        ),
        "E": (6, "srun bash -c 'MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000)) python train.py'"),
        "F": (6, "#SBATCH --signal=B:USR1@120"),
    }[script]


@EXERCISE.trial
def trial(t: Trial, script: str) -> None:
    """Put the line in its place, and see what would come of the script."""
    found = t.call(script)
    t.returned(found, "(number, line)")
    number, line = found
    lines = SCRIPTS[script].splitlines()
    t.require(number in range(1, len(lines) + 1), f"there is no line {number!r}; there are 1 to {len(lines)}")
    t.require(isinstance(line, str), f"the line is a {type(line).__name__}, expected a text")
    said = symptom("\n".join([*lines[: number - 1], line, *lines[number:], ""]))
    t.require(not said, f"with your line {number}, {said}")
