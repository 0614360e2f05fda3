"""Every rule of a key refuses what breaks it, names both keys with their values, and suggests what is then accepted."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from megasync.config import Config, load_config
from megasync.config.builtin import ADVANTAGES, LOSSES
from megasync.config.limits import ADVANTAGE, LOSS, Choice
from megasync.config.load import schema_keys
from megasync.config.rules import (
    RELATIONS,
    UNKNOWN,
    Rule,
    View,
    check_rules,
    excludes,
    needs,
    refusals,
    rules_of,
    shown,
)
from megasync.config.schema import EnvironmentConfig, ServeConfig, TimeoutConfig
from megasync.errors import ConfigError

# A configuration with an entry in each section that has rules.
BASE = load_config(
    {
        "model": {"path": "m"},
        "data": {"train": {"kind": "digits", "source": "copy"}, "eval": {"kind": "digits", "source": "copy"}},
        "eval": {"sets": {"more": {"data": {"kind": "digits", "source": "copy"}}}},
        "rollout": {"rewards": {"own": {"function": "m:f"}}, "environment": {"kind": "gymnasium"}},
        "sft": {"train": {"kind": "digits", "source": "copy"}},
        "serve": {"keys": "tenants"},
        "reward_models": {"judge": {"kind": "generative", "path": "j"}},
    }
)
# What its values are unless a test gives others, with facts, so that no rule refuses it.
SOUND: dict[str, Any] = {
    **{"data.sets": {}, "rollout.rewards": {}, "rollout.environment": None, "data.prompt.format": "chat"},
    **{"rollout.server_args --speculative-": None, "trainer.megatron.model.moe_router_fusion": None},
    **{"trainer.megatron.optimizer.decoupled_weight_decay": None, "data.eval.size": None},
    **{f"model's {name}": 64 for name in ("layers", "experts", "num_attention_heads", "num_key_value_heads")},
    **{f"model's {name}": 1 for name in ("shared experts", "dense layers", "pipeline in SGLang")},
    **{f"model's {name}": False for name in ("latent attention", "gated delta nets", "attention in chunks")},
    **{f"model's {name}": False for name in ("windows and sinks", "vision tower")},
    "model's rotated pairs of adjacent channels": False,
    **{"model's type": "qwen3", "model's max_position_embeddings": 32768, "model's linear_num_key_heads": 64},
    **{"trainer's ranks of an expert layer": 8, "run's held-out sets": 2, "run's other models": 0},
    "run's rollout.agent or verifiers environment": True,
    **{"run's models on rollout servers": 0, "server's number of nodes": 1},
}
# Values that no type says.
VALUES: dict[str, list[Any]] = {
    "rollout.external": [["http://127.0.0.1:1"], ["http://127.0.0.1:1", "http://127.0.0.1:2"], ["http://a:1"], []],
    "rollout.server_args": [{"--enable-fp32-lm-head": True}, {}],
    "rollout.server_args --speculative-": ["--speculative-algorithm"],
    "rollout.agent": ["external", "m:f", None],
    "rollout.environment": [EnvironmentConfig(kind="gymnasium"), None],
    "rollout.environment.kind": ["gymnasium", "verifiers"],
    "rollout.sampling.top_k": [50, -1],
    "serve": [ServeConfig(), None],
    "data.train": [BASE.data.train, None],
    "rollout.chat.tool_format": [None, "auto"],
    "trainer.recompute_modules": [[each] for each in ("moe", "moe_act", "shared_experts", "mlp", "layernorm")] + [[]],
}
# Every rule with its key.
PLACES = list(
    {
        (name, repr((rule.form, rule.other, rule.left, rule.because))): (name, rule)
        for name, rule in rules_of(View(BASE), BASE)
    }.values()
)


def absolute(name: str, key: str) -> str:
    return f"{key.rpartition('.')[0]}{name}" if name.startswith(".") else name


def candidates(name: str) -> list[Any]:
    """Values that a key or a fact may have; the default comes last."""
    if name in VALUES:
        return VALUES[name]
    default, limit = View(BASE).item(name)
    value = View(BASE, SOUND).value(name)
    if isinstance(limit, Choice):
        options: list[Any] = list(limit.options)
    elif limit in (ADVANTAGE, LOSS):
        options = list(ADVANTAGES if limit is ADVANTAGE else LOSSES)
    elif default is UNKNOWN and type(value) is int and value > 2:
        options = [1009, 97, 7, 0]
    elif isinstance(default, bool) or default is UNKNOWN:
        options = [True, False, *([0, 1, 2, 7, "other"] if default is UNKNOWN else ())]
    elif isinstance(default, dict | list):
        options = [{"a": 1} if isinstance(default, dict) else ["m:f"]]
    else:
        number = int if isinstance(default, int) else float
        options = [*map(number, (0, 1, 2, 3, 7, 97, 1009, 100_003)), "m:f", 0.25]
    kinds = (type(default), type(None)) if default not in (None, UNKNOWN) else (object,)
    sound = [each for each in (*options, value, default) if isinstance(each, kinds) and each is not UNKNOWN]
    return [each for each in sound if each is None or each == "???" or limit is None or not _refused(limit, each)]


def _refused(limit: Any, value: Any) -> bool:
    try:
        return limit.refusal(value) is not None
    except TypeError:
        return True


def broken(name: str, rule: Rule) -> Iterator[dict[str, Any]]:
    """Values of keys and facts that break a rule, in place of those that are sound."""
    where = [absolute(other, name) for other in rule.where]
    sides = [each for side in (rule.left, rule.other) for each in re.split(r" [*+] ", side) if each]
    others = [absolute(each, name) for each in (sides if rule.form in RELATIONS else [rule.other])]
    numbers = [each for each in dict.fromkeys(others) if each != name and not each[0].isdigit()]
    for changed in numbers or [name]:
        keys = list(dict.fromkeys((*where, changed, name)))
        for values in product(*map(candidates, keys)):
            given = SOUND | dict(zip(keys, values, strict=True))
            try:
                if rule.refusal(View(BASE, given), name) is not None:
                    yield given
            except TypeError:
                # Two values that cannot be compared: null, or a text of another key.
                continue


@pytest.mark.parametrize(("name", "rule"), PLACES, ids=[f"{name} {rule.form} {rule.other}" for name, rule in PLACES])
def test_what_breaks_a_rule_is_refused_and_each_suggestion_is_accepted(name, rule):
    given = next(broken(name, rule))
    view = View(BASE, given)
    refusal = rule.refusal(view, name)
    assert refusal is not None and rule.because in refusal.message
    for key in (name, absolute(rule.other, name)):
        if "'s " not in key and " " not in key and not key[0].isdigit():
            assert key in refusal.message and key in refusal.keys
    if not isinstance(given.get(name), dict | list):
        assert shown(name, view.value(name)) in refusal.message
    for key, value in refusal.fixes:
        assert shown(key, value) in refusal.message
        assert rule.refusal(View(BASE, given | {key: value}), name) is None, (key, value)
    assert refusal.fixes or absolute(rule.other, name) in ("data.train", "trainer.megatron.model.moe_router_fusion")


def test_a_configuration_without_rules_broken_is_accepted():
    check_rules(BASE, SOUND, without=["serve"])


@pytest.mark.parametrize(("name", "rule"), PLACES[:: max(1, len(PLACES) // 40)])
def test_whoever_follows_the_messages_ends_with_an_accepted_configuration(name, rule):
    given = next(broken(name, rule))
    for _ in range(20):
        refused = next(refusals(BASE, given, without=["sft", "serve"]), None)
        if refused is None:
            return
        given = given | dict(refused.fixes[-1:])
    raise AssertionError(f"still refused: {refused}")


def test_rules_name_keys_and_facts_that_exist():
    keys = {key for key, _ in schema_keys()}
    entries = ("reward_models.judge.", "rollout.rewards.own.", "eval.sets.more.", "trainer.megatron.")
    for name, rule in PLACES:
        for other in rule.names(name):
            place = other.partition(" --")[0]
            assert other in SOUND or place in keys or place.startswith(entries), (name, other)


def test_all_broken_rules_are_named_at_once():
    config = load_config({"model": {"path": "m"}}, ["sync.delta=true", "sync.wave=1", "timeouts.no_progress=600"])
    with pytest.raises(ConfigError, match=r"(?s)sync\.delta=true and sync\.wave=1 .*\ntimeouts\.no_progress=600"):
        check_rules(config)


def test_a_rule_about_something_unknown_is_not_checked():
    config = load_config({"model": {"path": "m"}}, ["trainer.moe_aux_loss=0.1"])
    check_rules(config)
    with pytest.raises(ConfigError, match="trainer.moe_aux_loss=0.1 needs experts, and the model has none"):
        check_rules(config, {"model's experts": 0})
    check_rules(config, {"model's experts": 0}, within=["rollout"])
    check_rules(config, {"model's experts": 0}, without=["trainer"])


def test_rules_of_training_do_not_hold_for_servers_alone():
    config = load_config({"model": {"path": "m"}}, ["timeouts.no_progress=600"])
    with pytest.raises(ConfigError, match=r"timeouts\.no_progress=600 must be longer than"):
        check_rules(config)
    check_rules(config, training=False)


def test_secrets_are_not_shown():
    rule = excludes("rollout.server_args")
    config = Config()
    config.rollout.server_args = {"--api-key": "sesame"}
    config.cluster.colocate = True
    refusal = rule.refusal(View(config), "cluster.colocate")
    assert refusal is not None and "sesame" not in refusal.message
    assert needs("rollout.server_args").refusal(View(config), "cluster.colocate") is None


def test_slurm_signals_early_enough_for_a_clean_end():
    script = (Path(__file__).parents[2] / "launch" / "slurm.sbatch").read_text()
    (lead,) = re.findall(r"^#SBATCH --signal=B:USR1@(\d+)$", script, re.MULTILINE)
    # Trainer ranks and servers each have `shutdown` to end, one after the other.
    assert 2 * TimeoutConfig().shutdown < float(lead)
