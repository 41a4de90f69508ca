"""A plain script that spawns two ranks and takes one DDP step, by PyTorch alone: what `sessions.py` compares with.

For each line that it reads it does so once, and writes the seconds from `mp.spawn` to the first step on both ranks.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def first_step(rank: int, world_size: int, port: int, done: Any) -> None:
    """Take one DDP step and say when it was done."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model(torch.randn(32, 64)).pow(2).mean().backward()
    optimizer.step()
    done.put(time.time())
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Answer each line."""
    for line in sys.stdin:
        world_size = int(line)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        done = mp.get_context("spawn").SimpleQueue()
        start_s = time.time()
        mp.spawn(first_step, args=(world_size, port, done), nprocs=world_size)
        print(max(done.get() for _ in range(world_size)) - start_s, flush=True)


if __name__ == "__main__":
    main()
