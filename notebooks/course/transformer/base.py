"""What the strategies for the GPT have in common: which part of a batch a rank takes, and what its loss counts."""

from __future__ import annotations

import contextlib
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course.strategies.base import Strategy
from course.strategies.sharding import whole
from course.transformer.gpt import GPT, IGNORED, Place


class GPTStrategy(Strategy):
    """One process that trains a GPT: a `Strategy` whose batch is cut by samples, by positions, or not at all.

    A subclass says which of them are this rank's, and over how many ranks gradients are averaged. Sequences may be
    ragged (targets `IGNORED`): each rank's loss counts by its share of the targets that count in the whole batch.
    """

    title = "one process"
    network: GPT
    """The whole network, as it was given; what it has become where it was cut in place."""

    cuts_layers: ClassVar[bool] = False
    """Whether ranks share out the heads and hidden units of each layer."""

    averaged_over = 1
    """How many ranks' gradients are averaged; 1 where none are, or where they are added up."""

    def prepare(self, network: nn.Module) -> nn.Module:
        """Keep the network, then have the strategy wrap it or cut it."""
        assert isinstance(network, GPT), f"this strategy trains a course.transformer.GPT, got {type(network).__name__}"
        self.network = network
        self.shape = (0, 0)
        return self.cut(network)

    def cut(self, network: GPT) -> nn.Module:
        """Return the part of the network that this rank trains."""
        return network

    def samples(self, batch_size: int) -> Tensor:
        """Return the numbers of the samples that this rank takes: here all."""
        return torch.arange(batch_size)

    def positions(self, time: int) -> Tensor:
        """Return the positions of the sequence that this rank takes: here all."""
        return torch.arange(time)

    def around(self) -> contextlib.AbstractContextManager[object]:
        """Return what forward and backward pass run in."""
        return contextlib.nullcontext()

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """Take one step on a whole batch, (batch_size, time) each. Called on all ranks at once, with the same batch.

        Returns this rank's loss; its mean over the ranks is the loss of the whole batch.
        """
        self.set_place(inputs)
        mine = self.local_batch(targets)
        # The mean over all bytes that count; of these, one rank may have more than another.
        share = self.averaged_over * counted(mine) / counted(targets)
        self.optimizer.zero_grad()
        with self.around():
            with self.clock("forward"):
                loss = share * self.loss(self.forward(self.local_batch(inputs)), mine)
            with self.clock("backward"):
                loss.backward()
        self.communicate()
        with self.clock("optimizer"):
            self.optimizer.step()
        return whole(loss.detach())

    def set_place(self, inputs: Tensor) -> None:
        """Tell the network's layers which part of the whole batch they get."""
        self.shape = inputs.shape[0], inputs.shape[1]
        place = self.place
        place.step += 1
        place.samples = self.samples(inputs.shape[0]).to(inputs.device)
        place.positions = self.positions(inputs.shape[1]).to(inputs.device)

    @property
    def place(self) -> Place:
        """What the network's layers look at."""
        return self.network.place

    def local_batch(self, batch: Tensor) -> Tensor:
        """Return this rank's part of (batch_size, time) inputs or targets."""
        rows, columns = self.samples(batch.shape[0]), self.positions(batch.shape[1])
        return batch[rows.to(batch.device)][:, columns.to(batch.device)]

    def weights(self) -> dict[str, Tensor]:
        """Return the whole weights, gathered where they are sharded."""
        return {name: whole(tensor) for name, tensor in self.model.state_dict().items()}

    @property
    def features_bytes(self) -> float:
        """Bytes of the whole batch's features between two blocks: batch_size × time × width numbers."""
        first: Any = next(iter(self.network.blocks.values()))
        width: int = first.norm1.normalized_shape[0]
        return self.shape[0] * self.shape[1] * width * self.itemsize


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


def ring(n: int) -> float:
    """How many times its size a rank sends of what it all-gathers, or reduce-scatters, over n ranks: (n − 1) / n."""
    return (n - 1) / n


def counted(targets: Tensor) -> int:
    """Return how many targets count. A Python number: a quotient of tensors would be of 32 bits."""
    return int((targets != IGNORED).sum())


def all_reduce_flat(tensors: list[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Replace tensors by their sums over the ranks of a group, all in one buffer."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat, group=group)
    for tensor, total in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(total.view_as(tensor))
