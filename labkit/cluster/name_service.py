"""How addresses are looked up in files alone while a connection is made.

The problem: whoever connects to a `TCPStore` has PyTorch look up a name for the other end's address, for a line of its
log (`formatSockAddr`; pytorch #159007). The address is written as IPv6, ::ffff:127.0.0.1, which is in no hosts file, so
a DNS server is asked; one that is far, or that drops a question now and then, makes a launch wait for 5 s and more.
What does not work: another host (::1 is in many hosts files, not in all), RES_OPTIONS (a second at least, and the
reader's function would find it in its environment).
What is done: where the host is an address, so that no name need be found, the C library is told to look into its own
files alone while PyTorch connects, which takes about a millisecond.
What still fails: another thread that begins to look up a name in this millisecond finds only what the hosts file has;
and systems without glibc wait as they did.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import ipaddress
import threading
from collections.abc import Callable, Iterator

_lock = threading.Lock()
_within = 0
"""How many connections are being opened just now."""


@contextlib.contextmanager
def without_name_service(host: str) -> Iterator[None]:
    """Have addresses looked up in files alone, if `host` is an address; see above."""
    global _within
    switch = _switch()
    if switch is None or not is_address(host):
        yield
        return
    look_up, usual = switch
    with _lock:
        _within += 1
        if _within == 1:
            look_up(b"hosts", b"files")
    try:
        yield
    finally:
        with _lock:
            _within -= 1
            if _within == 0:
                look_up(b"hosts", usual)


def is_address(host: str) -> bool:
    """Return whether a host is given by its address, so that no name need be looked up."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


@functools.cache
def _switch() -> tuple[Callable[[bytes, bytes], int], bytes] | None:
    """Return what sets where glibc looks names up, and where it usually does; None where it is another library."""
    with contextlib.suppress(OSError, AttributeError):
        look_up = ctypes.CDLL(None).__nss_configure_lookup
        look_up.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
        with open("/etc/nsswitch.conf") as lines:
            for line in lines:
                database, _, sources = line.partition("#")[0].partition(":")
                if database.strip() == "hosts" and sources.strip():
                    return look_up, sources.strip().encode()
    return None
