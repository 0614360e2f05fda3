"""Names the lines of a sample: which one the sample ended in, and what the others were for.

A line (`rollout.conversation`) begins where a prompt continues no earlier answer token by token, or one that another
prompt continues too. Agents do so for several reasons. Each line gets two words, which follow from the prompts alone.
How it began, the first that applies:

    origin     its first prompt
    ---------  ---------------------------------------------------------------------------------------------------------
    retry      is that of an earlier answer, token by token
    summary    has fewer messages than an earlier one of the same agent, and in a message of the user or the system the
               text of an earlier answer that nothing continues: the context was compacted
    rewritten  holds, as a message of the assistant, an earlier answer that it does not continue token by token. Or it
               continues none, and begins with the messages of an earlier prompt and an answer in place of its own, or
               has the same agent and first message as an earlier prompt: the agent edited or dropped messages, or the
               chat template rewrote them
    branch     continues an earlier answer, which another prompt continues too
    new        is none of these

What it is, the first that applies:

    kind       the line
    ---------  ---------------------------------------------------------------------------------------------------------
    final      holds the last answer of the sample
    compacted  was left for one that began with a summary
    rewritten  ended with the answer from which a rewritten one began: the agent went on there
    retry      ended with an answer whose prompt another answer has too, a later one or one that was continued
    sub-agent  ended with a prompt of another agent than the final line
    side       is none of these, such as a branch that was given up

Prompts are of the same agent if they have the same tools, and system prompts that begin alike (`AGENT` characters: what
follows may tell the date, or hold a summary). The text of an answer is found by its longest line or its last long one,
because agents leave out parts of a summary or frame it. Without messages, as in token-level workflows, there are only
new lines, retries and branches. The words are notes for readers and metrics: nothing is trained on them.

Invariant: a line comes from one that holds an earlier answer than its own first, so lines form trees.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megasync.trajectory import Line

if TYPE_CHECKING:
    from megasync.rollout.conversation import ChatTurn, Generation

NEW, BRANCH, SUMMARY = "new", "branch", "summary"
FINAL, COMPACTED, REWRITTEN, RETRY, SUB_AGENT, SIDE = "final", "compacted", "rewritten", "retry", "sub-agent", "side"
# The first characters of a system prompt, which tell agents apart.
AGENT = 256
# Shorter lines of an answer also stand in texts that do not repeat it.
LONG_LINE = 32
# The last tokens of a prompt, by which equal ones are looked for.
_TAIL = 32

Agent = tuple[str, str]


def lines_of(generations: Sequence[Generation], turns: Mapping[Generation, ChatTurn]) -> list[tuple[Generation, Line]]:
    """Return the last generation of each line and what the line is, in the order in which the lines ended.

    ``generations`` are those of a sample in the order in which they ended, and ``turns`` those that were chat turns.
    """
    continued = {generation.parent for generation in generations}
    leaves = [generation for generation in generations if generation not in continued]
    if len(leaves) < 2:
        return [(leaf, Line(FINAL, NEW, 0, None, 0, leaf.number)) for leaf in leaves]
    # The line that trains a generation, and the first generation that a line trains.
    line_of: dict[Generation, int] = {}
    firsts: list[Generation] = []
    for number, leaf in enumerate(leaves):
        at, first = leaf, leaf
        while at is not None and at not in line_of:
            line_of[at] = number
            first, at = at, at.parent
        firsts.append(first)
    sample = _Sample(generations, turns, leaves)
    origins = [sample.origin(first) for first in firsts]
    compacted = {line_of[source] for origin, source in origins if origin == SUMMARY and source is not None}
    rewritten = {source for origin, source in origins if origin == REWRITTEN}
    final = sample.agent(leaves[-1])

    def kind(number: int) -> str:
        leaf = leaves[number]
        if number == len(leaves) - 1:
            return FINAL
        if number in compacted:
            return COMPACTED
        if leaf in rewritten:
            return REWRITTEN
        if any(other.number > leaf.number or other in continued for other in sample.same_prompt(leaf)):
            return RETRY
        return SIDE if sample.agent(leaf) in (None, final) else SUB_AGENT

    return [
        (
            leaf,
            Line(kind(number), origin, number, None if source is None else line_of[source], first.number, leaf.number),
        )
        for number, (leaf, first, (origin, source)) in enumerate(zip(leaves, firsts, origins, strict=True))
    ]


class _Sample:
    """Indexes of the generations of a sample; lists are in the order in which they ended."""

    def __init__(
        self, generations: Sequence[Generation], turns: Mapping[Generation, ChatTurn], leaves: Sequence[Generation]
    ) -> None:
        self._turns = turns
        self._agents: dict[Generation, Agent] = {}
        # The first message behind the system prompt.
        self._first: dict[Generation, str] = {}
        self._by_end: dict[tuple[int, bytes], list[Generation]] = defaultdict(list)
        self._by_agent: dict[Agent, list[Generation]] = defaultdict(list)
        self._by_first: dict[tuple[Agent, str], list[Generation]] = defaultdict(list)
        self._by_answer: dict[str, list[Generation]] = defaultdict(list)
        for generation in generations:
            self._by_end[_end(generation)].append(generation)
            if (turn := turns.get(generation)) is not None:
                agent, first = self._agents[generation], self._first[generation] = self._begins(turn)
                self._by_agent[agent].append(generation)
                self._by_first[agent, first].append(generation)
                self._by_answer[_said(turn.answer)].append(generation)
        # The last answers of lines, and the pieces by which they are found in other texts.
        self._endings = [(leaf, pieces) for leaf in leaves if leaf in turns and (pieces := _pieces(turns[leaf].answer))]

    def _begins(self, turn: ChatTurn) -> tuple[Agent, str]:
        """The agent of a prompt, and its first message behind the system prompt."""
        before = turn.prompt.before
        if before is None:
            system = "".join(_content(message) for message in turn.prompt.new if message["role"] == "system")[:AGENT]
            first = next((_content(message) for message in turn.prompt.new if message["role"] != "system"), "")
            return (system, _tools(turn)), first
        (system, tools), first = self._agents[before.generation], self._first[before.generation]
        return (system, tools if turn.prompt.tools is before.prompt.tools else _tools(turn)), first

    def agent(self, generation: Generation) -> Agent | None:
        """The agent that asked for it; None if it was not a chat."""
        return self._agents.get(generation)

    def same_prompt(self, generation: Generation) -> list[Generation]:
        """The others with the same prompt."""
        return [
            other
            for other in self._by_end[_end(generation)]
            if other is not generation and other.prompt == generation.prompt
        ]

    def origin(self, first: Generation) -> tuple[str, Generation | None]:
        """How the line that begins with this generation began, and the one that it came from."""
        if repeated := _before(self.same_prompt(first), first):
            return RETRY, repeated[-1]
        if (turn := self._turns.get(first)) is None:
            return (NEW, None) if first.parent is None else (BRANCH, first.parent)
        messages = turn.prompt.messages
        if (source := self._summarised(first, messages)) is not None:
            return SUMMARY, source
        if (source := self._held(first, messages)) is not None:
            return REWRITTEN, source
        if first.parent is not None:
            return BRANCH, first.parent
        source = self._rewritten(first)
        return (NEW, None) if source is None else (REWRITTEN, source)

    def _summarised(self, first: Generation, messages: Sequence[dict[str, Any]]) -> Generation | None:
        """The answer of the same agent from which a line went on with a summary."""
        agent, count = self._agents[first], len(messages)
        same = _before(self._by_agent[agent], first)
        longer = next((each for each in reversed(same) if self._turns[each].prompt.count > count), None)
        if longer is None:
            return None
        text = "\n".join(_content(message) for message in messages if message["role"] in ("system", "user"))
        for leaf, pieces in reversed(self._endings):
            if leaf.number < first.number and any(piece in text for piece in pieces):
                return leaf if self._agents[leaf] == agent else longer
        return None

    def _held(self, first: Generation, messages: Sequence[dict[str, Any]]) -> Generation | None:
        """The last answer that the prompt holds and does not continue token by token."""
        agent = self._agents[first]
        parent = None if first.parent is None else self._turns.get(first.parent)
        for message in reversed(messages[0 if parent is None else parent.prompt.count + 1 :]):
            said = _said(message) if message["role"] == "assistant" else ""
            if said and (held := _before(self._by_answer.get(said, []), first)):
                return max(held, key=lambda each: (self._agents[each] == agent, each.number))
        return None

    def _rewritten(self, first: Generation) -> Generation | None:
        """The latest answer that was given to an earlier form of the prompt."""
        if (before := self._turns[first].prompt.before) is not None:
            return before.generation
        asked = self._first[first]
        alike = _before(self._by_first[self._agents[first], asked], first) if asked else []
        return alike[-1] if alike else None


def _before(generations: list[Generation], generation: Generation) -> list[Generation]:
    """The generations of a list that ended before another one."""
    return generations[: bisect_left(generations, generation.number, key=lambda each: each.number)]


def _end(generation: Generation) -> tuple[int, bytes]:
    """The length and the last tokens of a prompt: equal for equal prompts, and hardly for others."""
    return len(generation.prompt), generation.prompt.array[-_TAIL:].tobytes()


def _tools(turn: ChatTurn) -> str:
    return json.dumps(turn.prompt.tools, sort_keys=True, default=str) if turn.prompt.tools else ""


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""


def _said(answer: Mapping[str, Any]) -> str:
    """The text and the calls of an answer, without its reasoning and the ids of its calls."""
    calls = [call.get("function") for call in answer.get("tool_calls") or ()]
    return _content(answer) + (json.dumps(calls, default=str) if calls else "")


def _pieces(answer: Mapping[str, Any]) -> set[str]:
    """The longest line of an answer and its last long one."""
    lines = [line for each in _content(answer).splitlines() if len(line := each.strip()) >= LONG_LINE]
    return {max(lines, key=len), lines[-1]} if lines else set()
