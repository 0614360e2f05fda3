"""The tool agent, from the workflow down to HTTP; the server that answers and parses is a fake."""

from __future__ import annotations

import json

import pytest
from clients import make_rollout_client
from fake_sglang import FakeSGLang
from passing_time import late_after
from tiny_models import byte_tokenizer

from megasync.app.workload import _configured_workflow
from megasync.config.schema import ChatConfig, RolloutConfig, SamplingConfig, ToolsConfig
from megasync.errors import ConfigError, ContextLengthExceeded, DataError, ServerError
from megasync.rollout.inflight import RequestGate
from megasync.rollout.tool_agent import tool_agent
from megasync.rollout.workflow import SampleClient, single_turn
from megasync.serving.control import ServerControl
from megasync.trajectory import ANSWER

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<bos>{{ m['role'] }}: {{ m['content'] }}"
    "{% for c in m.get('tool_calls', []) %}<tool_call>{{ c['function'] | tojson }}</tool_call>{% endfor %}<eos>"
    "{% endfor %}{% if add_generation_prompt %}<bos>assistant: {% endif %}"
)


def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: one
        b: another
    """
    return a + b


class Rig:
    """A sample's client of a server that writes `answers` in their order."""

    def __init__(self, fake, answers, **changes):
        self.fake, self.answers = fake, list(answers)
        self.tokenizer = byte_tokenizer(TEMPLATE)
        arguments = {"vocab_size": 300, "context_length": 4000, "timeout": 600.0, "tokenizer": self.tokenizer}
        sampling = SamplingConfig(max_new_tokens=500)
        self.control = ServerControl(fake.url)
        self.client = make_rollout_client(fake.url, [self.control], sampling=sampling, **(arguments | changes))
        self.sample = SampleClient(self.client, RequestGate(), routing_key="0:0")
        fake.script += [self._write] * len(self.answers)

    async def _write(self, fake, body):
        ids = [*self.tokenizer.encode(self.answers.pop(0)), self.tokenizer.eos_token_id]
        kept = ids[: body["sampling_params"]["max_new_tokens"]]
        fake.continuation = lambda body, count: kept
        return fake.answer(body, len(kept), "stop" if kept == ids else "length")

    async def play(self, agent, messages=({"role": "user", "content": "1+2?"},)):
        return await agent(self.sample, {"messages": list(messages)})


@pytest.fixture
async def fake():
    async with FakeSGLang(vocab=300) as server:
        yield server


@pytest.fixture
async def rig_of(fake):
    """Makes rigs, and closes them."""
    made = []

    def make(answers, **changes):
        made.append(Rig(fake, answers, **changes))
        return made[-1]

    yield make
    for rig in made:
        await rig.client.close()
        await rig.control.close()


def call(name="add", **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def test_the_model_calls_sees_and_answers_in_one_trajectory(fake, rig_of):
    rig = rig_of(["So " + call(a=1, b=2) + call(a=3, b=4), "three"])
    (trajectory,) = await rig.play(tool_agent([add]))
    shown = rig.tokenizer.decode(trajectory.prompt_ids)
    assert '"name": "add"' in shown
    trained = [i for i, m in zip(trajectory.response_ids, trajectory.loss_mask, strict=True) if m]
    between = [i for i, m in zip(trajectory.response_ids, trajectory.loss_mask, strict=True) if not m]
    assert rig.tokenizer.decode(trained) == f"So {call(a=1, b=2)}{call(a=3, b=4)}<eos>three<eos>"
    assert rig.tokenizer.decode(between) == "<bos>tool: 3<eos><bos>tool: 7<eos><bos>assistant: "
    told = [
        (turn.role, turn.name, rig.tokenizer.decode(trajectory.response_ids[turn.start : turn.end]))
        for turn in trajectory.turns
    ]
    assert told == [
        (ANSWER, "", f"So {call(a=1, b=2)}{call(a=3, b=4)}<eos>"),
        ("tool", "add", "<bos>tool: 3"),
        ("tool", "add", "<eos><bos>tool: 7<eos><bos>assistant: "),
        (ANSWER, "", "three<eos>"),
    ]
    assert [(made.name, json.loads(made.arguments)) for made in trajectory.turns[0].calls] == [
        ("add", {"a": 1, "b": 2}), ("add", {"a": 3, "b": 4}),
    ]  # fmt: skip
    assert trajectory.text.startswith("<")  # the fake's own text; the tokens above are what counts
    assert trajectory.metrics["tool_calls"] == 2.0
    assert (trajectory.metrics["turns"], trajectory.metrics["turn_limit"]) == (2.0, 0.0)
    assert len(fake.requests) == 2


async def test_a_malformed_and_an_unknown_call_cost_a_turn_and_are_told(rig_of):
    rig = rig_of(['<tool_call>{"name": </tool_call>', call("subtract", a=1), "sorry"])
    (trajectory,) = await rig.play(tool_agent([add]))
    text = rig.tokenizer.decode(trajectory.response_ids)
    assert "tool: Error: 1 tool call could not be parsed." in text
    assert "tool: Error: there is no tool 'subtract'. Known tools: add." in text
    metrics = trajectory.metrics
    assert (metrics["tool_malformed"], metrics["tool_unknown"], metrics["tool_calls"]) == (1.0, 1.0, 1.0)
    assert metrics["turns_forked"] == 0.0


async def test_the_turns_are_limited(rig_of):
    rig = rig_of([call(a=1, b=2)] * 3)
    (trajectory,) = await rig.play(tool_agent([add], max_turns=3))
    assert (trajectory.metrics["turns"], trajectory.metrics["turn_limit"]) == (3.0, 1.0)
    assert (trajectory.metrics["tool_calls"], trajectory.metrics["tool_repeated"]) == (2.0, 1.0)


async def test_the_configuration_names_the_tools_and_their_limits(tmp_path, monkeypatch, rig_of):
    (tmp_path / "configured_tools.py").write_text('def shout() -> str:\n    """Shouts."""\n    return "x" * 30\n')
    monkeypatch.syspath_prepend(tmp_path)
    tools = ToolsConfig(functions=["configured_tools:shout"], max_turns=2, max_output=10)
    agent = _configured_workflow(RolloutConfig(tools=tools))
    (trajectory,) = await (rig := rig_of([call("shout")] * 2)).play(agent)
    assert f"tool: {'x' * 10}\n[20 more characters]" in rig.tokenizer.decode(trajectory.response_ids)
    assert (trajectory.metrics["turns"], trajectory.metrics["turn_limit"]) == (2.0, 1.0)
    assert _configured_workflow(RolloutConfig()) is single_turn
    config = RolloutConfig(workflow="collections:Counter", workflow_options={"a": 1})
    with pytest.raises(ConfigError, match="instances of 'collections:Counter' cannot be called"):
        _configured_workflow(config)


async def test_a_full_context_ends_the_sample_with_what_there_is(rig_of):
    def tell() -> str:
        """Tells much."""
        return "x" * 600

    rig = rig_of([call("tell")] * 2, context_length=600)
    (trajectory,) = await rig.play(tool_agent([tell]))
    assert trajectory.metrics["context_full"] == 1.0
    assert trajectory.metrics["turns"] == 1.0
    assert rig.tokenizer.decode(trajectory.response_ids) == call("tell") + "<eos>"


async def test_a_result_that_the_template_rejects_ends_the_sample_with_what_there_is(caplog, rig_of):
    refuses = "{% if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}<bos>{{ m['role'] }}"
    refusing, agent = byte_tokenizer(TEMPLATE.replace("<bos>{{ m['role'] }}", refuses)), tool_agent([add])
    for _ in range(2):
        (trajectory,) = await rig_of([call(a=1, b=2)], tokenizer=refusing).play(agent)
        assert (trajectory.metrics["template_refused"], trajectory.metrics["turns"]) == (1.0, 1.0)
        assert refusing.decode(trajectory.response_ids) == call(a=1, b=2) + "<eos>"
    assert caplog.text.count("no tools here") == 1


async def test_requests_name_the_tokens_that_end_a_response(fake, rig_of):
    rig = rig_of(["x"], stop_ids=[7, 2])
    await rig.play(lambda client, sample: client.chat(sample["messages"], stop_token_ids=[9]))
    assert fake.requests[-1]["sampling_params"]["stop_token_ids"] == [2, 7, 9]


async def test_a_prompt_that_fills_the_context_alone_is_an_error(rig_of):
    with pytest.raises(ContextLengthExceeded):
        await rig_of([], context_length=50).play(tool_agent([add]))


async def test_raw_prompts_are_refused():
    with pytest.raises(DataError, match=r"data\.prompt\.format=chat"):
        await tool_agent([add])(None, {"prompt_ids": [1]})


async def test_tools_without_a_format_are_refused_with_the_known_ones(rig_of):
    rig = rig_of([], chat=ChatConfig(tool_format=None))
    with pytest.raises(DataError, match=r"tool_format is null; set it to one of .*hermes.*qwen"):
        await rig.play(tool_agent([add]))


async def test_reasoning_is_kept_apart_in_the_message_and_whole_in_the_tokens(rig_of):
    rig = rig_of(["<think>hm</think>four"], chat=ChatConfig(reasoning_format="qwen3"))
    reply = await rig.sample.chat([{"role": "user", "content": "2+2?"}])
    assert reply.messages[-1] == {"role": "assistant", "content": "four", "reasoning_content": "hm"}
    assert reply.content == "four"
    assert rig.tokenizer.decode(reply.trajectory().response_ids) == "<think>hm</think>four<eos>"


async def test_another_server_parses_when_one_is_gone_and_none_is_a_server_error(rig_of, monkeypatch):
    gone = ServerControl("http://127.0.0.1:9")
    rig = rig_of([call(a=1, b=2), "three", call(a=1, b=2)])
    rig.client.servers.insert(0, gone)
    reply = await rig.sample.chat([{"role": "user", "content": "x"}], tools=[add])
    assert [c.arguments for c in reply.tool_calls] == [{"a": 1, "b": 2}]
    rig.client.servers = [gone]
    monkeypatch.setattr(gone, "post", late_after(gone.post))
    with pytest.raises(ServerError, match=r"no server parsed an answer within 600 s: .*127\.0\.0\.1:9"):
        await rig.sample.chat([{"role": "user", "content": "y"}], tools=[add])
    await gone.close()


async def test_text_on_which_a_parser_fails_is_malformed_and_no_error(fake, rig_of):
    fake.parser_status = 500
    rig = rig_of([call(a=1, b=2)])
    reply = await rig.sample.chat([{"role": "user", "content": "x"}], tools=[add])
    assert (reply.tool_calls, reply.malformed_calls) == ([], 1)
    assert reply.content == call(a=1, b=2)


@pytest.mark.parametrize(("status", "kind"), [(400, DataError), (404, ServerError)])
async def test_a_server_that_refuses_to_parse_is_an_error(fake, rig_of, status, kind, monkeypatch):
    fake.parser_status = status
    rig = rig_of([call(a=1, b=2)])
    monkeypatch.setattr(rig.control, "post", late_after(rig.control.post))
    with pytest.raises(kind, match=f"status {status}"):
        await rig.sample.chat([{"role": "user", "content": "x"}], tools=[add])
