"""Who may take part in a handover, and of which version it is. No server."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zmq
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from megasync.sglang.handover import (
    Handover,
    keyed_context,
    keyed_requests,
    patient,
    word_of,
)

KEY = "key-of-these-engines"


@pytest.mark.parametrize(("sender", "arrives"), [(KEY, True), ("another", False), (None, False)])
def test_sockets_take_messages_of_their_own_key_only(sender, arrives):
    with (
        keyed_context(KEY)() as ours,
        zmq.Context() if sender is None else keyed_context(sender)() as theirs,
        ours.socket(zmq.PULL) as inlet,
        theirs.socket(zmq.PUSH) as outlet,
    ):
        inlet.linger = outlet.linger = 0
        outlet.connect(f"tcp://127.0.0.1:{inlet.bind_to_random_port('tcp://127.0.0.1')}")
        outlet.setsockopt(zmq.SNDTIMEO, 300)
        with suppress(zmq.Again):
            outlet.send_multipart([b"room", b"address"])
        assert bool(inlet.poll(2000 if arrives else 500)) == arrives
        if arrives:
            assert inlet.recv_multipart() == [b"room", b"address"]


class Meeting:
    """As much of SGLang's HTTP server as the guard sees."""

    def __init__(self) -> None:
        self.app = web.Application()

    def routes(self) -> None:
        async def answer(request: web.Request) -> web.Response:
            return web.Response(text=request.headers.get("Authorization", ""))

        for route in ("/route", "/health"):
            self.app.router.add_route("*", route, answer)


async def test_engines_meet_with_the_key_only():
    meeting, handover = Meeting(), Handover(KEY, on_cpu=True)
    handover.around_routes(lambda server: server.routes(), meeting)
    async with TestClient(TestServer(meeting.app)) as client:
        for key, status in ((KEY, 200), ("another", 401), ("schlüssel", 401)):
            async with client.put("/route", headers={"Authorization": f"Bearer {key}"}) as answer:
                assert answer.status == status
        async with client.get("/route") as answer:
            assert answer.status == 401
        async with client.get("/health") as answer:
            assert answer.status == 200
        # What SGLang uses instead of the module `requests`.
        keyed = keyed_requests(f"Bearer {KEY}")
        for send in (keyed.put, keyed.post, keyed.get, keyed.Session().get):
            answer = await asyncio.to_thread(send, str(client.make_url("/route")), timeout=5)
            assert (answer.status_code, answer.text) == (200, f"Bearer {KEY}")


class Buffers:
    """SGLang's metadata of handovers: a row for each request, whose room is 77."""

    def __init__(self) -> None:
        self.cached_tokens = torch.zeros((2, 16), dtype=torch.int32)

    def read(self, row: int) -> tuple[Any, ...]:
        return torch.zeros(1), self.cached_tokens[row].clone(), torch.zeros(1), torch.tensor([77, 0])


@pytest.mark.parametrize(
    ("computed", "own", "accepted"), [("4", "4", True), ("3", "4", False), ("0", "0", True), ("5", "4", False)]
)
def test_a_handover_is_of_the_version_that_computed_it(computed, own, accepted, caplog):
    buffers, versions = Buffers(), iter([computed, own])
    handover = Handover(KEY, on_cpu=True, version=lambda: next(versions))
    handover.around_write(lambda buffers, request: None, buffers, SimpleNamespace(metadata_buffer_index=1))
    with caplog.at_level(logging.ERROR):
        received = handover.around_read(Buffers.read, buffers, 1)
    assert (int(received[-1][0]) == 77) == accepted
    assert int(received[-1][0]) != 0
    if not accepted:
        assert f"version {computed} computed, to version {own}" in caplog.text


def test_metadata_without_a_version_is_not_that_of_the_first_version():
    received = Handover(KEY, on_cpu=True, version=lambda: "0").around_read(Buffers.read, Buffers(), 0)
    assert int(received[-1][0]) not in (0, 77)
    assert word_of(str(2**31 - 2)) == 2**31 - 1


def test_a_cache_on_the_host_is_registered_as_that_and_moved_on_patiently(monkeypatch):
    class Settings:
        def __init__(self) -> None:
            self.delay = 5

        @property
        def pthrDelay(self) -> int:
            return self.delay

        @pthrDelay.setter
        def pthrDelay(self, delay: int) -> None:
            self.delay = delay

    settings = patient(Settings)()
    settings.pthrDelay = 0
    assert settings.pthrDelay == settings.delay == 1000
    settings.pthrDelay = 5000
    assert settings.delay == 5000
    api = SimpleNamespace(nixlBind=SimpleNamespace(nixlAgentConfig=Settings))
    monkeypatch.setitem(__import__("sys").modules, "nixl", SimpleNamespace(_api=api))
    monkeypatch.setitem(__import__("sys").modules, "nixl._api", api)
    arguments = SimpleNamespace(kv_data_ptrs=[1, 2, 3], kv_data_mem_kinds=["VRAM"] * 3)
    Handover(KEY, on_cpu=True).before_transfers(None, arguments)
    assert arguments.kv_data_mem_kinds == ["DRAM"] * 3
    assert issubclass(api.nixlBind.nixlAgentConfig, Settings)
