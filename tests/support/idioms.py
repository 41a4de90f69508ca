"""What a script may do, and a cell therefore, too: a row each. `tests/whole/test_twins.py` runs them every way."""

from __future__ import annotations

from tests.support.twins import Twin

BY_CHANCE = ("meeting",)
"""A FileStore removes its file with the last of its ranks. Two that end at the same moment may both take the other for
the last, for each counts that it has ended, and then, with the file unlocked in between, that it has let go."""

IDIOMS = [
    Twin(
        "ends with sys.exit(0)",
        """
import sys


def main(worker):
    print("trained")
    sys.exit(0)
""",
    ),
    Twin(
        "ends with sys.exit(run())",
        """
import sys


def run():
    print("trained")


def main(worker):
    sys.exit(run())
""",
    ),
    Twin(
        "ends with an exit code",
        """
import sys


def main(worker):
    sys.exit(3)
""",
    ),
    Twin(
        "ends with a message",
        """
import sys


def main(worker):
    sys.exit("no data in ./data")
""",
        world_size=1,
    ),
    Twin(
        "reads its command line with argparse",
        """
import argparse


def main(worker):
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.1)
    return vars(parser.parse_args())
""",
    ),
    Twin(
        "sets its command line itself",
        """
import argparse
import sys

sys.argv = ["train.py", "--epochs", "5"]


def main(worker):
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    return parser.parse_args().epochs
""",
    ),
    Twin(
        "joins with init_process_group() by its environment",
        """
import os

import torch
import torch.distributed as dist


def main(worker):
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return [total.item(), os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"]]
""",
        joins=False,
    ),
    Twin(
        "joins at an address",
        """
import os

import torch
import torch.distributed as dist


def main(worker):
    address = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    dist.init_process_group("gloo", init_method=address, rank=worker.rank, world_size=worker.world_size)
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()
""",
        joins=False,
    ),
    Twin(
        "joins through a file",
        """
import os

import torch
import torch.distributed as dist


def main(worker):
    meeting = f"file://{os.getcwd()}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=worker.rank, world_size=worker.world_size)
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total.item()
""",
        joins=False,
        repeats=False,
        leaves_by_chance=BY_CHANCE,
    ),
    Twin(
        "reads what torchrun has put into its environment",
        """
import os

NAMES = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK ROLE_WORLD_SIZE ROLE_NAME"
NAMES += " TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS"


def main(worker):
    return {name: os.environ[name] for name in NAMES.split()}
""",
        scripts=("torchrun",),
    ),
    Twin(
        "joins through a store of its own",
        """
import torch
import torch.distributed as dist


def main(worker):
    store = dist.FileStore("meeting", worker.world_size)
    dist.init_process_group("gloo", store=store, rank=worker.rank, world_size=worker.world_size)
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total.item()
""",
        joins=False,
        repeats=False,
        leaves_by_chance=BY_CHANCE,
    ),
    Twin(
        "has imported init_process_group by its name",
        """
import torch
from torch.distributed import all_reduce, destroy_process_group
from torch.distributed import init_process_group as join


def main(worker):
    join("gloo")
    total = torch.ones(1)
    all_reduce(total)
    destroy_process_group()
    return total.item()
""",
        joins=False,
    ),
    Twin(
        "takes its rank, as mp.spawn passes it",
        """
def main(rank):
    return "saves" if rank == 0 else "does not save"
""",
        takes="rank",
        refused="the first parameter is the worker; write worker.rank",
        note="`rank` would be the worker, and `rank == 0` would never hold. Any comparison of a worker with a number "
        "raises TypeError, too.",
    ),
    Twin(
        "takes its rank, and the cell passes that",
        """
def main(rank):
    return "saves" if rank == 0 else "does not save"
""",
        takes="rank",
        launched="lambda worker: main(worker.rank)",
    ),
    Twin(
        "chooses a port, and calls its ranks through it",
        """
import os
import socket

import torch
import torch.distributed as dist
from torch.distributed import rpc


def main(worker):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = torch.tensor(free.getsockname()[1])
    dist.broadcast(port, src=0)
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(port.item())
    rpc.init_rpc(f"rank{worker.rank}", rank=worker.rank, world_size=worker.world_size)
    answer = rpc.rpc_sync(f"rank{1 - worker.rank}", os.getenv, ("RANK",))
    rpc.shutdown()
    return answer
""",
        scripts=("spawn",),
        note="Under torchrun itself the ranks would wait for each other: its agent has the store, at another port.",
    ),
    Twin(
        "goes on alone, in a world of one that its environment describes",
        """
import os
import socket

import torch
import torch.distributed as dist


def main(worker):
    total = torch.tensor([worker.rank + 1.0])
    dist.all_reduce(total)
    dist.destroy_process_group()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo")
    alone = torch.tensor([worker.rank + 1.0])
    dist.all_reduce(alone)
    return total.item(), alone.item(), dist.get_world_size()
""",
        scripts=("spawn",),
    ),
    Twin(
        "starts processes that form a world of their own",
        """
import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def child(index, rank):
    dist.init_process_group("gloo", rank=index, world_size=2)
    total = torch.ones(1)
    dist.all_reduce(total)
    with open(f"child-{rank}-{index}-{total.item():.0f}", "w"):
        pass
    dist.destroy_process_group()


def main(worker):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(port)
    mp.spawn(child, (worker.rank,), nprocs=2)
""",
        world_size=1,
        repeats=False,
        scripts=("spawn",),
    ),
    Twin(
        "chooses the start method of its processes",
        """
import torch.multiprocessing as mp


def child(queue, rank):
    queue.put(rank + 1)


def main(worker):
    mp.set_start_method("spawn")
    queue = mp.SimpleQueue()
    process = mp.Process(target=child, args=(queue, worker.rank))
    process.start()
    answer = queue.get()
    process.join()
    return [answer, mp.get_start_method()]
""",
        world_size=1,
        scripts=("torchrun",),
        note="Under mp.spawn itself it has been chosen already.",
    ),
    Twin(
        "makes of every error an exit",
        """
import sys


def main(worker):
    try:
        raise ValueError("bad batch")
    except Exception:
        sys.exit(1)
""",
    ),
    Twin(
        "trains with an Accelerator()",
        """
import torch
from accelerate import Accelerator


def main(worker):
    accelerator = Accelerator()
    data = torch.utils.data.TensorDataset(torch.arange(8.0)[:, None])
    loader = accelerator.prepare(torch.utils.data.DataLoader(data, batch_size=2))
    batches = [x.flatten().tolist() for (x,) in loader]
    accelerator.wait_for_everyone()
    return [accelerator.num_processes, batches]
""",
        joins=False,
        environment={"ACCELERATE_USE_CPU": "true"},
        note="As a script by `accelerate launch --cpu`. In a launched function that is set where ranks compute on the "
        "CPU; else Accelerate would have each of them train alone.",
        scripts=("torchrun",),
    ),
]
