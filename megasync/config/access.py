"""Who may ask a run's servers for tokens, and with which certificate its router proves who it is."""

from __future__ import annotations

import os
import secrets
import ssl
from dataclasses import dataclass, field
from pathlib import Path

from megasync.config.host import is_loopback
from megasync.config.schema import ClusterConfig
from megasync.errors import ConfigError

# A key of the user's own, which must not be in a file; a run draws one otherwise.
GENERATION_KEY_VARIABLE = "MEGASYNC_GENERATION_KEY"
# Characters. As many random hexadecimal digits are 64 bits.
SHORTEST_KEY = 16
# Random bytes of a key that megasync draws.
KEY_BYTES = 24


def given_generation_key() -> str | None:
    """The user's own key. Raises ConfigError, without the key, for one that is short or no word of an HTTP header."""
    key = os.environ.get(GENERATION_KEY_VARIABLE, "")
    if not key:
        return None
    if len(key) < SHORTEST_KEY or not all("!" <= letter <= "~" for letter in key):
        raise ConfigError(
            f"the key in {GENERATION_KEY_VARIABLE} has {len(key)} characters and must have at least {SHORTEST_KEY}, "
            "all of them printable ASCII and none a blank; take one such as `openssl rand -hex 24` prints, or unset "
            "the variable"
        )
    return key


def generation_needs_key(cluster: ClusterConfig) -> bool:
    """Whether a request for tokens must carry a key. Raises ConfigError as `given_generation_key`."""
    if cluster.generation_key != "auto":
        return cluster.generation_key == "always"
    return not is_loopback(cluster.host) or given_generation_key() is not None


def check_access(cluster: ClusterConfig, *, planning: bool = False) -> None:
    """Raises ConfigError for keys or certificates that contradict each other or, unless `planning`, cannot be used."""
    given = given_generation_key()
    if cluster.generation_key == "never" and given is not None:
        raise ConfigError(
            f"cluster.generation_key=never, but {GENERATION_KEY_VARIABLE} holds a key; unset it, or set "
            f"generation_key=auto"
        )
    if (cluster.tls_cert is None) != (cluster.tls_key is None):
        raise ConfigError(
            f"cluster.tls_cert={cluster.tls_cert} and cluster.tls_key={cluster.tls_key} are used together or not at "
            f"all; set both or neither"
        )
    if cluster.tls_ca is not None and cluster.tls_cert is None:
        raise ConfigError(
            f"cluster.tls_ca={cluster.tls_ca} is what the router's certificate is checked against, but "
            f"cluster.tls_cert is not set; set tls_cert and tls_key, or tls_ca to null"
        )
    if not planning:
        check_certificates(cluster)


def describe_access(cluster: ClusterConfig) -> str:
    """Who reaches the servers and may do what, in one sentence."""
    where = "this machine alone" if is_loopback(cluster.host) else "the network"
    who = "holders of the generation key" if generation_needs_key(cluster) else "whoever reaches them"
    router = "plain HTTP" if cluster.tls_cert is None else "TLS"
    return f"servers listen to {where} (cluster.host={cluster.host}) and generate for {who}; the router speaks {router}"


def check_certificates(cluster: ClusterConfig) -> None:
    """Raises ConfigError for files of this machine that the router or its clients cannot use."""
    if cluster.tls_cert is None or cluster.tls_key is None:
        return
    for name in ("tls_cert", "tls_key", "tls_ca"):
        path = getattr(cluster, name)
        try:
            if path is not None:
                Path(path).read_bytes()
        except OSError as error:
            raise ConfigError(
                f"cluster.{name}={path} cannot be read: {error.strerror}; name a PEM file that this user may read"
            ) from None
    try:
        # An encrypted key has no password here, and nobody is asked for one.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            cluster.tls_cert, cluster.tls_key, password=lambda: b"-"
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cluster.tls_cert={cluster.tls_cert} and cluster.tls_key={cluster.tls_key} cannot be used together: "
            f"{error}; name a PEM certificate and its own PEM key, which must not be encrypted"
        ) from None
    router_trust(cluster)


def router_trust(cluster: ClusterConfig) -> ssl.SSLContext | None:
    """What clients of the router trust; None where it speaks plain HTTP. Raises ConfigError for a file that holds no
    certificate.
    """
    if cluster.tls_cert is None:
        return None
    name = "tls_ca" if cluster.tls_ca is not None else "tls_cert"
    path = getattr(cluster, name)
    try:
        trust = ssl.create_default_context(cafile=path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cluster.{name}={path} cannot be used: {error}; name a PEM file of certificates") from None
    if cluster.tls_ca is None:
        # The certificate itself is trusted, whoever signed it.
        trust.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return trust


@dataclass(frozen=True, slots=True)
class Keys:
    """The random keys of one run's servers and router, without a representation in logs and tracebacks.

    No key is ever in a configuration, a log, a file or a command line: the processes that check them read them from a
    pipe.
    """

    # Opens every route of a server.
    admin: str = field(repr=False)
    # Opens the router's list of servers. Separate, so that the router has no control over weights.
    router: str = field(repr=False)
    # Opens generation; None where generation needs no key.
    generation: str | None = field(default=None, repr=False)

    @classmethod
    def draw(cls, cluster: ClusterConfig) -> Keys:
        """Draws new keys. Raises ConfigError when the user's own generation key cannot be used."""
        generation = (given_generation_key() or _random_key()) if generation_needs_key(cluster) else None
        return cls(_random_key(), _random_key(), generation)


def _random_key() -> str:
    return secrets.token_hex(KEY_BYTES)
