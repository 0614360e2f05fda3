"""The chat template as a conversation uses it: finds what closes the answers that a server sampled."""

from __future__ import annotations

from megasync.data.chat_template import ChatTemplate
from megasync.rollout.generation import Generation


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
