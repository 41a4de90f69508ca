"""DistributedDataParallel on one machine: one file, which starts its own ranks by mp.spawn.

    python ddp_spawn.py digits.pt --world-size 2 --epochs 5

digits.pt holds images, float (count, 1, 28, 28), and labels, int64 (count,), as `torch.save((images, labels), …)`
writes them. Rank 0 leaves the trained network in weights.pt, under keys that a bare network can load.
"""

import argparse
import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def network():
    return nn.Sequential(
        *(nn.Conv2d(1, 10, kernel_size=5), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Conv2d(10, 20, kernel_size=5), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(320, 50), nn.ReLU(), nn.Linear(50, 10)),
    )


def train(rank, world_size, device, options):
    train_set = TensorDataset(*torch.load(options.data, weights_only=True))
    sampler = DistributedSampler(train_set, seed=options.seed, drop_last=True)
    rank_batch_size = options.batch_size // world_size  # all ranks together: batch_size
    loader = DataLoader(train_set, rank_batch_size, sampler=sampler, drop_last=True)
    torch.manual_seed(options.seed)
    model = network().to(device)
    ddp = DistributedDataParallel(model, device_ids=[rank] if device.type == "cuda" else None)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=options.lr, momentum=0.9)
    steps = options.epochs * len(loader)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0, total_iters=steps)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)  # or every epoch deals the samples out alike
        total = torch.zeros(2, device=device)  # sum of the losses, number of images
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            loss = nn.functional.cross_entropy(ddp(images), labels)
            optimizer.zero_grad()
            loss.backward()  # averages the gradients, too
            optimizer.step()
            schedule.step()
            total += torch.stack(
                [loss.detach() * len(images), torch.tensor(len(images), device=device)]
            )
        dist.all_reduce(total)  # a rank's own loss is not the loss
        if rank == 0:
            print(
                f"epoch {epoch}: loss {total[0] / total[1]:.4f} over {int(total[1])} images",
                flush=True,
            )
    if rank == 0:
        torch.save(
            ddp.module.state_dict(), options.out
        )  # not ddp's own: its keys begin with "module."


def run_rank(rank, world_size, port, options):
    """What mp.spawn calls in each new process, with its rank in front."""
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(port)
    on_gpus = torch.cuda.device_count() >= world_size
    device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)  # before NCCL, which else takes GPU 0 on every rank
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    dist.init_process_group("nccl" if on_gpus else "gloo", rank=rank, world_size=world_size)
    try:
        train(rank, world_size, device, options)
    finally:
        dist.destroy_process_group()
    os._exit(0)  # done; PyTorch 2.15 with gloo sometimes aborts while it takes itself down


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


if (
    __name__ == "__main__"
):  # the new processes import this file, and must not start ranks in their turn
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data")
    parser.add_argument("--world-size", type=int, default=torch.cuda.device_count() or 2)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=48)
    parser.add_argument("--lr", type=float, default=0.03)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="weights.pt")
    options = parser.parse_args()
    if options.batch_size % options.world_size:
        parser.error(
            f"--batch-size {options.batch_size} is no multiple of {options.world_size} ranks"
        )
    arguments = (options.world_size, free_port(), options)
    mp.spawn(run_rank, args=arguments, nprocs=options.world_size)
