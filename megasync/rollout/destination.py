"""Where a request goes that asks for certain weights, in place of the newest published ones."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Destination:
    """`server` is the URL of the server that answers, `adapter` the name of the adapter that any server answers with.

    Without both, the router chooses the server, which answers with what it holds.
    """

    server: str | None = None
    adapter: str | None = None


ANYWHERE = Destination()
