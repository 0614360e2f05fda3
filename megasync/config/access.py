"""Access control of a run's servers: generation keys, and the TLS certificate of the router."""

from __future__ import annotations

import os
import secrets
import ssl
from dataclasses import dataclass, field
from pathlib import Path

from megasync.base.files import PRIVATE, atomic_write
from megasync.config.host import is_loopback
from megasync.config.load import SESSIONS_FOLDER, SESSIONS_KEY
from megasync.config.schema import ClusterConfig
from megasync.errors import ConfigError, raised_as

# Environment variable with the user's own key, which must not be in a file. Without it, the run generates a key.
GENERATION_KEY_VARIABLE = "MEGASYNC_GENERATION_KEY"
# As well, for sessions from outside (`rollout.agent: external`).
SESSIONS_KEY_VARIABLE = "MEGASYNC_SESSIONS_KEY"
# The key of servers that somebody else runs.
EXTERNAL_KEY_VARIABLE = "MEGASYNC_EXTERNAL_KEY"
# Minimum length in characters. 16 random hexadecimal digits are 64 bits.
SHORTEST_KEY = 16
# Length of a generated key, in random bytes.
KEY_BYTES = 24


def foreign_environment() -> dict[str, str]:
    """The variables of this process without the keys of a run, for processes that run the code of others."""
    keys = (GENERATION_KEY_VARIABLE, SESSIONS_KEY_VARIABLE, EXTERNAL_KEY_VARIABLE)
    return {name: value for name, value in os.environ.items() if name not in keys}


def given_key(variable: str = GENERATION_KEY_VARIABLE) -> str | None:
    """The user's own key in a variable of the environment, or None if that is unset or empty.

    Raises ConfigError if the key is too short or cannot be sent in an HTTP header. The message omits the key.
    """
    key = os.environ.get(variable, "")
    if not key:
        return None
    if len(key) < SHORTEST_KEY or not all("!" <= letter <= "~" for letter in key):
        raise ConfigError(
            f"the key in {variable} has {len(key)} characters; it must have at least {SHORTEST_KEY} "
            "printable ASCII characters and no spaces. Generate one with `openssl rand -hex 24`, or unset the variable"
        )
    return key


def given_external_key() -> str | None:
    """The key of external servers (`rollout.external`), or None if the variable is unset or empty.

    Raises ConfigError if it cannot be sent in an HTTP header, or contradicts the user's own generation key.
    """
    key = os.environ.get(EXTERNAL_KEY_VARIABLE, "")
    if not all("!" <= letter <= "~" for letter in key):
        raise ConfigError(f"the key in {EXTERNAL_KEY_VARIABLE} must be printable ASCII characters without spaces")
    if key and given_key() not in (None, key):
        raise ConfigError(
            f"{EXTERNAL_KEY_VARIABLE} and {GENERATION_KEY_VARIABLE} differ, but generation on external servers needs "
            f"their key; unset {GENERATION_KEY_VARIABLE}"
        )
    return key or None


def sessions_key(run_dir: Path) -> str:
    """The key of sessions from outside: the user's own, or the run's, which a resumed run keeps.

    Writes the run's, for this user alone. Raises ConfigError.
    """
    if (own := given_key(SESSIONS_KEY_VARIABLE)) is not None:
        return own
    file = run_dir / SESSIONS_FOLDER / SESSIONS_KEY
    with raised_as(ConfigError, f"{file} cannot be written", f"make room, or set {SESSIONS_KEY_VARIABLE}"):
        if not file.exists():
            file.parent.mkdir(exist_ok=True)
            atomic_write(file, secrets.token_hex(KEY_BYTES), PRIVATE)
        return file.read_text().strip()


def describe_sessions(run_dir: Path) -> str:
    """One sentence that says where programs outside open sessions, and with which key."""
    folder = run_dir / SESSIONS_FOLDER
    key = f"in {SESSIONS_KEY_VARIABLE}" if given_key(SESSIONS_KEY_VARIABLE) else f"in {folder / SESSIONS_KEY}"
    return f"programs outside open sessions at the addresses in {folder}/*.url, with the key {key}"


def generation_needs_key(cluster: ClusterConfig) -> bool:
    """Whether generation requests must carry a key. Raises ConfigError like `given_key`."""
    if cluster.generation_key != "auto":
        return cluster.generation_key == "always"
    return not is_loopback(cluster.host) or given_key() is not None


def check_access(cluster: ClusterConfig, *, external: bool = False, planning: bool = False) -> None:
    """Raises ConfigError if keys of the environment contradict `cluster.generation_key`, for ``external`` servers too.

    Unless `planning`, it also checks that this machine can use the certificate files.
    """
    keys = {GENERATION_KEY_VARIABLE: given_key()}
    if external:
        keys[EXTERNAL_KEY_VARIABLE] = given_external_key()
    if cluster.generation_key == "never" and (name := next((each for each in keys if keys[each]), None)):
        raise ConfigError(f"cluster.generation_key=never, but {name} is set; unset it, or set generation_key=auto")
    if not planning:
        check_certificates(cluster)


def describe_access(cluster: ClusterConfig) -> str:
    """One sentence that says who can reach the servers, who may generate, and whether the router uses TLS."""
    where = "this machine only" if is_loopback(cluster.host) else "the network"
    key = "requires the generation key" if generation_needs_key(cluster) else "requires no key"
    router = "plain HTTP" if cluster.tls_cert is None else "TLS"
    return (
        f"servers accept connections from {where} (cluster.host={cluster.host}); generation {key}; the router uses "
        f"{router}"
    )


def check_certificates(cluster: ClusterConfig) -> None:
    """Raises ConfigError if the router or its clients cannot use the certificate files on this machine."""
    if cluster.tls_cert is None or cluster.tls_key is None:
        return
    for name in ("tls_cert", "tls_key", "tls_ca"):
        path = getattr(cluster, name)
        if path is not None:
            with raised_as(ConfigError, f"cluster.{name}={path} cannot be read", "name a PEM file that you may read"):
                Path(path).read_bytes()
    what = f"cluster.tls_cert={cluster.tls_cert} and cluster.tls_key={cluster.tls_key} cannot be used together"
    fix = "name a PEM certificate and its own PEM key, which must not be encrypted"
    with raised_as(ConfigError, what, fix, of=(OSError, ValueError)):
        # The dummy password makes an encrypted key fail instead of prompting for its password.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            cluster.tls_cert, cluster.tls_key, password=lambda: b"-"
        )
    router_trust(cluster)


def router_trust(cluster: ClusterConfig) -> ssl.SSLContext | None:
    """The TLS context that clients of the router use; None if the router speaks plain HTTP.

    Raises ConfigError if the file contains no certificate.
    """
    if cluster.tls_cert is None:
        return None
    name = "tls_ca" if cluster.tls_ca is not None else "tls_cert"
    path = getattr(cluster, name)
    what, fix = f"cluster.{name}={path} cannot be used", "name a PEM file of certificates"
    with raised_as(ConfigError, what, fix, of=(OSError, ValueError)):
        trust = ssl.create_default_context(cafile=path)
    if cluster.tls_ca is None:
        # Trust the certificate itself, regardless of its issuer.
        trust.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return trust


@dataclass(frozen=True, slots=True)
class Keys:
    """The random keys of one run's servers and router. Their `repr` omits them, for logs and tracebacks.

    A key never appears in a configuration, a log, a file or a command line. The processes that check keys read them
    from a pipe.
    """

    # Authorizes every route of a server.
    admin: str = field(repr=False)
    # Authorizes access to the router's list of servers. Separate, so that the router cannot control weights.
    router: str = field(repr=False)
    # Authorizes generation; None if generation needs no key.
    generation: str | None = field(default=None, repr=False)
    # Authorizes programs outside to open sessions; None if nobody may.
    sessions: str | None = field(default=None, repr=False)

    @classmethod
    def draw(cls, cluster: ClusterConfig, external: bool = False) -> Keys:
        """Generates new keys; `external` servers have a key already, or none.

        Raises ConfigError if the user's own key cannot be used.
        """
        admin, router, generation = (secrets.token_hex(KEY_BYTES) for _ in range(3))
        if external and (key := given_external_key()) is not None:
            return cls(key, router, key)
        return cls(admin, router, (given_key() or generation) if generation_needs_key(cluster) else None)
