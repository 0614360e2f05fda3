"""Whatever a configuration or a model's config.json holds, it is accepted or refused with a ConfigError."""

import json
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_models import MODELS, MORE_MODELS

from megasync.config import load_config
from megasync.config.load import schema_keys
from megasync.errors import ConfigError
from megasync.layout.model_files import end_tokens
from megasync.preflight.check import check_config, model_layout

KEYS = [key for key, _ in schema_keys()]
VALUES = [
    *("", "''", "' '", "0", "-1", "1.5", "1e400", "-.inf", ".nan", "true", "null", "99999999999999999999", "9" * 5000),
    *("[]", "[a]", "[1,2,3]", "[null]", "['']", "[[1]]", "[[]]", "[{}]", "[{a: 1}]", "[1e400]", "[.nan]", "[-1, 1.5]"),
    *("{}", "{a: 1}", "{a: {b: c}}", "{'': 1}", "{1: 2}", "{null: 1}", "{a b: {}}", "{a: {}}", "{a: [1]}", "{a: null}"),
    *("é", "'\\x00'", '"a\\nb"', '"\\ud800"', "../x", "/", "/dev/null", "/dev/zero", "~nobody/x", "~", "s3://a/b"),
    *("http://", "'http://[::1'", "http://h:99999", "http://h:0", "http://u:p@h:1", "'http://h:1/#x'", "':0'", "a:b:c"),
    *("'{'", "'{0}'", "'{prompt.x}'", "'{prompt!x}'", "'{prompt:9999999999d}'", "'{}'", "'('", "'(?P<a'", "'\\'"),
    *("a.b:c", "os:system", "json:loads", "math:pi", "antigravity_:x", "a:", ":a", ".:a"),
    *("${oc.env:HOME}", "${oc.env:NOT_SET_X}", "${seed}", "${nothing}", "${", "${a:}", "???", "'2024-01-01'", "1_000"),
    *("x" * 5000, "[" * 300 + "]" * 300, "!!python/name:os.system", "&a [*a]", "*a", "!!binary AA=="),
]
TEXTS = {
    "deep": "name: " + "[" * 3000 + "]" * 3000,
    "deep mapping": "".join("  " * depth + "a:\n" for depth in range(2000)),
    "NUL": b"name: a\x00b\n",
    "latin-1": b"name: gr\xf6\xdfe\n",
    "utf-16": "name: a\n".encode("utf-16"),
    "binary": bytes(range(256)),
    "tabs": "model:\n\tpath: x\n",
    "a list": "- a\n- b\n",
    "a number": "3",
    "a tag": "!!python/object/apply:os.system ['true']\n",
    "an alias of itself": "model: &m {path: *m}\n",
    "an unknown alias": "model: *m\n",
    "an unknown merge": "model:\n  <<: 3\n",
    "a key twice": "name: a\nname: b\n",
    "a list as key": "? [a]\n: 1\n",
    "a mapping as key": "? {a: 1}\n: 1\n",
    "two documents": "name: a\n---\nname: b\n",
    "a huge integer": "seed: " + "9" * 5000,
    "a bad sexagesimal": "seed: 99999999:99\n",
    "bad base64": "name: !!binary '#'\n",
    "an open quote": 'name: "a\n',
    "an open interpolation": "name: '${'\n",
    "a base that is a list": "base: [a]\n",
    "a base with NUL": 'base: "a\\0b"\n',
    "a base that is too long": f"base: {'x' * 5000}\n",
}


def settle(check: Callable[[], object]) -> None:
    """Passes whether the input is accepted or refused; any other error is the fault that is looked for."""
    with suppress(ConfigError):
        check()


def attempt(make, *overrides: str) -> None:
    def check() -> None:
        config = make(*overrides)
        check_config(config)
        check_config(config, planning=True)

    settle(check)


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_text_that_is_no_configuration_is_refused(tmp_path, text):
    file = tmp_path / "run.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError):
        load_config(file)


def test_a_byte_order_mark_is_not_part_of_the_configuration(tmp_path, model):
    file = tmp_path / "run.yaml"
    file.write_bytes(f"\ufeffmodel: {{path: {model}}}\n".encode())
    assert load_config(file).model.path == str(model)


def test_odd_values_of_some_keys(make):
    """A value for each key of a sample; `test_odd_values_of_all_keys` tries all of both."""
    chance = random.Random(1)
    for key in chance.sample(KEYS, 40):
        attempt(make, f"{key}={chance.choice(VALUES)}")


@pytest.mark.soak
@pytest.mark.parametrize("key", KEYS)
def test_odd_values_of_all_keys(make, key):
    for value in VALUES:
        attempt(make, f"{key}={value}")


@pytest.mark.soak
@settings(max_examples=2000, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_damaged_configuration_files(make, tmp_path, data):
    """A file that is cut, or has other bytes at some place."""
    sound = yaml.safe_dump({"model": {"path": "x"}, "rollout": {"external": ["http://h:1"]}, "name": "${run_root}"})
    content = bytearray(sound.encode())
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(content)))
        content[start : start + data.draw(st.integers(0, 5))] = data.draw(st.binary(max_size=6))
    file = tmp_path / "run.yaml"
    file.write_bytes(content)
    settle(lambda: load_config(file))


# config.json and generation_config.json

ODD = [
    *(
        None,
        True,
        False,
        0,
        -1,
        1,
        1.5,
        float("nan"),
        float("inf"),
        10**30,
        2**31,
        "",
        "a",
        "1",
        [],
        [1],
        ["a"],
        [None],
    ),
    *({}, {"a": 1}, [[1]], {"rope_type": "yarn"}, {"type": None}, [True]),
]
# Keys that a config.json may have beside those of the tiny models.
OTHERS = (
    *(
        "num_key_value_heads",
        "head_dim",
        "rope_scaling",
        "rope_parameters",
        "rope_theta",
        "architectures",
        "model_type",
    ),
    *("text_config", "quantization_config", "layer_types", "sliding_window", "tie_word_embeddings", "attention_bias"),
    *("n_shared_experts", "mlp_only_layers", "first_k_dense_replace", "partial_rotary_factor", "moe_layers", "n_group"),
)


def places(values: dict, above: tuple = ()) -> list[tuple]:
    found = []
    for key, value in values.items():
        found.append((*above, key))
        if isinstance(value, dict):
            found += places(value, (*above, key))
    return found


def try_model(config, folder: Path, values: object) -> None:
    (folder / "config.json").write_text(json.dumps(values))
    settle(lambda: model_layout(config))
    settle(lambda: end_tokens(folder))


def changed(values: dict, place: tuple, value: object) -> dict:
    values = json.loads(json.dumps(values))
    section = values
    for key in place[:-1]:
        section = section[key]
    section[place[-1]] = value
    return values


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "odd"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("name", [*MODELS, *MORE_MODELS])
def test_odd_values_in_a_models_configuration(make, folder, name):
    values, config, chance = (MODELS | MORE_MODELS)[name], make(f"model.path={folder}"), random.Random(name)
    for place in [*places(values), *((key,) for key in OTHERS)]:
        try_model(config, folder, changed(values, place, chance.choice(ODD)))


@pytest.mark.soak
@pytest.mark.parametrize("name", [*MODELS, *MORE_MODELS])
def test_all_odd_values_in_a_models_configuration(make, folder, name):
    values, config = (MODELS | MORE_MODELS)[name], make(f"model.path={folder}")
    for place in [*places(values), *((key,) for key in OTHERS)]:
        for value in ODD:
            try_model(config, folder, changed(values, place, value))


JSON = [b"", b"{", b"[]", b"3", b"null", b'"x"', b"\xff\xfe{}", b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}", b"{}\0"]


@pytest.mark.parametrize("content", JSON, ids=lambda content: repr(content[:8]))
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_files_that_hold_no_object_are_refused_by_name(make, model, name, content):
    (model / name).write_bytes(content)
    with pytest.raises(ConfigError, match=name):
        check_config(make())


@pytest.mark.parametrize("ends", ["<end>", [1, "<end>"], -1, 1.5, True, {"a": 1}, [[1]]])
def test_ends_that_are_no_tokens_are_refused(make, model, ends):
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    with pytest.raises(ConfigError, match="generation_config.json: eos_token_id="):
        check_config(make())
