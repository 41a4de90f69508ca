"""No address: an exhibit of the museum of pitfalls."""

from __future__ import annotations

import os
from unittest import mock

import torch.distributed as dist

from course.pitfalls.base import Exhibit

EXHIBIT = Exhibit(
    wing="starting",
    title="No address",
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
    kind="error",
)


@EXHIBIT.broken
def no_address():
    with mock.patch.dict(os.environ, clear=True):
        dist.init_process_group("gloo", rank=0, world_size=1)


@EXHIBIT.symptom
def symptom(seen):
    return "MASTER_ADDR expected" in seen


@EXHIBIT.right
def right():
    """Ranks find each other at one address. Say which, by a store as here or by the
    variables that torchrun sets; `labkit.launch` does it for you."""
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert dist.get_world_size() == 1
        return f"a group of {dist.get_world_size()}"
    finally:
        dist.destroy_process_group()
