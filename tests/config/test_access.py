"""Generation keys, and invalid settings of keys and certificates."""

import shutil
import subprocess

import pytest

from megasync.config.access import (
    EXTERNAL_KEY_VARIABLE,
    GENERATION_KEY_VARIABLE,
    SESSIONS_KEY_VARIABLE,
    Keys,
    check_access,
    describe_access,
    describe_sessions,
    foreign_environment,
    generation_needs_key,
    router_trust,
    sessions_key,
)
from megasync.config.schema import ClusterConfig
from megasync.errors import ConfigError

OWN = "a-key-of-the-users-own"


@pytest.fixture(autouse=True)
def no_key_of_ones_own(monkeypatch):
    for name in (GENERATION_KEY_VARIABLE, SESSIONS_KEY_VARIABLE):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("cluster", "needed"),
    [
        ({}, False),
        ({"host": "::1"}, False),
        ({"host": "localhost"}, False),
        ({"host": "auto"}, True),
        ({"host": "10.0.0.3"}, True),
        ({"host": "node7"}, True),
        ({"host": "10.0.0.3", "generation_key": "never"}, False),
        ({"generation_key": "always"}, True),
    ],
)
def test_generation_requires_a_key_if_the_network_can_reach_it(cluster, needed):
    config = ClusterConfig(**cluster)
    assert generation_needs_key(config) is needed
    assert (Keys.draw(config).generation is not None) is needed
    assert ("generation requires the generation key" in describe_access(config)) is needed


def test_keys_differ_from_each_other_and_between_runs():
    drawn = [Keys.draw(ClusterConfig(host="auto")) for _ in range(2)]
    found = [key for keys in drawn for key in (keys.admin, keys.router, keys.generation)]
    assert len(set(found)) == 6 and min(map(len, found)) == 48
    assert not any(key in f"{keys!r}{keys!s}" for keys in drawn for key in found)


def test_the_users_own_key_is_read_from_the_environment(monkeypatch):
    monkeypatch.setenv(GENERATION_KEY_VARIABLE, OWN)
    check_access(ClusterConfig())
    assert Keys.draw(ClusterConfig()).generation == OWN
    with pytest.raises(ConfigError, match=f"generation_key=never, but {GENERATION_KEY_VARIABLE}") as refused:
        check_access(ClusterConfig(generation_key="never"))
    assert OWN not in str(refused.value)


def test_a_run_keeps_the_key_of_its_sessions_in_a_private_file(tmp_path):
    key, other = sessions_key(tmp_path), sessions_key(tmp_path.parent)
    assert len(key) == 48 and key != other
    assert sessions_key(tmp_path) == key
    file = tmp_path / "sessions" / "key"
    assert (file.stat().st_mode & 0o777, str(file) in describe_sessions(tmp_path)) == (0o600, True)


def test_the_users_own_key_of_sessions_is_written_nowhere(tmp_path, monkeypatch):
    monkeypatch.setenv(SESSIONS_KEY_VARIABLE, OWN)
    assert sessions_key(tmp_path) == OWN
    assert not (tmp_path / "sessions").exists()
    assert f"in {SESSIONS_KEY_VARIABLE}" in describe_sessions(tmp_path)
    monkeypatch.setenv(SESSIONS_KEY_VARIABLE, "short")
    with pytest.raises(ConfigError, match=f"{SESSIONS_KEY_VARIABLE} has 5 characters"):
        sessions_key(tmp_path)


def test_processes_of_others_get_no_key_of_a_run(monkeypatch):
    for name in (GENERATION_KEY_VARIABLE, SESSIONS_KEY_VARIABLE, EXTERNAL_KEY_VARIABLE):
        monkeypatch.setenv(name, OWN)
    monkeypatch.setenv("OTHER", "kept")
    assert OWN not in foreign_environment().values() and foreign_environment()["OTHER"] == "kept"


@pytest.mark.parametrize("key", ["short", "with a blank in it", "schlüssel-der-zu-viel-hat", "two-lines-of\r\nheaders"])
def test_an_invalid_key_is_refused_without_printing_it(monkeypatch, key):
    monkeypatch.setenv(GENERATION_KEY_VARIABLE, key)
    with pytest.raises(ConfigError, match=f"{GENERATION_KEY_VARIABLE} has {len(key)} characters") as refused:
        check_access(ClusterConfig())
    assert key not in str(refused.value)


def test_missing_files_are_refused_at_start_but_not_in_a_plan(tmp_path):
    cluster = ClusterConfig(tls_cert=str(tmp_path / "absent.pem"), tls_key=str(tmp_path / "absent.key"))
    check_access(cluster, planning=True)
    with pytest.raises(ConfigError, match=r"cluster\.tls_cert=.*absent\.pem cannot be read: .*No such file"):
        check_access(cluster)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make certificates")
def test_a_certificate_with_another_key_is_refused(tmp_path):
    files = {}
    for name, secret in (("one", []), ("other", []), ("locked", ["-passout", "pass:secret"])):
        cert, key = tmp_path / f"{name}.pem", tmp_path / f"{name}.key"
        subprocess.run(
            [*("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "2")]
            + [*(secret or ["-nodes"]), "-subj", f"/CN={name}", "-out", str(cert), "-keyout", str(key)],
            check=True,
            capture_output=True,
        )
        files[name] = str(cert), str(key)

    def cluster(cert: str, key: str, ca: str | None = None) -> ClusterConfig:
        return ClusterConfig(tls_cert=files[cert][0], tls_key=files[key][1], tls_ca=ca)

    check_access(cluster("one", "one"))
    check_access(cluster("one", "one", files["other"][0]))
    assert router_trust(cluster("one", "one")) is not None and router_trust(ClusterConfig()) is None
    with pytest.raises(ConfigError, match=r"cannot be used together: .*mismatch"):
        check_access(cluster("one", "other"))
    with pytest.raises(ConfigError, match="must not be encrypted"):
        check_access(cluster("locked", "locked"))
    with pytest.raises(ConfigError, match=r"cluster\.tls_ca=.*one\.key cannot be used"):
        check_access(cluster("one", "one", files["one"][1]))
