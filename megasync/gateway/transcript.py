"""Maps messages between the form that agents send and the form that the conversation and the chat template use.

An agent sends an earlier answer back unchanged, without its reasoning, or with the arguments of its tool calls
serialised again. Invariant: an answer with the same content is recognised and replaced by the recorded message, so that
the next prompt continues from the sampled tokens. Any other answer is kept as the agent sent it, and the conversation
forks. `restore` guarantees it.

An agent sends all messages again with each request. Those that it has sent before are recognised by one comparison, so
only new ones are converted.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec

from megasync.data.messages import as_message
from megasync.gateway.chat_request import Message
from megasync.rollout.conversation import Reply

# The latest requests of a session whose messages are kept, for agents that alternate between conversations.
_REQUESTS_KEPT = 8


class Transcript:
    """The answers and tool call ids of one session."""

    def __init__(self) -> None:
        # (messages as sent, restored messages) of the latest requests.
        self._requests: deque[tuple[list[Message], list[dict[str, Any]]]] = deque(maxlen=_REQUESTS_KEPT)
        # (messages before an answer, the answer), by the number of those messages.
        self._answers: dict[int, list[tuple[list[dict[str, Any]], dict[str, Any]]]] = {}
        # Tool call ids that agents see, to the recorded ones. Recorded ids count from 0 in every answer, which breaks
        # agents that look up a call by its id.
        self._ids: dict[str, str] = {}

    def restore(self, messages: list[Message]) -> list[dict[str, Any]]:
        """The agent's messages in the form for `client.chat`, with known answers replaced by the recorded ones.

        Raises DataError for a message that cannot be shown to the model.
        """
        sent, before = self._continued(messages)
        restored = list(before)
        for number, message in enumerate(messages[len(sent) :], len(sent)):
            plain = self._plain(message, number)
            restored.append(self._known(plain, restored) or plain)
        # Shares the earlier messages, which would otherwise be kept once per request.
        self._requests.appendleft(([*sent, *messages[len(sent) :]], restored))
        return restored

    def answered(self, before: list[dict[str, Any]], reply: Reply) -> dict[str, Any]:
        """Records the answer to these restored messages and returns the message for the agent."""
        answer = reply.messages[-1]
        self._answers.setdefault(len(before), []).append((before, answer))
        message: dict[str, Any] = {"role": "assistant", "content": answer["content"], "refusal": None}
        if reasoning := answer.get("reasoning_content"):
            message["reasoning_content"] = reasoning
        if reply.tool_calls:
            message["content"] = answer["content"] or None
            message["tool_calls"] = [
                {
                    "id": self._new_id(call.id),
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.raw_arguments},
                }
                for call in reply.tool_calls
            ]
        return message

    def _continued(self, messages: list[Message]) -> tuple[Sequence[Message], Sequence[dict[str, Any]]]:
        """The longest earlier request that these messages begin with."""
        prefixes = [request for request in self._requests if messages[: len(request[0])] == request[0]]
        return max(prefixes, key=lambda request: len(request[0]), default=((), ()))

    def _new_id(self, call_id: str) -> str:
        shown = f"call_{secrets.token_hex(12)}"
        self._ids[shown] = call_id
        return shown

    def _known(self, plain: dict[str, Any], before: list[dict[str, Any]]) -> dict[str, Any] | None:
        if plain["role"] != "assistant":
            return None
        optional = {"reasoning_content"} - plain.keys()
        for messages, answer in reversed(self._answers.get(len(before), ())):
            if messages == before and {key: value for key, value in answer.items() if key not in optional} == plain:
                return answer
        return None

    def _plain(self, message: Message, number: int) -> dict[str, Any]:
        """The message in the form of `data/messages.py`, with the recorded ids of calls."""
        sent = msgspec.to_builtins(message)
        for call in sent["tool_calls"] or ():
            del call["index"]
            call["id"] = self._ids.get(call["id"], call["id"])
        if sent["tool_call_id"] is not None:
            sent["tool_call_id"] = self._ids.get(sent["tool_call_id"], sent["tool_call_id"])
        plain = as_message(sent, number)
        plain.pop("annotations", None)
        return plain
