"""The store through which ranks of several machines meet: opened by rank 0, joined by the others.

Whoever reaches its port can read its keys and overwrite them. They are bytes: labkit unpickles none of them.

When a client connects, PyTorch looks up a name for the other end's address, for a line of its log (`formatSockAddr`,
https://github.com/pytorch/pytorch/issues/159007). A start takes 5 s or more longer where DNS servers do not answer.
"""

from __future__ import annotations

import ipaddress
import socket
from datetime import timedelta

import torch.distributed as dist

RENDEZVOUS_S = 300.0
"""How long ranks of several machines wait for each other."""

RENDEZVOUS = timedelta(seconds=RENDEZVOUS_S)


def open_store(world_size: int, host: str = "127.0.0.1", port: int = 0) -> dist.TCPStore:
    """Open a store on this machine: at `host` alone if that is an address, else on every interface."""
    listener = listen(host, port, max(128, 2 * world_size))
    return dist.TCPStore(
        host,
        listener.getsockname()[1],
        world_size,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # by itself the store would listen on every interface
        timeout=RENDEZVOUS,
    )


def join_store(host: str, port: int, world_size: int) -> dist.TCPStore:
    """Return the store that was opened there. Raises torch's DistStoreError if nobody answers in time."""
    return dist.TCPStore(host, port, world_size, is_master=False, timeout=RENDEZVOUS)


def listen(host: str, port: int, backlog: int) -> socket.socket:
    """Return a socket that listens at `host` alone if that is an address, else on every interface."""
    if is_address(host):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=backlog)
    # A name may mean another interface to the others than to this machine: Debian's hosts file has 127.0.1.1 for it.
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=backlog)


def is_address(host: str) -> bool:
    """Return whether a host is given by its IP address, so that no name need be looked up."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
