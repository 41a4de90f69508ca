"""DistributedDataParallel for torchrun, which starts the ranks, on one machine or on several.

    torchrun --nproc-per-node 2 ddp_torchrun.py digits.pt --epochs 5
    torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:29500 ddp_torchrun.py digits.pt

`--backend gloo` or `--backend nccl` is the one switch between CPU and GPU. digits.pt holds (images, labels), as
`torch.save` writes a tuple. Rank 0 leaves the trained network in weights.pt.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def network():
    return nn.Sequential(
        *(nn.Conv2d(1, 10, kernel_size=5), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Conv2d(10, 20, kernel_size=5), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(320, 50), nn.ReLU(), nn.Linear(50, 10)),
    )


def train(device, options):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    train_set = TensorDataset(*torch.load(options.data, weights_only=True))
    sampler = DistributedSampler(train_set, seed=options.seed, drop_last=True)
    rank_batch_size = options.batch_size // world_size  # all ranks together: batch_size
    loader = DataLoader(train_set, rank_batch_size, sampler=sampler, drop_last=True)
    torch.manual_seed(options.seed)
    model = network().to(device)
    ddp = DistributedDataParallel(
        model, device_ids=[device.index] if device.type == "cuda" else None
    )
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


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data")
    has_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    parser.add_argument("--backend", default="nccl" if has_gpus else "gloo")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=48)
    parser.add_argument("--lr", type=float, default=0.03)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="weights.pt")
    options = parser.parse_args()
    # torchrun has set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
    device = torch.device("cpu")
    if options.backend == "nccl":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))  # on this machine, not of all
        torch.cuda.set_device(device)
    dist.init_process_group(options.backend, device_id=None if device.type == "cpu" else device)
    if options.batch_size % dist.get_world_size():
        parser.error(f"--batch-size {options.batch_size} is no multiple of the number of ranks")
    try:
        train(device, options)
    finally:
        dist.destroy_process_group()
    os._exit(0)  # done; PyTorch 2.15 with gloo sometimes aborts while it takes itself down


if __name__ == "__main__":
    main()
