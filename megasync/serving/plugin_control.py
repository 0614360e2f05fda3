"""The driver's side of the plugin: commands to one server, answered by each of its ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from megasync.concurrency.first_use import prepared
from megasync.errors import InvalidAnswer, ServerError
from megasync.layout.engine_layout import EngineRank
from megasync.serving.answers import parse_as
from megasync.serving.control import ServerControl
from megasync.serving.plugin_protocol import (
    ACTION,
    ANSWER,
    LOAD_FORMAT,
    PROTOCOL,
    Hello,
    RankAnswer,
    TraceRequest,
    decode,
    encode,
)

# How a server without the plugin refuses an unknown action.
_STOCK_REFUSAL = "Unsupported action"


@prepared
class RankChecksums(msgspec.Struct):
    """A rank's answer to a check of its weights: checksums by name, or what the plugin answers to a command."""

    checksums: dict[str, Any]


@prepared
class ChecksumReport(msgspec.Struct):
    """A server's answer to ``/weights_checker``."""

    ranks: list[RankChecksums]


A = TypeVar("A")


class PluginControl:
    """Commands travel over ``server``, which stays its owner's to close."""

    def __init__(self, control: ServerControl) -> None:
        self.server = control

    async def call(self, command: str, request: object, answer: type[A], timeout: float = 60.0) -> list[A]:
        """Each rank's answer, by rank.

        ``request`` is a msgspec struct, or of JSON's own types. Raises ServerError when the server has no plugin, a
        rank failed (in its own words), or no answer came within ``timeout`` seconds.
        """
        body = {"action": ACTION + command, "skip_tensor_list": [encode(request)], "selector": "target"}
        try:
            reply = await self.server.post("/weights_checker", body, timeout)
        except ServerError as error:
            if _STOCK_REFUSAL in str(error):
                raise ServerError(
                    f"{self.server.url} runs without megasync's plugin. Install megasync in that server's Python "
                    "environment, add megasync to SGLANG_PLUGINS if that is set there, and look for 'Failed to load "
                    "plugin' in the server's log"
                ) from error
            raise
        what = f"{self.server.url}: {command}"
        try:
            ranks = [decode(str(rank.checksums[ANSWER])) for rank in parse_as(reply, ChecksumReport, what).ranks]
        except (KeyError, ValueError, RecursionError) as error:
            raise InvalidAnswer(f"{what}: not an answer of the plugin ({error!r}): {reply!r:.300}") from error
        # Each attention group of a server repeats the answers of all ranks.
        by_rank = {answer.rank: answer for answer in parse_as(ranks, list[RankAnswer], what)}
        answers = [by_rank[rank] for rank in sorted(by_rank)]
        failed = [f"rank {rank.rank}: {rank.error}" for rank in answers if not rank.ok]
        if failed:
            raise ServerError(f"{what} failed: {'; '.join(failed)}")
        return parse_as([rank.result for rank in answers], list[answer], what)

    async def hello(self, timeout: float = 30.0) -> list[Hello]:
        """Each rank's identity. Raises as `call`, and when the plugin speaks another protocol than this driver."""
        ranks = await self.call("hello", {}, Hello, timeout)
        spoken = {rank.protocol for rank in ranks}
        if spoken != {PROTOCOL}:
            raise ServerError(
                f"{self.server.url}: its plugin speaks protocol {sorted(spoken)}, this driver {PROTOCOL}; "
                "install the same version of megasync on both sides"
            )
        return ranks

    async def load(self, request: object, version: str, flush: bool, timeout: float) -> None:
        """Has every rank commit ``request`` as ``version``, inside an open weight update; ``flush`` drops the cache.

        Raises ServerError; its text has `REFUSED` in it when no rank wrote anything.
        """
        body = {
            "names": [encode(request)],
            "dtypes": [],
            "shapes": [],
            "group_name": "",
            "load_format": LOAD_FORMAT,
            "flush_cache": flush,
            "weight_version": version,
        }
        await self.server.post("/update_weights_from_distributed", body, timeout)

    async def trace(self, specs: Iterable[tuple[str, Sequence[int]]], timeout: float = 120.0) -> list[EngineRank]:
        """Where each rank keeps the tensors of a checkpoint with these names and shapes. Raises as `call`."""
        request = TraceRequest(tuple((name, tuple(shape)) for name, shape in specs))
        return await self.call("trace", request, EngineRank, timeout)
