"""A training that is resumed where it stopped: torch.save of everything that the next epoch depends on.

    torchrun --nproc-per-node 2 checkpoint_torchrun.py digits.pt --epochs 3

Run it again after it was killed, and it goes on after the last whole epoch. digits.pt holds (images, labels), as
`torch.save` writes a tuple. The checkpoint is checkpoint.pt; rank 0 leaves the trained network in weights.pt.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def network():
    return nn.Sequential(
        *(nn.Conv2d(1, 10, kernel_size=5), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Conv2d(10, 20, kernel_size=5), nn.Dropout2d(0.25), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(320, 50), nn.ReLU(), nn.Dropout(0.25), nn.Linear(50, 10)),
    )


def save(path, model, optimizer, scheduler, epochs_done, device):
    """Called on every rank: each has random numbers of its own."""
    states = [None] * dist.get_world_size()
    own = [torch.get_rng_state()]
    if device.type == "cuda":
        own.append(torch.cuda.get_rng_state(device))
    dist.all_gather_object(states, own)
    if dist.get_rank() == 0:
        state = {
            "model": model.state_dict(),  # of the network, not of DDP: no "module." in the keys
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "epochs_done": epochs_done,
            "random_states": states,
        }
        part = path.with_suffix(".part")
        torch.save(state, part)
        part.replace(path)  # whole or not at all, whenever the process is killed
    dist.barrier()


def resume(path, model, optimizer, scheduler, device):
    """Return how many epochs are done."""
    is_there = [path.exists()]
    dist.broadcast_object_list(is_there, src=0)  # ranks may see different disks
    if not is_there[0]:
        return 0
    state = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    if len(state["random_states"]) == dist.get_world_size():
        host, *on_gpu = state["random_states"][dist.get_rank()]
        torch.set_rng_state(host)
        for random_state in on_gpu:
            torch.cuda.set_rng_state(random_state, device)
    return state["epochs_done"]


def train(device, options):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(
        options.seed + rank
    )  # dropout of its own on every rank; DDP sends rank 0's weights
    model = network().to(device)
    ddp = DistributedDataParallel(
        model, device_ids=[device.index] if device.type == "cuda" else None
    )
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)
    train_set = TensorDataset(*torch.load(options.data, weights_only=True))
    sampler = DistributedSampler(train_set, seed=options.seed)
    loader = DataLoader(train_set, options.batch_size // world_size, sampler=sampler)
    path = Path(options.checkpoint)
    done = resume(path, model, optimizer, scheduler, device)
    if rank == 0:
        print(f"{done} epochs are done", flush=True)
    for epoch in range(done, min(options.epochs, options.stop_after)):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = nn.functional.cross_entropy(ddp(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()
        save(path, model, optimizer, scheduler, epoch + 1, device)
    if rank == 0:
        torch.save(model.state_dict(), options.out)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--stop-after", type=int, default=10**9, help="epochs; as if killed then")
    parser.add_argument("--batch-size", type=int, default=96)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", default="checkpoint.pt")
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
