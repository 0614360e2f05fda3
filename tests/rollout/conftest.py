"""Clients of a fake server, closed with their test. A module changes them by a fixture `client_options` of its own."""

from __future__ import annotations

import pytest
from clients import make_rollout_client
from fake_sglang import FakeSGLang
from passing_time import endless_pause
from rollout_bench import fake_client, make_bench, make_trajectory

from megasync.config.schema import SamplingConfig
from megasync.rollout import client as client_module
from megasync.rollout import reply_parser
from megasync.serving import frozen_client
from megasync.serving.control import ServerControl

__all__ = ["endless_pause", "fake_client", "make_bench", "make_trajectory"]


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(client_module, "_FAILURE_WAIT", (0.005, 0.02))
    monkeypatch.setattr(frozen_client, "_FAILURE_WAIT", (0.001, 0.01))
    monkeypatch.setattr(reply_parser, "_ROUND_SECONDS", 0.01)


@pytest.fixture
async def fake():
    async with FakeSGLang() as server:
        yield server


@pytest.fixture
def client_options():
    return {}


@pytest.fixture
async def make_client(fake, client_options):
    made, controls = [], []

    def make(**changes):
        controls.append(ServerControl(fake.url))
        arguments = {
            "router_url": fake.url,
            "servers": [controls[-1]],
            "vocab_size": fake.vocab,
            "context_length": 64,
            "sampling": SamplingConfig(max_new_tokens=8),
            "timeout": 600.0,
        }
        made.append(make_rollout_client(**(arguments | client_options | changes)))
        return made[-1]

    yield make
    for each in (*made, *controls):
        await each.close()


@pytest.fixture(params=[0, 3], ids=["whole", "streamed"])
def client(make_client, request):
    return make_client(stream_interval=request.param)
