"""Refuses trackers and monitoring that could not work: a missing package or key, a port in use; a part of `check`."""

from __future__ import annotations

import configparser
import netrc
import os
import socket
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from megasync.config.host import is_wildcard, resolve_host
from megasync.config.schema import Config, MlflowConfig, PrometheusConfig, WandbConfig
from megasync.errors import ConfigError

EXTRA = "megasync[trackers]"
WANDB_HOST = "https://api.wandb.ai"
# Schemes of MLflow's databases, which the small package mlflow-skinny cannot open.
DATABASES = ("sqlite", "postgresql", "mysql", "mssql")


def check_observe(config: Config, planning: bool) -> None:
    """Raises ConfigError for the first problem. With `planning`, the run may start on another machine than this."""
    observe = config.observe
    if observe.wandb is not None and observe.wandb.mode != "disabled" and not planning:
        _check_wandb(observe.wandb)
    if observe.mlflow is not None:
        _check_mlflow(observe.mlflow, planning)
    if observe.prometheus is not None:
        _check_prometheus(observe.prometheus, planning)


def _check_wandb(wandb: WandbConfig) -> None:
    _require("wandb", "observe.wandb")
    if wandb.mode == "online" and not _has_wandb_key():
        raise ConfigError(
            "observe.wandb.mode=online, but there is no key for Weights & Biases; run `wandb login`, set "
            "WANDB_API_KEY, or set mode=offline"
        )


def _check_mlflow(mlflow: MlflowConfig, planning: bool) -> None:
    uri = mlflow.tracking_uri
    if uri is not None and urlsplit(uri).password:
        raise ConfigError(
            "observe.mlflow.tracking_uri contains a password, which must not be in a file; set it as "
            "MLFLOW_TRACKING_URI, or set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
        )
    if planning:
        return
    _require("mlflow", "observe.mlflow")
    uri = uri or os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        raise ConfigError(
            "observe.mlflow.tracking_uri is null and MLFLOW_TRACKING_URI is not set; name the tracking server in one"
        )
    if urlsplit(uri).scheme.partition("+")[0] in DATABASES and find_spec("sqlalchemy") is None:
        raise ConfigError(
            f"observe.mlflow.tracking_uri is a {urlsplit(uri).scheme} database, which the package mlflow-skinny cannot "
            f"open; install the package mlflow, or name a tracking server"
        )


def _check_prometheus(prometheus: PrometheusConfig, planning: bool) -> None:
    host, port = prometheus.host, prometheus.port
    if is_wildcard(host):
        raise ConfigError(
            f"observe.prometheus.host={host} binds to every interface; name the address of one, or set auto for this "
            f"node's own"
        )
    if planning:
        return
    host = resolve_host(host)
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family) as probe:
            # As the endpoint does: a port in TIME_WAIT counts as free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        raise ConfigError(
            f"observe.prometheus cannot listen at host={host}, port={port}: {error.strerror}; set another port, or 0 "
            f"for a free one"
        ) from None


def _require(package: str, key: str) -> None:
    if find_spec(package) is None:
        raise ConfigError(
            f"{key} is set, but the package {package} is not installed; install {EXTRA} (in a checkout: bash "
            f"launch/setup_extra.sh trackers), or set {key}=null"
        )


def _has_wandb_key() -> bool:
    """Whether wandb will find a key where it looks: the environment, or the netrc file that `wandb login` writes."""
    if any(os.environ.get(name) for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")):
        return True
    settings = configparser.ConfigParser(interpolation=None)
    settings.read(Path("~/.config/wandb/settings").expanduser())
    configured = settings.get("default", "base_url", fallback=WANDB_HOST)
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or configured).netloc
    try:
        return netrc.netrc(os.environ.get("NETRC") or Path("~/.netrc").expanduser()).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
