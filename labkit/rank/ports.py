"""Ports of this machine: one that is kept free until a rank listens there, and how to listen at one address."""

from __future__ import annotations

import ipaddress
import socket

from labkit.system import host


def reserve(address: str) -> tuple[int, socket.socket]:
    """Return a port, and a socket that keeps it: bound, and not listening.

    So no program is given this port by the system, and what listens there later finds it free, for both set
    SO_REUSEADDR. Outside Linux that does not help: the port is let go of at once, and most likely stays free.
    """
    family, address = _resolved(address)
    reserved = socket.socket(family)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((address, 0))
    port: int = reserved.getsockname()[1]
    if not host.lends_bound_ports:
        reserved.close()
    return port, reserved


def listen(address: str, port: int = 0) -> socket.socket:
    """Return a socket that listens at an IP address alone; for a name, on every interface."""
    family, address = _resolved(address)
    return socket.create_server((address, port), family=family, backlog=1024)


def _resolved(address: str) -> tuple[socket.AddressFamily, str]:
    try:
        version = ipaddress.ip_address(address).version
    except ValueError:
        # A name may mean another interface to the others than to this machine: Debian's hosts file has 127.0.1.1.
        return socket.AF_INET, ""
    return socket.AF_INET6 if version == 6 else socket.AF_INET, address
