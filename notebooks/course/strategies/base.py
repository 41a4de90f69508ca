"""What strategies have in common: equal parts of a batch, stages of a network. `labkit.Strategy` is the interface."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit import Strategy
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
        """A ring all-reduce sends 2 (n − 1) / n of what it averages (Patarasuk and Yuan 2009)."""
        n = self.worker.world_size
        return 2 * (n - 1) / n * self.parameter_bytes


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


def layers(network: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return a network's layers in the order in which they are called, by their names in it.

    For `nn.Sequential`, nested too, and for networks that call their children in the order in which these stand.
    """
    found = []
    for name, child in network.named_children():
        if isinstance(child, nn.Sequential):
            found += [(f"{name}.{deeper}", layer) for deeper, layer in layers(child)]
        else:
            found.append((name, child))
    return found


class Stage(nn.Module):
    """Some consecutive layers of a network; `full_names` gives its weights by the network's own names."""

    def __init__(self, named: list[tuple[str, nn.Module]]) -> None:
        super().__init__()
        self._names = [name for name, _ in named]
        self.body = nn.Sequential(*(layer for _, layer in named))

    def forward(self, inputs: Tensor) -> Tensor:
        """Call the layers one after the other."""
        outputs: Tensor = self.body(inputs)
        return outputs

    def full_names(self) -> dict[str, Tensor]:
        """Return the weights by the whole network's names."""
        return {
            f"{name}.{key}": tensor
            for name, layer in zip(self._names, self.body, strict=True)
            for key, tensor in layer.state_dict().items()
        }


def split_stages(network: nn.Module, parts: int) -> list[Stage]:
    """Split a network into consecutive stages, each with at least one layer that has parameters.

    Raises ValueError if there are not enough of those.
    """
    groups: list[list[tuple[str, nn.Module]]] = []
    for name, layer in layers(network):
        if not groups or (has_parameters(layer) and any(has_parameters(earlier) for _, earlier in groups[-1])):
            groups.append([])
        groups[-1].append((name, layer))
    if len(groups) < parts:
        raise ValueError(f"a network of {len(groups)} layers with parameters cannot be cut into {parts} stages")
    bounds = [round(index * len(groups) / parts) for index in range(parts + 1)]
    return [Stage(sum(groups[a:b], [])) for a, b in zip(bounds, bounds[1:], strict=False)]


def has_parameters(layer: nn.Module) -> bool:
    """Whether there is anything to train in it."""
    return any(True for _ in layer.parameters())
