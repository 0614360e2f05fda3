"""Agents rewrite, branch, shrink and repeat their histories: each sampled token is trained once, as the server saw it.

The reference is what a server would write down: the ids of every prompt and answer, with a log-prob of its own for each
sampled token. Whatever the trajectories hold is looked up there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pytest
from chat_families import FAMILIES
from fake_template import FakeTemplate
from hypothesis import given
from hypothesis import strategies as st

from megasync.data.messages import as_messages
from megasync.errors import TemplateRefused
from megasync.rollout.chat import AnswerTemplate
from megasync.rollout.conversation import Conversation, Generation
from megasync.rollout.lines import FINAL
from megasync.rollout.tokens import Tokens
from megasync.trajectory import ANSWER, Trajectory
from megasync.trajectory.runs import Runs

TEMPLATES: dict[str, Callable[[], Any]] = {
    "pairs": FakeTemplate,
    "forgetful": lambda: FakeTemplate(forgets=True, tidies=True),
    # The last one refuses messages whose roles do not alternate.
    **{
        name: partial(AnswerTemplate, FAMILIES[name].tokenizer())
        for name in ("llama 3", "qwen 3", "glm 4.5", "mistral")
    },
}
PIECES = ("ab", "cd", "(hm)", "  ", "x", "q\n", "what was seen and done and found so far", "{}}")
AGENTS: tuple[tuple[str, list[dict[str, Any]]], ...] = (
    ("You work.", [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]),
    ("You help.", []),
)


class Asked(NamedTuple):
    """A request as the server saw it."""

    prompt: list[int]
    answer: list[int]
    logprobs: list[float]
    versions: list[int]


class Step(NamedTuple):
    """What an agent does next, to one of its histories; the numbers are taken modulo what there is."""

    action: int
    history: int
    place: int
    # Whether its request is sent before the answers to the ones before are known.
    at_once: bool
    # Of the answer: pieces of its text, calls, whether it reasons, and whether it ended.
    answer: tuple[int, ...]
    calls: int
    reasons: bool
    ends: bool


STEPS = st.builds(
    Step,
    *(st.integers(0, 7), st.integers(0, 30), st.integers(0, 30), st.booleans()),
    st.lists(st.integers(0, len(PIECES) - 1), max_size=4).map(tuple),
    *(st.sampled_from([0, 0, 1, 2]), st.booleans(), st.booleans()),
)


def random_steps(seed: int) -> list[Step]:
    random = Random(seed)
    return [
        Step(
            *(random.randrange(8), random.randrange(30), random.randrange(30), random.random() < 0.4),
            tuple(random.randrange(len(PIECES)) for _ in range(random.randrange(5))),
            *(random.choice([0, 0, 1, 2]), random.random() < 0.5, random.random() < 0.7),
        )
        for _ in range(12)
    ]


class Agents:
    """Agents of one sample, whose model writes what the steps say."""

    def __init__(self, template: Any, realign: bool = False) -> None:
        self.template, self.realign = template, realign
        self.conversation = Conversation()
        self.server: list[Asked] = []
        self.sampled = 0
        self.histories: list[tuple[list[dict[str, Any]], list[dict[str, Any]]]] = []
        self.waiting: list[tuple[Any, Step]] = []

    def play(self, steps: list[Step]) -> list[Trajectory]:
        for step in steps:
            if not step.at_once:
                self.answer()
            messages, tools = self.next(step)
            try:
                prompt = self.conversation.prompt(
                    self.template, as_messages(messages), tools, realign_rewritten=self.realign
                )
            except TemplateRefused:
                continue
            self.waiting.append((prompt, step))
        self.answer()
        return self.conversation.trajectories(0.5) if self.server else []

    def next(self, step: Step) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The messages and tools of the request."""
        if not self.histories or step.action == 0:
            system, tools = AGENTS[step.place % len(AGENTS)]
            return [{"role": "system", "content": system}, {"role": "user", "content": f"task {step.history}"}], tools
        messages, tools = self.histories[step.history % len(self.histories)]
        place = 1 + step.place % (len(messages) - 1)
        user = {"role": "user", "content": PIECES[step.place % len(PIECES)]}
        match step.action:
            case 1 | 2:
                calls = messages[-1].get("tool_calls", [])
                # Results may come in another order than the calls.
                order = calls[::-1] if step.place % 2 else calls
                results = [{"role": "tool", "tool_call_id": call["id"], "content": "ab seen"} for call in order]
                return [*messages, *(results or [user])], tools
            case 3:  # the same again, as after a timeout
                return messages[:-1], tools
            case 4:  # an edited message, such as a tool's result that was cleared
                edited = messages[place] | {"content": "[cleared]"}
                return [*messages[:place], edited, *messages[place + 1 :], user], tools
            case 5:  # dropped messages
                return [messages[0], *messages[place + 1 :], user], tools
            case 6:  # a new context with a summary
                return [messages[0], {"role": "user", "content": f"So far: {messages[-1]['content']}"}], tools
            case _:  # a branch from an earlier answer, without its reasoning
                bare = [{k: v for k, v in message.items() if k != "reasoning_content"} for message in messages]
                ends = [n + 1 for n, message in enumerate(bare) if message["role"] == "assistant"]
                return [*bare[: ends[place % len(ends)]], user], tools

    def answer(self) -> None:
        """Answers what was asked, the last request first."""
        while self.waiting:
            prompt, step = self.waiting.pop()
            text = "".join(PIECES[piece] for piece in step.answer)
            # Not what the tokenizer would make of the text: no two characters are one token.
            ids = [token for character in text for token in self.template.encode(character)]
            end = self.template.encode("$") if isinstance(self.template, FakeTemplate) else [self.template.turn_end()]
            ids += [token for token in end if step.ends and token is not None]
            asked = Asked(
                list(prompt.ids),
                ids,
                [-(self.sampled + n + 1) / 1024 for n in range(len(ids))],
                [len(self.server) + (n > 1) for n in range(len(ids))],
            )
            self.sampled += len(ids)
            self.server.append(asked)
            finish = "stop" if step.ends else "length"
            generation = Generation.of(prompt.ids, ids, asked.logprobs, asked.versions, finish, text)
            self.conversation.record(generation)
            generation.added = prompt.added
            message: dict[str, Any] = {"role": "assistant", "content": text}
            if step.reasons:
                message["reasoning_content"] = "hm"
            if prompt.tools and step.calls:
                function = {"name": "look", "arguments": {"at": step.place}}
                message["tool_calls"] = [
                    {"id": f"call_{n}", "type": "function", "function": function} for n in range(step.calls)
                ]
            (message,) = as_messages([message])
            messages = self.conversation.answered(self.template, prompt, generation, message)
            assert messages == [*prompt.messages, message]
            # What the next prompt most likely continues is kept, and found turn by turn otherwise.
            longest = self.conversation._longest_turn
            assert longest is not None and self.conversation._longest_messages == longest.prompt.messages
            assert self.conversation._longest_guarded == longest.prompt.guarded
            self.histories.append((messages, prompt.tools))


def check(server: list[Asked], trajectories: list[Trajectory]) -> None:
    """Raises AssertionError unless the trajectories train each token of the answers once, as it was sampled."""
    places = {
        np.float32(logprob): (number, at)
        for number, asked in enumerate(server)
        for at, logprob in enumerate(asked.logprobs)
    }
    seen: set[tuple[int, int]] = set()
    wholes = [asked.prompt + asked.answer for asked in server]
    for trajectory in trajectories:
        prompt = trajectory.prompt_ids.tolist()
        whole, versions = [*prompt, *trajectory.response_ids.tolist()], list(trajectory.versions)
        assert whole in wholes
        for at in np.flatnonzero(trajectory.loss_mask.expand()).tolist():
            logprob = trajectory.logprobs[at]
            assert logprob in places, "a token is trained that nobody sampled"
            number, behind = places[logprob]
            assert (number, behind) not in seen, "a token is trained twice"
            seen.add((number, behind))
            asked, position = server[number], len(prompt) + at
            assert position == len(asked.prompt) + behind, "a token is trained in another place"
            assert whole[: position + 1] == asked.prompt + asked.answer[: behind + 1], "the model saw other tokens"
            assert versions[at] == asked.versions[behind]
        bounds = [0, *(turn.end for turn in trajectory.turns)]
        assert [turn.start for turn in trajectory.turns] == bounds[:-1]
        assert not trajectory.turns or bounds[-1] == len(trajectory.loss_mask)
        for turn in trajectory.turns:
            trained = trajectory.loss_mask.expand()[turn.start : turn.end]
            assert turn.role == ANSWER or not trained.any(), "what another wrote is trained"
    assert len(seen) == len(places), "sampled tokens are lost"
    assert {trajectory.reward for trajectory in trajectories} <= {0.5}


def check_lines(trajectories: list[Trajectory]) -> None:
    lines = [trajectory.line for trajectory in trajectories]
    if len(lines) < 2:
        assert lines in ([], [None])
        return
    assert all(line is not None for line in lines)
    assert [line.number for line in lines] == [*range(len(lines))]
    assert [line.kind == FINAL for line in lines] == [False] * (len(lines) - 1) + [True]
    for line in lines:
        assert line.first <= line.last
        assert (line.parent is None) == (line.origin == "new")
        assert line.parent is None or lines[line.parent].first < line.first


@given(st.lists(STEPS, max_size=14), st.sampled_from(sorted(TEMPLATES)), st.booleans())
def test_any_history_trains_each_sampled_token_once_as_the_server_saw_it(steps, name, realign):
    agents = Agents(TEMPLATES[name](), realign)
    trajectories = agents.play(steps)
    check(agents.server, trajectories)
    check_lines(trajectories)


def test_the_histories_have_lines_of_all_kinds():
    kinds, origins = set(), set()
    for seed in range(150):
        for trajectory in Agents(FakeTemplate()).play(random_steps(seed)):
            if trajectory.line is not None:
                kinds.add(trajectory.line.kind)
                origins.add(trajectory.line.origin)
    assert kinds == {"final", "compacted", "rewritten", "retry", "sub-agent", "side"}
    assert origins == {"new", "retry", "branch", "summary", "rewritten"}


def twice(patch):
    once = Generation.trajectory
    patch(Generation, "trajectory", lambda self, *a, **options: once(self, *a, **(options | {"untrained": ()})))


def never(patch):
    record = Conversation.record

    def forgetful(self, generation):
        record(self, generation)
        if generation.number == 3:
            self.generations.pop()
        return generation

    patch(Conversation, "record", forgetful)


def of_another(patch):
    """Any earlier conversation that is short enough counts as the beginning of a prompt."""
    patch(Tokens, "begins_with", lambda self, other: len(other) <= len(self))


def changed(**fields):
    """Every trajectory has other values in some of its fields."""

    def plant(patch):
        made = Generation.trajectory

        def wrong(self, *a, **options):
            trajectory = made(self, *a, **options)
            return replace(trajectory, **{name: change(trajectory) for name, change in fields.items()})

        patch(Generation, "trajectory", wrong)

    return plant


MISTAKES = {
    "trained twice": twice,
    "forgotten": never,
    "continues another": of_another,
    "observations are trained": changed(loss_mask=lambda t: Runs.of([1] * len(t.loss_mask))),
    "the first token is not trained": changed(loss_mask=lambda t: Runs.of([0, *list(t.loss_mask)[1:]])),
    "log-probs of the next token": changed(logprobs=lambda t: np.roll(t.logprobs, 1)),
    "the version of the first token": changed(versions=lambda t: Runs.of([*t.versions][:1] * len(t.versions))),
    "another token": changed(response_ids=lambda t: t.response_ids ^ (np.arange(len(t.response_ids)) == 2)),
    "a shorter prompt": changed(prompt_ids=lambda t: t.prompt_ids[1:]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_found(mistake, monkeypatch):
    MISTAKES[mistake](monkeypatch.setattr)
    with pytest.raises((AssertionError, ValueError)):
        for seed in range(100):
            agents = Agents(FakeTemplate())
            check(agents.server, agents.play(random_steps(seed)))
