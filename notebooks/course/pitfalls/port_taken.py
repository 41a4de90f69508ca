"""A port that is taken."""

import socket

import torch.distributed as dist

from course.pitfalls.base import Exhibit, Expected

EXHIBIT = Exhibit(
    wing="starting",
    title="Port 29500",
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
    gives=Expected("the port is taken", lambda seen: "address already in use" in seen.lower()),
    expects=True,
    kind="error",
)


@EXHIBIT.broken
def port_taken():
    with socket.create_server(("127.0.0.1", 0)) as other_job:
        port = other_job.getsockname()[1]
        store = dist.TCPStore("127.0.0.1", port, 1, is_master=True)
        return store.port != port


@EXHIBIT.right
def right():
    """Only rank 0 is told: our other ranks would find the other job's store at that port. Port 0
    means any free port. On a cluster all nodes need the port beforehand: derive it
    from the job's number."""
    with socket.create_server(("127.0.0.1", 0)) as other_job:
        store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
        return store.port != other_job.getsockname()[1]
