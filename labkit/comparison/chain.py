"""A network as a chain of layers, which can be cut between them; and as blocks, each of which is wrapped for itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


def blocks(network: nn.Module) -> Iterator[nn.Module]:
    """Yield a network's children; of an `nn.ModuleList`, which is never called itself, its elements."""
    for child in network.children():
        if isinstance(child, nn.ModuleList):
            yield from blocks(child)
        else:
            yield child


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
