"""The store through which ranks meet: opened by the notebook or by rank 0, joined by the others."""

from __future__ import annotations

import socket
from datetime import timedelta

import torch.distributed as dist

STORE_S = 300.0
"""How long whoever opened the store waits for what is not there yet; torch's own default."""

JOIN_S = 60.0
"""How long a rank waits for the others of its machine."""


def open_store(
    world_size: int, host: str = "127.0.0.1", port: int = 0, timeout_s: float = STORE_S
) -> tuple[dist.TCPStore, int]:
    """Open a store on this machine and return it with its port; on loopback alone if `host` is there."""
    backlog = max(128, 2 * world_size)
    if host.startswith("127."):
        listener = socket.create_server((host, port), backlog=backlog)
    elif socket.has_dualstack_ipv6():
        listener = socket.create_server(("", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    else:
        listener = socket.create_server(("", port), backlog=backlog)
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        host,
        port,
        world_size,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # the store listens on this socket only, not on every interface
        timeout=timedelta(seconds=timeout_s),
    )
    return store, port


def join_store(host: str, port: int, world_size: int, timeout_s: float = JOIN_S) -> dist.TCPStore:
    """Return the store that was opened there. Raises torch's DistStoreError if nobody answers in time."""
    return dist.TCPStore(host, port, world_size, is_master=False, timeout=timedelta(seconds=timeout_s))
