"""Chat over a real server: SGLang's parsers behind its endpoints, conversations and episodes across weight updates."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from real_servers import make_server
from tiny_models import make_tiny_model

from megasync.config.schema import SamplingConfig
from megasync.environments import Play
from megasync.environments.pool import EnvironmentPool
from megasync.rollout.client import RequestSettings, RolloutClient, ServedModel
from megasync.rollout.inflight import RequestGate
from megasync.rollout.reply_parser import ReplyParser
from megasync.rollout.workflow import SampleClient
from megasync.serving.control import ServerControl

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="module")]

TEMPLATE = (
    "{% for m in messages %}<bos>{{ m['role'] }}: {{ m['content'] }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant: {% endif %}"
)
CALL = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
LATER = '{"name": "nothing_of_the_kind", "arguments": {}}'
DEEPSEEK = "\n".join(
    f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"
    for name, arguments in (("add", '{"a": 1, "b": 2}'), ("nothing_of_the_kind", "{}"))
)
SCHEMA = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


@dataclass
class Served:
    model: Path
    server: ServerControl
    client: RolloutClient


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    model = make_tiny_model(folder / "model", chat_template=TEMPLATE)
    server = make_server(model, folder / "server.log", 1)
    control = ServerControl(await server.start(180))
    client = RolloutClient(
        control.url,
        [control],
        ServedModel(300, 1024, _tokenizer(model)),
        RequestSettings(SamplingConfig(max_new_tokens=12), 60.0),
    )
    try:
        yield Served(model, control, client)
    finally:
        await client.close()
        await control.close()
        await server.stop(5)


def _tokenizer(model):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


READ = [("add", {"a": 1, "b": 2}), ("nothing_of_the_kind", {})]


@pytest.mark.parametrize(
    ("format", "text", "calls"),
    [
        ("qwen", f"So.<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{LATER}\n</tool_call>", READ),
        ("hermes", f"So.<tool_call>{CALL}</tool_call><tool_call>{LATER}</tool_call>", READ),
        ("llama3", f"So.<|python_tag|>{CALL};{LATER}", READ),
        ("deepseekv3", f"So.<｜tool▁calls▁begin｜>{DEEPSEEK}<｜tool▁calls▁end｜>", READ),
        ("qwen", '<tool_call>\n{"name": "add", "argu\n</tool_call>', []),
        ("hermes", '<tool_call>{"name": "add", "argu</tool_call>', []),
        ("llama3", '<|python_tag|>{"name": "add", "argu', []),
        ("deepseekv3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function add<｜tool▁calls▁end｜>", []),
    ],
)
async def test_each_format_gives_its_calls_unknown_ones_too_and_counts_those_that_cannot_be_read(
    served, format, text, calls
):
    parsed = await ReplyParser(lambda: [served.server], 30.0).parse(text, [SCHEMA], format, None)
    assert [(call.name, call.arguments) for call in parsed.calls] == calls
    assert (parsed.content, parsed.malformed) == (("So.", 0) if calls else (text, 1))


@pytest.mark.parametrize("format", ["qwen3", "qwen3-thinking", "deepseek-r1"])
async def test_reasoning_is_set_apart(served, format):
    text = "Hm.</think>4" if format != "qwen3" else "<think>Hm.</think>4"
    parsed = await ReplyParser(lambda: [served.server], 30.0).parse(text, [], None, format)
    assert (parsed.reasoning.strip(), parsed.content.strip()) == ("Hm.", "4")


class Updating:
    """An episode of three steps; each but the last brings the server new weights, by name."""

    def __init__(self, server, version):
        self.server, self.version = server, version

    async def reset(self, sample):
        self.steps = 0
        return f"Room {sample['room']}."

    async def step(self, action):
        self.steps += 1
        if self.steps < 3:
            version = str(self.version + self.steps)
            await self.server.post("/update_weight_version", {"new_version": version, "abort_all_requests": False})
        return f"Step {self.steps}.", 0.25 * self.steps, self.steps == 3

    async def close(self): ...


async def test_an_episode_across_weight_updates_is_one_trajectory_that_the_model_agrees_with(served):
    first = await served.server.weight_version()
    play = Play(EnvironmentPool(partial(Updating, served.server, first), 1, 60.0), max_turns=5, system="Go.")
    client = SampleClient(served.client, RequestGate(), routing_key="1:0", seed=7, ignore_eos=True)
    try:
        (trajectory,) = await play(client, {"room": 4})
    finally:
        await play.close()
    assert trajectory.reward == 1.5
    assert trajectory.metrics["environment/turns"] == trajectory.metrics["turns"] == 3.0
    assert (trajectory.metrics["environment/finished"], trajectory.metrics["turns_forked"]) == (1.0, 0.0)

    tokenizer = _tokenizer(served.model)
    assert tokenizer.decode(trajectory.prompt_ids) == "<bos>system: Go.<eos>\n<bos>user: Room 4.<eos>\n<bos>assistant: "
    pieces = [
        (mask, list(run)) for mask, run in groupby(range(len(trajectory.loss_mask)), trajectory.loss_mask.__getitem__)
    ]
    assert [(mask, len(run)) for mask, run in pieces if mask] == [(1, 12)] * 3
    shown = [tokenizer.decode([trajectory.response_ids[i] for i in run]) for mask, run in pieces if not mask]
    assert shown == [f"<eos>\n<bos>user: Step {step}.<eos>\n<bos>assistant: " for step in (1, 2)]
    assert [turn.role for turn in trajectory.turns] == ["answer", "user"] * 2 + ["answer"]
    versions = [{trajectory.versions[i] for i in run} for mask, run in pieces if mask]
    assert versions == [{first}, {first + 1}, {first + 2}]
    _check_logprobs(served.model, trajectory)


def _check_logprobs(model_path, trajectory):
    expected = _logprobs(model_path, trajectory.prompt_ids.tolist(), trajectory.response_ids.tolist())
    for ours, theirs, trained in zip(trajectory.logprobs, expected, trajectory.loss_mask, strict=True):
        assert abs(ours - theirs) < 1e-4 if trained else ours == 0.0


def _logprobs(model_path, prompt, response):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits.double(), dim=-1).gather(1, torch.tensor(response)[:, None])[:, 0].tolist()
