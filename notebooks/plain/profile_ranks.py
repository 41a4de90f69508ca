"""One trace per rank, and who is late: torch.profiler on every rank.

    torchrun --nproc-per-node 2 profile_ranks.py --slow 1

Each rank writes trace-RANK.json, to be opened at ui.perfetto.dev. Rank 0 prints each rank's median time per part of a
step. The rank with the shortest `average` is the late one: the others' calls are longer because they wait for it.
"""

import argparse
import os
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function, schedule

PARTS = ("load", "compute", "average")


def train_step(model, optimizer, device, options):
    with record_function("load"):
        if dist.get_rank() == options.slow:
            time.sleep(0.02)  # stands for large files
        inputs = torch.randn(64, 256, device=device)
    with record_function("compute"):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
    with record_function("average"):
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        if device.type == "cuda":
            # NCCL only enqueues. Measuring waits for the result here; in a real run the kernels' own times are in
            # the trace, and the rule holds for them: the rank with the shortest ncclDevKernel is the late one.
            torch.cuda.synchronize(device)
    optimizer.step()


def medians_ms(profiler):
    """Return the median duration of each part of a step, in ms."""
    times = {part: [] for part in PARTS}
    for event in profiler.events():
        if event.name in times and event.device_type == torch.autograd.DeviceType.CPU:
            times[event.name].append(event.time_range.elapsed_us() / 1000)
    return {part: statistics.median(each) for part, each in times.items()}


def train(device, options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    # The first steps are slower: one is left out, and one only warms the profiler up.
    plan = schedule(wait=1, warmup=1, active=3, repeat=1)
    with profile(activities=activities, schedule=plan) as profiler:
        for _ in range(5):
            train_step(model, optimizer, device, options)
            profiler.step()
    rank = dist.get_rank()
    profiler.export_chrome_trace(f"trace-{rank}.json")
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, medians_ms(profiler))
    if rank == 0:
        for each, times in enumerate(of_ranks):
            print(f"rank {each}:", ", ".join(f"{part} {ms:.1f} ms" for part, ms in times.items()))
        waits = [times["average"] for times in of_ranks]
        print(f"late: rank {waits.index(min(waits))}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slow", type=int, default=-1, help="the rank that gets the large files")
    options = parser.parse_args()
    device = torch.device("cpu")
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    is_gpu = device.type == "cuda"
    dist.init_process_group("nccl" if is_gpu else "gloo", device_id=device if is_gpu else None)
    try:
        train(device, options)
    finally:
        dist.destroy_process_group()
    os._exit(0)  # done; PyTorch 2.15 with gloo sometimes aborts while it takes itself down


if __name__ == "__main__":
    main()
