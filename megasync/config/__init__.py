"""Configuration: `schema` defines the keys, `load` reads YAML and overrides, `limits` checks each value alone.

`changes` decides what a resumed run may change, `deadlines` relates timeouts to each other, `pools` counts the nodes
that a run needs, `reference` writes docs/configuration.md. No module here imports torch or Ray, so a bad configuration
is refused before anything heavy is loaded. Contradictions between keys are refused by `megasync.preflight.check`.
"""

from megasync.config.load import CONFIG_FILE, CUSTOM_FILE, load_config, remember, save_config
from megasync.config.schema import Config

__all__ = ["CONFIG_FILE", "CUSTOM_FILE", "Config", "load_config", "remember", "save_config"]
