"""A network as a chain of layers, to be cut between two of them, and as blocks, to be wrapped one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


def blocks(network: nn.Module) -> list[nn.Module]:
    """Return the modules that FSDP2 wraps: children that have parameters; of module lists and dicts, the elements.

    These are never called themselves. Children that share a weight are left to the whole network: FSDP2 wants both in
    one group.
    """
    found = [child for child in _children(network) if has_parameters(child)]
    owners = Counter(id(parameter) for child in found for parameter in child.parameters())
    return [child for child in found if all(owners[id(parameter)] == 1 for parameter in child.parameters())]


def _children(network: nn.Module) -> Iterator[nn.Module]:
    for child in network.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _children(child)
        else:
            yield child


def sparse_embeddings(network: nn.Module) -> dict[str, nn.Embedding | nn.EmbeddingBag]:
    """Return the modules whose weights' gradients hold only the rows that were looked up, by these weights' names."""
    return {
        f"{name}.weight".removeprefix("."): module
        for name, module in network.named_modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
    }


def layers(network: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return a network's layers in the order in which they stand, by their names in it.

    What is in `nn.Sequential`, `nn.ModuleList` and `nn.ModuleDict`, nested too, are layers of their own: a residual
    block, say. Whether the network calls them in that order is for `check_chain` to say.
    """
    found = []
    for name, child in network.named_children():
        if isinstance(child, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
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
    if shared := _shared(chain):
        raise ValueError(f"{title} cannot cut this network: {shared}. Take DDP, or untie them")
    called: list[_Call] = []

    def begin(name: str) -> Any:
        return lambda _, args: called.append(_Call(name, args, [_version(each) for each in args]))

    def end(_: nn.Module, args: Any, output: Any) -> None:
        called[-1].output, called[-1].output_version = output, _version(output)

    hooks = [layer.register_forward_pre_hook(begin(name)) for name, layer in chain]
    hooks += [layer.register_forward_hook(end) for _, layer in chain]
    given_version = _version(inputs)
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
    called.append(_Call("nothing", (outputs,), [_version(outputs)]))
    before, expected, version, why = "the input", inputs, given_version, ""
    for name, call in zip([*(name for name, _ in chain), "nothing"], called, strict=False):
        if call.name != name:
            why = f"after {before}, {call.name} is called, and not {name}"
        elif len(call.args) != 1 or call.args[0] is not expected or call.versions[0] != version:
            gets = "the network does not return" if call is called[-1] else f"{name} does not get just"
            why = f"{gets} what {before} returned"
        if why:
            raise ValueError(
                f"{title} cannot cut this network: {why}. Cuts lie between layers, so these must be called one after "
                "the other, and nothing may happen between them. Put what belongs together, such as a residual "
                "connection, into a module of its own (nn.Flatten for a view), and these into an nn.Sequential or "
                "nn.ModuleList"
            )
        before, expected, version = name, call.output, call.output_version


def _shared(chain: list[tuple[str, nn.Module]]) -> str:
    """Say which layers share a weight, if any do: a stage each would train a copy of its own."""
    owners: dict[int, str] = {}
    for name, layer in chain:
        for key, parameter in layer.named_parameters():
            if id(parameter) in owners:
                return f"{name}.{key} is {owners[id(parameter)]}, and two stages would train a copy each"
            owners[id(parameter)] = f"{name}.{key}"
    return ""


@dataclass
class _Call:
    """A layer that was called: what it got and returned, and how often each had been written in place by then."""

    name: str
    args: Any
    versions: list[int]
    output: Any = None
    output_version: int = 0


def _version(thing: Any) -> int:
    """Return how often a tensor has been written in place: that, too, is something between two layers."""
    return thing._version if isinstance(thing, Tensor) else 0


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
