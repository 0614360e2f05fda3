"""Small chat templates that behave as those of model families do, and their tokenizers.

Each is written for these tests, with the manners of its family that matter here: what ends a turn, which form of
arguments, contents and ids it takes, and what it refuses.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from tiny_models import byte_tokenizer

ASK = "{% if add_generation_prompt %}"
DONE = "{% endif %}"
EACH = "{% for m in messages %}"
NEXT = "{% endfor %}"
SHOWN_TOOLS = "{% if tools %}[{{ tools | tojson }}]{% endif %}"


class Family(NamedTuple):
    """A template, the tokens that end a response in a server, and what the template cannot do."""

    template: str
    stops: list[str]
    refuses: frozenset[str] = frozenset()

    def tokenizer(self) -> Any:
        names = {*re.findall(r"<\|\w+\|>|<\w+>|\[\w+\]", self.template), *self.stops} - {"<tool_call>", "<think>"}
        tokenizer = byte_tokenizer(self.template)
        tokenizer.add_special_tokens({"additional_special_tokens": sorted(names - {"<eos>", "<bos>", "<pad>"})})
        tokenizer.eos_token = self.stops[0]
        return tokenizer


def chatml(assistant: str, tool: str = "<tool>{{ m.content }}</tool>", ask: str = "") -> str:
    """ChatML, with what the template writes for an assistant's message and for a result."""
    return (
        SHOWN_TOOLS + EACH + "<|im_start|>{% if m.role == 'assistant' %}assistant\n" + assistant + "{% elif m.role =="
        " 'tool' %}user\n" + tool + "{% else %}{{ m.role + '\n' + m.content }}{% endif %}<|im_end|>\n" + NEXT + ASK
        + "<|im_start|>assistant\n" + ask + DONE
    )  # fmt: skip


CALLS = "{% for c in m.tool_calls or [] %}{% set f = c.function %}"
JSON_CALLS = CALLS + '<tool_call>{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}</tool_call>' + NEXT
XML_CALLS = (
    CALLS
    + "<tool_call>{{ f.name }}{% for k, v in f.arguments | items %}({{ k }}={{ v }})"
    + NEXT
    + "</tool_call>"
    + NEXT
)
THOUGHT = "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
OLD_THOUGHT = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
)
RAISE = "{{ raise_exception('%s') }}"
IM = ["<|im_end|>", "<eos>"]

FAMILIES = {
    # Two calls are refused, and so is content beside a call: it is not written.
    "llama 3": Family(
        SHOWN_TOOLS + EACH + "<|start|>{{ 'ipython' if m.role == 'tool' else m.role }}<|stop|>\n\n"
        "{% if 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}" + RAISE % "one call at a time" + "{% endif %}"
        "{% set f = m.tool_calls[0].function %}"
        '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}'
        "{% else %}{{ m.content | trim }}{% endif %}<|eot_id|>" + NEXT + ASK + "<|start|>assistant<|stop|>\n\n" + DONE,
        ["<|eot_id|>", "<|eom_id|>"],
        frozenset({"two calls", "content and call", "reasoning"}),
    ),
    "qwen 2.5": Family(chatml("{{ m.content }}" + JSON_CALLS), IM, frozenset({"reasoning"})),
    # Its base models name another end in config.json.
    "qwen 2.5 base": Family(chatml("{{ m.content }}" + JSON_CALLS), ["<eos>"], frozenset({"reasoning"})),
    "qwen 3": Family(
        OLD_THOUGHT + chatml("{% if loop.index0 > ns.last %}" + THOUGHT + "{% endif %}{{ m.content }}" + JSON_CALLS), IM
    ),
    "qwen 3 coder": Family(chatml("{{ m.content }}" + XML_CALLS), IM, frozenset({"reasoning"})),
    # Arguments are text, and the type of a call is written.
    "deepseek 3": Family(
        "<bos>" + EACH + "{% if m.role == 'tool' %}<|out|>{{ m.content }}<|out_end|>{% elif m.role == 'assistant' %}"
        "<|Assistant|>{{ m.content }}{% for c in m.tool_calls or [] %}<|call|>{{ c.type + '<|sep|>' + c.function.name +"
        " '\n```json\n' + c.function.arguments + '\n```' }}{% endfor %}<eos>{% else %}<|{{ m.role }}|>{{ m.content }}"
        "{% endif %}" + NEXT + ASK + "<|Assistant|>" + DONE,
        ["<eos>"],
        frozenset({"reasoning"}),
    ),
    # Calls are written only if the content is null.
    "deepseek r1": Family(
        "<bos>" + EACH + "{% if m.role == 'assistant' %}<|Assistant|>{% if m.content is none %}{% for c in m.tool_calls"
        " %}<|call|>{{ c.function.name + c.function.arguments }}{% endfor %}{% else %}{{ m.content }}{% endif %}<eos>"
        "{% else %}<|{{ m.role }}|>{{ m.content }}{% endif %}" + NEXT + ASK + "<|Assistant|>" + DONE,
        ["<eos>"],
        frozenset({"reasoning", "content and call"}),
    ),
    # Ids have nine letters, and roles alternate.
    "mistral": Family(
        "<bos>{% set ns = namespace(n=0) %}" + EACH + "{% if m.role != 'tool' and m.tool_calls is not defined %}"
        "{% if m.role != 'system' and (m.role == 'user') != (ns.n % 2 == 0) %}" + RAISE % "roles must alternate" +
        "{% endif %}{% if m.role != 'system' %}{% set ns.n = ns.n + 1 %}{% endif %}{% endif %}"
        "{% if m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}" + RAISE % "ids of length 9" + "{% endif %}"
        "[RESULTS]{{ m.content }}[/RESULTS]{% elif m.tool_calls is defined %}[CALLS]{% for c in m.tool_calls %}"
        "{% if c.id | length != 9 %}" + RAISE % "ids of length 9" + "{% endif %}{{ c.function | tojson }}{{ c.id }}"
        "{% endfor %}<eos>{% elif m.role == 'assistant' %}{{ m.content }}<eos>{% else %}[INST]{{ m.content }}[/INST]"
        "{% endif %}" + NEXT,
        ["<eos>"],
        frozenset({"content and call", "reasoning"}),
    ),
    # What ends a turn is the first token of the next message.
    "glm 4.5": Family(
        SHOWN_TOOLS + EACH + "{% if m.role == 'tool' %}<|observation|>\n{{ m.content }}{% else %}<|{{ m.role }}|>\n"
        "{% if m.role == 'assistant' %}{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
        "{{ m.content }}" + XML_CALLS + "{% else %}{{ m.content }}{% endif %}{% endif %}" + NEXT + ASK
        + "<|assistant|>\n" + DONE + "{# <|user|><|system|> #}",
        ["<eos>", "<|user|>", "<|observation|>"],
    ),
    # System messages, tools and two messages of one role are refused; the newline after the end is not trained.
    "gemma 2": Family(
        "<bos>" + EACH + "{% if m.role == 'system' %}" + RAISE % "System role not supported" + "{% endif %}"
        "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}" + RAISE % "roles must alternate" + "{% endif %}"
        "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
        + NEXT + ASK + "<start_of_turn>model\n" + DONE,
        ["<eos>", "<end_of_turn>"],
        frozenset({"system", "calls", "reasoning"}),
    ),
    # An end of text is written where no answer is asked for.
    "phi 3": Family(
        EACH + "<|{{ m.role }}|>\n{{ m.content }}<|end|>\n" + NEXT + ASK + "<|assistant|>\n{% else %}<eos>" + DONE
        + "{# <|user|><|system|> #}",
        ["<eos>", "<|end|>"],
        frozenset({"calls", "reasoning"}),
    ),
    "smollm 2": Family(chatml("{{ m.content }}"), IM, frozenset({"calls", "reasoning"})),
    # Marks enclose the header too.
    "smollm 3": Family(
        EACH + "{% if m.role == 'assistant' %}{% generation %}<|im_start|>assistant\n{{ m.content }}<|im_end|>\n"
        "{% endgeneration %}{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}" + NEXT + ASK
        + "<|im_start|>assistant\n" + DONE,
        IM,
        frozenset({"calls", "reasoning"}),
    ),
    "command r": Family(
        EACH + "<|turn|>{% if m.role == 'assistant' and m.tool_calls %}<|action|>" + JSON_CALLS + "{% else %}<|text|>"
        "{{ m.content }}<|text_end|>{% endif %}<|turn_end|>" + NEXT + ASK + "<|turn|>" + DONE,
        ["<|turn_end|>"],
        frozenset({"content and call", "reasoning"}),
    ),
    # Ids are written, for calls and results.
    "kimi k2": Family(
        SHOWN_TOOLS + EACH + "<|im_{{ m.role }}|>{% if m.role == 'tool' %}{{ m.tool_call_id }}: {% endif %}"
        "{{ m.content }}" + CALLS + "<|call|>{{ c.id }}<|arguments|>{{ f.arguments | tojson }}" + NEXT + "<|im_end|>"
        + NEXT + ASK + "<|im_assistant|>" + DONE + "{# <|im_user|><|im_system|><|im_tool|> #}",
        ["<|im_end|>"],
        frozenset({"reasoning"}),
    ),
    # Channels, one call, thinking under another key and only up to the next answer, another end of earlier turns.
    "gpt-oss": Family(
        "{% set ns = namespace(done=-1) %}" + EACH + "{% if m.role == 'assistant' and not m.tool_calls %}"
        "{% set ns.done = loop.index0 - (loop.last and not add_generation_prompt) %}{% endif %}" + NEXT + SHOWN_TOOLS +
        EACH +
        "{% if m.role == 'assistant' %}{% if m.thinking and loop.index0 > ns.done %}<|start|>assistant"
        "<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}{% if m.tool_calls %}<|start|>assistant to="
        "{{ m.tool_calls[0].function.name }}<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
        "{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}{{ '<|return|>' if loop.last else"
        " '<|end|>' }}{% endif %}{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}" + NEXT
        + ASK + "<|start|>assistant" + DONE,
        ["<|return|>", "<|call|>"],
        frozenset({"two calls", "content and call"}),
    ),
    # A result without a call before it is refused; arguments that are no object are left out.
    "minimax": Family(
        "{% set ns = namespace(call=0) %}" + EACH + "{% if m.role == 'tool' and not ns.call %}" + RAISE % "no call" +
        "{% endif %}{% if m.role == 'assistant' %}{% set ns.call = m.tool_calls | length %}{% endif %}"
        "<|b|>{{ m.role }}\n" + THOUGHT + "{{ m.content }}" + XML_CALLS + "<|e|>\n" + NEXT + ASK
        + "<|b|>assistant\n" + DONE,
        ["<|e|>"],
    ),
}  # fmt: skip
