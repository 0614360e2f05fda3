"""What agents do with their histories, over HTTP with the real `openai` package: the lines that come of it."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from megasync.config.schema import ChatConfig

MAIN, HELPER = ({"role": "system", "content": text} for text in ("You are the lead.", "You look things up."))
TASK = {"role": "user", "content": "Fix the test."}
SUMMARY = "The test fails because the parser drops the last line of a file."


def tool(name):
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}


LEAD, LOOK = [tool("delegate")], [tool("look")]


def called(name):
    return f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>'


def user(content):
    return {"role": "user", "content": content}


class Agent:
    """Sends requests and goes on from their answers."""

    def __init__(self, create):
        self.create = create

    async def ask(self, messages, tools=()):
        """The messages with the answer behind them."""
        found = await self.create(messages=messages, **({"tools": tools} if tools else {}))
        return [*messages, found.choices[0].message.model_dump(exclude_none=True)]

    async def act(self, messages, tools, result="seen"):
        """The same, with the results of the answer's calls."""
        said = await self.ask(messages, tools)
        calls = said[-1].get("tool_calls", ())
        return [*said, *({"role": "tool", "tool_call_id": call["id"], "content": result} for call in calls)]


async def sub_agents(agent):
    said = await agent.act([MAIN, TASK], LEAD)

    async def help(number):
        await agent.ask(await agent.act([HELPER, user(f"part {number}")], LOOK), LOOK)

    await asyncio.gather(help(1), help(2))
    await agent.ask(said, LEAD)


async def compaction(agent):
    said = await agent.act([MAIN, TASK], LOOK)
    said = await agent.ask([*said, user("Summarise what was done.")], LOOK)
    await agent.ask([MAIN, user(f"This goes on from an earlier conversation: {said[-1]['content']}")], LOOK)


async def compaction_by_another(agent):
    said = await agent.ask(await agent.act([MAIN, TASK], LOOK), LOOK)
    summary = (await agent.ask([user(f"Summarise: {said}")]))[-1]["content"]
    await agent.ask([MAIN, TASK, user(f"So far: {summary}")], LOOK)


async def compaction_in_the_middle(agent):
    """The first answer and the last one stay."""
    said = [MAIN, TASK]
    for _ in range(4):
        said = await agent.act(said, LOOK)
    summary = (await agent.ask([user(f"Summarise: {said}")]))[-1]["content"]
    await agent.ask([*said[:4], user(f"So far: {summary}"), *said[8:]], LOOK)


async def retry(agent):
    await agent.ask([MAIN, TASK])
    await agent.ask([*await agent.ask([MAIN, TASK]), user("Go on.")])


async def cleared_results(agent):
    said = await agent.act(await agent.act([MAIN, TASK], LOOK), LOOK)
    cleared = next(message for message in said if message["role"] == "tool")
    await agent.ask([message | {"content": "[cleared]"} if message is cleared else message for message in said], LOOK)


async def window(agent):
    said = await agent.act(await agent.act([MAIN, TASK], LOOK), LOOK)
    await agent.ask([MAIN, *said[4:], user("Go on.")], LOOK)


async def rewind(agent):
    said = await agent.ask([MAIN, TASK])
    await agent.ask([*said, user("one way")])
    await agent.ask([*said, user("another way")])


async def dropped_reasoning(agent):
    said = await agent.ask([MAIN, TASK])
    said[-1].pop("reasoning_content", None)
    await agent.ask([*said, user("Go on.")])


async def changed_tools(agent):
    said = await agent.ask([MAIN, TASK], LOOK)
    await agent.ask([*said, user("Now do it.")], LEAD)


# What the model writes, and kind, origin and parent of each line.
HABITS = {
    sub_agents: (
        [called("delegate"), *[called("look")] * 2, "found", "found", "done"],
        [("sub-agent", "new", None), ("sub-agent", "new", None), ("final", "new", None)],
    ),
    compaction: ([called("look"), SUMMARY, "done"], [("compacted", "new", None), ("final", "summary", 0)]),
    compaction_in_the_middle: (
        [*[called("look")] * 4, SUMMARY, "done"],
        [("compacted", "new", None), ("sub-agent", "new", None), ("final", "summary", 0)],
    ),
    compaction_by_another: (
        [called("look"), "It fails.", SUMMARY, "done"],
        [("compacted", "new", None), ("sub-agent", "new", None), ("final", "summary", 0)],
    ),
    retry: (["one", "two", "three"], [("retry", "new", None), ("final", "retry", 0)]),
    cleared_results: (
        [called("look"), called("look"), "done"],
        [("rewritten", "new", None), ("final", "rewritten", 0)],
    ),
    window: ([called("look"), called("look"), "done"], [("rewritten", "new", None), ("final", "rewritten", 0)]),
    rewind: (["one", "two", "three"], [("side", "new", None), ("final", "branch", 0)]),
    dropped_reasoning: (["<think>hm</think>one", "two"], []),
    changed_tools: (["one", "two"], [("rewritten", "new", None), ("final", "rewritten", 0)]),
}


def trained(trajectory):
    """The ids from the beginning to the end of each answer that the trajectory trains."""
    whole = [*trajectory.prompt_ids.tolist(), *trajectory.response_ids.tolist()]
    mask = trajectory.loss_mask
    ends = [len(trajectory.prompt_ids) + end for end, kept in zip(mask.ends, mask.values, strict=True) if kept]
    return [tuple(whole[:end]) for end in ends]


@pytest.mark.parametrize("habit", HABITS, ids=lambda habit: habit.__name__)
async def test_each_answer_is_trained_once_in_a_line_that_tells_what_it_was_for(make_rig, habit):
    written, lines = HABITS[habit]
    async with make_rig(chat=ChatConfig(reasoning_format="qwen3")) as rig:
        rig.write(*written)
        trajectories = await rig.converse(lambda create: habit(Agent(create)))
        answers = [(*rig.tokenizer.encode(text), rig.tokenizer.eos_token_id) for text in written]
        sent = [tuple(request["input_ids"]) for request in rig.fake.requests]
    assert Counter(each for trajectory in trajectories for each in trained(trajectory)) == Counter(
        prompt + answer for prompt, answer in zip(sent, answers, strict=True)
    )
    found = [trajectory.line for trajectory in trajectories]
    assert [(line.kind, line.origin, line.parent) for line in found if line is not None] == lines
    kinds, metrics = Counter(kind for kind, _, _ in lines), trajectories[-1].metrics
    assert metrics["lines"] == len(trajectories) == max(1, len(lines))
    assert [metrics[f"lines_{name}"] for name in ("sub_agent", "retry", "compacted")] == [
        kinds["sub-agent"],
        kinds["retry"],
        kinds["compacted"],
    ]
