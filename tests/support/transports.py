"""What carries the messages, for tests: gloo over TCP, and stand-ins for transports that tell nobody of an end.

With gloo's libuv transport (macOS) and with NCCL a rank does not notice that another has gone. Over TCP it
does, because the system closes the other's sockets. So here the process of the tests holds a copy of each: a socket is
closed when its last copy is, and nobody notices anything. No compiler is needed, and nothing of PyTorch is replaced.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import sys
import tempfile
import threading
import time
from pathlib import Path

MOST = 250
"""Descriptors in one message at most."""


@contextlib.contextmanager
def holding():
    """Hold copies of the sockets that ranks give to `keep_open`, until the end of the block; give where to bring them.

    One file, so that ranks find it however they are started.
    """
    held: list[int] = []
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as server:
        path = str(Path(folder) / "held")
        server.bind(path)
        server.listen(64)

        def serve():
            while True:
                try:
                    client, _ = server.accept()
                except OSError:
                    return
                with client:
                    _, fds, _, _ = socket.recv_fds(client, 16, MOST)
                    held.extend(fds)
                    client.send(b"held")

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield path
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
            for fd in held:
                os.close(fd)


def keep_open(path):
    """Have the end of this rank go unnoticed: its connections stay open in another process. `path`: see `holding`."""
    ours = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            copy = os.dup(int(name))
            if not stat.S_ISSOCK(os.fstat(copy).st_mode):
                os.close(copy)
                continue
            one = socket.socket(fileno=copy)
            if one.family == socket.AF_INET and one.type == socket.SOCK_STREAM:
                with contextlib.suppress(OSError):
                    one.getpeername()
                    ours.append(one.detach())
            one.close()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
        socket.send_fds(client, [b"take"], ours[:MOST])
        client.recv(16)
    for fd in ours:
        os.close(fd)


ABORTED = """\
[rank{rank}]:[E1125 20:00:00.000000000 ProcessGroupNCCL.cpp:632] [Rank {rank}] Watchdog caught collective operation \
timeout: WorkNCCL(SeqNum={number}, OpType={kind}, NumelIn=1, NumelOut=1, Timeout(ms)={limit_ms}) ran for {limit_ms} \
milliseconds before timing out.
[rank{rank}]:[E1125 20:00:00.000000001 ProcessGroupNCCL.cpp:684] [Rank {rank}] To avoid data inconsistency, we are \
taking the entire process down.
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG ID {group} PG GUID {group}({description}) Rank {rank}] Process group watchdog thread terminated with \
exception: [Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={number}, OpType={kind}, \
NumelIn=1, NumelOut=1, Timeout(ms)={limit_ms}) ran for {limit_ms} milliseconds before timing out.
"""
"""What NCCL's watchdog writes, as PyTorch 2.9 to 2.15 have it."""


def abort_after(rank, limit_s, number, kind="ALLREDUCE", group="0", description="default_pg"):
    """Do as NCCL's watchdog does: end this process if the call that follows has not ended in time."""
    said = ABORTED.format(
        rank=rank, number=number, kind=kind, limit_ms=int(limit_s * 1000), group=group, description=description
    )

    def watch():
        time.sleep(limit_s)
        sys.stderr.write(said)
        sys.stderr.flush()
        os.abort()

    threading.Thread(target=watch, name="pt_nccl_watchdg", daemon=True).start()
