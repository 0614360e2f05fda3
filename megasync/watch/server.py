"""Serves the page: binds the port, makes the token, prints the address, and runs until it is interrupted."""

from __future__ import annotations

import errno
import ipaddress
import logging
import secrets
import socket
from collections.abc import Callable
from pathlib import Path

from megasync.errors import ConfigError

PORT = 8420
LOOPBACK = "127.0.0.1"
# Browsers behind a tunnel may need this long to come back after a dropped connection; then the page is built anew.
RECONNECT_SECONDS = 30.0


def serve(target: Path, host: str, port: int, with_token: bool, say: Callable[[str], None]) -> None:
    """Blocks until Ctrl-C. Raises ConfigError if `target` has no run, the port is taken, or the host is not usable."""
    loopback = _is_loopback(host)
    if not with_token and not loopback:
        raise ConfigError(
            f"--no-token with --host {host} would show prompts and responses to everyone who reaches this machine; "
            f"leave out --no-token, or keep --host {LOOPBACK} and use an ssh tunnel"
        )
    try:
        import uvicorn
        from nicegui import core

        from megasync.watch.guard import TOKEN_PARAMETER, Guard
        from megasync.watch.page import application
    except ImportError as error:
        raise ConfigError(
            f"megasync watch needs {error.name}, which is not installed; install megasync again with its dependencies"
        ) from None

    app = application(target, RECONNECT_SECONDS)
    bound = _bind(host, port)
    token = secrets.token_urlsafe(24) if with_token else None
    name = "localhost" if loopback else socket.gethostname() if host in ("0.0.0.0", "::") else host
    number = bound.getsockname()[1]
    query = f"?{TOKEN_PARAMETER}={token}" if token else ""
    say(f"watching {target}: http://{f'[{name}]' if ':' in name else name}:{number}/{query}")
    if loopback:
        say(f"from another machine: ssh -L {number}:{LOOPBACK}:{number} {socket.gethostname()}, then the same address")
    say("press Ctrl-C to end; the run is not affected")
    # Errors of the page itself are logged; requests that Guard refuses are not news.
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    config = uvicorn.Config(
        Guard(app, token, loopback),
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=1,
    )
    with bound:
        uvicorn.Server(config).run(sockets=[bound])
    core.reset()


def _bind(host: str, port: int) -> socket.socket:
    """A listening socket. Port 0 is any free one."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise ConfigError(f"--host {host} is not an address of this machine: {error.strerror}") from None
    family, kind, protocol, _, address = addresses[0]
    bound = socket.socket(family, kind, protocol)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
        bound.listen()
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} of {host} is in use, perhaps by another `megasync watch`; pass --port with another one, "
                "or --port 0 for any that is free"
            ) from None
        raise ConfigError(f"cannot listen on {host}, port {port}: {error.strerror}") from None
    return bound


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
