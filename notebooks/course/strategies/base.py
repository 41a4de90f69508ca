"""The interface of a strategy, one process, which is the plainest, and what others have in common.

That is: equal parts of a batch, and stages of a network.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course.chain import Stage, check_chain
from course.formulas import all_reduce_bytes
from labkit.rank.device import is_nccl
from labkit.rank.worker import Worker
from labkit.trace.profiling import Clock, size_bytes


class Strategy:
    """One way to train in parallel. As it stands: one process.

    Every rank makes one, with the same network, and calls `step` with the same whole batch; the strategy takes the
    rank's part of it. Yours is a subclass; often `local_batch` and `communicate` are all that it must say.

    Args:
        worker: the rank.
        network: the whole network, with the same weights on every rank: (n, …) inputs → (n, …) outputs.
        loss: of (n, …) outputs and (n, …) targets: the mean over the n samples, shape ().
        optimizer: a `functools.partial` of an optimizer class: what all takes but the parameters.
        clock: marks what the rank does in a step.
    """

    title: ClassVar[str] = "one process"
    exact: ClassVar[bool] = True
    """Whether it claims to compute the same step as one process."""

    @classmethod
    def ranks(cls, world_size: int) -> int:
        """How many ranks it takes where `world_size` were asked for."""
        return 1

    def __init__(
        self,
        worker: Worker,
        network: nn.Module,
        loss: Callable[[Tensor, Tensor], Tensor],
        optimizer: Callable[..., torch.optim.Optimizer],
        clock: Clock,
    ) -> None:
        self.worker, self.loss, self.clock = worker, loss, clock
        self.model: nn.Module = self.prepare(network.to(worker.device))
        """What of the network lies on this rank."""
        self.optimizer = self.make_optimizer(optimizer)

    @classmethod
    def check(cls, network: nn.Module, inputs: Tensor) -> None:
        """Raise ValueError, which names what is in the way, for a network that this strategy would train wrongly.

        Called before anything is trained, with a batch of (batch_size, …) inputs.
        """

    def prepare(self, network: nn.Module) -> nn.Module:
        """Return the part of the network that this rank trains."""
        return network

    def make_optimizer(self, optimizer: Callable[..., torch.optim.Optimizer]) -> torch.optim.Optimizer:
        """Make the optimizer of this rank."""
        return optimizer(self.model.parameters())

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """Take one step on a whole batch. Called on all ranks at once, with the same batch.

        Args:
            inputs: (batch_size, …), on the rank's device.
            targets: (batch_size, …), likewise.

        Returns the mean loss of this rank's part, shape (), without gradient; None if the rank knows none.
        """
        inputs, targets = self.local_batch(inputs), self.local_batch(targets)
        self.optimizer.zero_grad()
        with self.clock("forward"):
            loss = self.loss(self.forward(inputs), targets)
        with self.clock("backward"):
            loss.backward()
        self.communicate()
        with self.clock("optimizer"):
            self.optimizer.step()
        return loss.detach()

    def local_batch(self, batch: Tensor) -> Tensor:
        """Return this rank's part, (rank_batch_size, …), of (batch_size, …) inputs or targets: here the whole."""
        return batch

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the outputs, (rank_batch_size, …), for this rank's inputs, (rank_batch_size, …)."""
        outputs: Tensor = self.model(inputs)
        return outputs

    def communicate(self) -> None:
        """Do what is to be done between the backward pass and the optimizer's step."""

    def weights(self) -> dict[str, Tensor]:
        """Return the weights that this rank knows, by the whole network's names; of a stage, the stage's.

        Called on all ranks at once.
        """
        return self.model.state_dict()

    def bytes_expected(self, batch_size: int) -> float:
        """Bytes that a rank sends per step, by the formula; the mean over ranks where they differ."""
        return 0.0

    def averaging_bytes(self, ranks: int) -> float:
        """Return the bytes that a rank sends to average its gradients with so many ranks, itself included."""
        return all_reduce_bytes(ranks, size_bytes(p for p in self.model.parameters() if p.requires_grad))

    @property
    def parameter_bytes(self) -> int:
        """Bytes of this rank's parameters."""
        return size_bytes(self.model.parameters())

    @property
    def itemsize(self) -> int:
        """Bytes of one number of this rank's parameters."""
        return next(self.model.parameters()).element_size()


class DataParallelStrategy(Strategy):
    """A whole network on every rank, and a part of every batch for each."""

    @classmethod
    def ranks(cls, world_size: int) -> int:
        """As many as are asked for."""
        return world_size

    def local_batch(self, batch: Tensor) -> Tensor:
        """Return the rank's equal part, (batch_size / world_size, …).

        Raises ValueError if there is none: a mean of unequal parts would be wrong.
        """
        return equal_part(batch, self.worker.rank, self.worker.world_size)

    def bytes_expected(self, batch_size: int) -> float:
        """A ring all-reduce sends 2 (n − 1) / n of the gradients that it averages (Patarasuk and Yuan 2009)."""
        return self.averaging_bytes(self.worker.world_size)


class StageStrategy(Strategy):
    """A stage of the network on every rank, and the whole batch for the chain of them."""

    @classmethod
    def ranks(cls, world_size: int) -> int:
        """As many as are asked for: a stage each."""
        return world_size

    @property
    def device(self) -> torch.device:
        """Where the stage lies. Where ranks share a GPU the backend is gloo, which sends CPU tensors."""
        return self.worker.device if is_nccl(dist.get_backend()) else torch.device("cpu")

    @classmethod
    def check(cls, network: nn.Module, inputs: Tensor) -> None:
        """Raise ValueError for a network that is not a chain of layers; see `check_chain`."""
        check_chain(network, inputs, cls.title)

    def weights(self) -> dict[str, Tensor]:
        """Return the stage's weights by the whole network's names."""
        assert isinstance(self.model, Stage)
        return self.model.full_names()


def equal_part(batch: Tensor, index: int, parts: int) -> Tensor:
    """Return part number `index`, (batch_size / parts, …), of a batch cut into `parts` equal ones.

    Raises ValueError if it cannot be cut so.
    """
    if len(batch) % parts:
        raise ValueError(f"a batch of {len(batch)} cannot be cut into {parts} equal parts; take a multiple of {parts}")
    return batch.chunk(parts)[index]
