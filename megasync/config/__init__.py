"""Configuration: `schema` is what may be said, `load` reads YAML and overrides, `check` refuses contradictions."""

from megasync.config.schema import Config

__all__ = ["Config"]
