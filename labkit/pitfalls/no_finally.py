"""No finally: an exhibit of the museum of pitfalls."""

from __future__ import annotations

import contextlib

import torch.distributed as dist

from labkit.pitfalls.base import Exhibit

EXHIBIT = Exhibit(
    wing="starting",
    title="No finally",
    story="""
    The group is destroyed in the last line of training, in two texts not even there. Training
    fails with an error, which you mend; then you run the cell again, in the same kernel. What
    does it say?
    """,
    choices=(
        "it trains",
        "an error: there is a group already",
        "it waits for the ranks of before",
    ),
    shows=2,
    kind="error",
)


def train(failure):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if failure:
        raise ValueError(failure)
    dist.destroy_process_group()
    return "trained"


@EXHIBIT.broken
def no_finally():
    try:
        with contextlib.suppress(ValueError):
            train("bad batch")
        return train(None)
    finally:
        dist.destroy_process_group()  # or the exhibits after this one could not start either


@EXHIBIT.symptom
def symptom(seen):
    return "twice" in seen


@EXHIBIT.right
def right():
    """What a `finally` does is done even then."""

    def train(failure):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            if failure:
                raise ValueError(failure)
            return "trained"
        finally:
            dist.destroy_process_group()

    with contextlib.suppress(ValueError):
        train("bad batch")
    assert not dist.is_initialized()
    return train(None)
