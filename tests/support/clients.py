"""Rollout clients from flat options, of which a test changes one or two."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from megasync.rollout.client import RequestSettings, RolloutClient, ServedModel


def make_rollout_client(router_url: str, servers: Any = (), **options: Any) -> RolloutClient:
    """`options` are the fields of `ServedModel` and `RequestSettings`, and the other options of `RolloutClient`."""

    def part(kind: type) -> Any:
        return kind(**{field.name: options.pop(field.name) for field in fields(kind) if field.name in options})

    return RolloutClient(router_url, servers, part(ServedModel), part(RequestSettings), **options)
