"""The section of chat messages and tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# The value of a key that is chosen from something else, such as the model.
AUTO = "auto"


@dataclass
class ChatConfig:
    """How chat messages become tokens, and answers become messages (docs/workflows.md)."""

    # Variables of the chat template in `client.chat`, for example {"enable_thinking": false}.
    template_options: dict[str, Any] = field(default_factory=dict)
    # SGLang's parser for the model's tool calls, such as qwen, hermes, llama3 or deepseekv3; auto asks the chat
    # template.
    tool_format: str | None = AUTO
    # SGLang's parser for reasoning, such as qwen3 or deepseek-r1; auto asks the chat template, null leaves it in the
    # text.
    reasoning_format: str | None = AUTO
    # When the chat template rewrites earlier turns, as by dropping their reasoning: fork (the model sees what a user's
    # would, and a trajectory of its own begins) or realign (it goes on seeing what it wrote, in one trajectory).
    rewritten_turns: str = "fork"
