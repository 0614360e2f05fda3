"""The driver's side of the plugin: commands to one server, answered by each of its tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NotRequired, TypedDict

import msgspec

from megasync.errors import InvalidAnswer, ServerError
from megasync.layout.engine_layout import EngineRank
from megasync.serving.answers import converted
from megasync.serving.control import ServerControl
from megasync.serving.engine_protocol import ACTION, ANSWER, LOAD_FORMAT, PROTOCOL, decode, encode

# What a server without the plugin says to an action it does not know.
_STOCK_REFUSAL = "Unsupported action"


class _Rank(msgspec.Struct):
    checksums: dict[str, str]


class _Checked(msgspec.Struct):
    ranks: list[_Rank]


class _Answer(msgspec.Struct):
    tp_rank: int
    ok: bool
    result: Any = None
    error: Any = None


class _Hello(TypedDict):
    protocol: int
    instance: str


class _Program(TypedDict):
    stages: bool
    bytes: int


class _Report(TypedDict):
    attempt: str
    state: str
    error: str
    digest: NotRequired[Any]


# What a rank's answer to a command is, for those whose answers are used outside this module.
_RESULTS: dict[str, Any] = {"hello": _Hello, "program": _Program, "poll": _Report}


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
        what = f"{self.server.url}: {command}"
        try:
            ranks = [decode(rank.checksums[ANSWER]) for rank in converted(found, _Checked, what).ranks]
        except (KeyError, ValueError, RecursionError) as error:
            raise InvalidAnswer(f"{what}: not an answer of the plugin ({error!r}): {found!r:.300}") from error
        answers = converted(ranks, list[_Answer], what)
        failed = [f"tp rank {answer.tp_rank}: {answer.error}" for answer in answers if not answer.ok]
        if failed:
            raise ServerError(f"{what} failed: {'; '.join(failed)}")
        results = [answer.result for answer in sorted(answers, key=lambda answer: answer.tp_rank)]
        if (form := _RESULTS.get(command)) is not None:
            # The results themselves are returned: they have more than has to be there.
            converted(results, list[form], what)
        return results

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
        found = await self.call("trace", payload, timeout)
        try:
            return [EngineRank.from_json(rank) for rank in found]
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidAnswer(f"{self.server.url}: trace: not a layout ({error!r}): {found!r:.300}") from error
