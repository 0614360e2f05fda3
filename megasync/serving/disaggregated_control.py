"""Control of a server that has several engines: each call goes to all of them, generation to the decode engines.

So pausing, loading and measuring such a server are what they are for any other, and its weights change in all engines
or count as changed in none: a call that some engines failed at raises `EngineErrors`, even if the others did what was
asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megasync.errors import EngineErrors, InvalidAnswer, ServerError
from megasync.serving.control import ServerControl

# What prefill engines get from decode engines only.
_GENERATE = "/generate"
# Lists in the answers of engines that together are the server's.
_JOINED = ("ranks", "loads", "internal_states")


@dataclass(frozen=True, slots=True)
class EngineScores:
    """The log-probs that an engine computed, and those that another one of its server computed for the same tokens."""

    engine: str
    expected: list[float]
    logprobs: list[float]


class DisaggregatedControl(ServerControl):
    """Controls the engines of one server. Owns their controls: `close` closes them.

    Args:
        url: of the router in front of the decode engines, or of the only one.
        key: what is required there for generation.
    """

    def __init__(
        self,
        url: str,
        prefill: Sequence[ServerControl],
        decode: Sequence[ServerControl],
        key: str | None = None,
    ) -> None:
        super().__init__(url, key)
        self._prefill = tuple(prefill)
        self._decode = tuple(decode)
        self._engines = (*prefill, *decode)

    @property
    def engine_urls(self) -> tuple[str, ...]:
        """The engines, those for prompts first, in the order of their ranks."""
        return tuple(engine.url for engine in self._engines)

    @property
    def pairs(self) -> int:
        """Pairs of a prefill and a decode engine in which each engine is at least once."""
        return max(len(self._prefill), len(self._decode))

    async def generate_on(self, pair: int, body: Mapping[str, Any], timeout: float) -> Any:
        """The answer of a pair's decode engine, with scores of the input by its prefill engine. Raises as `post`."""
        prefill, decode = self._prefill[pair % len(self._prefill)], self._decode[pair % len(self._decode)]
        # The plugin in the decode engine reads the prefill engine there (`sglang.prompts.PromptCalls`).
        return await decode.post(_GENERATE, {**body, "bootstrap_host": prefill.url}, timeout)

    async def weight_version(self, timeout: float = 60.0) -> int:
        """The version that all engines hold. Raises ServerError when they hold several."""
        versions = await asyncio.gather(*(engine.weight_version(timeout) for engine in self._engines))
        if len(set(versions)) > 1:
            each = ", ".join(f"{url}: {held}" for url, held in zip(self.engine_urls, versions, strict=True))
            raise InvalidAnswer(f"the engines of {self.url} hold different versions: {each}")
        return versions[0]

    async def close(self) -> None:
        await super().close()
        for engine in self._engines:
            await engine.close()

    async def _request(self, method: str, path: str, body: Mapping[str, Any] | None, timeout: float) -> Any:
        if path == _GENERATE:
            return await super()._request(method, path, body, timeout)
        calls = [engine._request(method, path, body, timeout) for engine in self._engines]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        errors = [answer if isinstance(answer, ServerError) else None for answer in answers]
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, ServerError):
                raise answer
        if any(errors):
            failed = [str(error) for error in errors if error is not None]
            raise EngineErrors(f"{len(failed)} of {len(errors)} engines of {self.url}: {'; '.join(failed)}", errors)
        return joined(answers)


def joined(answers: Sequence[Any]) -> Any:
    """One answer for all engines: the first one's, with the lists of what each has in it of all of them."""
    first = answers[0]
    if not all(isinstance(answer, dict) for answer in answers):
        return first
    lists = {name: [part for answer in answers for part in answer.get(name) or ()] for name in _JOINED if name in first}
    return first | lists
