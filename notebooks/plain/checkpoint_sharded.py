"""A checkpoint of weights that no rank has whole: FSDP2 and torch.distributed.checkpoint.

    torchrun --nproc-per-node 2 checkpoint_sharded.py digits.pt --steps 3
    torchrun --nproc-per-node 3 checkpoint_sharded.py digits.pt --steps 0

Each rank writes its own shards into the folder `sharded`; the second command reads them with another number of ranks.
digits.pt holds (images, labels), as `torch.save` writes a tuple. Rank 0 leaves the whole weights in weights.pt.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def network():
    return nn.Sequential(
        *(nn.Conv2d(1, 10, kernel_size=5), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Conv2d(10, 20, kernel_size=5), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(320, 50), nn.ReLU(), nn.Linear(50, 10)),
    )


def train(device, options):
    torch.manual_seed(options.seed)
    model = network().to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())  # after sharding: it sees shards only
    is_there = [Path(options.folder).exists()]
    dist.broadcast_object_list(is_there, src=0)  # ranks may see different disks
    if is_there[0]:
        # The state as it is now says what to read, and into which shards.
        weights, states = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": states}
        dcp.load(state, checkpoint_id=options.folder)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
    images, labels = torch.load(options.data, weights_only=True)
    seen = 0
    for step in range(options.steps):
        # Of each batch every rank takes its own part. FSDP2 averages the gradients, so the parts are equal.
        batch = torch.arange(64 * step, 64 * (step + 1))
        mine = batch.chunk(dist.get_world_size())[dist.get_rank()]
        outputs = model(images[mine].to(device))
        nn.functional.cross_entropy(outputs, labels[mine].to(device)).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen += len(mine)
    if options.steps:
        weights, states = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": states}, checkpoint_id=options.folder)
    here = sum(parameter.to_local().numel() for parameter in model.parameters())
    print(f"rank {dist.get_rank()} holds {here:,} parameters, took {seen} images", flush=True)
    whole = {name: shard.full_tensor().cpu() for name, shard in model.state_dict().items()}
    if dist.get_rank() == 0:
        torch.save(whole, options.out)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", default="sharded")
    parser.add_argument("--out", default="weights.pt")
    options = parser.parse_args()
    device = torch.device("cpu")
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    is_gpu = device.type == "cuda"
    dist.init_process_group("nccl" if is_gpu else "gloo", device_id=device if is_gpu else None)
    if options.steps and 64 % dist.get_world_size():
        parser.error(f"batches of 64 have no equal parts for {dist.get_world_size()} ranks")
    try:
        train(device, options)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
