"""The host of srun."""

import re
import socket

import torch.distributed as dist

from course.pitfalls.base import Exhibit, has
from course.pitfalls.helpers import python

EXHIBIT = Exhibit(
    wing="machines",
    title="The address at which ranks meet",
    story="""
    [The text on ResNet-50 and
    SLURM](https://avoid.overfit.cn/post/67095b9014cb40888238b84fea17e872) takes
    `SLURM_SRUN_COMM_HOST` for the address at which all ranks meet. The variables below are
    those of a job on three nodes that was started by `srun` on a login node. Nothing runs
    on a cluster here: two addresses of this machine, which is every 127.x.x.x on Linux, stand
    for two machines, and rank 0 waits at the first node's. Does a rank that calls `SLURM_SRUN_COMM_HOST` reach it?
    """,
    choices=(
        "yes",
        "no, and it fails at once",
        "no, but it tries again until its timeout",
    ),
    shows=3,
    gives=has("timed out after 1000ms"),
    expects="reached",
    kind="error",
    needs="Linux",
)


JOB = {"SLURM_SRUN_COMM_HOST": "login1", "SLURM_JOB_NODELIST": "node[03-04,07]"}
ADDRESSES = {"login1": "127.0.0.1", "node03": "127.0.0.2"}


CALL = """
import datetime, torch.distributed
limit = datetime.timedelta(seconds=1)  # init_process_group's: 10 min over NCCL
torch.distributed.TCPStore({host!r}, {port}, 2, is_master=False, timeout=limit)
"""


def rank_0():
    """The store at which ranks meet, and its port."""
    server = socket.create_server(("127.0.0.2", 0))
    port = server.getsockname()[1]
    options = {"wait_for_workers": False, "master_listen_fd": server.detach()}
    return dist.TCPStore("127.0.0.2", port, 2, is_master=True, **options), port


@EXHIBIT.broken
def address_of_srun():
    store, port = rank_0()
    host = ADDRESSES[JOB["SLURM_SRUN_COMM_HOST"]]
    exit_code, said = python(CALL.format(host=host, port=port))
    assert exit_code == 0, said
    return "reached"


@EXHIBIT.right
def right():
    """Use the first node's address: `scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n
    1`, spelt out here. `SLURM_SRUN_COMM_HOST` is the host of `srun`. In a batch script that is
    the job's first node, so there the call succeeds by luck. From a login node it fails, and
    only after the timeout."""
    name, ranges = re.fullmatch(r"(\w+)\[(.*)\]", JOB["SLURM_JOB_NODELIST"]).groups()
    ends = [(part.split("-")[0], part.split("-")[-1]) for part in ranges.split(",")]
    nodes = [f"{name}{i:0{len(a)}d}" for a, b in ends for i in range(int(a), int(b) + 1)]
    assert nodes == ["node03", "node04", "node07"]
    store, port = rank_0()
    exit_code, said = python(CALL.format(host=ADDRESSES[nodes[0]], port=port))
    assert exit_code == 0, said
    return "reached"
