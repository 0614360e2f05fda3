"""Supervised rows under the chat templates of model families: what is trained, and what is refused."""

from __future__ import annotations

import itertools
import json
from contextlib import nullcontext

import pytest
from chat_families import FAMILIES, Family

from megasync.config.schema import PromptConfig, SftConfig
from megasync.data.chat_template import ChatTemplate
from megasync.data.prompts import Renderer
from megasync.errors import DataError, TemplateRefused
from megasync.supervised.rows import SupervisedRenderer

ASK = {"role": "user", "content": "Weather?"}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]


def call(number=0, arguments=None, **keys):
    function = {"name": "weather", "arguments": {"city": "Oslo"} if arguments is None else arguments}
    return {"id": f"call_{number}", "type": "function", "function": function} | keys


def says(content, **keys):
    return {"role": "assistant", "content": content, **keys}


def result(number=0, content="sun"):
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": content}


CALL = [ASK, says("", tool_calls=[call()]), result(), says("It is sunny.")]
# Messages, and what a family may refuse them for.
CASES = {
    "one answer": ([ASK, says("It rains.")], ()),
    "two answers": ([ASK, says("It rains."), ASK, says("It still rains.")], ()),
    "system": ([{"role": "system", "content": "Be brief."}, ASK, says("It rains.")], ("system",)),
    "developer": ([{"role": "developer", "content": "Be brief."}, ASK, says("It rains.")], ("system",)),
    "one call": (CALL, ("calls",)),
    "two calls": (
        [ASK, says("", tool_calls=[call(), call(1)]), result(), result(1, "rain"), says("It is mixed.")],
        ("calls", "two calls"),
    ),
    "content and call": (
        [ASK, says("Let me look.", tool_calls=[call()]), result(), says("It is sunny.")],
        ("calls", "content and call"),
    ),
    "reasoning and call": (
        [ASK, says("", reasoning_content="I ask.", tool_calls=[call()]), result(), says("Sunny.", reasoning="So.")],
        ("calls", "reasoning"),
    ),
    "reasoning": ([ASK, says("It rains.", reasoning_content="Hm, clouds.")], ("reasoning",)),
}


def render(family: Family, messages, tools=None):
    """The tokens of each turn that is trained, as text, and the tokens that end one."""
    tokenizer = family.tokenizer()
    stops = tokenizer.convert_tokens_to_ids(family.stops)
    renderer = SupervisedRenderer(tokenizer, SftConfig(), PromptConfig(format="chat"), len(tokenizer), stops, 10**6)
    rows, _ = renderer.rows([{"messages": messages, "tools": tools}], "sft.train")
    assert "None" not in "".join(tokenizer.decode(row.ids) for row in rows)
    ends = {*family.stops, *([] if renderer.added_stop is None else [tokenizer.decode([renderer.added_stop])])}
    turns = []
    for row in rows:
        for own, part in itertools.groupby(zip(row.ids.tolist(), row.trained.tolist(), strict=True), lambda p: p[1]):
            if own:
                turns.append([tokenizer.decode([token]) for token, _ in part])
    return turns, ends


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", FAMILIES)
def test_each_turn_is_trained_up_to_the_token_at_which_a_server_stops(name, case):
    family, (messages, refusable) = FAMILIES[name], CASES[case]
    if family.refuses.intersection(refusable):
        with pytest.raises(DataError, match=r"sft\.train, row 0: .*(rejected \d messages|does not write)"):
            render(family, messages)
        return
    turns, ends = render(family, messages)
    answers = [message for message in messages if message["role"] == "assistant"]
    assert len(turns) == len(answers)
    for turn, message in zip(turns, answers, strict=True):
        *text, end = turn
        assert end in ends and ends.isdisjoint(text)
        assert message["content"] in "".join(text)
        assert message.get("reasoning_content", "") in "".join(text)
        assert "".join(text).count("Oslo") == len(message.get("tool_calls", ()))


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if "calls" not in family.refuses])
def test_one_conversation_in_its_usual_forms_gives_the_same_tokens(name):
    family, expected = FAMILIES[name], render(FAMILIES[name], CALL)
    empty = {"name": None, "tool_calls": None, "tool_call_id": None, "reasoning_content": None}
    args = {"city": "Oslo", "unit": None}
    for messages in (
        # OpenAI's wire format, and its older form.
        [ASK, says(None, tool_calls=[call(arguments='{"city": "Oslo"}')]), result(), says("It is sunny.")],
        [ASK, says(None, function_call={"name": "weather", "arguments": '{"city": "Oslo"}'}),
         {"role": "function", "name": "weather", "content": "sun"}, says("It is sunny.")],
        # As Arrow stores it: each message has all keys, and arguments have those of all rows.
        [empty | message for message in CALL[:1]] + [empty | says(None, tool_calls=[call(arguments=args)])]
        + [empty | message for message in CALL[2:]],
        # Parts, calls without ids, text of calls in a column.
        [ASK | {"content": [{"type": "text", "text": "Wea"}, {"type": "text", "text": "ther?", "image_url": None}]},
         says([], tool_calls=json.dumps([call(id=None)])), {"role": "tool", "content": "sun"},
         says([{"type": "text", "text": "It is sunny."}])],
    ):  # fmt: skip
        found = render(family, messages)
        if name not in ("kimi k2", "mistral"):  # which write ids
            assert found == expected


def test_tools_are_shown_as_objects_and_as_text_without_what_arrow_adds():
    family = FAMILIES["qwen 2.5"]

    def prompt(tools):
        renderer = Renderer(family.tokenizer(), PromptConfig(format="chat"), 10**6)
        return renderer.text({"prompt": "hi", "tools": tools})

    expected = prompt(TOOLS)
    assert "weather" in expected
    arrow = [{"type": "function", "strict": None, "function": TOOLS[0]["function"] | {"description": None}}]
    assert [prompt(tools) for tools in (json.dumps(TOOLS), arrow, [TOOLS[0]["function"]])] == [expected] * 3
    assert prompt(None) == prompt([]) == prompt("") != expected
    for wrong in ("[{", "{}", [{"function": {}}], ["weather"], 3):
        with pytest.raises(DataError, match=r"tools"):
            prompt(wrong)


@pytest.mark.parametrize("name", FAMILIES)
def test_only_a_template_that_rejects_results_of_calls_cannot_serve_tools(name):
    template = ChatTemplate(FAMILIES[name].tokenizer())
    with pytest.raises(TemplateRefused, match="must alternate") if name == "gemma 2" else nullcontext():
        template.check_tools(TOOLS)


def test_a_template_that_ends_no_turn_is_refused_with_the_fix():
    family = Family("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", ["<eos>"])
    with pytest.raises(DataError, match=r"no stop token after message 1.*<eos>.*generation_config\.json"):
        render(family, [ASK, says("It rains.")])
    with pytest.raises(DataError, match=r"ends message 1 with 'user: Weather\?.*not a stop token"):
        render(family, [ASK, says("It rains."), ASK, says("Still.")])


def test_options_of_the_template_change_prompts_and_supervised_rows():
    template = FAMILIES["qwen 2.5"].template.removesuffix("{% endif %}") + (
        "{% if quiet %}(quiet){% endif %}{% endif %}"
    )
    tokenizer = FAMILIES["qwen 2.5"]._replace(template=template).tokenizer()
    config = PromptConfig(format="chat", template_options={"quiet": True})
    assert Renderer(tokenizer, config, 10**6).text({"prompt": "hi"}).endswith("assistant\n(quiet)")
    stops = tokenizer.convert_tokens_to_ids(["<|im_end|>"])
    with pytest.raises(DataError, match=r"assistant\\n\(quiet\)', which is not what it writes"):
        SupervisedRenderer(tokenizer, SftConfig(), config, 10**6, stops, 999).rows([{"messages": CALL[:2]}], "x")
