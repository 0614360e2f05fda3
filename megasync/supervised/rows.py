"""Rows for supervised training: token ids, and which of them are trained.

Of a conversation, the assistant's turns are trained. If the chat template marks them (`{% generation %}`), its marks
count. Otherwise the conversation is rendered up to each turn. Each piece of text is tokenized by itself, so that what
is trained are the tokens that a server would have to generate after the prompt. A template may rewrite earlier turns
(some leave out their reasoning): then each turn becomes a row of its own.

Of a row with a prompt and an answer, the answer and the end of the response are trained.

A message with `weight: 0`, as OpenAI's format for fine-tuning has it, is not trained.

Invariant: each trained turn ends with its first stop token, at which a server stops, and nothing behind it is trained.
`_ended` guarantees it, also for templates that leave the end to the next message.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megasync.config.schema import PromptConfig, SftConfig
from megasync.data.chat_template import ChatTemplate
from megasync.data.messages import ASSISTANT, Message, as_messages, as_tools
from megasync.data.outside_text import OutsideText, plain
from megasync.data.prompts import Renderer
from megasync.data.rows import fill
from megasync.errors import DataError, TemplateRefused, raised_as

_FIX = (
    "let the template end a turn with a stop token, or add the token that ends it to eos_token_id in "
    "generation_config.json"
)

# Text, and the number of the message if the assistant wrote it.
Piece = tuple[str, int | None]


class TokenRow(NamedTuple):
    """``ids`` int32 [tokens]; ``trained`` bool [tokens], false at the first token, which nothing predicts."""

    ids: NDArray[np.int32]
    trained: NDArray[np.bool_]


class SupervisedRenderer:
    """Renders rows of at most `limit` tokens.

    `tokenizer` is a Hugging Face tokenizer; `stops` are the tokens that end a response in a server. `added_stop` is the
    token with which the chat template ends a turn, if that is none of them; it counts as one of them here.
    """

    def __init__(
        self,
        tokenizer: Any,
        sft: SftConfig,
        prompt: PromptConfig,
        vocab_size: int,
        stops: Collection[int],
        limit: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._config = sft
        self._limit = limit
        self._vocab_size = vocab_size
        self._outside = OutsideText(tokenizer)
        self._prompts = Renderer(tokenizer, prompt, vocab_size)
        chats = bool(getattr(tokenizer, "chat_template", None))
        self._template = ChatTemplate(tokenizer, prompt.template_options) if chats else None
        end = self._template.turn_end(stops) if self._template else None
        self.added_stop = None if end in stops else end
        added: set[int] = set() if self.added_stop is None else {self.added_stop}
        self._stops = frozenset(stops) | added

    def rows(self, rows: Sequence[Mapping[str, Any]], name: str) -> tuple[list[TokenRow], int]:
        """Rows of tokens, and how many were left out because they were too long.

        `name` is the key of the dataset. Raises DataError that names the row.
        """
        kept: list[TokenRow] = []
        long = 0
        for number, row in enumerate(rows):
            with raised_as(DataError, f"{name}, row {number}", of=DataError):
                rendered = self._row(row)
            for each in rendered:
                if len(each.ids) <= self._limit:
                    kept.append(each)
                elif self._config.drop_long_rows:
                    long += 1
                else:
                    raise DataError(
                        f"{name}, row {number} has {len(each.ids)} tokens, more than sft.max_tokens={self._limit}; "
                        f"raise it, or set sft.drop_long_rows=true"
                    )
        if not kept:
            raise DataError(f"{name}: all {long} rows are longer than sft.max_tokens={self._limit}; raise it")
        return kept, long

    def _row(self, row: Mapping[str, Any]) -> list[TokenRow]:
        tools = as_tools(row.get("tools"))
        if "messages" in row:
            return self._conversation(as_messages(row["messages"]), tools)
        answer = row.get(self._config.answer)
        if not isinstance(answer, str):
            raise DataError(
                f"the column {self._config.answer!r} (sft.answer) must be text, got {answer!r:.80}; the columns are "
                f"{sorted(map(str, row))}"
            )
        answer = fill("sft.answer_template", self._config.answer_template, {"answer": answer})
        if self._prompts.chat:
            answered = as_messages([*self._prompts.messages(row), {"role": ASSISTANT, "content": answer}])
            return self._conversation(answered, tools)
        if not self._stops:
            raise DataError("the model names no token that ends a response (eos_token_id in config.json); add it")
        end = self._tokenizer.eos_token_id
        end = min(self._stops) if end is None else end
        prompt, response = self._prompts.prompt_ids(row), [*self._outside.encode(self._outside.guard(answer)), end]
        return [self._checked([(prompt, False), (response, True)])]

    def _conversation(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[TokenRow]:
        if self._template is None:
            raise DataError("messages need a chat template, but the tokenizer of model.path has none")
        ends = [at + 1 for at, message in enumerate(messages) if message["role"] == ASSISTANT]
        if not ends:
            raise DataError(f"no message has the role {ASSISTANT!r}, so nothing would be trained")
        ends = [end for end in ends if _weight(messages[end - 1], end - 1)]
        if not ends:
            raise DataError(f"all messages with the role {ASSISTANT!r} have weight 0, so nothing would be trained")
        rendering = _Rendering(self._template, self._template.guard(messages), tools)
        pieces = rendering.marked() if self._template.marks_answers else rendering.turns()
        if pieces is not None:
            return [self._ended(pieces, messages)]
        last_turn = rendering.last_marked if self._template.marks_answers else rendering.last_turn
        return [self._ended(last_turn(end), messages[:end]) for end in ends]

    def _ended(self, pieces: Sequence[Piece], messages: Sequence[Message]) -> TokenRow:
        """The row of these pieces, in which each turn is trained up to the stop token that ends it."""
        assert self._template is not None
        encoded: list[tuple[list[int], bool]] = []
        last_pieces = {turn: at for at, (_, turn) in enumerate(pieces)}
        # The turn whose text has begun, or has already ended with a stop token.
        begun = ended = None
        for number, (text, turn) in enumerate(pieces):
            ids = self._template.encode(text)
            at = next((at + 1 for at, token in enumerate(ids) if token in self._stops), 0)
            if turn is not None:
                kept = 0 if turn == ended else at or len(ids)
                encoded += [(ids[:kept], _weight(messages[turn], turn)), (ids[kept:], False)]
                begun, ended = turn, turn if at else ended
                continue
            if begun not in (None, ended) and number > last_pieces[begun] and ids:
                # The template writes the end outside its marks, or as the beginning of the next message.
                between = self._template.decode(ids[: at - 1 if at else None]).strip()
                if not at or between:
                    raise DataError(
                        f"the chat template ends message {begun} with {between!r:.80}, which is not a stop token, so a "
                        f"server would not stop there; {_FIX}"
                    )
                encoded.append((ids[:at], _weight(messages[begun], begun)))
                ids, ended = ids[at:], begun
            encoded.append((ids, False))
        if begun != ended:
            # Only the next message would end it.
            end = self._template.next_turn_end(self._stops, calls="tool_calls" in messages[begun or 0])
            if end is None:
                names = ", ".join(sorted(self._template.decode([token]) for token in self._stops)) or "none"
                raise DataError(
                    f"the chat template writes no stop token after message {begun}, so a server would not stop there; "
                    f"the model's stop tokens are {names}; {_FIX}"
                )
            encoded.append(([end], _weight(messages[begun or 0], begun or 0)))
        return self._checked(encoded)

    def _checked(self, pieces: Sequence[tuple[Sequence[int], bool]]) -> TokenRow:
        ids = np.array([token for tokens, _ in pieces for token in tokens], dtype=np.int64)
        trained = np.array([is_trained for tokens, is_trained in pieces for _ in tokens], dtype=np.bool_)
        trained[:1] = False
        if not trained.any():
            raise DataError("no token would be trained, because the assistant's turns are empty")
        if wrong := ids[(ids < 0) | (ids >= self._vocab_size)].tolist():
            raise DataError(
                f"token id {wrong[0]} is outside the model's vocabulary of {self._vocab_size}; the tokenizer does not "
                f"belong to this model"
            )
        # Nothing after the last trained token has an effect.
        used = int(np.flatnonzero(trained)[-1]) + 1
        return TokenRow(ids[:used].astype(np.int32), trained[:used])


class _Rendering:
    """A conversation as a template writes it, in pieces. `messages` are guarded."""

    def __init__(self, template: ChatTemplate, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> None:
        self._template = template
        self._messages = messages
        self._tools = tools

    def marked(self) -> list[Piece] | None:
        """The whole conversation as the template marks it; None if the template rewrites earlier turns."""
        marked = self._template.marked(self._messages, self._tools)
        text_of_all, writers = "".join(text for text, _ in marked), list[int]()
        for number, message in enumerate(self._messages):
            if message["role"] == ASSISTANT:
                turn = self.last_marked(number + 1)
                if not text_of_all.startswith("".join(text for text, _ in turn)):
                    return None
                writers += [number] * sum(writer is not None for _, writer in turn)
        if sum(is_marked for _, is_marked in marked) != len(writers):
            return None
        return self._without_headers([(text, writers.pop(0) if is_marked else None) for text, is_marked in marked])

    def last_marked(self, end: int) -> list[Piece]:
        """The last of the first `end` messages as the template marks it."""
        marked = self._template.marked(self._messages[:end], self._tools)
        before = self._template.marked(self._messages[: end - 1], self._tools) if end > 1 else []
        # Text and marked text alternate, so what is marked in both belongs to earlier messages.
        earlier = len(before) // 2 * 2
        last: list[Piece] = [
            (text, end - 1 if is_marked and number >= earlier else None)
            for number, (text, is_marked) in enumerate(marked)
        ]
        self._check_written(end, "".join(text for text, writer in last if writer is not None))
        return self._without_headers(last)

    def _without_headers(self, pieces: Sequence[Piece]) -> list[Piece]:
        """The same, if the marks enclose what a prompt already ends with when it asks for an answer."""
        header, parts = self._template.header, list[Piece]()
        for text, writer in pieces:
            inside = writer is not None and bool(header) and text.startswith(header)
            parts += [(header, None), (text[len(header) :], writer)] if inside else [(text, writer)]
        return parts

    def turns(self) -> list[Piece] | None:
        """The turns of the whole conversation as they are asked for; None if the template rewrites earlier ones."""
        text, at = self._render(len(self._messages), False), 0
        pieces: list[Piece] = []
        for number, message in enumerate(self._messages):
            if message["role"] != ASSISTANT:
                continue
            before, after = self._render(number, True), self._render(number + 1, False)
            if not (text.startswith(after) and after.startswith(before) and len(before) >= at):
                return None
            self._check_written(number + 1, after[len(before) :])
            pieces += [(text[at : len(before)], None), (text[len(before) : len(after)], number)]
            at = len(after)
        return [*pieces, (text[at:], None)]

    def last_turn(self, end: int) -> list[Piece]:
        """The last of the first `end` messages as it is asked for."""
        before, after = self._render(end - 1, True), self._render(end, False)
        if not after.startswith(before):
            # Some templates leave out what was thought before earlier calls as soon as there is an answer.
            messages = [_thoughtless(message) for message in self._messages[: end - 1]]
            prompt = self._template.render(messages, self._tools, answer=True)
            messages.append(self._messages[end - 1])
            if not after.startswith(prompt) or after != self._template.render(messages, self._tools, answer=False):
                raise DataError(
                    f"the chat template ends the prompt for message {end - 1} with {plain(before[-40:])!r}, which is "
                    f"not what it writes before that message, so a server would not be asked for what is trained. "
                    f"Change that by the template's options (data.prompt.template_options), give the message what the "
                    f"template expects, such as reasoning, or mark answers in the template with {{% generation %}}"
                )
            after = before + after[len(prompt) :]
        self._check_written(end, after[len(before) :])
        return [(before, None), (after[len(before) :], end - 1)]

    def _render(self, end: int, answer: bool) -> str:
        if end == 0:
            # No template takes an empty conversation: what a prompt for the first message would be.
            text, header = self._render(1, False), self._template.header
            before, found, _ = text.partition(header)
            if not (header and found):
                raise DataError("the chat template shows no beginning of message 0; let a user's message come first")
            return before + found
        return self._template.render(self._messages[:end], self._tools, answer=answer)

    def _check_written(self, end: int, text: str) -> None:
        """Raises DataError for what the last of the first `end` messages has and the template did not write."""
        *before, message = self._messages[:end]
        for key in ("reasoning_content", "content"):
            if message.get(key, "").strip().rpartition("\n")[2] not in text:
                raise DataError(
                    f"the chat template does not write the {key} of message {end - 1}, so it would not be trained; "
                    f"leave it out, or write it as the template expects it"
                )
        if calls := message.get("tool_calls"):
            fewer = {key: value for key, value in message.items() if key != "tool_calls"}
            fewer |= {"tool_calls": calls[:-1]} if calls[1:] else {}
            try:
                same = self._render(end, False) == self._template.render([*before, fewer], self._tools, answer=False)
            except TemplateRefused:
                return
            if same:
                raise DataError(
                    f"the chat template does not write call {len(calls) - 1} of message {end - 1}, so it would not be "
                    f"trained; write calls into the content as the model writes them"
                )


def _weight(message: Message, number: int) -> bool:
    """Whether a message is trained."""
    weight = message.get("weight", 1)
    if weight not in (0, 1):
        raise DataError(
            f"message {number} has weight={weight!r:.40}; it must be 1, or 0 for a turn that is not trained"
        )
    return bool(weight)


def _thoughtless(message: Message) -> Message:
    """A message without reasoning, and without content beside its calls, which some templates take for reasoning."""
    kept = {key: value for key, value in message.items() if key != "reasoning_content"}
    return kept | {"content": ""} if "tool_calls" in message else kept
