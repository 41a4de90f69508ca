"""A port that is taken: an exhibit of the museum of pitfalls."""

from __future__ import annotations

import socket

import torch.distributed as dist

from course.pitfalls.base import Exhibit

EXHIBIT = Exhibit(
    wing="starting",
    title="A port that is taken",
    story="""
    [The text on ResNet-50 and
    SLURM](https://avoid.overfit.cn/post/67095b9014cb40888238b84fea17e872) and [*Writing
    Distributed Applications with
    PyTorch*](https://docs.pytorch.org/tutorials/intermediate/dist_tuto.html) both fix the
    port to 29500. What if another job on the machine has done the same? (Here the "other
    job" holds some port, and ours wants the same.)
    """,
    choices=(
        "it joins the other job",
        "it waits until the port is free",
        "an error: in use",
    ),
    shows=3,
    kind="error",
)


@EXHIBIT.broken
def port_taken():
    with socket.create_server(("127.0.0.1", 0)) as other_job:
        port = other_job.getsockname()[1]
        dist.TCPStore("127.0.0.1", port, 1, is_master=True)


@EXHIBIT.symptom
def symptom(seen):
    return "address already in use" in seen.lower()


@EXHIBIT.right
def right():
    """Port 0 asks the system for one that is free. On a cluster, where all nodes must know
    it beforehand, derive it from the job's number."""
    with socket.create_server(("127.0.0.1", 0)) as other_job:
        store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
        assert store.port != other_job.getsockname()[1]
        return f"a port of its own: {store.port > 0}"
