"""The store through which ranks meet, opened and joined without a question to a name server."""

from __future__ import annotations

import torch.distributed as dist

from labkit.plugins.name_service.lookup import without_name_service
from labkit.rank import store
from labkit.rank.store import JOIN_S, STORE_S


def open_store(
    world_size: int, host: str = "127.0.0.1", port: int = 0, timeout_s: float = STORE_S
) -> tuple[dist.TCPStore, int]:
    """Open a store on this machine and return it with its port; on loopback alone if `host` is there."""
    with without_name_service(host):
        return store.open_store(world_size, host, port, timeout_s)


def join_store(host: str, port: int, world_size: int, timeout_s: float = JOIN_S) -> dist.TCPStore:
    """Return the store that was opened there. Raises torch's DistStoreError if nobody answers in time."""
    with without_name_service(host):
        return store.join_store(host, port, world_size, timeout_s)
