"""What both services share: loopback by default, a graceful end on SIGTERM or Ctrl-C, clear refusals."""

from __future__ import annotations

import argparse

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

# Seconds for requests that are under way when the service is told to end.
GRACE = 5


def add_address(parser: argparse.ArgumentParser, port: int) -> None:
    parser.add_argument("--host", default="127.0.0.1", help="interface; nobody has to log in, so mind who can reach it")
    parser.add_argument("--port", type=int, default=port)


def refuse_clearly(app: FastAPI) -> None:
    """A request that does not fit gets a 422 with place and reason of each mistake.

    FastAPI's own answer also repeats the input, which fails for half of a surrogate pair, as models write them.
    """

    @app.exception_handler(RequestValidationError)
    async def refuse(request: Request, error: RequestValidationError) -> JSONResponse:
        return JSONResponse({"detail": [{"loc": e["loc"], "msg": e["msg"]} for e in error.errors()]}, 422)


def serve(app: FastAPI, options: argparse.Namespace) -> None:
    """Returns when the service has ended."""
    uvicorn.run(app, host=options.host, port=options.port, log_level="warning", timeout_graceful_shutdown=GRACE)
