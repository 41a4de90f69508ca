"""A training that depends on all that a checkpoint must hold, and ways to kill it. For tests and benchmarks."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import signal
import time

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import labkit

SAMPLES, BATCH = 96, 8


def data():
    """Random images and labels, the same in every process."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(SAMPLES, 1, 8, 8, generator=generator)
    return TensorDataset(images, torch.randint(10, (SAMPLES,), generator=generator))


def network(seed=0):
    """Convolution, batch norm and dropout: buffers that differ by rank, random numbers at every step."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Flatten(),
        nn.Linear(4 * 36, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )


def fingerprint(*states):
    """SHA-256 over all tensors of state dicts, bit by bit."""
    sha = hashlib.sha256()

    def add(value):
        if isinstance(value, torch.Tensor):
            sha.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                sha.update(str(key).encode())
                add(value[key])
        elif isinstance(value, (list, tuple)):
            for inner in value:
                add(inner)
        else:
            sha.update(repr(value).encode())

    add(list(states))
    return sha.hexdigest()


def train(worker, folder, epochs=3, die=None, stay_after=0):
    """Train under DDP, mid-epoch saves included; give a fingerprint of everything at the end, and the losses.

    `die` is (rank, n): that rank kills itself at its n-th operation on files while saving. After `stay_after` steps all
    ranks wait to be killed.
    """
    torch.manual_seed(100 + worker.rank)  # other random numbers on every rank
    if die is not None and die[0] == worker.rank:
        die_at_operation(die[1])
    model = DistributedDataParallel(network().to(worker.device))
    torch.manual_seed(100 + worker.rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)
    dataset = data()
    sampler = DistributedSampler(dataset, seed=3)
    loader = DataLoader(dataset, BATCH, sampler=sampler)
    checkpoint = labkit.Checkpoint(folder, model=model, optimizer=optimizer, scheduler=scheduler)
    checkpoint.resume()
    losses = []
    for epoch in range(checkpoint.epoch, epochs):
        sampler.set_epoch(epoch)
        for images, labels in checkpoint.batches(loader):
            noise = random.random() + np.random.rand()  # noqa: NPY002
            loss = cross_entropy(model(images.to(worker.device) + 0.01 * noise), labels.to(worker.device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            worker.log(step=checkpoint.step, loss=loss.item())
            while len(losses) == stay_after:
                time.sleep(1)
            checkpoint.save()
        scheduler.step()
        checkpoint.save()
    everything = model.module.state_dict(), optimizer.state_dict(), scheduler.state_dict()
    return fingerprint(*everything, labkit.checkpoint.random_state()), losses


def die_at_operation(n):
    """Let this process kill itself just before the n-th thing that it does to a checkpoint's files."""
    import builtins
    import pathlib

    done = 0

    def counted(operation, always=True):
        def call(*args, **kwargs):
            nonlocal done
            if always or "checkpoint-" in str(args[0]):
                done += 1
                if done == n:
                    os.kill(os.getpid(), signal.SIGKILL)
            return operation(*args, **kwargs)

        return call

    builtins.open = counted(open, always=False)
    torch.save = counted(torch.save)
    for name in ("fsync", "unlink", "rmdir"):
        setattr(os, name, counted(getattr(os, name)))
    for name in ("rename", "mkdir"):
        setattr(pathlib.Path, name, counted(getattr(pathlib.Path, name), always=False))


def kill(folder, world_size, on, die=None, stay_after=0):
    """Launch the training, which dies, or is killed once it stays; say if that ended it."""
    options = {"world_size": world_size, "on": on, "live": False, "wait": False}
    run = labkit.launch(train, folder, die=die, stay_after=stay_after, **options)
    if stay_after:
        while not run.over.is_set() and len(run.history) < stay_after * world_size:
            time.sleep(0.005)
        for pid in run.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    run.over.wait()
    return run.status == "failed"
