"""Contradictions of agents and the gateway with other keys."""

import pytest

from megasync.app.async_trainer import AsyncTrainer
from megasync.errors import ConfigError
from megasync.preflight.check import check_config

AGENT = "rollout.agent=json:dumps"
CHAT = "data.prompt.format=chat"


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["rollout.gateway.port=8000"], ["rollout.gateway.port=8000", "rollout.agent", "0"]),
        (["rollout.gateway.sampling=request"], ["rollout.gateway.sampling=request", "rollout.agent"]),
        (["timeouts.agent=5"], ["timeouts.agent=5", "rollout.agent"]),
        ([AGENT, "rollout.workflow=json:dumps"], [AGENT, "rollout.workflow=json:dumps", "remove one"]),
        ([AGENT, CHAT, "rollout.environment.kind=a:B"], [AGENT, "rollout.environment.kind=a:B", "remove one"]),
        ([AGENT, CHAT, "rollout.tools.functions=[a:b]"], [AGENT, "rollout.tools.functions=['a:b']", "remove one"]),
        ([AGENT, "rollout.gateway.host=0.0.0.0"], ["rollout.gateway.host=0.0.0.0", "auto"]),
        ([AGENT, "rollout.gateway.host='::'"], ["rollout.gateway.host=::", "auto"]),
        (["rollout.agent=json.dumps"], ["'json.dumps'", "package.module:function"]),
        ([AGENT, "rollout.gateway.sampling=mine"], ["'mine'", "configured, request"]),
        (
            [AGENT, "rollout.gateway.port=65534", "rollout.workers=3"],
            ["rollout.gateway.port=65534", "rollout.workers=3", "65536", "at most 65533"],
        ),
        ([AGENT, "rollout.gateway.port=70000"], ["70000", "at most 65535"]),
    ],
)
def test_a_contradiction_names_all_sides(make, overrides, parts):
    with pytest.raises(ConfigError) as caught:
        check_config(make(*overrides))
    assert all(part in str(caught.value) for part in parts), caught.value


def test_an_agent_with_gateway_settings_is_accepted(make):
    check_config(make(AGENT, "rollout.gateway.port=8000", "rollout.gateway.host=auto", "timeouts.agent=700"))


def test_an_agent_from_python_replaces_the_configured_one(make):
    config = make("rollout.gateway.port=8000")
    AsyncTrainer(config, agent=print)
    AsyncTrainer(make("rollout.workflow=json:dumps"), agent=print)
    with pytest.raises(ConfigError, match="rollout= and agent="):
        AsyncTrainer(config, agent=print, rollout=print)
