"""One of several requests with the same prompt goes ahead; the others follow its first token, or its end."""

import asyncio

import pytest

from megasync.rollout.client import SharedPrompts
from megasync.rollout.tokens import Tokens


class Requests:
    """Requests that run until the test ends them, by name."""

    def __init__(self):
        self.shared = SharedPrompts()
        self.sent = {}
        self.tasks = {}

    async def begin(self, *names, key="0:0", prompt=(1, 2)):
        for name in names:
            self.tasks[name] = asyncio.create_task(self._run(name, key, Tokens.of(list(prompt))))
        await settled()

    async def _run(self, name, key, prompt):
        async with self.shared.request(key, prompt) as first_token:
            self.sent[name] = first_token
            await asyncio.Event().wait()

    async def end(self, *names):
        for name in names:
            self.tasks.pop(name).cancel()
        await settled()


async def settled():
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.fixture
async def requests():
    requests = Requests()
    yield requests
    await requests.end(*list(requests.tasks))
    assert not requests.shared._shared


async def test_the_others_follow_the_first_token(requests):
    await requests.begin("a", "b", "c")
    assert list(requests.sent) == ["a"]
    requests.sent["a"]()
    await settled()
    assert list(requests.sent) == ["a", "b", "c"]
    await requests.end("a")
    await requests.begin("d")
    assert "d" in requests.sent, "the prompt is in the server's cache while any of them runs"


async def test_another_goes_ahead_when_the_first_ends_without_a_token(requests):
    await requests.begin("a", "b", "c")
    await requests.end("a")
    assert list(requests.sent) == ["a", "b"]
    await requests.end("b")
    assert list(requests.sent) == ["a", "b", "c"]


async def test_one_that_is_cancelled_while_it_waits_changes_nothing(requests):
    await requests.begin("a", "b", "c")
    await requests.end("b")
    assert list(requests.sent) == ["a"]
    requests.sent["a"]()
    await settled()
    assert list(requests.sent) == ["a", "c"]


async def test_other_prompts_and_other_keys_wait_for_nobody(requests):
    await requests.begin("a")
    await requests.begin("further turn", prompt=(1, 2, 3))
    await requests.begin("other group", key="0:1")
    assert list(requests.sent) == ["a", "further turn", "other group"]
