"""A training that saves while it goes on, and once more when it is told to stop; started again, it goes on.

    torchrun --nproc-per-node 2 stop_and_save.py digits.pt --steps 300

SIGTERM is what a cluster sends before SIGKILL. torchrun passes it on to its ranks, and gives them 30 seconds. For
sbatch --signal=USR1@120, start it with torchrun --signals-to-handle SIGTERM,SIGUSR1. One rank that is told is enough: all
stop after the same step, and save it. Checkpoints are folders below --folder, named by the number of steps.
digits.pt holds (images, labels), as `torch.save` writes a tuple. Rank 0 leaves the weights in weights.pt.
"""

import argparse
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel


def listen_for_stop(device):
    """Return a function that all ranks call after each step: whether any of them has been told to stop."""
    told = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: told.append(number))

    def has_to_stop():
        flag = torch.tensor(len(told), device=device)
        dist.all_reduce(flag)
        return flag.item() > 0

    return has_to_stop


class Checkpoints:
    """Folders with a checkpoint each. At most one of them is being written."""

    def __init__(self, folder, model, optimizer):
        self.folder, self.model, self.optimizer = Path(folder), model, optimizer
        # The thread that writes calls collectives while the loop calls its own: each needs a group of its own.
        self.group = dist.new_group(backend="gloo")
        self.under_way = None

    def state(self):
        weights, states = get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optimizer": states}

    def begin(self, step):
        """Copy the state, and write it while training goes on."""
        self.finish()
        path = self.folder / f"{step:08}"
        self.under_way = dcp.async_save(self.state(), checkpoint_id=path, process_group=self.group)

    def finish(self):
        """Wait for what is being written. Raises what went wrong with it."""
        if self.under_way is not None:
            self.under_way.result()
            self.under_way = None

    def resume(self):
        """Put back the newest checkpoint; return how many steps it has."""
        # A rank's files are written first, and .metadata last, when those of all ranks are there.
        done = sorted(path.parent for path in self.folder.glob("*/.metadata"))
        if not done:
            return 0
        state = self.state()
        dcp.load(state, checkpoint_id=done[-1], process_group=self.group)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        return int(done[-1].name)


def train(device, options):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    has_to_stop = listen_for_stop(device)
    torch.manual_seed(options.seed)
    network = nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))
    model = DistributedDataParallel(network.to(device))
    optimizer = torch.optim.AdamW(model.parameters())
    images, labels = torch.load(options.data, weights_only=True)
    checkpoints = Checkpoints(options.folder, model, optimizer)
    first = checkpoints.resume()
    if rank == 0:
        print(f"goes on after step {first}", flush=True)
    for step in range(first, options.steps):
        # Which images come is a function of the step, so nothing of it has to be saved.
        order = torch.Generator().manual_seed(options.seed + step)
        batch = torch.randint(len(images), (options.batch_size,), generator=order)
        mine = batch.split(options.batch_size // world_size)[rank]
        outputs = model(images[mine].to(device))
        optimizer.zero_grad()
        nn.functional.cross_entropy(outputs, labels[mine].to(device)).backward()
        optimizer.step()
        is_told = has_to_stop()
        if is_told or (step + 1) % options.every == 0:
            checkpoints.begin(step + 1)
            if rank == 0:
                print(f"step {step + 1}", flush=True)
        if is_told:
            checkpoints.finish()
            print(f"rank {rank} was told to stop, and saved step {step + 1}", flush=True)
            return
    checkpoints.finish()
    if rank == 0:
        torch.save(network.state_dict(), options.out)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=20, help="steps between two checkpoints")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", default="checkpoints")
    parser.add_argument("--out", default="weights.pt")
    options = parser.parse_args()
    device = torch.device("cpu")
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    is_gpu = device.type == "cuda"
    dist.init_process_group("nccl" if is_gpu else "gloo", device_id=device if is_gpu else None)
    if options.batch_size % dist.get_world_size():
        parser.error(
            f"--batch-size {options.batch_size} is no multiple of {dist.get_world_size()} ranks"
        )
    try:
        train(device, options)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
