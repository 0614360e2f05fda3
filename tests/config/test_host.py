"""A fixed address is used unchanged; auto selects one of this machine. No proxy lies between a run's processes."""

import os
import socket

import pytest

from megasync.config.host import is_loopback, proxy_variables, reach_directly, resolve_host, without_proxies


def test_a_fixed_address_is_kept():
    assert resolve_host("10.1.2.3") == "10.1.2.3"


def test_auto_selects_an_address_that_can_be_bound():
    with socket.socket() as listener:
        listener.bind((resolve_host("auto"), 0))


def test_loopback_is_recognised():
    assert is_loopback("127.0.0.1") and is_loopback("::1") and is_loopback("localhost")
    assert not is_loopback("10.0.0.1") and not is_loopback("node-1")


@pytest.mark.parametrize("name", ["http_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY", "grpc_proxy"])
def test_proxies_of_the_environment_are_found_and_left_out(name):
    env = {name: "socks5://user:word@proxy:1080", "PATH": "/bin", "no_proxy": "example.org"}
    assert proxy_variables(env) == [name]
    assert without_proxies(env) == {"PATH": "/bin", "no_proxy": "example.org"}
    assert proxy_variables({name: ""}) == []


def test_the_runs_addresses_are_added_to_those_without_a_proxy(monkeypatch):
    for name in [*proxy_variables(os.environ), "no_proxy", "NO_PROXY"]:
        monkeypatch.delenv(name, raising=False)
    reach_directly("10.0.0.5")
    assert "no_proxy" not in os.environ
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    monkeypatch.setenv("no_proxy", "example.org, .internal")
    monkeypatch.setenv("NO_PROXY", "example.org")
    for _ in range(2):
        reach_directly("10.0.0.5")
    wanted = "example.org,.internal,localhost,127.0.0.1,::1,10.0.0.5"
    assert os.environ["no_proxy"] == os.environ["NO_PROXY"] == wanted
