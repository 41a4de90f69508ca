"""Gradients averaged by hand: two processes of mp.Process, gloo, 127.0.0.1, one all-reduce per parameter.

    python average_by_hand.py digits.pt --size 2 --epochs 3

digits.pt holds (images, labels), as `torch.save` writes a tuple. Rank 0 leaves the network in weights.pt.
"""

import argparse
import os
import random
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset


def network():
    return nn.Sequential(
        *(nn.Conv2d(1, 10, kernel_size=5), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Conv2d(10, 20, kernel_size=5), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(320, 50), nn.ReLU(), nn.Linear(50, 10)),
    )


def partition(samples, rank, size):
    """This rank's piece of the samples: shuffled alike on every rank, cut into equal pieces, the rest left out."""
    order = list(range(len(samples)))
    random.Random(1234).shuffle(order)
    length = len(samples) // size
    return Subset(samples, order[rank * length : (rank + 1) * length])


def average_gradients(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)  # the sum …
        parameter.grad /= dist.get_world_size()  # … made the mean


def run(rank, size, options):
    images, labels = torch.load(options.data, weights_only=True)
    mine = partition(TensorDataset(images.double(), labels), rank, size)
    shuffling = torch.Generator().manual_seed(options.seed)
    bsz = options.batch_size // size
    batches = DataLoader(mine, bsz, shuffle=True, drop_last=True, generator=shuffling)
    torch.manual_seed(options.seed)  # the same weights on every rank: here nobody sends them
    model = network().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    for epoch in range(options.epochs):
        epoch_loss = torch.zeros(2, dtype=torch.float64)  # sum of the losses, number of images
        for x, y in batches:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            average_gradients(model)
            optimizer.step()
            epoch_loss += torch.tensor([loss.item() * len(x), len(x)])
        print(f"rank {rank}, epoch {epoch}: loss {epoch_loss[0] / epoch_loss[1]:.4f}", flush=True)
    if rank == 0:
        torch.save(model.state_dict(), options.out)


def init_process(rank, size, port, options):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(port)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    dist.init_process_group("gloo", rank=rank, world_size=size)
    try:
        run(rank, size, options)
    finally:
        dist.destroy_process_group()
    os._exit(0)  # done; PyTorch 2.15 with gloo sometimes aborts while it takes itself down


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data")
    parser.add_argument("--size", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=48)
    parser.add_argument("--lr", type=float, default=0.03)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="weights.pt")
    options = parser.parse_args()
    if options.batch_size % options.size:
        parser.error(f"--batch-size {options.batch_size} is no multiple of {options.size} ranks")
    context, port = mp.get_context("spawn"), free_port()
    processes = [
        context.Process(target=init_process, args=(rank, options.size, port, options))
        for rank in range(options.size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    codes = [process.exitcode for process in processes]
    if any(codes):  # join alone says nothing: a rank that failed would go unnoticed
        raise SystemExit(f"exit codes by rank: {codes}")
