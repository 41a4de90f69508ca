"""Where ranks can be placed: what a rank takes, what nodes have, and what is missing, in words. Knows no Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
"""As Ray names them: https://docs.ray.io/en/latest/ray-core/scheduling/placement-group.html."""

Resources = Mapping[str, float]


class Place(NamedTuple):
    """Where a rank is."""

    bundle: int
    """Of the placement group."""
    node: str
    """Ray's number of the node."""
    rank: int
    local_rank: int
    local_world_size: int


def places(node_of_bundle: Mapping[int, str]) -> list[Place]:
    """Return the place of each rank: those of a node follow each other, as under every launcher."""
    nodes = list(dict.fromkeys(node_of_bundle[bundle] for bundle in sorted(node_of_bundle)))
    found: list[Place] = []
    for node in nodes:
        here = [bundle for bundle in sorted(node_of_bundle) if node_of_bundle[bundle] == node]
        for local_rank, bundle in enumerate(here):
            found.append(Place(bundle, node, len(found), local_rank, len(here)))
    return found


def fit_on(node: Resources, rank: Resources) -> int:
    """Return how many ranks fit on a node."""
    return min(int(node.get(name, 0) / amount + 1e-9) for name, amount in rank.items())


def can_be_placed(nodes: Sequence[Resources], rank: Resources, world_size: int, strategy: str) -> bool:
    """Whether all ranks would fit if nobody else used the nodes."""
    on_each = [fit_on(node, rank) for node in nodes]
    if strategy == "STRICT_PACK":
        return max(on_each, default=0) >= world_size
    if strategy == "STRICT_SPREAD":
        return sum(count > 0 for count in on_each) >= world_size
    return sum(on_each) >= world_size


def asked_for(rank: Resources, world_size: int, strategy: str) -> str:
    """Return in words what is asked for: "4 ranks, each with 1 CPU and 1 GPU, all on one node"."""
    each = " and ".join(f"{amount:g} {name}" for name, amount in rank.items())
    how = {"STRICT_PACK": ", all on one node", "STRICT_SPREAD": ", each on a node of its own"}.get(strategy, "")
    return f"{world_size} rank{'s, each' if world_size > 1 else ''} with {each}{how}"


def there_is(nodes: Sequence[Resources], rank: Resources) -> str:
    """Return in words what nodes have of what a rank takes: "4 CPU and 2 GPU on 2 nodes"."""
    sums = (f"{sum(node.get(name, 0) for node in nodes):g} {name}" for name in rank)
    return f"{' and '.join(sums)} on {len(nodes)} node{'' if len(nodes) == 1 else 's'}"
