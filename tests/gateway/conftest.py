"""The fixture of these tests, with options of the real client that the gateway uses."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest
from clients import make_rollout_client
from fake_sglang import FakeSGLang
from gateway_rig import TEMPLATE, Rig
from tiny_models import byte_tokenizer

from megasync.config.schema import ChatConfig, SamplingConfig
from megasync.serving.control import ServerControl


@pytest.fixture
def make_rig():
    """A factory of context managers: `async with make_rig(chat=..., stream_interval=...) as rig`."""

    @asynccontextmanager
    async def make(**changes):
        async with FakeSGLang(vocab=300) as fake:
            control = ServerControl(fake.url)
            options = {
                "vocab_size": 300,
                "context_length": 4000,
                "sampling": SamplingConfig(max_new_tokens=300),
                "timeout": 10.0,
                "tokenizer": byte_tokenizer(TEMPLATE),
                "chat": ChatConfig(),
            }
            fake.words = lambda ids: options["tokenizer"].decode(ids, skip_special_tokens=True)
            client = make_rollout_client(fake.url, [control], **(options | changes))
            try:
                yield Rig(fake, client)
            finally:
                await client.close()
                await control.close()

    return make


@pytest.fixture
async def rig(make_rig):
    async with make_rig() as rig:
        yield rig
