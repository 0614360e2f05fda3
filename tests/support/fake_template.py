"""A chat template and tokenizer with a switch for each of their irregularities."""

from __future__ import annotations

import json
import re

from megasync.errors import DataError

# Pairs that the tokenizer always encodes as one token. A model may still sample the two halves.
PAIRS = {"ab": 1000, "cd": 1001, "}}": 1002}
EOS = "$"
THOUGHT = re.compile(r"\(.*?\)")


class FakeTemplate:
    """One token per character, except for PAIRS. Messages are written `<role>content$`, after the list of tools.

    `forgets` drops reasoning (in parentheses) from answers before the last user message, as Qwen3 does. `tidies`
    collapses repeated spaces in answers. `refuses` rejects conversations that end with an assistant message.
    `hides_answers` omits the content of answers. `ends_calls` ends each tool call as a message.
    """

    def __init__(self, *, forgets=False, tidies=False, refuses=False, hides_answers=False, ends_calls=False):
        self.forgets, self.tidies, self.refuses, self.hides_answers = forgets, tidies, refuses, hides_answers
        self.between_calls = EOS if ends_calls else ""

    def guard(self, message):
        return message

    def render(self, messages, tools=(), *, answer):
        if self.refuses and messages[-1]["role"] == "assistant":
            raise DataError("refused")
        last = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
        text = f"[{','.join(t['function']['name'] for t in tools)}]" if tools else ""
        for number, message in enumerate(messages):
            content = message["content"]
            if message["role"] == "assistant":
                content += self.between_calls.join(
                    json.dumps(call["function"]) for call in message.get("tool_calls", [])
                )
                if self.forgets and number < last:
                    content = THOUGHT.sub("", content)
                if self.tidies:
                    content = re.sub(" +", " ", content)
                if self.hides_answers:
                    content = ""
            text += f"<{message['role']}>{content}{EOS}"
        return text + "<assistant>" * answer

    def encode(self, text):
        ids, at = [], 0
        while at < len(text):
            pair = PAIRS.get(text[at : at + 2])
            ids.append(ord(text[at]) if pair is None else pair)
            at += 1 if pair is None else 2
        return ids

    def starts(self, text):
        starts = [0]
        for token in self.encode(text):
            starts.append(starts[-1] + len(self.decode([token])))
        return starts[:-1]

    def decode(self, ids):
        names = {token: pair for pair, token in PAIRS.items()}
        return "".join(names.get(token) or chr(token) for token in ids)

    def unended(self, text):
        return []

    def closing(self, generation):
        ids = generation.token_ids
        return EOS if generation.finish_reason == "stop" and ids and ids[-1] == ord(EOS) else ""

    def closings(self, generation, *, calls):
        return [(EOS, bool(self.closing(generation)))]
