"""What strategies have in common: equal parts of a batch, stages of a network. `labkit.Strategy` is the interface."""

from __future__ import annotations

from typing import Any

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


def layers(network: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return a network's layers in the order in which they stand, by their names in it.

    What is in `nn.Sequential` and `nn.ModuleList`, nested too, are layers of their own: a residual block, say. Whether
    the network calls them in that order is for `check_chain` to say.
    """
    found = []
    for name, child in network.named_children():
        if isinstance(child, (nn.Sequential, nn.ModuleList)):
            found += [(f"{name}.{deeper}", layer) for deeper, layer in layers(child)]
        else:
            found.append((name, child))
    return found


def check_chain(network: nn.Module, inputs: Tensor, title: str) -> None:
    """Raise ValueError unless a network is its layers, each called once, with what the one before it returned.

    One batch goes through the whole, without gradients, and each layer is asked what it gets: whatever `forward` does
    between two layers, such as adding a residual connection, would be lost where the network is cut.
    """
    chain = layers(network)
    called: list[tuple[str, Any, Any]] = []

    def hook(name: str) -> Any:
        def note(_: nn.Module, args: Any, output: Any) -> None:
            called.append((name, args, output))

        return note

    hooks = [layer.register_forward_hook(hook(name)) for name, layer in chain]
    modes = [(module, module.training) for module in network.modules()]
    try:
        network.eval()
        with torch.no_grad():
            outputs = network(inputs)
    finally:
        for module, is_training in modes:
            module.training = is_training
        for each in hooks:
            each.remove()
    expected: Any = inputs
    nothing: tuple[str, Any, Any] = ("nothing", (), None)
    before, why = "the input", ""
    for index in range(max(len(chain), len(called))):
        name = chain[index][0] if index < len(chain) else "nothing"
        found, given, returned = called[index] if index < len(called) else nothing
        if found != name:
            why = f"after {before}, {found} is called, and not {name}"
        elif len(given) != 1 or not _is_same(given[0], expected):
            why = f"{name} does not get just what {before} returned"
        if why:
            break
        before, expected = name, returned
    if not why and not _is_same(outputs, expected):
        why = f"the network does not return what {before} returned"
    if why:
        raise ValueError(
            f"{title} cannot cut this network: {why}. Cuts lie between layers, so these must be called one after the "
            "other, and nothing may happen between them. Put what belongs together, such as a residual connection, "
            "into a module of its own (nn.Flatten for a view), and these into an nn.Sequential or nn.ModuleList"
        )


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    both = isinstance(one, Tensor) and isinstance(other, Tensor) and one.shape == other.shape
    return both and torch.equal(one, other)


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
