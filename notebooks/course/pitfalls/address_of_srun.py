"""The address of whoever asked: an exhibit of the museum of pitfalls."""

from __future__ import annotations

import re
import socket

from course.pitfalls.base import Exhibit

EXHIBIT = Exhibit(
    wing="machines",
    title="The address of whoever asked",
    story="""
    [The text on ResNet-50 and
    SLURM](https://avoid.overfit.cn/post/67095b9014cb40888238b84fea17e872) takes
    `SLURM_SRUN_COMM_HOST` for the address at which all ranks meet. The variables below are
    those of a job on three nodes that was started by `srun` on a login node. Nothing runs
    on a cluster here: two addresses of this machine stand for two machines, and rank 0
    waits at the first node's. Does a rank that calls `SLURM_SRUN_COMM_HOST` reach it?
    """,
    choices=(
        "yes",
        "no, it calls in vain",
    ),
    shows=2,
    kind="error",
    needs="Linux",
)


JOB = {"SLURM_SRUN_COMM_HOST": "login1", "SLURM_JOB_NODELIST": "node[03-04,07]"}
ADDRESSES = {"login1": "127.0.0.1", "node03": "127.0.0.2"}


def call(host):
    with socket.create_server(("127.0.0.2", 0)) as rank_0:
        port = rank_0.getsockname()[1]
        with socket.create_connection((ADDRESSES[host], port), timeout=5) as reached:
            return reached.getpeername()[0]


@EXHIBIT.broken
def address_of_srun():
    return call(JOB["SLURM_SRUN_COMM_HOST"])


@EXHIBIT.symptom
def symptom(seen):
    return seen.startswith("ConnectionRefusedError")


@EXHIBIT.right
def right():
    """The address to use is the first node's: `scontrol show hostnames
    "$SLURM_JOB_NODELIST" | head -n 1`, spelt out here."""
    name, ranges = re.fullmatch(r"(\w+)\[(.*)\]", JOB["SLURM_JOB_NODELIST"]).groups()
    ends = [(part.split("-")[0], part.split("-")[-1]) for part in ranges.split(",")]
    nodes = [f"{name}{i:0{len(a)}d}" for a, b in ends for i in range(int(a), int(b) + 1)]
    assert nodes == ["node03", "node04", "node07"]
    assert call(nodes[0]) == ADDRESSES["node03"]
    return f"rank 0 answers at {nodes[0]}"
