"""The turns of one sample, token in and token out: finds which turn continues which, and builds the next prompt.

Turns are merged by prefix. A prompt that begins with all tokens of an earlier turn (its prompt and its response)
continues the line of that turn. Any other prompt begins a new line, which becomes a trajectory of its own. The next
prompt of a chat reuses the tokens of earlier turns and tokenises only the text that the template adds. To do so, it
compares the rendered messages with the text that the server saw:

    outcome    what the template does                                      the next prompt
    ---------  ----------------------------------------------------------  ------------------------------------------
    continued  renders the earlier turns unchanged                         the earlier tokens and the text after them
    realigned  renders the last answer in another form (such as spaces     the earlier tokens and the text after the
               in a tool call) and keeps that form; or rewrites earlier    last answer
               turns while `realign_rewritten` is set
    forked     rewrites earlier turns (such as dropping their reasoning);  the messages as rendered now, as a new line
               or the caller edited the messages

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

# Marks the end of an answer to locate the text after it. Plain characters, because templates render them unchanged.
_END = "endOfTheAnswer7Q3V"


class Template(Protocol):
    """What a conversation requires of a chat template and its tokenizer."""

    def render(self, messages: Messages, tools: Messages, *, answer: bool) -> str: ...
    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...
    def closing(self, generation: Generation) -> str: ...
    def closings(self, generation: Generation) -> list[str]: ...


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A prompt that is ready to be sent.

    `text` is the text of all its tokens; `rendered` is the template's rendering of the messages.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    ids: list[int]
    text: str
    rendered: str


@dataclass(frozen=True, slots=True)
class _Turn:
    """A prompt and its answer."""

    prompt: ChatPrompt
    generation: Generation
    answer: dict[str, Any]
    # The text of all tokens, including the answer's.
    text: str

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [*self.prompt.messages, self.answer]

    def is_continued_by(self, messages: Messages) -> bool:
        """Return whether the messages continue this prompt with an assistant message, not necessarily the answer."""
        count = len(self.prompt.messages)
        return (
            len(messages) > count
            and messages[count].get("role") == "assistant"
            and list(messages[:count]) == self.prompt.messages
        )


class Conversation:
    """The generations of one sample and the chat turns among them."""

    def __init__(self) -> None:
        self.generations: list[Generation] = []
        self.realigned = 0
        self.forked = 0
        self._turns: list[_Turn] = []

    def record(self, generation: Generation) -> Generation:
        """Record a generation and return it with its parent, the longest earlier turn that its prompt begins with."""
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
        """Build the prompt for these messages. Raises DataError if the template rejects them.

        With `realign_rewritten`, a template that rewrites earlier turns causes no fork: the model still sees the turns
        as they were sampled.
        """
        messages, tools = [dict(message) for message in messages], list(tools)
        rendered = template.render(messages, tools, answer=True)
        before = sorted((t for t in self._turns if t.is_continued_by(messages)), key=lambda t: len(t.prompt.messages))
        for turn in reversed(before):
            if rendered.startswith(turn.text):
                return _extended(template, turn, messages, tools, rendered, rendered[len(turn.text) :])
        if not before:
            return ChatPrompt(messages, tools, template.encode(rendered), rendered, rendered)
        last = before[-1]
        if (after := _text_after(template, last, messages, tools, rendered, realign_rewritten)) is not None:
            self.realigned += 1
            return _extended(template, last, messages, tools, rendered, after)
        self.forked += 1
        return ChatPrompt(messages, tools, template.encode(rendered), rendered, rendered)

    def answered(self, template: Template, prompt: ChatPrompt, generation: Generation, answer: dict[str, Any]) -> None:
        """Record `answer`, the message parsed from `generation`, so that the next prompt can continue it."""
        text = prompt.text + template.decode(generation.token_ids)
        self._turns.append(_Turn(prompt, generation, answer, text))

    def trajectories(self, reward: float | None = None, metrics: dict[str, float] | None = None) -> list[Trajectory]:
        """Return one trajectory per line, in the order in which the lines ended.

        Each sampled token is trained in exactly one trajectory. All trajectories get the reward and the text of the
        last answer, so a reward function scores the whole sample. Only the last one carries the metrics, so that means
        over trajectories are means over samples.
        """
        if not self.generations:
            raise DataError("the workflow requested trajectories before it generated anything")
        parents = {generation.parent for generation in self.generations}
        leaves = [generation for generation in self.generations if generation not in parents]
        trajectories: list[Trajectory] = []
        trained: set[Generation] = set()
        for leaf in leaves:
            own = self.metrics() | (metrics or {}) if leaf is leaves[-1] else None
            trajectories.append(
                leaf.trajectory(reward, text=self.generations[-1].text, metrics=own, untrained=frozenset(trained))
            )
            trained.update(leaf.line())
        return trajectories

    def metrics(self) -> dict[str, float]:
        return {
            "turns": float(len(self.generations)),
            "turns_realigned": float(self.realigned),
            "turns_forked": float(self.forked),
        }


def _text_after(
    template: Template, turn: _Turn, messages: Messages, tools: Messages, rendered: str, realign_rewritten: bool
) -> str | None:
    """Return the text after the turn's answer, or None if the tokens up to there do not represent these messages."""
    if list(tools) != turn.prompt.tools or list(messages[: len(turn.messages)]) != turn.messages:
        return None
    try:
        if not realign_rewritten and not _renders_unchanged(template, turn, tools, rendered):
            return None
        return _after_answer(template, turn, messages, tools)
    except DataError:
        # The template rejects a prefix or the marked variant of the messages, so the comparison is impossible.
        return None


def _renders_unchanged(template: Template, turn: _Turn, tools: Messages, rendered: str) -> bool:
    """Return whether the template renders the text up to the answer unchanged, and the answer as when it was last."""
    before = template.render(turn.prompt.messages, tools, answer=False)
    done = template.render(turn.messages, tools, answer=False)
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
    """Append the end mark to the answer: to its content and to the last tool call.

    If an answer has tool calls, a template may render only those.
    """
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
