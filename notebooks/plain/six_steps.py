"""Model parallel and data parallel at once, in six steps: each rank has two devices, half of the network on each.

    torchrun --nproc-per-node 2 six_steps.py digits.pt

With two GPUs per rank, rank r of a machine takes GPUs 2r and 2r + 1; without, the CPU stands for both. digits.pt holds
(images, labels), as `torch.save` writes a tuple. The mean loss of every step is left in losses.pt.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class TwoDevices(nn.Module):
    """The first half on one device, the second on another; `forward` carries the activations across."""

    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second
        relu = nn.ReLU  # between the halves, too: two linear layers in a row are only one
        self.part1 = nn.Sequential(
            *(nn.Flatten(), nn.Linear(28 * 28, 1024), relu(), nn.Linear(1024, 1024), relu())
        )
        self.part2 = nn.Sequential(
            *(nn.Linear(1024, 1024), relu(), nn.Linear(1024, 512), relu(), nn.Linear(512, 10))
        )
        self.part1.to(first)
        self.part2.to(second)

    def forward(self, images):
        return self.part2(self.part1(images.to(self.first)).to(self.second))


def my_devices():
    if torch.cuda.device_count() >= 2 * int(os.environ["LOCAL_WORLD_SIZE"]):
        local_rank = int(os.environ["LOCAL_RANK"])
        return torch.device("cuda", 2 * local_rank), torch.device("cuda", 2 * local_rank + 1)
    return torch.device("cpu"), torch.device("cpu")


def main(options):
    # Step 1: join the others. torchrun has set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
    first, second = my_devices()
    if first.type == "cuda":
        torch.cuda.set_device(first)
    dist.init_process_group("nccl" if first.type == "cuda" else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    print(f"step 1: rank {rank} of {world_size}, on {first} and {second}", flush=True)

    if options.batch_size % world_size:
        raise SystemExit(f"--batch-size {options.batch_size} is no multiple of {world_size} ranks")

    # Step 2: samples of its own for every rank. (`num_workers` has nothing to do with that.)
    train_set = TensorDataset(*torch.load(options.data, weights_only=True))
    sampler = DistributedSampler(train_set, seed=options.seed, drop_last=True)
    batches = DataLoader(
        train_set, options.batch_size // world_size, sampler=sampler, drop_last=True
    )
    print(f"step 2: rank {rank} has {len(sampler)} of {len(train_set)} samples", flush=True)

    # Step 3: the network over both devices. Never `.to(device)` on the whole: that would put it on one.
    torch.manual_seed(options.seed)
    model = TwoDevices(first, second)
    sizes = [sum(p.numel() for p in part.parameters()) for part in (model.part1, model.part2)]
    print(f"step 3: rank {rank} has {sizes[0]:,} + {sizes[1]:,} parameters", flush=True)

    # Step 4: gradients are averaged in `backward`. With several devices, `device_ids` stays unset.
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=options.lr, momentum=0.9)
    losses = []
    sampler.set_epoch(0)
    for _, (images, labels) in zip(range(options.steps), batches, strict=False):
        output = ddp(images)
        loss = nn.functional.cross_entropy(output, labels.to(output.device))  # on the second device
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().to(first)
        dist.all_reduce(mean)
        losses.append(mean.item() / world_size)
    print(f"step 4: loss {losses[0]:.4f}, after {len(losses)} steps {losses[-1]:.4f}", flush=True)

    # Step 5: nothing to synchronise. Equal weights and equal gradients make equal optimizer states.
    apart = 0.0
    for parameter in model.parameters():
        for own in (parameter.detach(), optimizer.state[parameter]["momentum_buffer"]):
            of_rank_0 = own.to(first)  # a copy on GPUs …
            of_rank_0 = of_rank_0.clone() if of_rank_0 is own else of_rank_0  # … and on the CPU
            dist.broadcast(of_rank_0, src=0)
            apart = max(apart, (of_rank_0.to(own.device) - own).abs().max().item())
    print(f"step 5: rank {rank}'s weights and momenta differ from rank 0's by {apart}", flush=True)
    if rank == 0:
        torch.save(losses, options.out)
    return apart == 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.03)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="losses.pt")
    in_step = False
    try:
        in_step = main(parser.parse_args())
    finally:
        # Step 6: leave, also when something went wrong.
        if dist.is_initialized():
            dist.destroy_process_group()
            print("step 6: left the group", flush=True)
    os._exit(
        0 if in_step else 1
    )  # PyTorch 2.15 with gloo sometimes aborts while it takes itself down
