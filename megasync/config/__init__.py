"""Configuration: `schema` defines the keys, `load` reads YAML and overrides, `limits` checks each value on its own.

`changes` decides which keys a resumed run may change, `deadlines` checks timeouts against each other, `pools` computes
the devices and nodes that a run needs, and `reference` writes docs/configuration.md. No module here imports torch or
Ray, so a bad configuration is refused before heavy packages are loaded. `megasync.preflight.check` refuses
contradictions between keys.
"""

from megasync.config.load import (
    CONFIG_FILE,
    CUSTOM_FILE,
    ROWS_FILE,
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
    "Config",
    "load_config",
    "remember",
    "save_config",
    "saved_values",
]
