"""Only SLURM's variables: an exhibit of the museum of pitfalls."""

from __future__ import annotations

import os
from unittest import mock

from course.pitfalls.base import Exhibit

EXHIBIT = Exhibit(
    wing="machines",
    title="Only SLURM's variables",
    story="""
    [The text on ResNet-50 and
    SLURM](https://avoid.overfit.cn/post/67095b9014cb40888238b84fea17e872) reads rank and size
    from `SLURM_PROCID` and `SLURM_NTASKS`. Run it under torchrun, which sets `RANK` and
    `WORLD_SIZE`: what does it read?
    """,
    choices=(
        "rank 0, as torchrun says",
        "a KeyError",
        "rank -1",
    ),
    shows=2,
    kind="error",
)


@EXHIBIT.broken
def only_slurms_variables():
    with mock.patch.dict(os.environ, {"RANK": "0", "WORLD_SIZE": "4"}, clear=True):
        return int(os.environ["SLURM_PROCID"])


@EXHIBIT.symptom
def symptom(seen):
    return seen.startswith("KeyError: 'SLURM_PROCID'")


@EXHIBIT.right
def right():
    """Read `RANK` first, then `SLURM_PROCID`, and be rank 0 of 1 if there is neither: under
    `srun torchrun` all ranks of a node have the same `SLURM_PROCID`. With SLURM's variables
    first there is no error there, only the wrong rank."""

    def place(environment):
        for rank, size in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")):
            if rank in environment and size in environment:
                return int(environment[rank]), int(environment[size])
        return 0, 1

    srun, torchrun = {"SLURM_PROCID": "3", "SLURM_NTASKS": "8"}, {"RANK": "1", "WORLD_SIZE": "4"}
    assert [place(srun), place(torchrun), place({})] == [(3, 8), (1, 4), (0, 1)]
    second_node = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "WORLD_SIZE": "8"}
    four_ranks = [place(second_node | {"RANK": str(rank)}) for rank in range(4, 8)]
    assert four_ranks == [(4, 8), (5, 8), (6, 8), (7, 8)]
    return four_ranks
