"""What agents, tools and the gateway may be combined with; `refused.jsonl` has what they may not."""

import pytest

from megasync.app.async_trainer import AsyncTrainer
from megasync.errors import ConfigError
from megasync.preflight.check import check_config

AGENT = "rollout.agent=json:dumps"


def test_an_agent_with_gateway_settings_is_accepted(make):
    check_config(make(AGENT, "rollout.gateway.port=8000", "rollout.gateway.host=auto", "timeouts.agent=700"))


def test_tools_with_chat_messages_are_accepted(make):
    tools = ("rollout.tools.functions=[json:dumps]", "rollout.tools.max_turns=3", "rollout.chat.tool_format=qwen")
    check_config(make(*tools, "data.prompt.format=chat"))


def test_an_agent_from_python_replaces_the_configured_one(make):
    config = make("rollout.gateway.port=8000")
    AsyncTrainer(config, agent=print)
    AsyncTrainer(make("rollout.workflow=json:dumps"), agent=print)
    with pytest.raises(ConfigError, match="rollout= and agent="):
        AsyncTrainer(config, agent=print, rollout=print)
