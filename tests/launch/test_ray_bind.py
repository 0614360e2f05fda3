"""A socket for all interfaces is bound to the chosen interface instead; nothing else changes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from megasync_patches import PatchError, ray_bind
from waits import PATIENCE

from megasync.planning import doctor
from megasync.planning.finding import OK, WARNING

# Binds each socket of argv[1], a list of (family, kind, for IPv6 only, address); prints where each came to be.
BIND = """
import json, socket, sys
found = []
for family, kind, only, address in json.loads(sys.argv[1]):
    with socket.socket(getattr(socket, family), getattr(socket, kind)) as one:
        if family == "AF_INET6":
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, only)
        try:
            one.bind((address, 0))
        except OSError as error:
            found.append(f"{error.errno}")
        else:
            found.append(one.getsockname()[0])
print(json.dumps(found))
"""
ANY4, ANY6 = ("AF_INET", "SOCK_STREAM", 0, "0.0.0.0"), ("AF_INET6", "SOCK_STREAM", 0, "::")
MAPPED, ONLY6 = ("AF_INET6", "SOCK_STREAM", 0, "::ffff:0.0.0.0"), ("AF_INET6", "SOCK_STREAM", 1, "::")
OTHERS = [
    ("AF_INET", "SOCK_STREAM", 0, "127.0.0.1"),
    ("AF_INET6", "SOCK_STREAM", 0, "::1"),
    ("AF_INET", "SOCK_DGRAM", 0, "0.0.0.0"),
    ("AF_INET6", "SOCK_DGRAM", 0, "::"),
]

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(ray_bind.compiler() is None, reason="needs a C compiler"),
]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing is built yet; the environment cannot be written, and the user's cache is elsewhere."""
    (tmp_path / "lib").write_text("in the way")
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home" / ".cache" / "megasync"


@pytest.fixture
def without_compiler(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_bind, "COMPILERS", ("no-such-compiler",))


def bound(address: str | None, *sockets: tuple) -> list[str]:
    extra = {} if address is None else ray_bind.environment(ray_bind.library(), address)
    command = [sys.executable, "-c", BIND, json.dumps(sockets)]
    done = subprocess.run(command, env=os.environ | extra, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return json.loads(done.stdout)


def test_all_interfaces_become_the_chosen_one_and_loopback_for_the_other_family() -> None:
    everywhere = (ANY4, ANY6, MAPPED, ONLY6)
    mapped = "::ffff:127.0.0.2"
    assert bound("127.0.0.2", *everywhere) == ["127.0.0.2", mapped, mapped, "::1"]
    assert bound("::1", *everywhere) == ["127.0.0.1", "::1", "::1", "::1"]


@pytest.mark.parametrize("address", [None, "", "host0"])
def test_without_an_address_nothing_changes(address: str | None) -> None:
    assert bound(address, ANY4, ANY6) == ["0.0.0.0", "::"]


def test_sockets_with_an_address_or_without_tcp_are_unchanged() -> None:
    assert bound("127.0.0.2", *OTHERS) == bound(None, *OTHERS) == [address for *_, address in OTHERS]
    nowhere = ("AF_INET", "SOCK_STREAM", 0, "192.0.2.1")
    assert bound("127.0.0.2", nowhere) == bound(None, nowhere), "errors stay what they are"


def test_the_library_is_built_once_and_cached(cache: Path) -> None:
    first = ray_bind.library()
    assert first.parent == cache
    made = first.stat().st_mtime_ns
    assert ray_bind.library() == first and first.stat().st_mtime_ns == made
    assert list(cache.iterdir()) == [first]


def test_a_changed_source_builds_another_library(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, source = ray_bind.library_name(), tmp_path / "changed.c"
    source.write_text(ray_bind.SOURCE.read_text() + "\n")
    monkeypatch.setattr(ray_bind, "SOURCE", source)
    assert ray_bind.library_name() != first


def test_existing_preloads_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", "/opt/a.so /opt/b.so")
    found = ray_bind.environment(Path("/venv/bind.so"), "10.0.0.1")
    assert found["LD_PRELOAD"] == "/opt/a.so:/opt/b.so:/venv/bind.so"
    monkeypatch.setenv("LD_PRELOAD", found["LD_PRELOAD"])
    assert ray_bind.environment(Path("/venv/bind.so"), "10.0.0.1") == found
    with pytest.raises(PatchError, match=r"my env/bind\.so has a space"):
        ray_bind.environment(Path("/my env/bind.so"), "10.0.0.1")


def test_a_missing_compiler_is_reported(without_compiler: None) -> None:
    with pytest.raises(PatchError, match="no C compiler"):
        ray_bind.library()
    (found,) = doctor.check_compiler()
    assert found.status == OK and "no C compiler" in found.detail


def test_a_failed_build_is_reported(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "broken.c"
    source.write_text("#error no headers here\n")
    monkeypatch.setattr(ray_bind, "SOURCE", source)
    with pytest.raises(PatchError, match="the C compiler failed: .*no headers here"):
        ray_bind.library()
    assert list(cache.iterdir()) == []


def test_an_ineffective_library_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wrong = tmp_path / "of-another-machine.so"
    wrong.write_bytes(b"\x7fELF of another processor")
    monkeypatch.setattr(ray_bind, "library", lambda: wrong)
    monkeypatch.setenv(ray_bind.VARIABLE, "127.0.0.1")
    with pytest.raises(
        PatchError, match=r"has no effect \(0\.0\.0\.0 instead of 127\.0\.0\.1\): .*cannot be preloaded"
    ):
        ray_bind.apply()
    assert "LD_PRELOAD" not in os.environ


def test_the_doctor_warns_of_a_node_that_listens_everywhere(monkeypatch: pytest.MonkeyPatch, request) -> None:
    monkeypatch.setenv("MEGASYNC_HOST", "10.0.0.1")
    (found,) = doctor.check_listening()
    assert found.status == WARNING and "not started by megasync's launcher" in found.detail and "firewall" in found.fix
    monkeypatch.setenv(ray_bind.VARIABLE, "10.0.0.1")
    request.getfixturevalue("without_compiler")
    (found,) = doctor.check_listening()
    assert found.status == WARNING and "no C compiler" in found.detail
    monkeypatch.setenv("MEGASYNC_HOST", "127.0.0.1")
    (found,) = doctor.check_listening()
    assert found.status == OK, "Ray on loopback listens there alone"


def test_a_nodes_processes_are_confined_and_its_doctor_sees_it() -> None:
    code = (
        "from megasync.planning.doctor import check_listening\n"
        "(found,) = check_listening()\nprint(found.status, found.detail)"
    )
    command = [sys.executable, "-m", "megasync.launch.node", "--folder", ".", "--peer", "127.0.0.1", "run"]
    with subprocess.Popen(
        [*command, sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as node:
        node.stdin.write("{}\n")
        # The end of its input would end it.
        node.stdin.flush()
        assert node.stdout.read() == "ok listens on 127.0.0.1\n"


def test_a_node_without_a_compiler_continues_with_a_warning(tmp_path: Path) -> None:
    """Only `ray` prints the warning, so a head prints it once; the device does not exist, which ends the command."""
    code = (
        "import sys\nfrom megasync_patches import ray_bind\nfrom megasync.launch import node\n"
        f"ray_bind.COMPILERS, sys.prefix = ('no-such-compiler',), {str(tmp_path)!r}\n"
        "words = ['--folder', '.', '--peer', '127.0.0.1', 'ray', '--devices', '1', '--log', 'x']\n"
        "sys.exit(node.main([*words, '--device', 'abacus']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        input="{}\n",
        env=os.environ | {"HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    first, second = done.stdout.splitlines()
    assert "Ray listens on ALL interfaces" in first and "no C compiler" in first and "firewall" in first
    assert "abacus" in second and done.returncode == 2
