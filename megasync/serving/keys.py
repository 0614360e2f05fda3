"""The keys of one run's servers and router, drawn anew for each run.

No key is ever in a configuration, a log, a file or a command line: the processes that check them read them from a pipe.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from megasync.config.access import generation_needs_key, given_generation_key
from megasync.config.schema import ClusterConfig

BYTES = 24


@dataclass(frozen=True, slots=True)
class Keys:
    """Not shown in logs and tracebacks."""

    # Opens every route of a server.
    admin: str = field(repr=False)
    # Opens the router's list of servers. Another one, so that the router has no control over weights.
    router: str = field(repr=False)
    # Opens generation; None where that is open.
    generation: str | None = field(default=None, repr=False)

    @classmethod
    def draw(cls, cluster: ClusterConfig) -> Keys:
        """Raises ConfigError for a key of the user's that cannot be used."""
        generation = (given_generation_key() or _random()) if generation_needs_key(cluster) else None
        return cls(_random(), _random(), generation)


def _random() -> str:
    return secrets.token_hex(BYTES)
