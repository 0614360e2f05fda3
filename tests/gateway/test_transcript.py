"""Messages that an agent sends again are recognised without being converted again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec

from megasync.gateway.chat_completions import ChatExchange
from megasync.gateway.messages import MessagesExchange
from megasync.gateway.request import Kept, Request
from megasync.gateway.transcript import Transcript


def sent(messages: list[dict[str, Any]]) -> Request:
    """As parsed from a request: every object is new."""
    return ChatExchange(msgspec.json.encode({"messages": messages}), "tiny", Kept()).request


def reply(before: list[dict[str, Any]], text: str, reasoning: str = "") -> Any:
    answer = {"role": "assistant", "content": text} | ({"reasoning_content": reasoning} if reasoning else {})
    return SimpleNamespace(messages=[*before, answer], tool_calls=[])


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_each_turn_converts_only_its_new_messages(monkeypatch) -> None:
    converted: list[str] = []
    plain = Transcript._plain

    def counted(self: Transcript, message: Any, number: int) -> dict[str, Any]:
        converted.append(str(message["content"]))
        return plain(self, message, number)

    monkeypatch.setattr(Transcript, "_plain", counted)
    transcript, messages = Transcript(), []
    for turn in range(50):
        messages.append(user(f"question {turn}"))
        restored = transcript.restore(sent(messages))
        assert restored == messages
        transcript.answered(restored, reply(restored, f"answer {turn}"))
        messages.append({"role": "assistant", "content": f"answer {turn}"})
    assert len(converted) == 50 + 49


def test_where_a_cache_ends_makes_no_message_new(monkeypatch) -> None:
    """Agents that speak Anthropic's dialect move the mark to the latest messages with every request."""
    read: list[Any] = []
    plain = Transcript._plain

    def counted(self: Transcript, message: Any, number: int) -> dict[str, Any]:
        read.append(message["content"])
        return plain(self, message, number)

    monkeypatch.setattr(Transcript, "_plain", counted)
    transcript, words = Transcript(), ["a", "b", "c"]
    for count in (1, 2, 3):
        messages = [{"role": "user", "content": [{"type": "text", "text": word}]} for word in words[:count]]
        messages[-1]["content"][0]["cache_control"] = {"type": "ephemeral", "ttl": "1h"}
        body = msgspec.json.encode({"max_tokens": 9, "messages": messages})
        restored = transcript.restore(MessagesExchange(body, "tiny", Kept()).request)
        assert [message["content"] for message in restored] == words[:count]
    assert read == words


def test_an_answer_is_recognised_without_its_reasoning_in_alternating_conversations() -> None:
    transcript = Transcript()
    for turn in range(3):
        for name in ("a", "b"):
            messages = [user(name)]
            for earlier in range(turn):
                messages += [{"role": "assistant", "content": f"{name}{earlier}"}, user(f"more {earlier}")]
            restored = transcript.restore(sent(messages))
            answers = [message for message in restored if message["role"] == "assistant"]
            assert [answer["reasoning_content"] for answer in answers] == [f"because {name}"] * turn
            transcript.answered(restored, reply(restored, f"{name}{turn}", f"because {name}"))


def test_a_changed_earlier_message_is_not_taken_for_the_known_one() -> None:
    transcript = Transcript()
    restored = transcript.restore(sent([user("x")]))
    transcript.answered(restored, reply(restored, "y", "because"))
    changed = [user("z"), {"role": "assistant", "content": "y"}, user("more")]
    assert transcript.restore(sent(changed)) == changed
