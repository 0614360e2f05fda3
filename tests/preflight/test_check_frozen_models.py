"""Frozen models that cannot start, or that no reward uses, are refused before a run starts."""

import json
from io import StringIO

import pytest
from header_files import write_headers
from rich.console import Console

from megasync.config.pools import nodes_needed, pool_specs
from megasync.errors import ConfigError
from megasync.planning.plan import resolve_plan
from megasync.planning.render import plan_tables
from megasync.preflight.check import check_config


@pytest.fixture
def folders(tmp_path, model):
    """(a classifier's folder, a judge's)"""
    writes = json.loads((model / "config.json").read_text())
    scores = {**writes, "architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "a", "1": "b"}}
    found = []
    for name, values in (("grader", scores), ("judge", writes)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(values))
        write_headers(folder)
        found.append(str(folder))
    return found


@pytest.fixture
def judged(make, folders):
    """A valid configuration with one reward model of each kind, and overrides."""
    grader, judge = folders

    def build(*overrides):
        return make(
            f"reward_models.grader={{kind: classifier, path: {grader}}}",
            f"reward_models.judge={{kind: generative, path: {judge}}}",
            "rollout.rewards.grader.model=grader",
            "rollout.rewards.judge={model: judge, weight: 0.5}",
            *overrides,
        )

    return build


def refused(config):
    with pytest.raises(ConfigError) as caught:
        check_config(config)
    return str(caught.value)


@pytest.mark.parametrize("grader", ["own", "rollout"])
@pytest.mark.parametrize("judge", ["own", "rollout"])
def test_each_kind_may_have_its_own_pool_or_share_one(judged, grader, judge):
    overrides = [f"reward_models.grader.pool={grader}", f"reward_models.judge.pool={judge}", "rollout.mem_fraction=0.4"]
    config = judged(*overrides, "reward_models.grader.mem_fraction=0.3", "reward_models.judge.mem_fraction=0.2")
    check_config(config)
    owned = {name for name, pool in (("grader", grader), ("judge", judge)) if pool == "own"}
    specs = pool_specs(config)
    assert set(specs) == {"trainer", "rollout", *(f"reward-{name}" for name in owned)}
    plan = resolve_plan(config)
    text = StringIO()
    Console(file=text, width=120).print(plan_tables(plan))
    for name, kind, pool in (("grader", "classifier", grader), ("judge", "generative", judge)):
        (row,) = [line for line in text.getvalue().splitlines() if f"{kind} server(s)" in line]
        assert (f"reward-{name}" if pool == "own" else f"rollout, for {name}") in row
        assert ("shared" in row) == (pool == "rollout")
    assert {model.name: model.shared for model in plan.frozen_models} == {
        "grader": grader == "rollout",
        "judge": judge == "rollout",
    }
    apart = [model.name for model in plan.frozen_models if not model.shared]
    drawn = " ".join(text.getvalue().split())
    for number, name in enumerate(apart):
        assert f"m{number}. server of {name}" in drawn and f"│ m{number}.0 " in drawn
    for model in plan.frozen_models:
        assert model.memory.kv_tokens > 0
        assert (model.pool.spec.name == "rollout") == model.shared


def test_reward_pools_take_their_own_devices(judged):
    config = judged("reward_models.grader.servers=8", "cluster.address=auto", "cluster.host=auto")
    check_config(config)
    assert pool_specs(config)["reward-grader"].total_devices == 8
    plan = resolve_plan(config)
    assert plan.nodes == nodes_needed(pool_specs(config), 8) == 4
    assert [model.pool.nodes for model in plan.frozen_models] == [(2,), (3,)]


def test_an_auxiliary_model_has_a_pool_of_its_own_beside_reward_models(judged, folders):
    config = judged(f"auxiliary_models.judge={{path: {folders[1]}, servers: 2}}")
    check_config(config)
    assert pool_specs(config)["auxiliary-judge"].total_devices == 2
    plan = resolve_plan(config)
    assert [(model.key, model.kind) for model in plan.frozen_models] == [
        ("reward_models.grader", "classifier"),
        ("reward_models.judge", "generative"),
        ("auxiliary_models.judge", "auxiliary"),
    ]
    text = StringIO()
    Console(file=text, width=120).print(plan_tables(plan))
    (row,) = [line for line in text.getvalue().splitlines() if "auxiliary server(s)" in line]
    assert "auxiliary-judge" in row and "2 auxiliary server(s)" in row
    config.auxiliary_models["judge"].path = folders[0]
    assert "auxiliary_models.judge.path=" in (said := refused(config)) and "generates no text" in said
    config.auxiliary_models["judge"].path = "/absent"
    assert "auxiliary_models.judge.path='/absent' has no readable config.json" in refused(config)


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["rollout.workflow_options={a: 1}"], ["rollout.workflow_options", "rollout.workflow=null"]),
        (["rollout.rewards.grader.model=greeder"], ["rollout.rewards.grader.model='greeder'", "grader, judge"]),
        (["rollout.rewards.judge.model=grader"], ["reward_models.judge", "never used"]),
        (["rollout.rewards.judge.function=math"], ["rollout.rewards.judge.model=judge", "function=math", "exclude"]),
        (["rollout.rewards.judge.options={a: 1}"], ["rollout.rewards.judge.model=judge", "options", "exclude"]),
        (["reward_models.judge.kind=classifier"], ["reward_models.judge.kind=classifier", "Qwen3ForCausalLM"]),
        (["reward_models.grader.kind=generative"], ["reward_models.grader.kind=generative", "set kind=classifier"]),
        (["reward_models.judge.kind=judge"], ["reward_models.judge.kind='judge'", "classifier, generative"]),
        (["reward_models.judge.pool=trainer"], ["reward_models.judge.pool='trainer'", "own, rollout"]),
        (["reward_models.judge.servers=0"], ["reward_models.judge.servers=0", "at least 1"]),
        (["reward_models.judge.path=/absent"], ["reward_models.judge.path='/absent'", "config.json"]),
        (
            ["reward_models.judge={pool: rollout, servers: 3, mem_fraction: 0.1}"],
            ["reward_models.judge.servers=3", "rollout.servers=2", "pool=rollout"],
        ),
        (
            ["reward_models.judge={pool: rollout, tensor_parallel: 2, mem_fraction: 0.1}"],
            ["reward_models.judge.tensor_parallel=2", "rollout.tensor_parallel=1"],
        ),
        (
            ["reward_models.judge={pool: rollout, mem_fraction: 0.2}"],
            ["rollout.mem_fraction=0.8", "reward_models.judge.mem_fraction=0.2", "less than 1"],
        ),
        (
            ["reward_models.grader.tensor_parallel=3"],
            ["reward_models.grader.tensor_parallel=3", "num_attention_heads=4"],
        ),
        (
            ["reward_models.grader.tensor_parallel=16"],
            ["reward_models.grader.tensor_parallel=16", "devices_per_node=8"],
        ),
        (["cluster.devices_per_node=2", "reward_models.grader.tensor_parallel=4"], ["tensor_parallel=4", "one node"]),
        (["reward_models.grader.label=2"], ["reward_models.grader.label=2", "2 output(s)"]),
        (["reward_models.grader.read=yes_no"], ["reward_models.grader.read=yes_no", "kind=classifier"]),
        (["reward_models.judge.label=1"], ["reward_models.judge.label=1", "kind=generative"]),
        (["reward_models.judge={read: yes_no, high: 5}"], ["reward_models.judge.high=5", "read=yes_no"]),
        (["reward_models.judge={read: yes_no, yes_token: 'No'}"], ["reward_models.judge.yes_token", "'No'", "differ"]),
        (["reward_models.judge={read: yes_no, yes_token: Yes}"], ["reward_models.judge.yes_token=True", "quote it"]),
        (["reward_models.judge.pattern='(a)(b)'"], ["reward_models.judge.pattern='(a)(b)'", "2 groups"]),
        (["reward_models.judge.pattern='('"], ["reward_models.judge.pattern='('", "regular expression"]),
        (["reward_models.judge={low: 5, high: 5}"], ["reward_models.judge.low=5", "high=5"]),
        (["reward_models.judge.template='{prompt}'"], ["reward_models.judge.template", "{completion}"]),
        (["reward_models.judge={format: raw, system: x}"], ["reward_models.judge.system", "format=raw"]),
        (["reward_models.judge.context_length=4096"], ["reward_models.judge.context_length=4096", "2048"]),
        (
            ["reward_models.judge.server_args={--dtype: float16}"],
            ["reward_models.judge.server_args", "--dtype", "set dtype instead"],
        ),
        (
            ["reward_models.judge.server_args={--disaggregation-mode: prefill}"],
            ["reward_models.judge.server_args must not"],
        ),
        (["reward_models.judge.server_args={--is-embedding: true}"], ["--is-embedding", "set kind instead"]),
    ],
)
def test_a_contradiction_is_refused_with_its_keys(judged, overrides, named):
    with pytest.raises(ConfigError) as caught:
        check_config(judged(*overrides))
    for part in named:
        assert part in str(caught.value)


def test_a_model_whose_servers_do_not_end_attention_at_a_chunk_is_refused(judged, tmp_path):
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "max_position_embeddings": 4096}
    kind = {"model_type": "llama4_text", "architectures": ["Llama4ForCausalLM"], "attention_chunk_size": 1024}
    (tmp_path / "config.json").write_text(json.dumps(sizes | kind))
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigError, match="judge.context_length=None allows more than attention_chunk_size=1024"):
        check_config(judged(f"reward_models.judge.path={tmp_path}"))


def test_a_plan_does_not_need_the_folder_of_a_reward_model(judged):
    config = judged("reward_models.judge.path=/absent")
    check_config(config, planning=True)
    assert [model.memory is None for model in resolve_plan(config).frozen_models] == [False, True]


def test_a_mem_fraction_that_is_too_small_for_the_weights_is_refused(judged, folders):
    config = judged()
    (refusal,) = [text for text in resolve_plan(config, 1000).refusals if "reward_models.grader" in text]
    assert "mem_fraction=0.8 leaves no room" in refusal
