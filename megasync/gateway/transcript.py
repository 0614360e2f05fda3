"""Maps messages between the form that agents send and the form that the conversation and the chat template use.

An agent sends an earlier answer back unchanged, without its reasoning, or with the arguments of its tool calls
serialised again. Invariant: an answer with the same content is recognised and replaced by the recorded message, so that
the next prompt continues from the sampled tokens. Any other answer is kept as the agent sent it, and the conversation
forks. `restore` guarantees it.

An agent sends all messages again with each request. Those that it has sent before are recognised by one comparison, so
only new ones are converted.
"""

from __future__ import annotations

import json
import secrets
from collections import deque
from collections.abc import Sequence
from typing import Any

from megasync.gateway.chat_request import Call, Message
from megasync.rollout.generation import Reply

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
        """The agent's messages in the form for `client.chat`, with known answers replaced by the recorded ones."""
        sent, before = self._continued(messages)
        restored = list(before)
        for message in messages[len(sent) :]:
            plain = self._plain(message)
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
        known = [request for request in self._requests if messages[: len(request[0])] == request[0]]
        return max(known, key=lambda request: len(request[0]), default=((), ()))

    def _new_id(self, known: str) -> str:
        shown = f"call_{secrets.token_hex(12)}"
        self._ids[shown] = known
        return shown

    def _known(self, plain: dict[str, Any], before: list[dict[str, Any]]) -> dict[str, Any] | None:
        if plain["role"] != "assistant":
            return None
        optional = {"reasoning_content"} - plain.keys()
        for messages, answer in reversed(self._answers.get(len(before), ())):
            if messages == before and {key: value for key, value in answer.items() if key not in optional} == plain:
                return answer
        return None

    def _plain(self, message: Message) -> dict[str, Any]:
        content = message.content
        if not isinstance(content, str):
            content = "".join(part.text for part in content or ())
        # Newer OpenAI models call the system role "developer"; chat templates know only "system".
        role = "system" if message.role == "developer" else message.role
        plain: dict[str, Any] = {"role": role, "content": content}
        if message.name is not None:
            plain["name"] = message.name
        if message.reasoning_content:
            plain["reasoning_content"] = message.reasoning_content
        if message.tool_call_id is not None:
            plain["tool_call_id"] = self._ids.get(message.tool_call_id, message.tool_call_id)
        if message.tool_calls:
            plain["tool_calls"] = [self._call(call) for call in message.tool_calls]
        return plain

    def _call(self, call: Call) -> dict[str, Any]:
        """The call with parsed arguments, as chat templates require; {} for arguments that are not a JSON object."""
        try:
            arguments = json.loads(call.function.arguments)
        except ValueError:
            arguments = None
        return {
            "id": self._ids.get(call.id, call.id),
            "type": "function",
            "function": {"name": call.function.name, "arguments": arguments if isinstance(arguments, dict) else {}},
        }
