"""Three ways to get weights out of a process: shared memory, a Queue, a Pipe, side by side.

    python sharing.py --world-size 2

Each rank takes its own step on a vector of weights. What does the parent see of it?
"""

import argparse

import torch
import torch.multiprocessing as mp


def step(rank, weights):
    """Change the weight that belongs to this rank, as an optimizer would: in place."""
    weights[rank] += 1


def train(rank, shared, copied, queue, pipe):
    step(rank, shared)  # the parent's own memory: seen there at once, and by the other ranks
    weights = torch.from_numpy(copied)  # came by value: a change stays in this process …
    step(rank, weights)
    queue.put((rank, weights.tolist()))  # … unless it is sent back, to whoever asks first
    pipe.send(weights.tolist())  # … or to the one at the other end
    pipe.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world-size", type=int, default=2)
    world_size = parser.parse_args().world_size
    context = mp.get_context("spawn")  # not set_start_method, which can be called only once
    shared = torch.zeros(world_size).share_memory_()
    copied = torch.zeros(world_size).numpy()  # a tensor would be shared, too: torch's mp moves it
    queue = context.SimpleQueue()
    ends = [context.Pipe(duplex=False) for _ in range(world_size)]
    processes = [
        context.Process(target=train, args=(rank, shared, copied, queue, sending))
        for rank, (_, sending) in enumerate(ends)
    ]
    for process in processes:
        process.start()
    # Received before join: a process does not end while what it has put nobody takes.
    by_queue = dict(queue.get() for _ in processes)
    by_pipe = {rank: receiving.recv() for rank, (receiving, _) in enumerate(ends)}
    for process in processes:
        process.join()
    if codes := [process.exitcode for process in processes if process.exitcode]:
        raise SystemExit(f"exit codes: {codes}")
    print("shared memory:", shared.tolist())
    print("a copy:", copied.tolist())
    print("queue:", [by_queue[rank] for rank in range(world_size)])
    print("pipe:", [by_pipe[rank] for rank in range(world_size)])
