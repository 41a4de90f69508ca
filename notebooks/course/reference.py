"""Training in one process, for lessons to compare theirs with."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from course import models


def train(
    worker: Any,
    train_set: Dataset[Any],
    epochs: int,
    batch_size: int,
    lr: float,
    starting_seed: int,
    dtype: torch.dtype = torch.float32,
    steps: int | None = None,
) -> None:
    """Train the ConvNet in one process, and log the loss of every step.

    Args:
        worker: this rank's; the only one.
        train_set: images and labels.
        epochs: how often all of them are seen; the learning rate falls to zero over them.
        batch_size: images in a step.
        lr: the learning rate of the first step.
        starting_seed: of the weights and the order of images; `seed` is the launch's own.
        dtype: of weights and images.
        steps: after which to end; by default, all.
    """
    sampler: DistributedSampler[Any] = DistributedSampler(train_set, 1, 0, seed=starting_seed, drop_last=True)
    loader = DataLoader(train_set, batch_size, sampler=sampler, drop_last=True)
    torch.manual_seed(starting_seed)
    model = models.ConvNet().to(worker.device, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    total = epochs * len(loader)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0, total_iters=total)
    worker.expect(steps or total)
    step = 0
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = cross_entropy(model(images.to(worker.device, dtype)), labels.to(worker.device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            worker.log(loss=loss.item(), samples=len(images))
            step += 1
            if step == steps:
                return
