from quickstart_config import config_file

__all__ = ["config_file"]
