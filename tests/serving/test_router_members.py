"""Changes of the router's list: one request per server that comes or goes, requested once."""

from __future__ import annotations

from typing import Any

from megasync.errors import HttpStatusError
from megasync.serving.router import REPEAT_SECONDS, RouterMembers


class SlowRouter:
    """The control of a router that applies changes only when `apply` is called."""

    url = "http://router"

    def __init__(self, listed: set[str]) -> None:
        self.listed = listed
        self.added: list[str] = []
        self.removed: list[str] = []

    async def get(self, path: str, timeout: float) -> Any:
        return {"workers": [{"url": url, "id": f"id of {url}", "is_healthy": True} for url in self.listed]}

    async def post(self, path: str, body: dict[str, Any], timeout: float) -> Any:
        self.added.append(body["url"])

    async def delete(self, path: str, timeout: float) -> Any:
        self.removed.append(path.removeprefix("/workers/id of "))
        if self.removed.count(self.removed[-1]) > 1:
            raise HttpStatusError("gone already", 404)

    def apply(self) -> None:
        self.listed = (self.listed | set(self.added)) - set(self.removed)


def members(router: Any, clock: list[float]) -> RouterMembers:
    return RouterMembers(router, clock=lambda: clock[0])


async def test_adding_one_of_many_servers_is_one_request_however_often_the_list_is_polled():
    many = {f"http://{number}" for number in range(512)}
    router, clock = SlowRouter(set(many)), [0.0]
    changed = members(router, clock)
    assert await changed.adjust(many)
    wanted = many - {"http://7"} | {"http://new"}
    for _ in range(10):
        assert not await changed.adjust(wanted)
    assert (router.added, router.removed) == (["http://new"], ["http://7"])
    router.apply()
    assert await changed.adjust(wanted)


async def test_a_change_that_the_router_does_not_apply_is_requested_again_later():
    router, clock = SlowRouter({"http://1"}), [0.0]
    changed = members(router, clock)
    assert not await changed.adjust({"http://2"})
    clock[0] = REPEAT_SECONDS + 1.0
    assert not await changed.adjust({"http://2"})
    assert (router.added, router.removed) == (["http://2"] * 2, ["http://1"] * 2)


async def test_a_restarted_router_gets_every_server_at_once():
    wanted = {f"http://{number}" for number in range(20)}
    router, clock = SlowRouter(set()), [0.0]
    changed = members(router, clock)
    assert not await changed.adjust(wanted)
    router.apply()
    assert await changed.adjust(wanted)
    # It died, and lists nothing.
    router.listed = set()
    assert not await changed.adjust(wanted)
    assert sorted(router.added) == sorted([*wanted] * 2)
