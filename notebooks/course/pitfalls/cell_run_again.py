"""No finally."""

import contextlib

import torch.distributed as dist

from course.pitfalls.base import Exhibit, has

EXHIBIT = Exhibit(
    wing="starting",
    title="The cell is run again",
    story="""
    The last line of training destroys the process group; in two of the texts nothing does.
    Training fails with an error. You mend it and run the cell again, in the same kernel.
    What happens?
    """,
    choices=(
        "it trains",
        "an error: there is a group already",
        "it waits for the ranks of the first run",
    ),
    shows=2,
    gives=has("twice"),
    expects="trained",
    kind="error",
)


def train(failure):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if failure:
        raise ValueError(failure)
    dist.destroy_process_group()
    return "trained"


@EXHIBIT.broken
def cell_run_again():
    with contextlib.suppress(ValueError):
        train("bad batch")
    return train(None)


@EXHIBIT.right
def right():
    """A `finally` runs however the function ends, so the group is gone after an error as
    well."""

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
