"""The driver's side of the plugin: commands to one server, answered by each of its tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from megasync.errors import ServerError
from megasync.rollout.control import ServerControl
from megasync.rollout.engine_protocol import ACTION, ANSWER, LOAD_FORMAT, PROTOCOL, decode, encode
from megasync.sync.engine_layout import EngineRank

# What a server without the plugin says to an action it does not know.
_STOCK_REFUSAL = "Unsupported action"


class EngineControl:
    """Commands travel over ``server``, which stays its owner's to close."""

    def __init__(self, control: ServerControl) -> None:
        self.server = control

    @property
    def url(self) -> str:
        return self.server.url

    async def call(self, command: str, payload: dict[str, Any] | None = None, timeout: float = 60.0) -> list[dict]:
        """What each rank answered, by rank.

        Raises:
            ServerError: the server has no plugin, a rank failed (in its own words), or no answer within ``timeout`` s.
        """
        body = {"action": ACTION + command, "skip_tensor_list": [encode(payload or {})], "selector": "target"}
        try:
            found = await self.server.post("/weights_checker", body, timeout)
        except ServerError as error:
            if _STOCK_REFUSAL in str(error):
                raise ServerError(
                    f"{self.server.url} runs without megasync's plugin. Install megasync in that server's Python "
                    "environment, let SGLANG_PLUGINS (if set there) name megasync, and look for 'Failed to load plugin' "
                    "in the server's log"
                ) from error
            raise
        answers = [decode(rank["checksums"][ANSWER]) for rank in found["ranks"]]
        failed = [f"tp rank {answer['tp_rank']}: {answer['error']}" for answer in answers if not answer["ok"]]
        if failed:
            raise ServerError(f"{self.server.url}: {command} failed: {'; '.join(failed)}")
        return [answer["result"] for answer in sorted(answers, key=lambda answer: answer["tp_rank"])]

    async def hello(self, timeout: float = 30.0) -> list[dict]:
        """Who the ranks are: protocol, sglang, tp_rank, tp_size, model, dtype, pid.

        Raises:
            ServerError: as `call`, and when the plugin speaks another protocol than this driver.
        """
        ranks = await self.call("hello", timeout=timeout)
        spoken = {rank["protocol"] for rank in ranks}
        if spoken != {PROTOCOL}:
            raise ServerError(
                f"{self.server.url}: its plugin speaks protocol {sorted(spoken)}, this driver {PROTOCOL}; "
                "install the same version of megasync on both sides"
            )
        return ranks

    async def load(self, request: dict[str, Any], version: str, flush: bool, timeout: float) -> None:
        """Has every rank commit ``request`` as ``version``, inside an open weight update; ``flush`` drops the cache.

        Raises:
            ServerError: its text has `REFUSED` in it when no rank wrote anything.
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
        payload = {"specs": [[name, list(shape)] for name, shape in specs]}
        return [EngineRank.from_json(found) for found in await self.call("trace", payload, timeout)]
