"""A network as a chain of layers, to be cut between two of them, and as blocks, to be wrapped one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

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
    """Raise ValueError unless a network computes what its layers compute, one after the other.

    One batch goes through both, without gradients. What `forward` does between two layers, such as adding a residual
    connection, would be lost where the network is cut.
    """
    chain = layers(network)
    if shared := _shared(chain):
        raise ValueError(f"{title} cannot cut this network: {shared}. Take DDP, or untie them")
    modes = [(module, module.training) for module in network.modules()]
    try:
        network.eval()
        with torch.no_grad():
            expected, found = network(inputs.clone()), inputs.clone()
            for _, layer in chain:
                found = layer(found)
        is_same = torch.allclose(expected, found, rtol=1e-5, atol=1e-8)
        why = "" if is_same else "they compute something else"
    except Exception as error:
        why = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    finally:
        for module, is_training in modes:
            module.training = is_training
    if why:
        raise ValueError(
            f"{title} cannot cut this network: its layers were called one after the other, and {why}. Put what belongs "
            "together, such as a residual connection, into a module of its own (nn.Flatten for a view), and these into "
            "an nn.Sequential or nn.ModuleList"
        )


def _shared(chain: list[tuple[str, nn.Module]]) -> str:
    """Say which layers share a weight, if any do: a stage each would train a copy of its own."""
    owners: dict[int, str] = {}
    for name, layer in chain:
        for key, parameter in layer.named_parameters():
            if id(parameter) in owners:
                return f"{name}.{key} is {owners[id(parameter)]}, and two stages would train a copy each"
            owners[id(parameter)] = f"{name}.{key}"
    return ""


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
