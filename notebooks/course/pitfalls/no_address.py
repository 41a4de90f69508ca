"""No address."""

import os
from unittest import mock

import torch.distributed as dist

from course.pitfalls.base import Exhibit, Expected


def symptom(seen):
    with mock.patch.dict(os.environ, clear=True):
        try:
            dist.init_process_group("gloo")
        except ValueError as error:
            return "MASTER_ADDR expected" in seen and "RANK expected" in str(error)
    return False


EXHIBIT = Exhibit(
    wing="starting",
    title="init_process_group, in an empty environment",
    story="""
    Two of the texts call `init_process_group` and never say where the ranks meet. Here that
    happens in an environment with no variables at all: what does the call do?
    """,
    choices=(
        "it waits for the others",
        "an error names what is missing",
        "it starts, alone",
    ),
    shows=2,
    gives=Expected("names of variables that are missing", symptom),
    expects=1,
    kind="error",
)


@EXHIBIT.broken
def no_address():
    with mock.patch.dict(os.environ, clear=True):
        dist.init_process_group("gloo", rank=0, world_size=1)
        return dist.get_world_size()


@EXHIBIT.right
def right():
    """Ranks meet at one address. Name it: by a store, as here, or by the variables that
    torchrun sets. (Without `rank` and `world_size`, as in one of the texts, the first one
    missing is `RANK`.) `labkit.launch` does it for you."""
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        return dist.get_world_size()
    finally:
        dist.destroy_process_group()
