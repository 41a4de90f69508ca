"""What strategies have in common: equal parts of a batch, stages of a network. `labkit.Strategy` is the interface."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit import Strategy
from labkit.comparison.chain import Stage, check_chain, sparse_embeddings
from labkit.rank.device import is_nccl


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


def check_dense(network: nn.Module, title: str) -> None:
    """Raise ValueError for a network with sparse gradients."""
    if names := sparse_embeddings(network):
        raise ValueError(
            f"{title} cannot train this network: the gradients of {', '.join(names)} are sparse. Take sparse=False"
        )


def equal_part(batch: Tensor, index: int, parts: int) -> Tensor:
    """Return part number `index`, (batch_size / parts, …), of a batch cut into `parts` equal ones.

    Raises ValueError if it cannot be cut so.
    """
    if len(batch) % parts:
        raise ValueError(f"a batch of {len(batch)} cannot be cut into {parts} equal parts; take a multiple of {parts}")
    return batch.chunk(parts)[index]
