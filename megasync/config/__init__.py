"""Configuration: `schema` is what may be said, `load` reads YAML and overrides, `check` refuses contradictions.

`changes` rules on what a resumed run may change, `limits` holds every key's range, `model_files` reads what is known of a model, `pools` counts the nodes that a run asks
for, `reference` writes docs/configuration.md. No module here imports torch or Ray, so a bad configuration is refused before
anything heavy is loaded.
"""

from megasync.config.load import CONFIG_FILE, CUSTOM_FILE, load_config, remember, save_config
from megasync.config.schema import Config

__all__ = ["CONFIG_FILE", "CUSTOM_FILE", "Config", "load_config", "remember", "save_config"]
