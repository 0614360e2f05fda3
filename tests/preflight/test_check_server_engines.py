"""What is refused for servers with prefill and decode engines."""

import pytest

from megasync.config.pools import pool_specs
from megasync.config.schema import Config
from megasync.errors import ConfigError
from megasync.preflight import check_server_engines as checks
from megasync.preflight.check import check_config, model_layout
from megasync.preflight.check_server_engines import check_server_engines

ENGINES = [*("rollout.servers=1", "rollout.prefill_engines=1", "rollout.decode_engines=2"), "sync.pause_mode=abort"]
GIVEN = "rollout.prefill_engines=1 and decode_engines=2"


@pytest.fixture(autouse=True)
def nixl(monkeypatch):
    """Whether nixl is installed: it is, unless the test sets this to false."""
    installed = {"nixl": True}
    monkeypatch.setattr(checks, "find_spec", lambda name: object() if installed[name] else None)
    return installed


def refused(config: Config, planning: bool = False) -> str:
    """Why the engines of a configuration are refused, whatever other checks say about it."""
    layout, _ = model_layout(config)
    with pytest.raises(ConfigError) as caught:
        check_server_engines(config, layout, planning=planning)
    return str(caught.value)


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["rollout.tensor_parallel=2"],
        ["rollout.prefill_engines=2", "rollout.decode_engines=1"],
        ["sync.transport=disk"],
        ["sync.transport=p2p"],
        ["reward_models.one={path: /nowhere, kind: classifier, pool: own}"],
    ],
    ids=" ".join,
)
def test_a_server_may_have_prefill_and_decode_engines(make, more):
    config = make(*ENGINES, *more)
    layout, _ = model_layout(config)
    check_server_engines(config, layout, planning=False)


def test_a_whole_configuration_with_engines_passes(make):
    check_config(make(*ENGINES))


def test_a_whole_configuration_is_checked_for_what_engines_do_not_support(make):
    with pytest.raises(ConfigError, match="not possible with rollout.deterministic=true"):
        check_config(make(*ENGINES, "rollout.deterministic=true"))


def test_servers_of_one_engine_are_not_restricted(make, nixl):
    nixl["nixl"] = False
    config = make("sync.pause_mode=retract", "rollout.deterministic=true", "rollout.pipeline_parallel=2")
    layout, _ = model_layout(config)
    layout.hf_config["model_type"] = "another"
    check_server_engines(config, layout, planning=False)


@pytest.mark.parametrize(("prefill", "decode"), [(1, 0), (0, 1)])
def test_engines_of_one_kind_alone_are_refused(make, prefill, decode):
    config = make(f"rollout.prefill_engines={prefill}", f"rollout.decode_engines={decode}", "sync.pause_mode=abort")
    message = refused(config)
    assert f"rollout.prefill_engines={prefill} and decode_engines={decode}: " in message
    assert "at least one of each kind, or none of both" in message


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_pause_that_does_not_abort_is_refused(make, mode):
    message = refused(make(*ENGINES, f"sync.pause_mode={mode}"))
    assert f"{GIVEN} with sync.pause_mode={mode}: " in message and "set sync.pause_mode=abort" in message


REFUSED = {
    "rollout.external=['http://a:1']": ["rollout.external=[http://a:1]"],
    "sync.transport=broadcast": ["sync.transport=broadcast"],
    "sync.transport=adapters": ["sync.transport=adapters", "trainer.lora.rank=4"],
    "rollout.routing_replay=true": ["rollout.routing_replay=true"],
    "rollout.sampling.top_k=20": ["rollout.sampling.top_k=20"],
    "rollout.deterministic=true": ["rollout.deterministic=true"],
    "rollout.fp8=true": ["rollout.fp8=true"],
    "rollout.expert_parallel=2": ["rollout.expert_parallel=2"],
    "rollout.pipeline_parallel=2": ["rollout.pipeline_parallel=2"],
    "rollout.attention_data_parallel=2": ["rollout.attention_data_parallel=2"],
    "reward_models.one.pool=rollout": ["reward_models.one={path: /nowhere, kind: classifier, pool: rollout}"],
    "teachers.two.pool=rollout": ["teachers.two={path: /nowhere, pool: rollout}"],
}


@pytest.mark.parametrize(("named", "overrides"), REFUSED.items(), ids=REFUSED)
def test_what_engines_do_not_support_is_refused(make, named, overrides):
    assert refused(make(*ENGINES, *overrides)) == f"{GIVEN} are not possible with {named}; change one of them"


@pytest.mark.parametrize("key", ["colocate", "share_device"])
def test_engines_have_devices_of_their_own(make, key):
    with pytest.raises(ConfigError) as caught:
        pool_specs(make(*ENGINES, f"cluster.{key}=true"))
    assert str(caught.value) == f"{GIVEN} are not possible with cluster.{key}=true; change one of them"


@pytest.mark.parametrize("kind", ["gemma3", "gpt_oss", "qwen3_next"])
def test_only_tested_models_have_engines(make, kind):
    config = make(*ENGINES)
    layout, _ = model_layout(config)
    assert layout.hf_config["model_type"] in checks.HANDED_OVER
    layout.hf_config["model_type"] = kind
    with pytest.raises(ConfigError) as caught:
        check_server_engines(config, layout, planning=False)
    tested = ", ".join(checks.HANDED_OVER)
    assert str(caught.value) == f"{GIVEN} are tested with {tested} only, not with {kind}; set both to 0"


def test_only_a_start_needs_nixl(make, nixl):
    nixl["nixl"] = False
    config = make(*ENGINES)
    message = refused(config)
    assert "nixl, which is not installed; install the extra `engines`" in message and GIVEN in message
    layout, _ = model_layout(config)
    check_server_engines(config, layout, planning=True)
    check_config(config, planning=True)


def test_a_plan_is_checked_for_everything_else(make, nixl):
    nixl["nixl"] = False
    assert "sync.pause_mode=in_place" in refused(make(*ENGINES, "sync.pause_mode=in_place"), planning=True)
    assert "rollout.fp8=true" in refused(make(*ENGINES, "rollout.fp8=true"), planning=True)
