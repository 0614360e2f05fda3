"""The chat template as a conversation uses it: finds what closes the answers that a server sampled."""

from __future__ import annotations

from megasync.data.chat_template import ChatTemplate
from megasync.rollout.generation import Generation


class AnswerTemplate(ChatTemplate):
    """A chat template, and the token with which an answer ends."""

    def closing(self, generation: Generation) -> str:
        """Return the special token that ended the answer. Empty if it was truncated or ended by a stop string."""
        answered = len(generation.tokens) > len(generation.prompt)
        if generation.finish_reason != "stop" or not answered:
            return ""
        last = generation.tokens[-1]
        return self.decode([last]) if last in self._outside.special_ids or last == self.turn_end else ""

    def closings(self, generation: Generation) -> list[str]:
        """Return the texts that may end this answer in the rendered conversation."""
        end = "" if self.turn_end is None else self.decode([self.turn_end])
        ends = (self.closing(generation), end, self._tokenizer.eos_token)
        return [mark for mark in dict.fromkeys(ends) if mark]

    def answer_text(self, generation: Generation) -> str:
        """Return what the model wrote, with special tokens but without the one that closes the answer."""
        return self.decode(generation.token_ids).removesuffix(self.closing(generation))
