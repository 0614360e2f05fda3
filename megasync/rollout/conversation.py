"""The turns of one sample, token in and token out: finds which turn continues which, and builds the next prompt.

A `Generation` is one response: tokens, each with its log-prob and the weight version that sampled it. Generations form
lines, merged by prefix: a prompt that begins with all tokens of an earlier turn (its prompt and its response) continues
the line of that turn. Any other prompt begins a new line, which becomes a trajectory of its own. The next prompt of a
chat reuses the tokens of earlier turns and tokenises only the text that the template adds. To do so, it compares the
rendered messages with the text that the server saw:

    outcome    what the template does                                      the next prompt
    ---------  ----------------------------------------------------------  ------------------------------------------
    continued  renders the earlier turns unchanged                         the earlier tokens and the text after them
    realigned  renders the last answer in another form (such as spaces     the earlier tokens and the text after the
               in a tool call) and keeps that form; or rejects it (such    last answer
               as two calls) and takes a simpler form in its place; or
               rewrites earlier turns while `realign_rewritten` is set
    forked     rewrites earlier turns (such as dropping their reasoning);  the messages as rendered now, as a new line
               or the caller edited the messages

`rollout.lines` says what each line is: the final one, a sub-agent's, and so on.

Invariants: no sampled token is ever replaced by another tokenisation of its text; over `trajectories` each sampled
token is trained exactly once, with the log-prob and version of its own generation, and tokens between two generations
(tool output, template text) have a loss mask of 0. `record` and `Generation.trajectory` guarantee them.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, pairwise
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from megasync.data.chat_template import ChatTemplate
from megasync.errors import DataError, TemplateRefused
from megasync.rollout.lines import COMPACTED, RETRY, SUB_AGENT, lines_of
from megasync.rollout.tokens import Tokens
from megasync.rollout.tools import ToolCall
from megasync.trajectory import (
    ANSWER,
    ROUTES,
    SUPPORT,
    SUPPORT_SIZES,
    TOKEN_REWARDS,
    Call,
    Line,
    Support,
    Trajectory,
    Turn,
)
from megasync.trajectory.runs import FloatArray, Runs, float_array

Messages = Sequence[dict[str, Any]]
T = TypeVar("T")

# Marks the end of an answer to locate the text after it. Plain characters, because templates render them unchanged.
_END = "endOfTheAnswer7Q3V"


class Generation:
    """One response to one prompt.

    `tokens` are those of prompt and response, to be continued by the next prompt: `generation.tokens + observation`.
    `prompt_ids`, `token_ids`, `logprobs` and `versions` are new lists with every access. `finish_reason` is "stop" or
    "length". `parts` is the number of requests: 1, plus one for each interruption. The conversation sets `number`, the
    place among its generations, and `parent`, the earlier generation that this one continues. A chat notes the turns
    that its messages `added` to the parent, counted from the first token of the prompt, and the tool `calls` of the
    answer.
    """

    __slots__ = (
        "_logprobs", "_spans", "added", "calls", "finish_reason", "number", "parent", "parts", "prompt", "support",
        "text", "tokens",
    )  # fmt: skip

    def __init__(
        self,
        prompt: Tokens,
        tokens: Tokens,
        logprobs: FloatArray | array[float],
        spans: list[tuple[int, int]],
        finish_reason: str,
        text: str = "",
        parts: int = 1,
        support: Support | None = None,
    ) -> None:
        """Takes everything as it is, for nobody to change later; `of` takes sequences.

        `tokens` are those of prompt and response. `logprobs` are natural logarithms of probabilities at the sampling
        temperature. `spans` are (version, number of tokens), in the order of the tokens. `support` is what truncated
        sampling left to choose each token from, over which the probabilities are.
        """
        self.prompt = prompt
        self.tokens = tokens
        self._logprobs = logprobs
        self._spans = spans
        self.finish_reason = finish_reason
        self.text = text
        self.parts = parts
        self.support = support
        self.number = 0
        self.parent: Generation | None = None
        self.added: tuple[Turn, ...] = ()
        self.calls: tuple[Call, ...] = ()

    @classmethod
    def of(
        cls,
        prompt_ids: Sequence[int],
        token_ids: Sequence[int] | NDArray[Any],
        logprobs: Sequence[float] | NDArray[Any],
        versions: Sequence[int],
        finish_reason: str,
        text: str = "",
    ) -> Generation:
        """A generation of the ids of prompt and response; each token of the response has a log-prob and a version."""
        prompt = Tokens.of(prompt_ids)
        spans = Runs.of(versions).spans()
        return cls(prompt, prompt + token_ids, float_array(logprobs), spans, finish_reason, text)

    @property
    def prompt_ids(self) -> list[int]:
        return self.prompt[:]

    @property
    def token_ids(self) -> list[int]:
        """The ids of the sampled tokens."""
        return self.tokens[len(self.prompt) :]

    @property
    def logprobs(self) -> list[float]:
        """One log-prob per sampled token, at the sampling temperature."""
        return self._logprobs.tolist()

    @property
    def versions(self) -> list[int]:
        """The weight version that sampled each token."""
        return list(Runs.of_spans(self._spans))

    @property
    def newest_version(self) -> int | None:
        """The weight version that sampled the last token; None without tokens."""
        return self._spans[-1][0] if self._spans else None

    @property
    def spans(self) -> list[tuple[int, int]]:
        """(version, number of sampled tokens), in the order of the tokens."""
        return list(self._spans)

    def line(self) -> list[Generation]:
        """Return this generation and its ancestors, oldest first."""
        line, at = [], self
        while at is not None:
            line.append(at)
            at = at.parent
        return line[::-1]

    def trajectory(
        self,
        reward: float | None = None,
        *,
        text: str | None = None,
        metrics: dict[str, float] | None = None,
        untrained: Collection[Generation] = (),
        turn_rewards: Mapping[Generation, float] | None = None,
        line: Line | None = None,
    ) -> Trajectory:
        """Return the whole line as one trajectory.

        A reward function receives `text`, by default the text of this generation. The tokens of `untrained` generations
        get a loss mask of 0, because another trajectory trains them. ``turn_rewards`` are those of single generations,
        given at their last tokens; they are parts of the reward. ``line`` is the note of what the line is.
        """
        generations = self.line()
        prompt = len(generations[0].prompt)
        response = self.tokens.array[prompt:]
        logprobs = np.zeros(response.size, np.float32)
        masks: list[tuple[int, int]] = []
        versions: list[tuple[int, int]] = []
        at = 0
        for generation in generations:
            start, end = len(generation.prompt) - prompt, len(generation.tokens) - prompt
            logprobs[start:end] = generation._logprobs
            # Tokens between generations were not sampled. Their versions only fill the gap and are never read.
            masks += [(0, start - at), (int(generation not in untrained), end - start)]
            versions += [(versions[-1][0] if versions else 0, start - at), *generation._spans]
            at = end
        arrays: dict[str, NDArray[Any]] = {}
        if any(generation.support is not None for generation in generations):
            support = Support.join(_supports(generations))
            arrays |= {SUPPORT_SIZES: support.sizes, SUPPORT: support.ids}
        if turn_rewards:
            arrays[TOKEN_REWARDS] = rewards = np.full(response.size, np.nan, np.float32)
            for generation in generations:
                if generation in turn_rewards and generation not in untrained and len(generation.token_ids):
                    rewards[len(generation.tokens) - prompt - 1] = turn_rewards[generation]
        turns = list(self._turns(generations))
        if self.tokens.routes is not None:
            arrays[ROUTES] = self.tokens.routes
        # An array that nobody can change is taken as it is.
        logprobs.flags.writeable = False
        return Trajectory(
            prompt_ids=generations[0].prompt.array,
            response_ids=response,
            loss_mask=Runs.of_spans(masks),
            logprobs=logprobs,
            versions=Runs.of_spans(versions),
            finish_reason=self.finish_reason,
            text=self.text if text is None else text,
            reward=reward,
            metrics=dict(metrics or {}),
            arrays=arrays,
            # One answer without a call says nothing that the loss mask does not.
            turns=turns if len(turns) > 1 or self.calls else (),
            line=line,
        )

    def _turns(self, line: Sequence[Generation]) -> Iterator[Turn]:
        """The turns of a line behind its prompt, in order, which together have all of its tokens."""
        prompt = at = len(line[0].prompt)
        for generation in line:
            start, end = len(generation.prompt), len(generation.tokens)
            between = [turn for turn in generation.added if at <= turn.start]
            complete = bool(between) and (between[0].start, between[-1].end) == (at, start)
            if at < start:
                yield from (turn.moved(-prompt) for turn in (between if complete else [Turn(at, start)]))
            if start < end:
                yield Turn(start - prompt, end - prompt, ANSWER, calls=generation.calls)
            at = end


class AnswerTemplate(ChatTemplate):
    """A chat template, and the token with which an answer ends."""

    def unended(self, text: str) -> list[str]:
        """Return rendered text without the end that some templates write only behind the last message, if it has it."""
        end = self._tokenizer.eos_token
        return [text.removesuffix(end)] if end and text.endswith(end) else []

    def closing(self, generation: Generation) -> str:
        """Return the special token that ended the answer. Empty if it was truncated or ended by a stop string."""
        answered = len(generation.tokens) > len(generation.prompt)
        if generation.finish_reason != "stop" or not answered:
            return ""
        last = generation.tokens[-1]
        return self.decode([last]) if last in self._outside.special_ids or last == self.turn_end() else ""

    def closings(self, generation: Generation, *, calls: bool) -> list[tuple[str, bool]]:
        """Return the texts that may end this answer in the rendered conversation, and whether its tokens have them.

        `calls` is whether it is rendered with calls. Its tokens also stand for the template's end if the model ended
        the answer with another token. A template that writes no end of its own begins the next message with a special
        token.
        """
        closing = self.closing(generation)
        last, between = self._after_answer(calls=calls)
        # What ends an answer that is not the last message: the last of these, after which a message begins. The first
        # ones may be parts of a call.
        ends = [a for a, b in zip(last, between, strict=False) if a == b] or (between[:1] if last else [])
        end = ends[-1:] if closing or calls else ends[:1]
        marks = {closing: True} if closing else {}
        if not (closing and generation.tokens[-1] in ends):
            marks |= {self.decode(end): bool(closing)} if end else {}
        marks |= {eos: bool(closing)} if (eos := self._tokenizer.eos_token) else {}
        starts = [] if last else self._tokenizer.all_special_tokens
        return list({**dict.fromkeys(starts, False), **marks}.items())

    def answer_text(self, generation: Generation) -> str:
        """Return what the model wrote, with special tokens but without the one that closes the answer."""
        return self.decode(generation.token_ids).removesuffix(self.closing(generation))


class _Text:
    """A text that continues an earlier one, by the length and hash of what it adds.

    The characters themselves would be held twice: messages have them.
    """

    __slots__ = ("before", "hashed", "size")

    def __init__(self, before: _Text | None, piece: str) -> None:
        self.before = before
        self.size = len(piece)
        # Keyed by the process, so nobody can write a text with the hash of another one.
        self.hashed = hash(piece)

    def rest(self, text: str, ends: dict[_Text, int]) -> str | None:
        """Return what follows this text in one that begins with it; None if it does not.

        ``ends`` says where texts end in it, -1 for those that it does not begin with, and is filled in: texts that
        share their beginnings are compared once.
        """
        path, at = list[_Text](), self
        while at is not None and at not in ends:
            path.append(at)
            at = at.before
        end = 0 if at is None else ends[at]
        for part in reversed(path):
            start, end = end, end + part.size
            if start < 0 or hash(text[start:end]) != part.hashed or end > len(text):
                end = -1
            ends[part] = end
        return None if end < 0 else text[end:]


@dataclass(frozen=True, slots=True, eq=False)
class ChatPrompt:
    """A prompt that is ready to be sent.

    The messages are those of the prompt of the turn `before`, an answer in place of its own, and what follows: `new`.
    `shown` are the new ones as they are rendered, or all of them if a stand-in changed earlier ones too. `text` is the
    text of all tokens. `added` are the turns since the answer that it continues, counted from the first token of the
    prompt.
    """

    before: ChatTurn | None
    new: list[dict[str, Any]]
    shown: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    ids: Tokens
    text: _Text
    # The number of messages.
    count: int
    added: tuple[Turn, ...] = ()

    def begun(self, ids: Sequence[int], text: str) -> ChatPrompt:
        """This prompt with the beginning of the answer, which the model continues."""
        tokens = self.ids + ids
        added = (*self.added[:-1], replace(self.added[-1], end=len(tokens))) if self.added else ()
        return replace(self, ids=tokens, text=_Text(self.text, text), added=added)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """All messages, in a new list with every access."""
        parts, at = list[list[dict[str, Any]]](), self
        while at is not None:
            parts.append(at.new)
            at = None if at.before is None else at.before.prompt
        return [message for part in reversed(parts) for message in part]

    @property
    def guarded(self) -> list[dict[str, Any]]:
        """All messages as they are rendered, in a new list with every access."""
        parts, at = list[list[dict[str, Any]]](), self
        while at is not None:
            parts.append(at.shown)
            at = None if at.before is None or len(at.shown) == at.count else at.before.prompt
        return [message for part in reversed(parts) for message in part]


@dataclass(frozen=True, slots=True, eq=False)
class ChatTurn:
    """A prompt and its answer."""

    prompt: ChatPrompt
    generation: Generation
    answer: dict[str, Any]
    # The text of all tokens, including the answer's.
    text: _Text

    def is_continued_by(self, messages: Messages, known: Messages | None = None) -> bool:
        """Return whether the messages continue this prompt with an assistant message, not necessarily the answer.

        They must continue the turn before it, unless `known` are all messages of this prompt.
        """
        new, count = self.prompt.new if known is None else known, self.prompt.count
        return (
            len(messages) > count
            # Prompts of other agents mostly differ in the last message, which saves comparing all of them.
            and messages[count - 1 : count] == new[-1:]
            and messages[count].get("role") == "assistant"
            and messages[count - len(new) : count] == new
        )


class Conversation:
    """The generations of one sample and the chat turns among them.

    Of both a tree is kept, from what continues nothing to what continues it, and so on: a search looks only at what
    continues something that fits. A sample with 200 agents of 20 turns thus compares a prompt with about 220 others.
    """

    def __init__(self) -> None:
        self.generations: list[Generation] = []
        self.realigned = 0
        self.forked = 0
        self._continuations: dict[Generation | None, list[Generation]] = {}
        self._turns: dict[Generation, ChatTurn] = {}
        self._continuing: dict[ChatTurn | None, list[ChatTurn]] = {}
        # What most prompts continue, which saves the search: the first of the longest generations; and of the turns
        # with the most messages the latest, with the messages of its prompt, as they are and as they are rendered.
        self._longest: Generation | None = None
        self._longest_turn: ChatTurn | None = None
        self._longest_messages: list[dict[str, Any]] = []
        self._longest_guarded: list[dict[str, Any]] = []

    def tokens(self, prompt_ids: Sequence[int]) -> Tokens:
        """The prompt as the continuation of the longest earlier turn that it begins with, whose tokens it shares."""
        if isinstance(prompt_ids, Tokens):
            return prompt_ids
        tokens = Tokens.of(prompt_ids)
        parent = self._parent(tokens)
        return tokens if parent is None else parent.tokens + tokens.array[len(parent.tokens) :]

    def record(self, generation: Generation) -> Generation:
        """Record a generation. Its parent is the longest earlier turn that its prompt begins with."""
        generation.number = len(self.generations)
        generation.parent = self._parent(generation.prompt)
        self.generations.append(generation)
        self._continuations.setdefault(generation.parent, []).append(generation)
        if self._longest is None or len(generation.tokens) > len(self._longest.tokens):
            self._longest = generation
        return generation

    def _parent(self, prompt: Tokens) -> Generation | None:
        if self._longest is not None and prompt.begins_with(self._longest.tokens):
            return self._longest
        begun = _fitting(self._continuations, lambda earlier: prompt.begins_with(earlier.tokens))
        return max(begun, key=lambda earlier: (len(earlier.tokens), -earlier.number), default=None)

    def prompt(
        self, template: AnswerTemplate, messages: Messages, tools: Messages = (), *, realign_rewritten: bool = False
    ) -> ChatPrompt:
        """Build the prompt for these messages, which it keeps. Raises DataError if the template rejects them.

        With `realign_rewritten`, a template that rewrites earlier turns causes no fork: the model still sees the turns
        as they were sampled.
        """
        messages = list(messages)
        turns = self._continued_by(messages)
        longest = next(turns, None)
        earlier: Messages = ()
        if longest is not None:
            earlier = self._longest_guarded if longest is self._longest_turn else longest.prompt.guarded
        # Those of the earlier turn are shared with it.
        new = messages[len(earlier) :]
        if longest is not None and new[0] == longest.answer:
            new[0] = longest.answer
        # An agent sends equal tools with each request.
        tools = longest.prompt.tools if longest is not None and longest.prompt.tools == list(tools) else list(tools)
        shown = [template.guard(message) for message in new]
        if all(guarded is message for guarded, message in zip(shown, new, strict=True)):
            shown = new
        guarded = [*earlier, *shown]
        try:
            rendered = template.render(guarded, tools, answer=True)
        except TemplateRefused:
            if longest is None or new[0] != longest.answer:
                raise
            rendered, guarded = _with_stand_in(template, longest, guarded, tools)
            shown = guarded

        def extended(turn: ChatTurn, piece: str, text: _Text) -> ChatPrompt:
            ids = turn.generation.tokens + template.encode(piece)
            added = _turns_of(template, turn, messages, guarded, tools, piece, len(ids))
            return ChatPrompt(longest, new, shown, tools, ids, text, len(messages), added)

        ends: dict[_Text, int] = {}
        for turn in () if longest is None else chain([longest], turns):
            if (rest := turn.text.rest(rendered, ends)) is not None:
                return extended(turn, rest, _Text(None, rendered))
            if turn is longest:
                # Before shorter ones, whose line would hold this answer in the template's form.
                after = _text_after(template, turn, new, guarded, tools, rendered, realign_rewritten)
                if after is not None:
                    self.realigned += 1
                    return extended(turn, after, _Text(turn.text, after))
        self.forked += longest is not None
        ids = Tokens.of(template.encode(rendered))
        return ChatPrompt(longest, new, shown, tools, ids, _Text(None, rendered), len(messages))

    def _continued_by(self, messages: list[dict[str, Any]]) -> Iterator[ChatTurn]:
        """Yield the turns that messages continue: the longest first, and of equally long ones the latest."""
        longest, known = self._longest_turn, self._longest_messages
        found = longest is not None and longest.is_continued_by(messages, known)
        if longest is not None and found:
            yield longest
        turns = _fitting(self._continuing, lambda turn: turn.is_continued_by(messages))
        turns.sort(key=_length, reverse=True)
        yield from turns[found:]

    def answered(
        self, template: AnswerTemplate, prompt: ChatPrompt, generation: Generation, answer: dict[str, Any]
    ) -> list[dict[str, Any]]:
        """Record `answer`, the message parsed from `generation`, so that the next prompt can continue it.

        Returns all messages, the answer included.
        """
        text = _Text(prompt.text, template.decode(generation.token_ids))
        turn = ChatTurn(prompt, generation, answer, text)
        self._turns[generation] = turn
        self._continuing.setdefault(prompt.before, []).append(turn)
        longest = self._longest_turn
        follows = prompt.before is longest
        messages = [*self._longest_messages, *prompt.new] if follows else prompt.messages
        if longest is None or _length(turn) > _length(longest):
            follows = follows and len(prompt.shown) < prompt.count
            self._longest_guarded = [*self._longest_guarded, *prompt.shown] if follows else prompt.guarded
            self._longest_messages, self._longest_turn = messages, turn
        return [*messages, answer]

    def lines(self) -> list[tuple[Generation, Line]]:
        """Return the last generation of each line and what the line is, in the order in which the lines ended."""
        return lines_of(self.generations, self._turns)

    def trajectories(
        self,
        reward: float | None = None,
        metrics: dict[str, float] | None = None,
        turn_rewards: Sequence[float] | None = None,
    ) -> list[Trajectory]:
        """Return one trajectory per line, in the order in which the lines ended.

        Each sampled token is trained in exactly one trajectory. All trajectories get the reward and the text of the
        last answer, so a reward function scores the whole sample. Only the last one carries the metrics, which are the
        sample's.

        ``turn_rewards`` are those of single generations, one for each: parts of the reward, which by default is their
        sum. Estimators that take rewards of tokens give each turn what it and the turns after it have got.

        Raises DataError without a generation, and for another number of rewards than there are generations.
        """
        if not self.generations:
            raise DataError("the workflow requested trajectories before it generated anything")
        if turn_rewards is not None:
            if len(turn_rewards) != len(self.generations):
                raise DataError(f"got {len(turn_rewards)} rewards for {len(self.generations)} turns")
            reward = sum(turn_rewards) if reward is None else reward
        of_turns = dict(zip(self.generations, turn_rewards or (), strict=False))
        lines = self.lines()
        trajectories: list[Trajectory] = []
        trained: set[Generation] = set()
        for leaf, line in lines:
            last = leaf is self.generations[-1]
            trajectories.append(
                leaf.trajectory(
                    reward,
                    text=self.generations[-1].text,
                    metrics=self._metrics(lines) | (metrics or {}) if last else None,
                    untrained=trained,
                    turn_rewards=of_turns,
                    line=line if len(lines) > 1 else None,
                )
            )
            trained.update(leaf.line())
        return trajectories

    def metrics(self) -> dict[str, float]:
        return self._metrics(self.lines())

    def _metrics(self, lines: Sequence[tuple[Generation, Line]]) -> dict[str, float]:
        kinds = Counter(line.kind for _, line in lines)
        return {
            "turns": float(len(self.generations)),
            "turns_realigned": float(self.realigned),
            "turns_forked": float(self.forked),
            "lines": float(len(lines)),
            "lines_sub_agent": float(kinds[SUB_AGENT]),
            "lines_retry": float(kinds[RETRY]),
            "lines_compacted": float(kinds[COMPACTED]),
        }


@dataclass(frozen=True, slots=True)
class Reply:
    """The assistant's turn of a chat, with all messages up to it."""

    # The parsed answer is the last one: "content", and "tool_calls" and "reasoning_content" if present.
    messages: list[dict[str, Any]]
    generation: Generation
    conversation: Conversation
    tool_calls: list[ToolCall] = field(default_factory=list)
    # Number of tool calls that begin but that the parser of the model's format cannot parse.
    malformed_calls: int = 0

    @property
    def text(self) -> str:
        """Everything that the model wrote, including reasoning and tool calls."""
        return self.generation.text

    @property
    def content(self) -> str:
        """The text without reasoning and tool calls."""
        return self.messages[-1]["content"]

    @property
    def finish_reason(self) -> str:
        return self.generation.finish_reason

    def trajectory(self, reward: float | None = None, metrics: dict[str, float] | None = None) -> Trajectory:
        """Return the line of turns that ends with this reply as one trajectory.

        If the conversation forked, use `trajectories`, which includes the other lines.
        """
        return self.generation.trajectory(reward, metrics=self.conversation.metrics() | (metrics or {}))

    def trajectories(
        self,
        reward: float | None = None,
        metrics: dict[str, float] | None = None,
        turn_rewards: Sequence[float] | None = None,
    ) -> list[Trajectory]:
        """Return all lines, with every sampled token trained once; see `Conversation.trajectories`."""
        return self.conversation.trajectories(reward, metrics, turn_rewards)


def _supports(line: Sequence[Generation]) -> Iterator[Support]:
    """The supports of the tokens of a line behind its prompt, of which those between generations had no choice."""
    at = len(line[0].prompt)
    for generation in line:
        start, end = len(generation.prompt), len(generation.tokens)
        yield Support.whole(start - at)
        yield generation.support or Support.whole(end - start)
        at = end


def _length(turn: ChatTurn) -> tuple[int, int]:
    return turn.prompt.count, turn.generation.number


def _fitting(continuing: Mapping[T | None, list[T]], fits: Callable[[T], bool]) -> list[T]:
    """Return all that fit, where what continues another one fits only if that does."""
    found: list[T] = []
    at: list[T | None] = [None]
    while at:
        fitting = [each for each in continuing.get(at.pop(), ()) if fits(each)]
        found += fitting
        at += fitting
    return found


def _with_stand_in(
    template: AnswerTemplate, turn: ChatTurn, guarded: list[dict[str, Any]], tools: Messages
) -> tuple[str, list[dict[str, Any]]]:
    """Render the messages with another form of the turn's answer, which the template rejects as the model wrote it.

    Only the text after the answer is needed, because the answer itself is represented by its tokens. Raises
    TemplateRefused if the template rejects every form.
    """
    answer, refusals = turn.answer, list[TemplateRefused]()
    bare = {"role": answer["role"], "content": answer["content"]}
    forms = [bare, bare | {"content": turn.generation.text.strip() or "..."}]
    if calls := answer.get("tool_calls"):
        calls = [call | {"function": call["function"] | {"arguments": _object(call)}} for call in calls]
        one = {"tool_calls": calls[:1]}
        forms = [answer | {"tool_calls": calls}, answer | one, bare | {"content": ""} | one, *forms]
    # The results of calls that could not be parsed get a call.
    called = [_called(*pair) for pair in pairwise(guarded)] + guarded[-1:]
    number = turn.prompt.count
    for form in (called[number], *map(template.guard, forms)):
        changed = [*called[:number], form, *called[number + 1 :]]
        try:
            return template.render(changed, tools, answer=True), changed
        except TemplateRefused as error:
            refusals.append(error)
    raise refusals[0]


def _called(message: dict[str, Any], following: dict[str, Any]) -> dict[str, Any]:
    """The message with a call in place of its content, if it has none, but a result follows."""
    if message["role"] != "assistant" or "tool_calls" in message or following["role"] != "tool":
        return message
    call = {"id": following.get("tool_call_id"), "type": "function", "function": {"name": "call", "arguments": {}}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _object(call: dict[str, Any]) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    return arguments if isinstance(arguments, dict) else {}


def _text_after(
    template: AnswerTemplate,
    turn: ChatTurn,
    new: Messages,
    guarded: Messages,
    tools: Messages,
    rendered: str,
    realign_rewritten: bool,
) -> str | None:
    """Return the text after the turn's answer, or None if the tokens up to there do not represent these messages."""
    if tools is not turn.prompt.tools or new[0] != turn.answer:
        return None
    try:
        if not realign_rewritten and not _renders_unchanged(template, turn, guarded, tools, rendered):
            return None
        return _after_answer(template, turn, guarded, tools)
    except DataError:
        # The template rejects a prefix or the marked variant of the messages, so the comparison is impossible.
        return None


def _renders_unchanged(
    template: AnswerTemplate, turn: ChatTurn, guarded: Messages, tools: Messages, rendered: str
) -> bool:
    """Return whether the template renders the text up to the answer unchanged, and the answer as when it was last."""
    count, prompt = turn.prompt.count, template.render(turn.prompt.guarded, tools, answer=True)
    before, done = (template.render(guarded[:number], tools, answer=False) for number in (count, count + 1))
    return any(
        prompt.startswith(earlier) and grown.startswith(earlier) and rendered.startswith(grown)
        for earlier in (before, *template.unended(before))
        for grown in (done, *template.unended(done))
    )


def _after_answer(template: AnswerTemplate, turn: ChatTurn, guarded: Messages, tools: Messages) -> str | None:
    marked, number = [*guarded], turn.prompt.count
    marked[number] = _marked(guarded[number])
    text = template.render(marked, tools, answer=True)
    if (at := text.rfind(_END)) < 0:
        return None
    # Where the text begins that the answer's tokens do not have, for each mark.
    rests = [
        (position, position + len(mark) * known)
        for mark, known in template.closings(turn.generation, calls="tool_calls" in marked[number])
        if (position := text.find(mark, at)) >= 0
    ]
    return text[min(rests)[1] :] if rests else None


def _turns_of(
    template: AnswerTemplate,
    turn: ChatTurn,
    messages: Messages,
    guarded: Messages,
    tools: Messages,
    added: str,
    end: int,
) -> tuple[Turn, ...]:
    """The turns between an answer and the `end` of a prompt that continues it by a text, one for each message.

    A turn ends with the text of its message; what the template writes before the next message belongs to that. Messages
    that cannot be told apart are one turn.
    """
    start = len(turn.generation.tokens)
    first = turn.prompt.count + 1
    called: dict[str, str] = {}
    # Role and name of each message.
    writers: list[tuple[str, str]] = []
    for message in messages[first - 1 :]:
        writers.append(
            (str(message.get("role", "")), str(message.get("name") or called.get(str(message.get("tool_call_id")), "")))
        )
        for call in message.get("tool_calls") or ():
            called[str(call.get("id"))] = str((call.get("function") or {}).get("name", ""))
    # The first is the answer itself, or another message in its place.
    if not (writers := writers[1:]):
        return ()
    cuts = _cuts(template, guarded, tools, added, first, end - start) if len(writers) > 1 else []
    if cuts is None:
        roles, names = (", ".join(dict.fromkeys(filter(None, words))) for words in zip(*writers, strict=True))
        writers, cuts = [(roles, names)], []
    bounds = [start, *(start + cut for cut in cuts), end]
    return tuple(
        Turn(start, end, role, name) for (start, end), (role, name) in zip(pairwise(bounds), writers, strict=True)
    )


def _cuts(
    template: AnswerTemplate, guarded: Messages, tools: Messages, added: str, first: int, tokens: int
) -> list[int] | None:
    """The numbers of added tokens up to the end of each message from the `first` to the last but one.

    None if the template does not render each of them once, in their order, or if it is unknown where tokens begin.
    """
    marked, marks = [*guarded], list[str]()
    for number, message in enumerate(marked[first:], first):
        if not isinstance(content := message.get("content"), str):
            return None
        # Templates may trim a content, but not within it.
        written = content.rstrip()
        marks.append(f"{_END}{number}")
        marked[number] = message | {"content": written + marks[-1] + content[len(written) :]}
    try:
        rest = template.render(marked, tools, answer=True)
    except DataError:
        return None
    starts = template.starts(added)
    rest = rest[-len(added) - sum(map(len, marks)) :]
    pieces: list[str] = []
    for mark in marks:
        piece, separator, rest = rest.partition(mark)
        pieces += [piece] if separator else []
    if starts is None or len(starts) != tokens or len(pieces) != len(marks) or "".join(pieces) + rest != added:
        return None
    cuts = [bisect_left(starts, at) for at in accumulate(map(len, pieces[:-1]))]
    return cuts if all(a < b for a, b in pairwise([0, *cuts, tokens])) else None


def _marked(answer: dict[str, Any]) -> dict[str, Any]:
    """Append the end mark to the answer: to its content and to each tool call.

    If an answer has tool calls, a template may render only those, or only the first.
    """
    marked = answer | {"content": (answer.get("content") or "") + _END}
    if calls := answer.get("tool_calls"):
        marked["tool_calls"] = [_marked_call(call) for call in calls]
    return marked


def _marked_call(call: dict[str, Any]) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    arguments = {**arguments, _END: _END} if isinstance(arguments, dict) else arguments + _END
    return call | {"function": call["function"] | {"arguments": arguments}}
