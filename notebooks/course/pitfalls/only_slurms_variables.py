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
    """Look where each launcher writes, and be a single process where there is none. Then
    the same file runs everywhere."""

    def place(environment):
        for rank, size in (("SLURM_PROCID", "SLURM_NTASKS"), ("RANK", "WORLD_SIZE")):
            if rank in environment and size in environment:
                return int(environment[rank]), int(environment[size])
        return 0, 1

    slurm, torchrun = {"SLURM_PROCID": "3", "SLURM_NTASKS": "8"}, {"RANK": "1", "WORLD_SIZE": "4"}
    assert [place(slurm), place(torchrun), place({})] == [(3, 8), (1, 4), (0, 1)]
    return place({})
