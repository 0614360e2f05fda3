"""Parsing hosts, and running commands on them."""

import socket
from pathlib import Path

import pytest

from megasync.errors import ConfigError, MegasyncError
from megasync.launch import slurm
from megasync.launch.hosts import Host, read_hosts
from megasync.launch.node import address_of, address_towards, interface_of
from megasync.launch.remote import shell_command


def test_hosts_come_from_a_list_or_from_a_file(tmp_path: Path) -> None:
    assert read_hosts("a, b,c") == [Host("a"), Host("b"), Host("c")]
    assert read_hosts("alone") == [Host("alone")]
    assert read_hosts("me@a")[0].reachable_at == "a"
    file = tmp_path / "hosts"
    file.write_text("# the big ones\na\n\nb  # and this\n")
    assert read_hosts(str(file)) == [Host("a"), Host("b")]
    file.write_bytes(b"\xef\xbb\xbfa\r\n\r\nme@b\r\n  10.0.0.3\t\r\n")
    assert read_hosts(str(file)) == [Host("a"), Host("me@b"), Host("10.0.0.3")], "as editors of other systems write"


def test_hosts_may_be_reserved_for_a_pool(tmp_path: Path) -> None:
    kept = [Host("a", "trainer"), Host("b", "rollout"), Host("c", "rollout")]
    assert read_hosts("a=trainer,b=rollout,c=rollout") == kept
    file = tmp_path / "hosts"
    file.write_text("a trainer\nb rollout\nc rollout\n")
    assert read_hosts(str(file)) == kept


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (",", "names no host"),
        ("missing/hosts", "cannot be read"),
        ("hosts.txt", "cannot be read"),
        ("a,b,a", "'a' is listed twice"),
        ("me@a,b,you@a", "'a' is listed twice"),
        ("a;b,c", "'a;b' in 'a;b,c' is not a host"),
        ("a=trainer,b", "host 'b' has no pool"),
        ("a=trainer,b=trainer", "name hosts for each pool"),
        ("a=judge,b=rollout", "'judge' after host 'a' is not a pool"),
        ("a b c,d", "is not a host"),
        ("--now,d", "is not a host"),
    ],
)
def test_invalid_hosts_are_refused(source: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_hosts(source)


def test_ssh_gets_one_string_and_others_the_words() -> None:
    command = ["echo", "a b", "$HOME"]
    assert shell_command("ssh -p 22", "gpu1", command) == ["ssh", "-p", "22", "gpu1", "echo 'a b' '$HOME'"]
    assert shell_command("/usr/bin/ssh", "gpu1", command)[-1] == "echo 'a b' '$HOME'"
    assert shell_command("srun -w", "gpu1", command) == ["srun", "-w", "gpu1", *command]


def test_the_interface_is_the_one_that_routes_to_the_peer() -> None:
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert interface_of("127.0.0.1") == "lo" and address_of("lo") == "127.0.0.1"
    with pytest.raises(ConfigError, match="cannot resolve the host 'no-such-host.invalid'"):
        address_towards("no-such-host.invalid")
    with pytest.raises(ConfigError, match="has no interface 'eth99'; it has .*lo"):
        address_of("eth99")


def test_a_host_with_addresses_of_both_families_is_reached_by_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    by6 = (socket.AF_INET6, socket.SOCK_DGRAM, 17, "", ("::1", 9, 0, 0))
    by4 = (socket.AF_INET, socket.SOCK_DGRAM, 17, "", ("127.0.0.1", 9))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [by6, by4])
    assert address_towards("both") == "127.0.0.1"
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [by6])
    with pytest.raises(ConfigError, match=r"resolves 'new' to IPv6 only \(::1\); list hosts by IPv4"):
        address_towards("new")


def test_slurm_names_the_nodes_of_a_job(fake_scontrol: Path) -> None:
    hosts = slurm.slurm_hosts({"SLURM_JOB_NODELIST": "n1,n2"})
    assert hosts == [Host("n1", address="10.0.0.1"), Host("n2", address="10.0.0.2")]
    with pytest.raises(ConfigError, match="SLURM_JOB_NODELIST is not set"):
        slurm.slurm_hosts({})
    with pytest.raises(ConfigError, match="no such list"):
        slurm.slurm_hosts({"SLURM_JOB_NODELIST": "bad"})


def test_the_components_of_a_heterogeneous_job_are_pools(fake_scontrol: Path) -> None:
    parts = {"SLURM_HET_SIZE": "2", "SLURM_JOB_NODELIST_HET_GROUP_0": "n1", "SLURM_JOB_NODELIST_HET_GROUP_1": "n2,n3"}
    hosts = slurm.slurm_hosts(parts)
    assert [(host.name, host.pool) for host in hosts] == [("n1", "trainer"), ("n2", "rollout"), ("n3", "rollout")]
    assert "--het-group=1" in hosts[2].shell.split()
    with pytest.raises(ConfigError, match="3 components"):
        slurm.slurm_hosts(parts | {"SLURM_HET_SIZE": "3"})


def test_a_job_that_slurm_has_already_requeued_stays_as_it_is(fake_scontrol: Path) -> None:
    path = fake_scontrol / "scontrol"
    path.write_text('#!/usr/bin/env bash\necho "$@" >"$0.asked"; echo "Job is pending execution" >&2; exit 1\n')
    slurm.requeue({"SLURM_JOB_ID": "7"})
    assert (fake_scontrol / "scontrol.asked").read_text() == "requeue 7\n"
    path.write_text('#!/usr/bin/env bash\necho "Requested operation is presently disabled" >&2; exit 1\n')
    with pytest.raises(MegasyncError, match="refused to requeue job 7: Requested operation is presently dis"):
        slurm.requeue({"SLURM_JOB_ID": "7"})
