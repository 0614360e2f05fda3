"""Chat and tool settings that contradict each other."""

import pytest

from megasync.errors import ConfigError
from megasync.preflight.check import check_config

TOOLS = "rollout.tools.functions=[json:dumps]"
CHAT = "data.prompt.format=chat"


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["rollout.tools.max_turns=3"], ["rollout.tools.max_turns=3", "rollout.tools.functions"]),
        (["rollout.tools.timeout=3"], ["rollout.tools.timeout=3", "rollout.tools.functions"]),
        (["rollout.tools.functions=[json.dumps]", CHAT], ["'json.dumps'", "package.module:function"]),
        ([TOOLS], ["data.prompt.format=raw", "chat"]),
        ([TOOLS, CHAT, "rollout.workflow=json:dumps"], ["rollout.workflow='json:dumps'", "remove one"]),
        ([TOOLS, CHAT, "rollout.chat.tool_format=null"], ["rollout.chat.tool_format=null", "auto"]),
        (["rollout.chat.tool_format=hermit"], ["rollout.chat.tool_format='hermit'", "hermes"]),
        (["rollout.chat.reasoning_format=qwen"], ["rollout.chat.reasoning_format='qwen'", "qwen3"]),
        (["rollout.chat.rewritten_turns=drop"], ["rollout.chat.rewritten_turns='drop'", "fork, realign"]),
        ([TOOLS, CHAT, "rollout.tools.max_turns=0"], ["rollout.tools.max_turns=0", "at least 1"]),
    ],
)
def test_a_contradiction_names_all_sides(make, overrides, parts):
    with pytest.raises(ConfigError) as caught:
        check_config(make(*overrides))
    assert all(part in str(caught.value) for part in parts), caught.value


def test_tools_with_chat_messages_are_accepted(make):
    check_config(make(TOOLS, CHAT, "rollout.tools.max_turns=3", "rollout.chat.tool_format=qwen"))
