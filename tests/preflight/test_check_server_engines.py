"""What is refused for servers with prefill and decode engines."""

import json

import pytest

from megasync.base import missing
from megasync.config.rules import refusals
from megasync.config.schema.rollout import HANDED_OVER
from megasync.errors import ConfigError
from megasync.preflight.check import check_config, run_facts

ENGINES = [*("rollout.servers=1", "rollout.prefill_engines=1", "rollout.decode_engines=2"), "sync.pause_mode=abort"]
GIVEN = "rollout.prefill_engines=1 with decode_engines=2"


@pytest.fixture(autouse=True)
def nixl(monkeypatch):
    """Whether nixl is installed: it is, unless the test sets this to false."""
    installed = {"nixl": True}
    monkeypatch.setattr(missing, "find_spec", lambda name: object() if installed[name] else None)
    return installed


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["rollout.tensor_parallel=2"],
        ["rollout.prefill_engines=2", "rollout.decode_engines=1"],
        ["sync.transport=disk"],
        ["sync.transport=p2p"],
    ],
    ids=" ".join,
)
def test_a_server_may_have_prefill_and_decode_engines(make, more):
    check_config(make(*ENGINES, *more))


@pytest.mark.parametrize(
    ("named", "overrides"),
    {
        "rollout.decode_engines": ["rollout.decode_engines=0"],
        "sync.pause_mode": ["sync.pause_mode=retract"],
        "rollout.external": ["rollout.external=[http://a:1]"],
        "sync.transport": ["sync.transport=adapters", "trainer.lora.rank=4"],
        "rollout.routing_replay": ["rollout.routing_replay=true"],
        "rollout.sampling.top_k": ["rollout.sampling.top_k=20"],
        "rollout.deterministic": ["rollout.deterministic=true"],
        "rollout.fp8": ["rollout.fp8=true"],
        "rollout.expert_parallel": ["rollout.expert_parallel=2"],
        "rollout.pipeline_parallel": ["rollout.pipeline_parallel=2"],
        "rollout.attention_data_parallel": ["rollout.attention_data_parallel=2"],
        "run's models on rollout servers": ["teachers.two={path: /nowhere, pool: rollout}"],
    }.items(),
)
def test_what_engines_do_not_support_is_refused(make, named, overrides):
    config = make(*ENGINES, *overrides)
    pairs = [refusal.keys for refusal in refusals(config, run_facts(config))]
    assert ("rollout.prefill_engines", named) in pairs
    with pytest.raises(ConfigError):
        check_config(config)


def test_only_tested_models_have_engines(make, model):
    values = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(values | {"model_type": "mistral", "sliding_window": None}))
    assert "mistral" not in HANDED_OVER
    with pytest.raises(ConfigError, match="prefill_engines=1 needs that the model's type is .*, but it is mistral"):
        check_config(make(*ENGINES), planning=True)


def test_only_a_start_needs_nixl(make, nixl):
    nixl["nixl"] = False
    config = make(*ENGINES)
    with pytest.raises(ConfigError, match=f"{GIVEN}, .* needs the package nixl, which is not installed"):
        check_config(config)
    check_config(config, planning=True)
    check_config(make())
