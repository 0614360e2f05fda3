"""One sample's turns, token in and token out: which turn continues which, and what the next prompt is made of.

Turns are merged by prefix: a prompt that begins with all tokens of an earlier turn (its prompt and what the model
wrote) continues that turn's line; any other begins a line, and with it a trajectory, of its own. A chat's next prompt
is made of the tokens that are there already, and only what the template adds to them is tokenised. For that the
rendered messages are held against what the server saw:

    outcome    the template                                                         the next prompt
    ---------  -------------------------------------------------------------------  --------------------------------------
    continued  writes all of it again as it was                                     those tokens, and the text behind them
    realigned  writes the last answer in another form (spaces in a tool call),      those tokens, and the text behind that
               and sticks to it; or a rewriting one, where that is asked for        answer
    forked     rewrites earlier turns (drops their reasoning); or the messages      the messages as rendered now, as a
               were edited                                                          line of its own

Invariants: no sampled token is ever replaced by another tokenisation of its text; over `trajectories` each sampled
token is trained exactly once. `record` and `Generation.trajectory` guarantee them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from megasync.errors import DataError
from megasync.rollout.generation import Generation
from megasync.trajectory import Trajectory

Messages = Sequence[dict[str, Any]]

# Stands where an answer ends while the text behind it is looked for. Plain letters: templates write them as they are.
_END = "endOfTheAnswer7Q3V"


class Template(Protocol):
    """What a conversation needs of a chat template and its tokenizer."""

    def render(self, messages: Messages, tools: Messages, *, answer: bool) -> str: ...
    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...
    def closing(self, generation: Generation) -> str: ...
    def closings(self, generation: Generation) -> list[str]: ...


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A prompt that is about to be sent. `text` is of all its tokens, `rendered` what the template made of the messages."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    ids: list[int]
    text: str
    rendered: str


@dataclass(frozen=True, slots=True)
class _Turn:
    """An answered prompt."""

    prompt: ChatPrompt
    generation: Generation
    answer: dict[str, Any]
    # Of all tokens, the answer's included.
    text: str

    @property
    def said(self) -> list[dict[str, Any]]:
        return [*self.prompt.messages, self.answer]

    def led_to(self, messages: Messages) -> bool:
        """The messages go on from here, whatever they make of the answer."""
        count = len(self.prompt.messages)
        return (
            len(messages) > count
            and messages[count].get("role") == "assistant"
            and list(messages[:count]) == self.prompt.messages
        )


class Conversation:
    """All generations of one sample."""

    def __init__(self) -> None:
        self.generations: list[Generation] = []
        self.realigned = 0
        self.forked = 0
        self._turns: list[_Turn] = []

    def record(self, generation: Generation) -> Generation:
        """Notes a generation and returns it with its parent: the longest earlier turn that its prompt begins with."""
        best: Generation | None = None
        reached = -1
        for earlier in self.generations:
            begun = len(earlier.prompt_ids)
            length = begun + len(earlier.token_ids)
            if (
                reached < length <= len(generation.prompt_ids)
                and generation.prompt_ids[begun:length] == earlier.token_ids
                and generation.prompt_ids[:begun] == earlier.prompt_ids
            ):
                best, reached = earlier, length
        placed = replace(generation, parent=best)
        self.generations.append(placed)
        return placed

    def prompt(
        self, template: Template, messages: Messages, tools: Messages = (), *, realign_rewritten: bool = False
    ) -> ChatPrompt:
        """The tokens to send for these messages. Raises DataError when the template refuses them.

        With `realign_rewritten` a template that rewrites earlier turns forks nothing: the model goes on seeing what it
        saw.
        """
        messages, tools = [dict(message) for message in messages], list(tools)
        rendered = template.render(messages, tools, answer=True)
        before = sorted((t for t in self._turns if t.led_to(messages)), key=lambda t: len(t.prompt.messages))
        for turn in reversed(before):
            if rendered.startswith(turn.text):
                return _extended(template, turn, messages, tools, rendered, rendered[len(turn.text) :])
        if not before:
            return ChatPrompt(messages, tools, template.encode(rendered), rendered, rendered)
        last = before[-1]
        if (behind := _behind(template, last, messages, tools, rendered, realign_rewritten)) is not None:
            self.realigned += 1
            return _extended(template, last, messages, tools, rendered, behind)
        self.forked += 1
        return ChatPrompt(messages, tools, template.encode(rendered), rendered, rendered)

    def answered(self, template: Template, prompt: ChatPrompt, generation: Generation, answer: dict[str, Any]) -> None:
        """Notes the message that `generation` was made into, so that the next prompt can go on from it."""
        text = prompt.text + template.decode(generation.token_ids)
        self._turns.append(_Turn(prompt, generation, answer, text))

    def trajectories(self, reward: float | None = None, metrics: dict[str, float] | None = None) -> list[Trajectory]:
        """One trajectory for each line, in the order in which they ended; every sampled token is trained in one of them.

        All of them get the reward and the last answer's text, so a reward function scores the sample and not its
        pieces. The last one alone carries the metrics: means over trajectories are then means over samples.
        """
        if not self.generations:
            raise DataError("the workflow asks for trajectories, but nothing was generated yet")
        parents = {generation.parent for generation in self.generations}
        leaves = [generation for generation in self.generations if generation not in parents]
        found, trained = [], set()
        for leaf in leaves:
            own = self.metrics() | (metrics or {}) if leaf is leaves[-1] else None
            found.append(
                leaf.trajectory(reward, text=self.generations[-1].text, metrics=own, untrained=frozenset(trained))
            )
            trained.update(leaf.line())
        return found

    def metrics(self) -> dict[str, float]:
        return {
            "turns": float(len(self.generations)),
            "turns_realigned": float(self.realigned),
            "turns_forked": float(self.forked),
        }


def _behind(
    template: Template, turn: _Turn, messages: Messages, tools: Messages, rendered: str, realign_rewritten: bool
) -> str | None:
    """The text behind the turn's answer; None where the tokens up to there cannot stand for these messages."""
    if list(tools) != turn.prompt.tools or list(messages[: len(turn.said)]) != turn.said:
        return None
    try:
        if not realign_rewritten and not _steady(template, turn, tools, rendered):
            return None
        return _after_answer(template, turn, messages, tools)
    except DataError:
        # The messages can be rendered, but not a part of them: so nothing can be said about that part.
        return None


def _steady(template: Template, turn: _Turn, tools: Messages, rendered: str) -> bool:
    """The template writes everything up to the answer as it did, and the answer as it does while it is the last one."""
    before = template.render(turn.prompt.messages, tools, answer=False)
    done = template.render(turn.said, tools, answer=False)
    return turn.prompt.rendered.startswith(before) and done.startswith(before) and rendered.startswith(done)


def _after_answer(template: Template, turn: _Turn, messages: Messages, tools: Messages) -> str | None:
    marked = [*messages]
    marked[len(turn.prompt.messages)] = _marked(turn.answer)
    text = template.render(marked, tools, answer=True)
    if (at := text.rfind(_END)) < 0:
        return None
    ends = [(found, mark) for mark in template.closings(turn.generation) if (found := text.find(mark, at)) >= 0]
    if not ends:
        return None
    found, mark = min(ends)
    return text[found + len(mark) :] if template.closing(turn.generation) else text[found:]


def _marked(answer: dict[str, Any]) -> dict[str, Any]:
    """The answer with the mark as its last words: where there are tool calls, templates may write those alone."""
    marked = answer | {"content": (answer.get("content") or "") + _END}
    if calls := answer.get("tool_calls"):
        function = calls[-1]["function"]
        arguments = {**function["arguments"], _END: _END}
        marked["tool_calls"] = [*calls[:-1], calls[-1] | {"function": function | {"arguments": arguments}}]
    return marked


def _extended(
    template: Template, turn: _Turn, messages: Messages, tools: Messages, rendered: str, added: str
) -> ChatPrompt:
    generation = turn.generation
    ids = generation.prompt_ids + generation.token_ids + template.encode(added)
    return ChatPrompt(list(messages), list(tools), ids, turn.text + added, rendered)
