"""Messages between two worlds: as agents send them, and as the conversation and the chat template know them.

Agents send an answer back as they were given it, or without its reasoning, or with the arguments of its calls written
anew. Invariant: an answer that still says what the model said is recognised, and stands for the very message that the
conversation noted, so that the next prompt goes on from the sampled tokens; any other stays as the agent sent it, and
forks. `restore` guarantees it.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from typing import Any

from megasync.gateway.chat_request import Call, Message
from megasync.rollout.generation import Reply


@dataclass(frozen=True, slots=True)
class _Given:
    """An answer, and the messages that it answered."""

    before: list[dict[str, Any]]
    answer: dict[str, Any]


class Transcript:
    """The answers of one session."""

    def __init__(self) -> None:
        # By the number of messages before them.
        self._given: dict[int, list[_Given]] = {}
        # Call ids: those of an answer count from 0, which agents that look a call up by its id cannot bear.
        self._ids: dict[str, str] = {}

    def restore(self, messages: list[Message]) -> list[dict[str, Any]]:
        """The messages for `client.chat`."""
        restored: list[dict[str, Any]] = []
        for message in messages:
            plain = self._plain(message)
            restored.append(self._known(plain, restored) or plain)
        return restored

    def answered(self, reply: Reply) -> dict[str, Any]:
        """Notes an answer; returns it as the agent gets it."""
        *before, answer = reply.messages
        self._given.setdefault(len(before), []).append(_Given(before, answer))
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

    def _new_id(self, known: str) -> str:
        given = f"call_{secrets.token_hex(12)}"
        self._ids[given] = known
        return given

    def _known(self, plain: dict[str, Any], before: list[dict[str, Any]]) -> dict[str, Any] | None:
        if plain["role"] != "assistant":
            return None
        for given in reversed(self._given.get(len(before), ())):
            dropped = "reasoning_content" not in plain
            said = {key: value for key, value in given.answer.items() if not (dropped and key == "reasoning_content")}
            if said == plain and given.before == before:
                return given.answer
        return None

    def _plain(self, message: Message) -> dict[str, Any]:
        content = message.content
        if not isinstance(content, str):
            content = "".join(part.text for part in content or ())
        # The name that newer OpenAI models have for it; chat templates know the older one.
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
        """Chat templates want the arguments parsed."""
        try:
            arguments = json.loads(call.function.arguments)
        except ValueError:
            arguments = None
        return {
            "id": self._ids.get(call.id, call.id),
            "type": "function",
            "function": {"name": call.function.name, "arguments": arguments if isinstance(arguments, dict) else {}},
        }
