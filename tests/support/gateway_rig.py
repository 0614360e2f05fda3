"""A gateway with the real rollout client and a fake server whose answers a test defines."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial

import pytest
from clients import make_rollout_client
from fake_sglang import FakeSGLang
from openai import AsyncOpenAI
from tiny_models import byte_tokenizer

from megasync.config.schema import ChatConfig, GatewayConfig, SamplingConfig
from megasync.gateway import AgentWorkflow
from megasync.rollout.client import RolloutClient
from megasync.rollout.inflight import RequestGate
from megasync.rollout.workflow import SampleClient
from megasync.serving.control import ServerControl


class Rig:
    """`write` defines the server's next answers; `play` runs an agent on one sample."""

    def __init__(self, fake: FakeSGLang, client: RolloutClient) -> None:
        self.fake = fake
        self.client = client
        self.tokenizer = client.tokenizer
        self.gateway = GatewayConfig()
        self.sampling = SamplingConfig(max_new_tokens=300)
        self.gate = RequestGate()

    def write(self, *answers: str, cut: bool = False) -> None:
        """Defines the answers to the next requests, in order. With `cut` they are truncated."""
        for text in answers:
            ids = [*self.tokenizer.encode(text), *([] if cut else [self.tokenizer.eos_token_id])]
            self.fake.script.append(_writes(ids, "length" if cut else "stop"))

    def sample_client(self, **options) -> SampleClient:
        return SampleClient(self.client, self.gate, routing_key="0:0", **options)

    async def play(self, agent, *, deadline=20.0, client=None, **sample):
        workflow = AgentWorkflow(agent, self.gateway, self.sampling, "tiny", deadline)
        try:
            return await workflow(client or self.sample_client(), sample)
        finally:
            await workflow.close()

    async def ask(self, **request):
        """Sends one request as an agent with the `openai` package: (response, trajectories)."""
        answers = []

        async def conversation(create):
            answers.append(await create(**({"messages": HI} | request)))

        trajectories = await self.converse(conversation)
        return answers[0], trajectories

    async def converse(self, conversation, **options):
        """The trajectories of an agent that does nothing but `await conversation(create)`."""

        async def agent(base_url, api_key, sample, model):
            async with openai(base_url, api_key) as client:
                return await conversation(partial(client.chat.completions.create, model=model))

        return await self.play(agent, **options)

    def sent(self, number: int = -1) -> str:
        """The prompt text of a request to the server."""
        return self.tokenizer.decode(self.fake.requests[number]["input_ids"])


def _writes(ids, finish):
    async def behave(fake, body):
        # As of a real server, which writes no more than it may.
        most = body["sampling_params"]["max_new_tokens"]
        fake.continuation = lambda body, count: ids[:most]
        return fake.answer(body, min(len(ids), most), finish if len(ids) <= most else "length")

    return behave


TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<bos>{{ m['role'] }}: {{ m['content'] }}"
    "{% for c in m.get('tool_calls', []) %}<tool_call>{{ c['function'] | tojson }}</tool_call>{% endfor %}<eos>"
    "{% endfor %}{% if add_generation_prompt %}<bos>assistant: {% endif %}"
)


HI = [{"role": "user", "content": "hi"}]


@asynccontextmanager
async def openai(base_url, api_key):
    """The real client, created for each use because connections belong to one event loop."""
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=20.0)
    try:
        yield client
    finally:
        await client.close()


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
