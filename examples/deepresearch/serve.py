"""How both services are started: on loopback unless told otherwise, ended gracefully by SIGTERM or Ctrl-C."""

from __future__ import annotations

import argparse

import uvicorn
from fastapi import FastAPI

# Seconds for requests that are under way when the service is told to end.
GRACE = 5


def add_address(parser: argparse.ArgumentParser, port: int) -> None:
    parser.add_argument("--host", default="127.0.0.1", help="interface; nobody has to log in, so mind who can reach it")
    parser.add_argument("--port", type=int, default=port)


def serve(app: FastAPI, options: argparse.Namespace) -> None:
    """Returns when the service has ended."""
    uvicorn.run(app, host=options.host, port=options.port, log_level="warning", timeout_graceful_shutdown=GRACE)
