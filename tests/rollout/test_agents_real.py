"""A model that calls tools on a real server, over weight updates."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from real_servers import make_server
from tool_model import ADD, LOOK, QUESTION, add, look, make_tool_models
from transformers import AutoModelForCausalLM, AutoTokenizer

from megasync.config.schema import SamplingConfig
from megasync.rollout.client import RequestSettings, RolloutClient, ServedModel
from megasync.rollout.inflight import RequestGate
from megasync.rollout.tools import Toolbox
from megasync.rollout.workflow import SampleClient
from megasync.serving.control import ServerControl
from megasync.sync.attempt import ServerUpdate

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="module")]

# Below 1 calls are written without a slip; log-probs are of this temperature.
SAMPLING = SamplingConfig(temperature=0.5, max_new_tokens=400)
BETWEEN = "<eos><bos>tool: {}<eos><bos>assistant: "


@dataclass
class Served:
    folders: list[Path]
    server: ServerControl
    client: RolloutClient

    def sample(self) -> SampleClient:
        return SampleClient(self.client, RequestGate(), routing_key="0:0")

    async def update(self, version: int) -> None:
        """What a sync does to a server: even versions have the first model's weights, odd ones the second's."""
        await self.server.post("/pause_generation", {"mode": "retract"})
        await ServerUpdate(self.server, "retract", 60.0).flush()
        body = {"model_path": str(self.folders[version % 2]), "weight_version": str(version)}
        await self.server.post("/update_weights_from_disk", body)
        await self.server.post("/continue_generation", {"torch_empty_cache": False})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("agents")
    folders = make_tool_models(folder)
    server = make_server(folders[0], folder / "server.log", 1, writes=True)
    control = ServerControl(await server.start(180))
    client = RolloutClient(
        control.url,
        [control],
        ServedModel(300, 1024, AutoTokenizer.from_pretrained(folders[0])),
        RequestSettings(SAMPLING, 120.0, stream_interval=16),
    )
    try:
        yield Served(folders, control, client)
    finally:
        await client.close()
        await control.close()
        await server.stop(5)


async def test_two_tools_and_three_turns_with_an_update_between_turns_and_one_within(served):
    updated = asyncio.Event()

    async def look_while_the_weights_change(item: str) -> int:
        """Counts an item.

        Args:
            item: its name
        """
        await served.update(1)
        return look(item)

    look_while_the_weights_change.__name__ = "look"

    def watch(ids):
        if len(ids) >= 16 and not updated.is_set():
            updated.set()
            updates.append(asyncio.create_task(served.update(2)))

    updates = []
    toolbox = Toolbox([look_while_the_weights_change, add])
    client = served.sample()
    messages = [QUESTION]
    for _ in range(2):
        reply = await client.chat(messages, tools=toolbox.tools)
        messages = reply.messages + await toolbox.run(reply.tool_calls, reply.malformed_calls)
    reply = await client.chat(messages, tools=toolbox.tools, watch=watch, ignore_eos=True)
    await updates[0]

    trajectory = reply.trajectory(reward=1.0)
    assert (trajectory.metrics["turns"], trajectory.metrics["turns_forked"]) == (3.0, 0.0)
    assert toolbox.metrics()["tool_calls"] == 2.0
    text = client.tokenizer.decode(trajectory.response_ids)
    assert text.startswith(LOOK + BETWEEN.format(4) + ADD + BETWEEN.format(7))
    between = [i for i, m in zip(trajectory.response_ids, trajectory.loss_mask, strict=True) if not m]
    assert client.tokenizer.decode(between) == (BETWEEN.format(4) + BETWEEN.format(7)).replace(
        "<eos><bos>tool", "<bos>tool"
    )

    # Every sampled token has the version, and the log-prob, of the weights that sampled it.
    of_turns = [set(generation.versions) for generation in reply.generation.line()]
    assert of_turns == [{0}, {1}, {1, 2}]
    last = reply.generation.versions
    assert last == sorted(last)
    expected = [_logprobs(folder, trajectory) for folder in served.folders]
    for ours, mask, version, *both in zip(
        trajectory.logprobs, trajectory.loss_mask, trajectory.versions, *expected, strict=True
    ):
        assert abs(ours - both[version % 2]) < 1e-3 if mask else ours == 0.0
    # The other weights would have given others, in both parts of the last answer.
    apart = [abs(a - b) for a, b in zip(*expected, strict=True)][-len(last) :]
    for version in (1, 2):
        assert max(apart[i] for i in range(len(last)) if last[i] == version) > 0.1


def _logprobs(folder, trajectory):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = [*trajectory.prompt_ids.tolist(), *trajectory.response_ids.tolist()]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, len(trajectory.prompt_ids) - 1 : -1].double()
    chosen = torch.tensor(trajectory.response_ids.tolist())[:, None]
    return torch.log_softmax(logits / SAMPLING.temperature, dim=-1).gather(1, chosen)[:, 0].tolist()
