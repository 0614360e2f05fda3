"""Rows for supervised training: token ids, and which of them are trained.

Of a conversation, the assistant's turns are trained. If the chat template marks them (`{% generation %}`), its marks
count. Otherwise the conversation is rendered up to each turn, and each piece is tokenized by itself, so that what is
trained are the tokens that a server would have to generate after the prompt. A template may rewrite earlier turns (some
leave out their reasoning): then each turn becomes a row of its own.

Of a row with a prompt and an answer, the answer and the end of the response are trained.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megasync.config.schema import PromptConfig, SftConfig
from megasync.data.outside_text import OutsideText
from megasync.data.render import Renderer
from megasync.data.template import fill
from megasync.errors import DataError

ASSISTANT = "assistant"
# How a chat template marks the assistant's turns.
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class TokenRow(NamedTuple):
    """``ids`` int32 [tokens]; ``trained`` bool [tokens], false at the first token, which nothing predicts."""

    ids: NDArray[np.int32]
    trained: NDArray[np.bool_]


class SupervisedRenderer:
    """Renders rows of at most `limit` tokens.

    `tokenizer` is a Hugging Face tokenizer; `stops` are the tokens that end a response.
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
        self._stops = frozenset(stops)
        self._outside = OutsideText(tokenizer)
        self._prompts = Renderer(tokenizer, prompt, vocab_size)
        template = getattr(tokenizer, "chat_template", None) or ""
        self._marks_turns = bool(_GENERATION.search(str(template)))

    def rows(self, rows: Sequence[Mapping[str, Any]], name: str) -> tuple[list[TokenRow], int]:
        """Rows of tokens, and how many were left out because they were too long.

        `name` is the key of the dataset. Raises DataError that names the row.
        """
        found: list[TokenRow] = []
        long = 0
        for number, row in enumerate(rows):
            try:
                rendered = self._row(row)
            except DataError as error:
                raise DataError(f"{name}, row {number}: {error}") from None
            for each in rendered:
                if len(each.ids) <= self._limit:
                    found.append(each)
                elif self._config.drop_long_rows:
                    long += 1
                else:
                    raise DataError(
                        f"{name}, row {number} has {len(each.ids)} tokens, more than sft.max_tokens={self._limit}; "
                        f"raise it, or set sft.drop_long_rows=true"
                    )
        if not found:
            raise DataError(f"{name}: all {long} rows are longer than sft.max_tokens={self._limit}; raise it")
        return found, long

    def _row(self, row: Mapping[str, Any]) -> list[TokenRow]:
        if "messages" in row:
            return self._conversation(row["messages"])
        answer = row.get(self._config.answer)
        if not isinstance(answer, str):
            raise DataError(
                f"the column {self._config.answer!r} (sft.answer) must be text, got {answer!r:.80}; the columns are "
                f"{sorted(map(str, row))}"
            )
        answer = fill("sft.answer_template", self._config.answer_template, {"answer": answer})
        if self._prompts.chat:
            return self._conversation([*self._prompts.messages(row), {"role": ASSISTANT, "content": answer}])
        if not self._stops:
            raise DataError("the model names no token that ends a response (eos_token_id in config.json); add it")
        end = self._tokenizer.eos_token_id
        end = min(self._stops) if end is None else end
        prompt, response = self._prompts.prompt_ids(row), [*self._outside.encode(self._outside.guard(answer)), end]
        return [self._checked([(prompt, False), (response, True)])]

    def _conversation(self, messages: Sequence[Mapping[str, Any]]) -> list[TokenRow]:
        if not self._tokenizer.chat_template:
            raise DataError("messages need a chat template, but the tokenizer of model.path has none")
        if not any(message["role"] == ASSISTANT for message in messages):
            raise DataError(f"no message has the role {ASSISTANT!r}, so nothing would be trained")
        guarded = self._outside.guard(messages)
        if self._marks_turns and guarded is messages:
            return [self._marked(messages)]
        pieces = self._turns(guarded)
        if pieces is not None:
            return [self._checked(self._encoded(pieces))]
        ends = [at + 1 for at, message in enumerate(messages) if message["role"] == ASSISTANT]
        return [self._checked(self._encoded(self._last_turn(guarded[:end]))) for end in ends]

    def _marked(self, messages: Sequence[Mapping[str, Any]]) -> TokenRow:
        rendered = self._tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, trained = rendered["input_ids"], rendered["assistant_masks"]
        return self._checked([([token], bool(own)) for token, own in zip(ids, trained, strict=True)])

    def _render(self, messages: Sequence[Mapping[str, Any]], generates: bool = False) -> str:
        return self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generates)

    def _turns(self, messages: Sequence[Mapping[str, Any]]) -> list[tuple[str, bool]] | None:
        """Pieces of text, and whether the assistant wrote them; None if the template rewrites earlier turns."""
        whole, at = self._render(messages), 0
        pieces: list[tuple[str, bool]] = []
        for number, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            before, after = self._render(messages[:number], generates=True), self._render(messages[: number + 1])
            if not (whole.startswith(after) and after.startswith(before) and len(before) >= at):
                return None
            pieces += [(whole[at : len(before)], False), (whole[len(before) : len(after)], True)]
            at = len(after)
        return pieces

    def _last_turn(self, messages: Sequence[Mapping[str, Any]]) -> list[tuple[str, bool]]:
        before, after = self._render(messages[:-1], generates=True), self._render(messages)
        if not after.startswith(before):
            raise DataError(
                f"the chat template writes something else before message {len(messages) - 1} than it does to ask for "
                f"it, so what the assistant wrote cannot be told; mark it in the template with {{% generation %}}"
            )
        return [(before, False), (after[len(before) :], True)]

    def _encoded(self, pieces: Sequence[tuple[str, bool]]) -> list[tuple[list[int], bool]]:
        """Tokens of each piece. What a template writes behind the end of a turn is not trained."""
        encoded: list[tuple[list[int], bool]] = []
        for text, own in pieces:
            ids = self._outside.encode(text)
            ends = [at for at, token in enumerate(ids) if token in self._stops] if own else []
            kept = ends[-1] + 1 if ends else len(ids)
            encoded += [(ids[:kept], own), (ids[kept:], False)]
        return encoded

    def _checked(self, pieces: Sequence[tuple[Sequence[int], bool]]) -> TokenRow:
        ids = np.array([token for tokens, _ in pieces for token in tokens], dtype=np.int64)
        trained = np.array([own for tokens, own in pieces for _ in tokens], dtype=np.bool_)
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
