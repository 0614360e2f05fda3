"""Refuses chat and tool settings that contradict each other, as `check` does for everything else."""

from __future__ import annotations

from megasync.config.limits import FUNCTION
from megasync.config.schema import Config, ToolsConfig
from megasync.errors import ConfigError
from megasync.rollout.reply_formats import check_formats


def check_chat(config: Config) -> None:
    """Raises ConfigError for the first contradiction."""
    rollout, prompt = config.rollout, config.data.prompt
    check_formats(rollout.chat)
    tools, defaults = rollout.tools, ToolsConfig()
    if not tools.functions:
        for key in ("max_turns", "timeout", "max_output"):
            if (value := getattr(tools, key)) != getattr(defaults, key):
                raise ConfigError(
                    f"rollout.tools.{key}={value} does nothing without rollout.tools.functions; name the tools there, or "
                    f"leave {key} at {getattr(defaults, key)}"
                )
        return
    for reference in tools.functions:
        if not FUNCTION.fullmatch(reference):
            raise ConfigError(f"rollout.tools.functions holds {reference!r}; write it as package.module:function")
    if rollout.workflow is not None:
        raise ConfigError(
            f"rollout.workflow={rollout.workflow!r} and rollout.tools.functions={list(tools.functions)} both say how a "
            f"sample is played; drop one (a workflow of your own may use the tools itself)"
        )
    if prompt.format != "chat":
        raise ConfigError(
            f"rollout.tools.functions need chat messages, but data.prompt.format={prompt.format}; set it to chat"
        )
    if rollout.chat.tool_format is None:
        raise ConfigError(
            f"rollout.tools.functions={list(tools.functions)} cannot be called with rollout.chat.tool_format=null; set it "
            f"to auto or to the model's format"
        )
