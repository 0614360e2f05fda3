"""Chat over a real server: SGLang's parsers behind its endpoints, conversations and episodes across weight updates."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
from real_servers import make_server
from tiny_models import make_tiny_model

from megasync.config.schema import SamplingConfig
from megasync.rollout.client import RequestSettings, RolloutClient, ServedModel
from megasync.rollout.reply_parser import ReplyParser
from megasync.serving.control import ServerControl

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="module")]

TEMPLATE = (
    "{% for m in messages %}<bos>{{ m['role'] }}: {{ m['content'] }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant: {% endif %}"
)
CALL = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
LATER = '{"name": "nothing_of_the_kind", "arguments": {}}'
DEEPSEEK = "\n".join(
    f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"
    for name, arguments in (("add", '{"a": 1, "b": 2}'), ("nothing_of_the_kind", "{}"))
)
SCHEMA = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


@dataclass
class Served:
    model: Path
    server: ServerControl
    client: RolloutClient


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    model = make_tiny_model(folder / "model", chat_template=TEMPLATE)
    server = make_server(model, folder / "server.log", 1)
    control = ServerControl(await server.start(180))
    client = RolloutClient(
        control.url,
        [control],
        ServedModel(300, 1024, _tokenizer(model)),
        RequestSettings(SamplingConfig(max_new_tokens=12), 60.0),
    )
    try:
        yield Served(model, control, client)
    finally:
        await client.close()
        await control.close()
        await server.stop(5)


def _tokenizer(model):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


READ = [("add", {"a": 1, "b": 2}), ("nothing_of_the_kind", {})]


@pytest.mark.parametrize(
    ("format", "text", "calls"),
    [
        ("qwen", f"So.<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{LATER}\n</tool_call>", READ),
        ("hermes", f"So.<tool_call>{CALL}</tool_call><tool_call>{LATER}</tool_call>", READ),
        ("llama3", f"So.<|python_tag|>{CALL};{LATER}", READ),
        ("deepseekv3", f"So.<｜tool▁calls▁begin｜>{DEEPSEEK}<｜tool▁calls▁end｜>", READ),
        ("qwen", '<tool_call>\n{"name": "add", "argu\n</tool_call>', []),
        ("hermes", '<tool_call>{"name": "add", "argu</tool_call>', []),
        ("llama3", '<|python_tag|>{"name": "add", "argu', []),
        ("deepseekv3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function add<｜tool▁calls▁end｜>", []),
    ],
)
async def test_each_format_gives_its_calls_unknown_ones_too_and_counts_those_that_cannot_be_read(
    served, format, text, calls
):
    parsed = await ReplyParser(lambda: [served.server], 30.0).parse(text, [SCHEMA], format, None)
    assert [(call.name, call.arguments) for call in parsed.calls] == calls
    assert (parsed.content, parsed.malformed) == (("So.", 0) if calls else (text, 1))


@pytest.mark.parametrize("format", ["qwen3", "qwen3-thinking", "deepseek-r1"])
async def test_reasoning_is_set_apart(served, format):
    text = "Hm.</think>4" if format != "qwen3" else "<think>Hm.</think>4"
    parsed = await ReplyParser(lambda: [served.server], 30.0).parse(text, [], None, format)
    assert (parsed.reasoning.strip(), parsed.content.strip()) == ("Hm.", "4")
