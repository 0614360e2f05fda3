"""Environments in which a model acts turn by turn. `Play` is the workflow; `EnvironmentPool` bounds their number.

`integrations` has environments of others.
"""

from megasync.environments.play import Play
from megasync.environments.pool import EnvironmentPool
from megasync.environments.protocol import Environment, Step

__all__ = ["Environment", "EnvironmentPool", "Play", "Step"]
