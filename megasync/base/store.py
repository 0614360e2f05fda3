"""Key-value stores by which the processes of a torch process group find each other."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore


def open_store(host: str, timeout: float) -> TCPStore:
    """A store that listens only on ``host``, on a free port (``store.port``)."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind((host, 0))
        listener.listen()
        port = listener.getsockname()[1]
        return TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout),
            master_listen_fd=listener.detach(),
        )


def join_store(host: str, port: int, timeout: float) -> TCPStore:
    """A client of the store that listens there; ``timeout`` is in seconds."""
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout))
