"""What the strategies for the GPT have in common: which part of a batch a rank takes, and what its loss counts."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course.transformer.gpt import GPT, IGNORED, mean_loss
from labkit import Worker


def train(
    worker: Worker,
    strategy: type[GPTStrategy],
    network: Callable[[], GPT],
    optimizer: Callable[..., torch.optim.Optimizer],
    batches: Callable[[torch.device], Iterator[tuple[Tensor, Tensor]]],
    steps: int,
) -> dict[str, Tensor]:
    """Train by a strategy; return the weights by the whole network's names: all of them, or a stage's.

    To be launched: `labkit.launch(transformer.train, transformer.DDP, network, …, trace=2)`.

    Args:
        worker: the rank.
        strategy: the class.
        network: makes the whole network, with the same weights on every rank.
        optimizer: a `functools.partial` of an optimizer's class: everything it takes but the parameters.
        batches: of a device: yields whole batches, (batch_size, time) each, the same on every rank, indefinitely.
        steps: how many to take.
    """
    trainer = strategy(worker, network(), optimizer)
    for inputs, targets in itertools.islice(batches(worker.device), steps):
        loss = trainer.step(inputs, targets)
        logged: dict[str, Any] = {} if loss is None else {"loss": loss.item()}
        worker.log(samples=len(inputs) / worker.world_size, **logged)
    return trainer.weights()


class GPTStrategy:
    """One process that trains a GPT. In a subclass a rank takes some of the samples, or of the tokens, or of the model.

    Sequences may be ragged (targets `IGNORED`): each rank's loss counts by its share of the targets that count in the
    whole batch.

    Args:
        worker: the rank.
        network: the whole network, with the same weights on every rank.
        optimizer: a `functools.partial` of an optimizer's class: everything it takes but the parameters.
    """

    title: ClassVar[str] = "one process"
    exact: ClassVar[bool] = True
    """Whether it claims to take the same step as one process."""

    cuts_layers: ClassVar[bool] = False
    """Whether ranks share out the heads and hidden units of each layer."""

    averaged_over = 1
    """How many ranks' gradients are averaged; 1 where none are, or where they are added up."""

    def __init__(self, worker: Worker, network: nn.Module, optimizer: Callable[..., torch.optim.Optimizer]) -> None:
        assert isinstance(network, GPT), f"this strategy trains a course.transformer.GPT, got {type(network).__name__}"
        self.worker = worker
        self.network = network.to(worker.device)
        """The whole network, as it was given; what it has become where it was cut in place."""
        self.place = self.network.place
        """What the network's layers look at."""
        self.model: nn.Module = self.cut(self.network)
        """What of the network lies on this rank."""
        self.optimizer = self.make_optimizer(optimizer)

    @classmethod
    def ranks(cls, world_size: int) -> int:
        """How many ranks it takes where `world_size` were asked for."""
        return 1

    def cut(self, network: GPT) -> nn.Module:
        """Return the part of the network that this rank trains."""
        return network

    def make_optimizer(self, optimizer: Callable[..., torch.optim.Optimizer]) -> torch.optim.Optimizer:
        """Make the optimizer of this rank."""
        return optimizer(self.model.parameters())

    def samples(self, batch_size: int) -> Tensor:
        """Return the numbers of the samples that this rank takes: here all."""
        return torch.arange(batch_size)

    def positions(self, time: int) -> Tensor:
        """Return the positions of the sequence that this rank takes: here all."""
        return torch.arange(time)

    def around(self) -> contextlib.AbstractContextManager[object]:
        """Return what forward and backward pass run in."""
        return contextlib.nullcontext()

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits for this rank's inputs."""
        outputs: Tensor = self.model(inputs)
        return outputs

    def communicate(self) -> None:
        """Do what is to be done between the backward pass and the optimizer's step."""

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """Take one step on a whole batch, (batch_size, time) each. Called on all ranks at once, with the same batch.

        Returns this rank's loss; its mean over the ranks is the loss of the whole batch.
        """
        self.set_place(inputs)
        mine = self.local_batch(targets)
        # The mean over all tokens that count; of these, one rank may have more than another.
        share = self.averaged_over * counted(mine) / counted(targets)
        self.optimizer.zero_grad()
        with self.around():
            loss = share * mean_loss(self.forward(self.local_batch(inputs)), mine)
            loss.backward()
        self.communicate()
        self.optimizer.step()
        return whole(loss.detach())

    def set_place(self, inputs: Tensor) -> None:
        """Tell the network's layers which part of the whole batch they get."""
        place = self.place
        place.step += 1
        place.samples = self.samples(inputs.shape[0]).to(inputs.device)
        place.positions = self.positions(inputs.shape[1]).to(inputs.device)

    def local_batch(self, batch: Tensor) -> Tensor:
        """Return this rank's part of (batch_size, time) inputs or targets."""
        rows, columns = self.samples(batch.shape[0]), self.positions(batch.shape[1])
        return batch[rows.to(batch.device)][:, columns.to(batch.device)]

    def weights(self) -> dict[str, Tensor]:
        """Return the whole weights, gathered where they are sharded. Called on all ranks at once."""
        return {name: whole(tensor) for name, tensor in self.model.state_dict().items()}


class DataParallelGPT(GPTStrategy):
    """A whole network on every rank, and some samples of every batch for each."""

    @classmethod
    def ranks(cls, world_size: int) -> int:
        """As many as are asked for."""
        return world_size

    @property
    def averaged_over(self) -> int:  # type: ignore[override]
        """All of them."""
        return self.worker.world_size

    def samples(self, batch_size: int) -> Tensor:
        """Return the rank's part. Raises ValueError if the batch has no equal parts, for which there is no need."""
        return equal_part(batch_size, self.worker.rank, self.worker.world_size)


def equal_part(size: int, index: int, parts: int) -> Tensor:
    """Return part number `index` of the numbers 0 … size − 1. Raises ValueError if `parts` does not divide `size`."""
    if size % parts:
        raise ValueError(f"{size} cannot be cut into {parts} equal parts; take a multiple of {parts}")
    return torch.arange(size).chunk(parts)[index]


def counted(targets: Tensor) -> int:
    """Return how many targets count. A Python number: a quotient of tensors would be of 32 bits."""
    return int((targets != IGNORED).sum())


def whole(tensor: Any) -> Tensor:
    """Return all of a tensor that is sharded over ranks, in its whole shape. Called on all ranks at once."""
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full


def one_by_one(model: nn.Module, optimizer: Callable[..., torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """Return an optimizer that steps each parameter by itself, where some are cut (DTensors) and others are whole.

    On a GPU the default, `foreach`, steps all of them in a few kernels, and raises where the two are mixed.
    """
    return optimizer(model.parameters(), foreach=False)


def all_reduce_flat(tensors: list[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Replace tensors by their sums over the ranks of a group, all in one buffer."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat, group=group)
    for tensor, total in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(total.view_as(tensor))
