"""A hang that reports itself: which rank is missing, and where every rank is.

    torchrun --nproc-per-node 3 find_the_hang.py --late 1

Rank 1 does not come to step 5. A watchdog of each rank writes Python's stacks into stacks-RANK.txt when a step takes
longer than --silent-s; then rank 0 ends the job with an error that names the missing rank. For the stacks at any other
moment: kill -USR1 PID, or, without a line in the program, py-spy dump --pid PID.
"""

import argparse
import faulthandler
import os
import re
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist


def load_batch(step, device, options):
    if step == 5 and dist.get_rank() == options.late:
        time.sleep(600)  # stands for a disk that does not answer
    return torch.ones(4, device=device)


def train(device, options):
    rank = dist.get_rank()
    # NCCL has no monitored barrier, so a group of gloo is made for it, by every rank, once.
    guard = dist.new_group(backend="gloo")
    # Rank 0 counts the ranks; the others must not give up before it does.
    patience = timedelta(seconds=2 * options.silent_s + (0 if rank == 0 else 60))
    with open(f"stacks-{rank}.txt", "w") as stacks:
        if hasattr(signal, "SIGUSR1"):
            faulthandler.register(signal.SIGUSR1, file=stacks)
        for step in range(options.steps):
            # The watchdog is a thread in C: it writes even if this one is stuck in a collective. Each step sets it anew.
            faulthandler.dump_traceback_later(options.silent_s, file=stacks)
            batch = load_batch(step, device, options)
            if step % options.check_every == 0:
                check(guard, patience)
            dist.all_reduce(batch)  # stands for the step
        faulthandler.cancel_dump_traceback_later()


def check(guard, patience):
    try:
        dist.monitored_barrier(guard, timeout=patience, wait_all_ranks=True)
    except RuntimeError as error:
        missing = re.search(r"Ranks? ([\d, ]+) failed to pass", str(error))
        if missing and dist.get_rank() == 0:
            print(f"missing: rank {missing[1]}", flush=True)
        raise


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--late", type=int, default=-1, help="the rank that does not come to step 5"
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--check-every", type=int, default=1, help="steps; a barrier costs time")
    parser.add_argument("--silent-s", type=float, default=2.0)
    options = parser.parse_args()
    device = torch.device("cpu")
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    is_gpu = device.type == "cuda"
    dist.init_process_group("nccl" if is_gpu else "gloo", device_id=device if is_gpu else None)
    try:
        train(device, options)
    except RuntimeError as error:
        print(f"rank {dist.get_rank()}: {error}", file=sys.stderr, flush=True)
        os._exit(1)  # not destroy_process_group: it may wait for the rank that is missing
    dist.destroy_process_group()
    os._exit(0)  # done; PyTorch 2.15 with gloo sometimes aborts while it takes itself down


if __name__ == "__main__":
    main()
