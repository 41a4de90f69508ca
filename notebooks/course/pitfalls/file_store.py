"""init_process_group, with a FileStore."""

import os
from unittest import mock

import torch.distributed as dist

from course.pitfalls.base import Exhibit

EXHIBIT = Exhibit(
    wing="starting",
    title="init_process_group, with a FileStore",
    story="""
    Again an environment without any variables. This time the call is given a store: a file,
    and still no address. What does it do?
    """,
    choices=(
        "it waits for the others",
        "an error names MASTER_ADDR",
        "a group of 1",
    ),
    shows=3,
    expects=1,
    why="""
    Ranks need one place to meet, and a file that all of them see is one. `MASTER_ADDR` and
    `MASTER_PORT` are for the default, `env://`.
    """,
)


@EXHIBIT.sound
def file_store(folder):
    with mock.patch.dict(os.environ, clear=True):
        store = dist.FileStore(str(folder / "store"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        return dist.get_world_size()
