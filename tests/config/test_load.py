"""YAML, bases and overrides become one typed Config; an error names the file or override."""

import json
from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from megasync.config import Config, load_config, save_config
from megasync.config.load import schema_keys
from megasync.config.schema import DatasetConfig, RewardConfig
from megasync.errors import ConfigError


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def refused(source, *overrides):
    with pytest.raises(ConfigError) as caught:
        load_config(source, overrides)
    return str(caught.value)


MODEL = {"model": {"path": "m"}}


def test_the_result_is_made_of_the_schemas_dataclasses():
    config = load_config({**MODEL, "data": {"train": {"kind": "digits", "source": "copy"}}})
    assert isinstance(config, Config)
    assert isinstance(config.data.train, DatasetConfig)
    assert config.data.eval is None


def test_a_file_overrides_its_base_and_overrides_come_last(tmp_path):
    (tmp_path / "shared").mkdir()
    write(tmp_path / "shared" / "base.yaml", "model: {path: m}\ntrainer: {tensor_parallel: 2, data_parallel: 2}\n")
    top = write(tmp_path / "run.yaml", "base: shared/base.yaml\ntrainer: {data_parallel: 3}\nname: mine\n")
    config = load_config(top, ["name=yours", "trainer.optimizer.lr=2e-5"])
    assert (config.trainer.tensor_parallel, config.trainer.data_parallel) == (2, 3)
    assert (config.name, config.trainer.optimizer.lr) == ("yours", 2e-5)


def test_bases_chain_relative_to_the_file_that_names_them(tmp_path):
    (tmp_path / "a").mkdir()
    write(tmp_path / "root.yaml", "model: {path: m}\nseed: 7\n")
    write(tmp_path / "a" / "middle.yaml", "base: ../root.yaml\n")
    assert load_config(write(tmp_path / "top.yaml", "base: a/middle.yaml\n")).seed == 7


def test_a_cycle_of_bases_is_refused_with_its_files(tmp_path):
    write(tmp_path / "a.yaml", "base: b.yaml\n")
    message = refused(write(tmp_path / "b.yaml", "base: a.yaml\n"))
    assert "cycle" in message and "a.yaml" in message and "b.yaml" in message


def test_the_error_of_a_missing_file_names_the_file_that_refers_to_it(tmp_path):
    assert "absent.yaml" in refused(tmp_path / "absent.yaml")
    top = write(tmp_path / "top.yaml", "base: gone.yaml\n")
    message = refused(top)
    assert "gone.yaml" in message and "top.yaml" in message
    assert "folder" in refused(tmp_path)


@pytest.mark.parametrize("base", ["${name}", "${oc.env:NO_SUCH_VARIABLE}", "[a.yaml]", "3"])
def test_an_invalid_base_is_refused(tmp_path, base):
    assert "base=" in refused(write(tmp_path / "run.yaml", f"base: {base}\n"))


@pytest.mark.parametrize("name", ["", "a" * 300, "a\0b", "~no-such-user/run.yaml"])
def test_an_invalid_file_name_is_refused(tmp_path, name):
    assert "is not a usable path" in refused(name)
    assert "is not a usable path" in refused({"base": name})
    assert "is not a usable path" in refused(write(tmp_path / "run.yaml", f"base: {json.dumps(name)}\n"))


def test_a_file_without_read_permission_is_refused(tmp_path, monkeypatch):
    def forbidden(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(OmegaConf, "load", forbidden)
    assert "Permission denied" in refused(write(tmp_path / "run.yaml", "name: a\n"))


def test_a_tilde_is_expanded_in_every_path(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    judge = {"kind": "generative", "path": "~/judge"}
    config = load_config({"model": {"path": "~/m"}, "run_root": "~/runs", "reward_models": {"judge": judge}})
    found = (config.model.path, config.run_root, config.reward_models["judge"].path)
    assert found == (f"{tmp_path}/m", f"{tmp_path}/runs", f"{tmp_path}/judge")
    assert config.model.config is None and config.sync.disk_dir is None


@pytest.mark.parametrize("text", ["a: [1\n", "- just\n- a list\n", "a: 1\na: 2\n"])
def test_a_file_that_is_not_a_mapping_is_refused(tmp_path, text):
    assert "bad.yaml" in refused(write(tmp_path / "bad.yaml", text))


def test_an_unknown_key_is_refused_with_its_source_and_a_suggestion(tmp_path):
    path = write(tmp_path / "run.yaml", "model: {path: m}\ntrainer: {tensor_paralel: 2}\n")
    message = refused(path)
    assert "run.yaml" in message
    assert "'trainer.tensor_paralel'" in message and "'trainer.tensor_parallel'" in message


def test_a_key_of_another_section_is_suggested():
    message = refused(MODEL, "max_staleness=2")
    assert "override 'max_staleness=2'" in message and "'schedule.max_staleness'" in message


def test_an_unknown_key_without_suggestion_lists_the_keys_of_the_section():
    assert "first_stage_layers" in refused(MODEL, "trainer.zzzz=2")


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("trainer.tensor_parallel=two", ("trainer.tensor_parallel='two'", "whole number")),
        ("trainer.tensor_parallel=2.5", ("2.5", "whole number")),
        ("checkpoint.export=-1", ("checkpoint.export=-1", "true or false")),
        ("trainer.sequence_parallel=maybe", ("'maybe'", "true or false")),
        ("trainer.optimizer.lr=fast", ("'fast'", "a number")),
        ("trainer.optimizer.betas=0.9", ("0.9", "list")),
        ("trainer.optimizer.betas=[a,b]", ("['a', 'b']", "a number")),
        ("trainer.optimizer=3", ("trainer.optimizer=3", "section with lr")),
        ("data.train=3", ("data.train=3", "section with kind")),
        ("trainer.recompute.a=1", ("trainer.recompute", "text or null")),
        ("trainer.optimizer.betas.a=1", ("trainer.optimizer.betas={'a': 1}", "list")),
        ("rollout.server_args=[1]", ("rollout.server_args=[1]", "key: value")),
        ("model.path=null", ("model.path", "text")),
        ("eval.sets.hard.temperatures=0", ("eval.sets.hard.temperatures=0", "list")),
        ("data.columns.answer=[a]", ("data.columns.answer=['a']", "text")),
        ("data.columns.answer=true", ("data.columns.answer=True", "quote it")),
        ("data.columns.answer=null", ("data.columns.answer", "null or empty")),
        ("rollout.tools.mcp.search.headers.Key={a: 1}", ("rollout.tools.mcp.search.headers.Key={'a': 1}", "text")),
    ],
)
def test_a_wrong_type_names_key_value_and_expected_type(override, parts):
    message = refused(MODEL, override)
    assert repr(override) in message
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("seed: 010\n", "YAML reads 010 as 8, a number in base 8"),
        ("trainer: {optimizer: {betas: [0_7, 1]}}\n", "YAML reads 0_7 as 7"),
        ("cluster: {address: 10:30}\n", "YAML reads 10:30 as 630, a number in base 60"),
        ("trainer:\n", "trainer is empty; give it keys, or remove it"),
        ("run_root: ~\n", "run_root is null or empty; expected text, or remove it"),
        ("rollout: {rewards: }\n", "rollout.rewards is null or empty"),
        (
            "schedule.total_steps: 5\n",
            "unknown key 'schedule.total_steps'; write it as a section, schedule: {total_steps",
        ),
        ("trainer.optimizer.lr: 5\n", "write it as a section, trainer: {optimizer: {lr: ...}}"),
    ],
)
def test_what_yaml_reads_otherwise_than_people_is_refused(tmp_path, text, said):
    assert said in refused(write(tmp_path / "run.yaml", f"model: {{path: m}}\n{text}"))


@pytest.mark.parametrize("value", ["0", "-0", "0.7", "08", "0x10", "1_000", "'010'"])
def test_numbers_that_people_read_alike_are_taken(tmp_path, value):
    write(tmp_path / "run.yaml", f"model: {{path: m}}\nrollout: {{workflow_options: {{a: {value}}}}}\n")
    load_config(tmp_path / "run.yaml", [f"rollout.workflow_options.b={value}"])


def test_an_override_is_read_as_a_file_is():
    assert "YAML reads 010 as 8" in refused(MODEL, "seed=010")


@pytest.mark.parametrize("override", ["trainer", "=3", " a=1", "--servers 2", ""])
def test_an_override_without_a_value_is_refused_with_an_example(override):
    assert "key=value" in refused(MODEL, override)


def test_missing_required_keys_are_named():
    assert "model.path" in refused({})
    assert "data.eval.kind" in refused(MODEL, "data.eval.size=4")


def test_values_with_commas_braces_and_equals_signs_survive():
    config = load_config(
        MODEL, ['rollout.sampling.stop=["\\n","a=b"]', "rollout.server_args={--chunked-prefill-size: 4096}"]
    )
    assert config.rollout.sampling.stop == ["\n", "a=b"]
    assert config.rollout.server_args == {"--chunked-prefill-size": 4096}


def test_a_value_may_refer_to_another_key():
    config = load_config(MODEL, ["rollout.tensor_parallel=2", "trainer.tensor_parallel=${rollout.tensor_parallel}"])
    assert config.trainer.tensor_parallel == 2
    assert "TrainerConfig" in refused(MODEL, "trainer=${rollout}")
    assert "nothing" in refused(MODEL, "trainer.optimizer.betas=${nothing}")


def test_null_turns_an_optional_section_off():
    values = {**MODEL, "data": {"eval": {"kind": "digits", "source": "copy"}}}
    assert load_config(values, ["data.eval=null"]).data.eval is None


def test_a_null_eval_section_turns_off_what_its_base_evaluates(tmp_path):
    sets = "{hard: {data: {kind: digits, source: copy}}}"
    held_out = f"model: {{path: m}}\ndata: {{eval: {{kind: digits, source: copy}}}}\neval: {{samples: 7, sets: {sets}}}"
    write(tmp_path / "below.yaml", held_out)
    off = write(tmp_path / "off.yaml", "base: below.yaml\neval: null")
    for config in (load_config(off), load_config(tmp_path / "below.yaml", ["eval=null"])):
        assert config.data.eval is None
        assert config.eval == Config(model=config.model).eval
    again = load_config(off, ["data.eval={kind: digits, source: copy}", "eval.samples=3"])
    assert (again.data.eval.source, again.eval.samples, again.eval.sets) == ("copy", 3, {})
    both = write(tmp_path / "both.yaml", "model: {path: m}\neval: null\ndata: {eval: {kind: digits, source: copy}}")
    assert "eval=null" in refused(both) and "data.eval" in refused(both)


def test_sections_with_user_defined_names_are_checked(tmp_path):
    below = write(tmp_path / "below.yaml", "model: {path: m}\nrollout: {rewards: {math: {}, short: {weight: 0.1}}}")
    rewards = load_config(below, ["rollout.rewards.short.function=m:f"]).rollout.rewards
    assert rewards == {"math": RewardConfig(), "short": RewardConfig("m:f", 0.1)}
    path = tmp_path / "again.yaml"
    save_config(load_config(below), path)
    assert load_config(path) == load_config(below)
    message = refused(below, "rollout.rewards.math.wieght=2")
    assert "unknown key 'rollout.rewards.math.wieght'" in message and "'rollout.rewards.math.weight'" in message
    assert "rollout.rewards.math=2 has the wrong type; expected a section" in refused(below, "rollout.rewards.math=2")
    assert "rollout.rewards" in refused(below, "rollout.rewards.math.weight=heavy")


def test_a_saved_configuration_is_read_back_unchanged(tmp_path):
    config = load_config(
        {**MODEL, "data": {"train": {"kind": "digits", "source": "copy", "options": {"length": 3}}}},
        ["schedule.window_fraction=null", "eval.temperatures=[0,1]", "rollout.server_args={--foo: bar}"],
    )
    save_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config


LEAVES = [key for key, hint in schema_keys() if hint is int]


@settings(max_examples=40)
@given(key=st.sampled_from(LEAVES), value=st.integers(-(10**9), 10**9))
def test_every_whole_number_of_the_schema_can_be_overridden(key, value):
    values = {
        **MODEL,
        "data": {"train": {"kind": "digits", "source": "copy"}, "eval": {"kind": "k", "source": "s"}},
        "sft": {"train": {"kind": "k", "source": "s"}, "validation": {"kind": "k", "source": "s"}},
        "rollout": {"environment": {"kind": "gymnasium"}},
    }
    node = load_config(values, [f"{key}={value}"])
    for part in key.split("."):
        node = getattr(node, part)
    assert node == value


@settings(max_examples=40)
@given(st.text(min_size=1).filter(lambda t: "=" not in t))
def test_no_text_without_an_equals_sign_is_an_override(text):
    assert "key=value" in refused(MODEL, text)


@settings(max_examples=40)
@given(key=st.text("abcdefghij._", min_size=1, max_size=12), value=st.text(max_size=12))
def test_any_override_is_accepted_or_raises_a_config_error(key, value):
    try:
        load_config(MODEL, [f"{key}={value}"])
    except ConfigError as error:
        assert str(error)


def test_schema_keys_are_all_leaves_and_sections():
    keys = [key for key, _ in schema_keys()]
    assert "trainer.optimizer.lr" in keys and "data.eval.kind" in keys
    assert len(keys) == len(set(keys))
    assert {item.name for item in fields(Config)} - set(keys) == {"as_written"}
