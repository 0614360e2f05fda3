"""Maps messages between the form that agents send and the form that the conversation and the chat template use.

An agent sends an earlier answer back unchanged, without its reasoning, or with the arguments of its tool calls
serialised again. Invariant: an answer with the same content is recognised and replaced by the recorded message, so that
the next prompt continues from the sampled tokens. Any other answer is kept as the agent sent it, and the conversation
forks. `restore` guarantees it, for all dialects alike, because it compares messages in the form of `data/messages.py`.

An agent sends all messages again with each request. Those that it has sent before are recognised by one comparison, so
only new ones are converted.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megasync.data.messages import Message, ReadMessages, add_message, as_message
from megasync.gateway.request import Request
from megasync.rollout.conversation import Reply
from megasync.rollout.tools import ToolCall

# The latest requests of a session whose messages are kept, for agents that alternate between conversations.
_REQUESTS_KEPT = 8


class Transcript:
    """The answers and tool call ids of one session."""

    def __init__(self) -> None:
        # (parts as sent, restored messages) of the latest requests.
        self._requests: deque[tuple[list[Any], list[Message]]] = deque(maxlen=_REQUESTS_KEPT)
        # (messages before an answer, the answer as the agent sees it, the answer). An earlier answer stands for all
        # messages up to itself: they are found under its `id`, or under None without one.
        self._answers: dict[int | None, list[tuple[list[Message], Message, Message]]] = {None: []}
        # Tool call ids that agents see, to the recorded ones. Recorded ids count from 0 in every answer, which breaks
        # agents that look up a call by its id.
        self._ids: dict[str, str] = {}

    def restore(self, request: Request) -> ReadMessages:
        """The agent's messages in the form for `client.chat`, with known answers replaced by the recorded ones.

        Raises DataError for a message that cannot be shown to the model.
        """
        sent, before = self._continued(request.sent)
        restored, new = ReadMessages(before), request.sent[len(sent) :]
        for part in new:
            for written in request.read(part):
                plain = self._plain(written, len(restored))
                known = self._known(plain, restored)
                if known is not None and getattr(part, "content", None) == known["content"]:
                    # One copy of the text instead of two.
                    part.content = known["content"]
                add_message(restored, known or plain)
        # Shares the earlier parts, which would otherwise be kept once per request.
        request.sent[: len(sent)] = sent
        self._requests.appendleft((list(request.sent), restored))
        return restored

    def answered(self, before: list[Message], reply: Reply, single_call: bool = False) -> list[ToolCall]:
        """Records the answer to these restored messages. Returns its calls as the agent sees them.

        With `single_call` the agent sees the first one only.
        """
        answer = shown = reply.messages[-1]
        calls = reply.tool_calls
        if single_call and len(calls) > 1:
            calls = calls[:1]
            shown = answer | {"tool_calls": answer["tool_calls"][:1]}
        earlier, since = self._split(before)
        if (entry := (since, shown, answer)) not in self._answers[earlier]:
            self._answers[earlier].append(entry)
            self._answers[id(answer)] = []
        return [replace(call, id=self._new_id(call.id)) for call in calls]

    def _continued(self, sent: list[Any]) -> tuple[Sequence[Any], Sequence[Message]]:
        """The longest earlier request that these parts begin with."""
        longest = sorted(self._requests, key=lambda request: len(request[0]), reverse=True)
        return next((request for request in longest if sent[: len(request[0])] == request[0]), ((), ()))

    def _new_id(self, call_id: str) -> str:
        shown = f"call_{secrets.token_hex(12)}"
        self._ids[shown] = call_id
        return shown

    def _known(self, plain: Message, before: list[Message]) -> Message | None:
        if plain["role"] != "assistant":
            return None
        optional = {"reasoning_content"} - plain.keys()
        earlier, since = self._split(before)
        for messages, shown, answer in reversed(self._answers[earlier]):
            if messages == since and {key: value for key, value in shown.items() if key not in optional} == plain:
                return answer
        return None

    def _split(self, messages: list[Message]) -> tuple[int | None, list[Message]]:
        """The `id` of the last message that is a recorded answer, which no other object takes, and those after it."""
        places = range(len(messages) - 1, -1, -1)
        at = next((number for number in places if id(messages[number]) in self._answers), None)
        return (None, messages[:]) if at is None else (id(messages[at]), messages[at + 1 :])

    def _plain(self, written: Mapping[str, Any], number: int) -> Message:
        """The message in the form of `data/messages.py`, with the recorded ids of calls."""
        plain = as_message(written, number)
        for call in plain.get("tool_calls", ()):
            call["id"] = self._ids.get(call["id"], call["id"])
        if (call_id := plain.get("tool_call_id")) is not None:
            plain["tool_call_id"] = self._ids.get(call_id, call_id)
        return plain
