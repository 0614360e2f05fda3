"""Configuration: `schema` defines the keys, each with its limit and rules, and `load` reads YAML and overrides.

`limits` checks each value on its own, `rules` what keys need and exclude, `changes` what a resumed run may change.
`pools` computes the devices and nodes that a run needs, and `reference` writes docs/keys. No module here
imports torch or Ray, so a bad configuration is refused before heavy packages are loaded. `megasync.preflight.check`
adds what depends on a model, on files or on the machine.
"""

from megasync.config.load import (
    CONFIG_FILE,
    CUSTOM_FILE,
    ROWS_FILE,
    SERVICE_FOLDER,
    SESSIONS_FOLDER,
    SESSIONS_KEY,
    TENANTS_FILE,
    custom_of,
    load_config,
    remember,
    save_config,
    saved_values,
)
from megasync.config.schema import Config

__all__ = [
    "CONFIG_FILE",
    "CUSTOM_FILE",
    "ROWS_FILE",
    "SERVICE_FOLDER",
    "SESSIONS_FOLDER",
    "SESSIONS_KEY",
    "TENANTS_FILE",
    "Config",
    "custom_of",
    "load_config",
    "remember",
    "save_config",
    "saved_values",
]
