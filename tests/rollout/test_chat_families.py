"""Conversations under the chat templates of model families: the second turn continues from the sampled tokens."""

from __future__ import annotations

import pytest
from chat_families import FAMILIES

from megasync.data.messages import as_messages
from megasync.errors import TemplateRefused
from megasync.rollout.chat import AnswerTemplate
from megasync.rollout.conversation import Conversation, Generation

ASK = {"role": "user", "content": "Weather?"}


def call(number=0, arguments=None):
    function = {"name": "weather", "arguments": {"city": "Oslo"} if arguments is None else arguments}
    return {"id": f"call_{number}", "type": "function", "function": function}


def says(content, *calls, **keys):
    return {"role": "assistant", "content": content, **({"tool_calls": list(calls)} if calls else {}), **keys}


# What a model may write: what its template can show, and what it cannot.
ANSWERS = {
    "text": says("It rains."),
    "one call": says("", call()),
    "two calls": says("", call(), call(1)),
    "content and call": says("Let me look.", call()),
    "reasoning and two calls": says("Look.", call(), call(1), reasoning_content="Hm."),
    "arguments that are not JSON": says("", call(arguments='{"city": ')),
    "arguments that are a list": says("", call(arguments="[1]")),
    "nested arguments": says("", call(arguments={"a": {"b": [None, {"c": "ü"}]}, "é": 1})),
    "no call that can be parsed": says("<tool_call>{"),
}
# Text of a result that is no valid Unicode.
RESULTS = {"sun \ud83d": "sun \ufffd", "\ud83d\ude00": "\U0001f600"}

# Cases in which the template rewrites earlier turns once a third one begins: it drops reasoning, or refuses two answers
# without a question between them.
REWRITTEN = {
    ("qwen 3", "reasoning and two calls"),
    ("gpt-oss", "reasoning and two calls"),
    ("mistral", "no call that can be parsed"),
}


class Talk:
    """A conversation of one family, in which the model writes any tokens."""

    def __init__(self, name):
        self.tokenizer = FAMILIES[name].tokenizer()
        self.stops = self.tokenizer.convert_tokens_to_ids(FAMILIES[name].stops)
        self.template, self.conversation = AnswerTemplate(self.tokenizer), Conversation()

    def turn(self, messages, message, stop, begin=()):
        prompt = self.conversation.prompt(self.template, as_messages(messages))
        if begin:
            prompt = prompt.begun(begin, self.template.decode(begin))
        ids = [*self.tokenizer.encode("what it wrote"), *([] if stop is None else [stop])]
        finish = "length" if stop is None else "stop"
        generation = self.conversation.record(Generation.of(prompt.ids, ids, [0.0] * len(ids), [0] * len(ids), finish))
        (answer,) = as_messages([message])
        self.conversation.answered(self.template, prompt, generation, answer)
        return [*prompt.messages, answer], generation

    def end(self, calls):
        """The stop token with which the family's models end an answer."""
        end = self.template.turn_end(self.stops)
        return (self.template.next_turn_end(self.stops, calls=True) or end) if calls and end in self.stops else end


def following(answer):
    calls = answer.get("tool_calls", ())
    if not calls and answer["content"].startswith("It"):
        return [ASK]
    # The result of a call that could not be parsed has no id.
    return [
        {"role": "tool", "content": text} | ({"tool_call_id": each["id"]} if each else {})
        for text, each in zip(RESULTS, calls or [None], strict=False)
    ]


@pytest.mark.parametrize("ended", [True, False], ids=["ended", "cut"])
@pytest.mark.parametrize("case", ANSWERS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_conversation_continues_from_its_tokens_whatever_the_model_wrote(name, case, ended):
    answer, talk = ANSWERS[case], Talk(name)
    follow = following(answer)
    said, first = talk.turn([ASK], answer, talk.end("tool_calls" in answer) if ended else None)
    if name == "gemma 2" and follow[0]["role"] == "tool":
        with pytest.raises(TemplateRefused, match="roles must alternate"):
            talk.turn([*said, *follow], says("done"), None)
        return
    said, second = talk.turn([*said, *follow], says("done"), talk.end(False))
    _, third = talk.turn([*said, ASK], says("bye"), talk.end(False))
    shown = talk.tokenizer.decode(second.prompt_ids)
    assert all(shown.count(RESULTS.get(message["content"], message["content"])) >= 1 for message in follow)
    assert second.parent is first
    assert third.parent is (None if (name, case) in REWRITTEN else second)
    # The end of the answer stands there once: the model's, or the template's.
    added = second.prompt_ids[len(first.tokens) :]
    if ended:
        assert added[0] != first.tokens[-1]
    else:
        assert added[0] in talk.tokenizer.all_special_ids


# Families whose template writes no calls.
CALLS_NOTHING = {"gemma 2", "phi 3", "smollm 2", "smollm 3"}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_demanded_call_begins_as_the_template_writes_it(name):
    talk = Talk(name)
    if name in CALLS_NOTHING:
        with pytest.raises(TemplateRefused, match="begins no answer with one"):
            talk.template.call_begin({"weather": "call_0"}, [])
        return
    id_of = "functions.{}:0" if name == "kimi k2" else "call_0"
    one, either = (
        talk.template.call_begin({each: id_of.format(each) for each in names}, [])
        for names in (["weather"], ["weather", "wind"])
    )
    assert one[: len(either)] == either
    assert "weather" in talk.template.decode(one) and "wea" not in talk.template.decode(either)
    asked = talk.template.render([ASK], [], answer=True)
    for arguments in ({}, {"city": "Oslo"}, {"a": {"b": [None]}}):
        whole = call(arguments=arguments) | {"id": id_of.format("weather")}
        rendered = talk.template.render(as_messages([ASK, says("", whole)]), [], answer=False)
        assert rendered.startswith(asked + talk.template.decode(one))
        assert talk.template.encode(rendered.removeprefix(asked))[: len(one)] == one
    # It is a part of the prompt, and the next turn continues it.
    said, first = talk.turn([ASK], says("", whole), talk.end(True), one)
    assert first.prompt_ids[-len(one) :] == one
    _, second = talk.turn([*said, *following(said[-1])], says("done"), talk.end(False), either)
    assert second.parent is first and second.prompt_ids[-len(either) :] == either
    (trajectory,) = talk.conversation.trajectories(1.0)
    sampled = [token for token, trained in zip(trajectory.response_ids, trajectory.loss_mask, strict=True) if trained]
    assert sampled == [*first.token_ids, *second.token_ids]
    assert [turn.end for turn in trajectory.turns][-1] == len(trajectory.response_ids)
