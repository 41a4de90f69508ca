"""Only SLURM's variables."""

from course.pitfalls.base import Exhibit, has

EXHIBIT = Exhibit(
    wing="machines",
    title="Rank and world size from the environment",
    story="""
    [The text on ResNet-50 and
    SLURM](https://avoid.overfit.cn/post/67095b9014cb40888238b84fea17e872) reads rank and size
    from `SLURM_PROCID` and `SLURM_NTASKS`. Here it is started by `srun`, by torchrun, by both
    (`srun torchrun`, whose ranks on a node share their `SLURM_PROCID`), and by hand. What happens
    in the second case?
    """,
    choices=(
        "rank 1, as torchrun says",
        "a KeyError",
        "rank -1",
    ),
    shows=2,
    gives=has("KeyError: 'SLURM_PROCID'"),
    expects=[(3, 8), (1, 4), (5, 8), (0, 1)],
    kind="error",
)


SRUN = {"SLURM_PROCID": "3", "SLURM_NTASKS": "8"}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4"}
BOTH = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "RANK": "5", "WORLD_SIZE": "8"}


def rank_and_size(environment):
    return int(environment["SLURM_PROCID"]), int(environment["SLURM_NTASKS"])


@EXHIBIT.broken
def only_slurms_variables():
    return [rank_and_size(environment) for environment in (SRUN, TORCHRUN, BOTH, {})]


@EXHIBIT.right
def right():
    """Read `RANK` first, then `SLURM_PROCID`, and be rank 0 of 1 if there is neither: under
    `srun torchrun` all ranks of a node have the same `SLURM_PROCID`. With SLURM's variables
    first they would get the same rank, without an error."""

    def rank_and_size(environment):
        for rank, size in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")):
            if rank in environment and size in environment:
                return int(environment[rank]), int(environment[size])
        return 0, 1

    return [rank_and_size(environment) for environment in (SRUN, TORCHRUN, BOTH, {})]
