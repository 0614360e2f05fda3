"""Trackers and monitoring that could not work are refused before anything starts."""

import socket

import pytest

from megasync.base import missing
from megasync.errors import ConfigError
from megasync.preflight import check
from megasync.preflight.check import check_config

KEYS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL", "MLFLOW_TRACKING_URI")


@pytest.fixture(autouse=True)
def no_keys(monkeypatch, tmp_path):
    for name in KEYS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


@pytest.fixture
def installed(monkeypatch):
    """Pretends that these packages are installed, and no others."""
    packages = {"wandb", "mlflow"}
    for module in (check, missing):
        monkeypatch.setattr(module, "find_spec", lambda name: name if name in packages else None)
    return packages


def refusal(config):
    with pytest.raises(ConfigError) as refused:
        check_config(config)
    return str(refused.value)


@pytest.mark.parametrize("key", ["observe.wandb.mode=offline", "observe.mlflow.tracking_uri=http://tracking:5000"])
def test_a_missing_package_is_named_with_its_extra(make, installed, key):
    installed.clear()
    message = refusal(make(key))
    assert "megasync install trackers" in message and key.rpartition(".")[0] in message


@pytest.mark.parametrize("variable", [True, False])
def test_an_address_that_is_none_is_named(make, installed, monkeypatch, variable):
    if variable:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://[::1")
    key = "MLFLOW_TRACKING_URI" if variable else "observe.mlflow.tracking_uri"
    config = make("observe.mlflow={}" if variable else "observe.mlflow.tracking_uri=http://[::1")
    assert f"{key}=http://[::1 is not an address" in refusal(config)


def test_weights_and_biases_needs_a_key_only_online(make, installed, monkeypatch, tmp_path):
    check_config(make("observe.wandb.mode=offline"))
    check_config(make("observe.wandb.mode=disabled"))
    online = make("observe.wandb.mode=online")
    assert "WANDB_API_KEY" in refusal(online) and "offline" in refusal(online)
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password key\n")
    check_config(online)
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert "WANDB_API_KEY" in refusal(online)
    monkeypatch.setenv("WANDB_API_KEY", "key")
    check_config(online)


def test_mlflow_needs_an_address(make, installed, monkeypatch):
    config = make("observe.mlflow.experiment=mine")
    assert "MLFLOW_TRACKING_URI" in refusal(config)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking:5000")
    check_config(config)


def test_a_password_in_the_configuration_is_refused_and_not_repeated(make, installed):
    message = refusal(make("observe.mlflow.tracking_uri='https://user:sesame@tracking:5000'"))
    assert "MLFLOW_TRACKING_PASSWORD" in message and "sesame" not in message


def test_a_database_needs_the_large_package_of_mlflow(make, installed):
    config = make("observe.mlflow.tracking_uri=sqlite:///runs.db")
    assert "mlflow-skinny" in refusal(config)
    installed.add("sqlalchemy")
    check_config(config)


def test_a_port_in_use_is_named(make):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        message = refusal(make(f"observe.prometheus.port={port}"))
    assert str(port) in message and "0 for a free one" in message
    check_config(make(f"observe.prometheus.port={port}"))


def test_an_endpoint_on_every_interface_is_refused(make):
    assert "every interface" in refusal(make("observe.prometheus.host=0.0.0.0"))


def test_a_plan_asks_for_nothing_of_this_machine(make, installed):
    installed.clear()
    with socket.create_server(("127.0.0.1", 0)) as other:
        config = make(
            "observe.wandb.mode=online",
            "observe.mlflow.experiment=mine",
            f"observe.prometheus.port={other.getsockname()[1]}",
        )
        check_config(config, planning=True)
