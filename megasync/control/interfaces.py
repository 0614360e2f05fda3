"""What the controller asks of the parts that it wires together. Real ones live in their rooms, fakes in tests and `sim`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol


class Trainer(Protocol):
    """The trainer ranks as one: every call reaches all of them, and raises RankLost when one died or hangs."""

    async def step(self, groups: list, step: int, version: int) -> dict[str, float]: ...

    async def save(self, step: int, state: dict) -> Any:
        """Returns the checkpoint's `path` and the `oldest_step` that is kept beside it."""

    async def check(self) -> None:
        """Raises RankLost when a rank is dead or does not answer."""

    async def restart(self) -> dict[str, Any] | None:
        """New ranks from the newest checkpoint; what it was saved with, None when they hold the initial weights."""


class Publisher(Protocol):
    """Moves the trainer's weights into every server, verified, as one version."""

    async def publish(self, version: int, only: Collection[str] | None = None) -> dict[str, float]:
        """Into every server, or those with these URLs. Raises PublishError, which says who failed, Disagreement with who
        alone computes other log-probs than the trainer, and ParityError when all do."""

    def forget_ranks(self) -> None:
        """The trainer ranks were started again."""


class Server(Protocol):
    @property
    def url(self) -> str: ...


class Fleet(Protocol):
    """The servers. It restarts them by itself; what only a weight sync can give back, it asks for as a joiner."""

    def serving(self) -> Sequence[Server]:
        """Servers in the router: they hold the published version."""

    def joiners(self) -> Sequence[Server]:
        """Servers that are up but hold no published weights."""

    async def changed(self) -> None:
        """Returns when a server has come up or gone since the last time, at once if that has happened already."""

    async def joined(self, urls: Collection[str]) -> None:
        """These have the published version now, and may serve."""

    async def sync_failed(self, reasons: Mapping[str, str]) -> None:
        """A weight sync failed on these: they serve no more until a later one has reached them."""

    def syncing(self, urls: Collection[str]) -> AbstractContextManager[None]:
        """Around a weight sync of these: a server that dies in it was not killed by its requests."""

    async def disagreed(self, reasons: Mapping[str, str]) -> None:
        """These alone fail parity: they are started again."""

    async def watch(self) -> None:
        """Raises when the servers cannot be brought back by anything that the fleet may do."""


class RewardModels(Protocol):
    """The servers of reward models, which restart by themselves and take no part in weight syncs."""

    def metrics(self) -> dict[str, float]: ...

    async def watch(self) -> None:
        """Raises when a model has no server left and can have none again."""


class Observer(Protocol):
    """Sees everything, decides nothing."""

    def step(self, step: int, version: int, metrics: dict[str, float]) -> None: ...
    def evaluation(self, step: int, version: int, metrics: dict[str, float]) -> None: ...
    def rewind(self, step: int) -> None: ...
    def activity(self, part: str, doing: str) -> None: ...
    def buffer(self, counts: dict[str, int]) -> None: ...
    def message(self, text: str) -> None: ...
