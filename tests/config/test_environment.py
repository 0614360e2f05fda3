"""Text that the environment gives is saved as it was written, and read again from the environment."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megasync.app.run_directory import new_run_dir
from megasync.base.confidential import masked
from megasync.config import CONFIG_FILE, Config, load_config, remember, save_config, saved_values
from megasync.errors import ConfigError
from megasync.integrations.trackers.mlflow_sink import _flat
from megasync.watch.configuration import shown
from megasync.watch.html_page import render_html
from megasync.watch.report import make_report
from megasync.watch.run_folder import RunFolder

SECRETS = {"HF": "hf-first-secret", "JUDGE": "second-secret", "BASIC": "third-secret", "ALL": "{a: fourth-secret}"}
# Each way in which a secret of the environment gets into an option, none of them by a telling name.
OPTIONS = {
    "direct": "${oc.env:HF}",
    "within": "Bearer ${oc.env:BASIC} and more",
    "default": "${oc.env:HF,none}",
    "of a key": "${data.train.options.direct}",
    "of a neighbour": "${.direct}",
    "of a key of a key": "${.of_a_key}",
    "of_a_key": "${data.train.options.direct}",
    "of all above": {"below": "${..direct}"},
    "decoded": "${oc.decode:${oc.env:ALL}}",
    "listed": ["a", "${oc.env:JUDGE}"],
    "selected": "${data.train.options.${oc.env:WHICH,direct}}",
    "with.a.point": "${oc.env:JUDGE}",
}
PLAIN = {"literal": r"a \${oc.env:HF} b", "name": "${name}", "number": 3, "nothing": None}


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name, value in {**SECRETS, "STEPS": "7"}.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def made(folder: Path, options: dict[str, Any] = OPTIONS | PLAIN) -> Config:
    values = {
        "name": "a",
        "model": {"path": "${oc.env:HF}/m"},
        "schedule": {"total_steps": "${oc.env:STEPS}"},
        "data": {"train": {"kind": "hf", "source": "s", "options": options}},
        "rollout": {"min_servers": "${rollout.servers}"},
        "run_root": str(folder),
    }
    (folder / "given.yaml").write_text(json.dumps(values))
    return load_config(folder / "given.yaml")


def test_no_secret_of_the_environment_reaches_a_file_and_all_of_it_is_read_back(
    environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = made(tmp_path)
    options = config.data.train.options
    assert options["direct"] == options["of a key of a key"] == options["of all above"]["below"] == "hf-first-secret"
    assert options["decoded"] == {"a": "fourth-secret"} and options["literal"] == "a ${oc.env:HF} b"
    path = new_run_dir(config) / CONFIG_FILE
    text = path.read_text()
    assert "-secret" not in text and path.stat().st_mode & 0o777 == 0o600
    assert load_config(path) == config
    # Numbers are kept, and references to keys that the environment does not give are resolved.
    environment.setenv("STEPS", "8")
    environment.setenv("HF", "another")
    again = load_config(path, ["rollout.servers=5"])
    assert (again.schedule.total_steps, again.rollout.min_servers, again.model.path) == (7, 2, "another/m")
    assert again.data.train.options["direct"] == again.data.train.options["of a key of a key"] == "another"


def test_a_run_that_remembers_a_key_keeps_the_rest_as_it_was_written(
    environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run_dir = new_run_dir(made(tmp_path))
    before = (run_dir / CONFIG_FILE).read_text()
    environment.delenv("HF")
    remember(run_dir, "rollout.servers", 3)
    after = (run_dir / CONFIG_FILE).read_text()
    assert after.splitlines() == [line.replace("  servers: 2", "  servers: 3") for line in before.splitlines()]
    assert (run_dir / CONFIG_FILE).stat().st_mode & 0o777 == 0o600


def test_what_was_changed_since_it_was_read_is_saved_as_it_is(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = made(tmp_path)
    config.data.train.options["direct"] = "changed"
    del config.data.train.options["within"]
    config.data.train.options["listed"] = []
    save_config(config, tmp_path / "saved.yaml")
    found = load_config(tmp_path / "saved.yaml")
    assert found.data.train.options["direct"] == "changed" and found.data.train.options["listed"] == []
    assert "within" not in found.data.train.options


def test_a_variable_that_is_missing_is_named_with_its_key(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = new_run_dir(made(tmp_path, {"key": "${oc.env:JUDGE}"})) / CONFIG_FILE
    environment.delenv("JUDGE")
    with pytest.raises(ConfigError, match=r"data\.train\.options\.key .*variable 'JUDGE', which is not set here"):
        load_config(path)
    read = load_config(path, unset=True)
    assert read.data.train.options == {"key": "${oc.env:JUDGE}"} and read.model.path == "hf-first-secret/m"
    save_config(read, tmp_path / "again.yaml")
    assert (tmp_path / "again.yaml").read_text() == path.read_text()


@cache
def plain_config() -> Config:
    return load_config({"model": {"path": "m"}, "data": {"train": {"kind": "hf", "source": "s"}}})


@settings(max_examples=30)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text() | st.text("${}\\:.ab"),
        lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text("ab.$", min_size=1), below, max_size=3),
        max_leaves=8,
    )
)
def test_any_options_are_read_back_as_they_are(tmp_path_factory: pytest.TempPathFactory, options: Any) -> None:
    config = plain_config()
    config.data.train.options = {"given": options}
    path = tmp_path_factory.mktemp("saved") / "config.yaml"
    save_config(config, path)
    assert load_config(path).data.train.options == {"given": options}


def test_secrets_that_are_written_into_a_configuration_are_shown_nowhere(tmp_path: Path) -> None:
    options = {
        "token": "literal-secret",
        "headers": {"Authorization": "Basic literal-secret", "X-Api-Key": "literal-secret"},
        "url": "https://user:literal-secret@host/?api_key=literal-secret&page=2",
        "credentials": {"user": "u", "value": "literal-secret"},
        "sources": ["https://u:literal-secret@host"],
        "max_tokens": 5,
    }
    config = made_plain(tmp_path, options)
    run_dir = new_run_dir(config)
    (run_dir / "logs").mkdir()
    (run_dir / "metrics.jsonl").write_text('{"step": 1, "time": 1764000000.0, "version": 1}\n')
    assert load_config(run_dir / CONFIG_FILE).data.train.options == options
    texts = [
        render_html(make_report(RunFolder(run_dir))),
        json.dumps(dict(_flat(saved_values(config)))),
        json.dumps(masked(saved_values(config))),
        *(shown(value, f"data.train.options.{key}") for key, value in options.items()),
    ]
    assert not any("literal-secret" in text for text in texts)
    assert dict(_flat(saved_values(config)))["data.train.options.max_tokens"] == "5"


def made_plain(folder: Path, options: dict[str, Any]) -> Config:
    train = {"kind": "hf", "source": "s", "options": options}
    return load_config({"name": "a", "model": {"path": "m"}, "data": {"train": train}, "run_root": str(folder)})
