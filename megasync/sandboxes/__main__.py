"""Serves sandboxes of this machine over HTTP: `python -m megasync.sandboxes --help`."""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import signal
import sys

from megasync.errors import MegasyncError
from megasync.sandboxes.kinds import KINDS, starter_of
from megasync.sandboxes.pool import WarmPool
from megasync.sandboxes.protocol import Spec
from megasync.sandboxes.remote import SandboxServer

_EXAMPLES = """examples:
  python -m megasync.sandboxes                              on loopback, at a free port, with a new key
  SANDBOX_KEY=... python -m megasync.sandboxes --host 10.0.0.5 --port 8400 --warm 8
  python -m megasync.sandboxes --kind docker --image python:3.12-slim
"""


async def _serve(options: argparse.Namespace) -> None:
    starter = starter_of(Spec(options.kind, options.image, options.folder, network=options.network))
    key = os.environ.get("SANDBOX_KEY") or secrets.token_urlsafe(24)
    server = SandboxServer(WarmPool(starter, options.warm), key, most=options.most)
    await server.start(options.host, options.port)
    print(
        f"url: {server.url}", f"key: {key if 'SANDBOX_KEY' not in os.environ else 'SANDBOX_KEY'}", sep="\n", flush=True
    )
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    await ended.wait()
    await server.close()


def main() -> None:
    """Serves until a signal."""
    parser = argparse.ArgumentParser(
        "python -m megasync.sandboxes", None, __doc__, _EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at; nothing is encrypted")
    parser.add_argument("--port", type=int, default=0, help="port; 0 takes a free one")
    parser.add_argument("--kind", default="process", choices=[kind for kind in KINDS if kind != "remote"])
    parser.add_argument("--image", help="image or root folder of the sandboxes")
    parser.add_argument("--folder", help="folder whose content each sandbox begins with")
    parser.add_argument("--network", action="store_true", help="let programs use the network")
    parser.add_argument("--warm", type=int, default=0, help="sandboxes that are started ahead")
    parser.add_argument("--most", type=int, default=256, help="sandboxes at once")
    try:
        asyncio.run(_serve(parser.parse_args()))
    except MegasyncError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
