"""A fixed address is used unchanged; auto selects an address of this machine."""

import socket

from megasync.config.host import is_loopback, resolve_host


def test_a_fixed_address_is_kept():
    assert resolve_host("10.1.2.3") == "10.1.2.3"


def test_auto_selects_an_address_that_can_be_bound():
    with socket.socket() as listener:
        listener.bind((resolve_host("auto"), 0))


def test_loopback_is_recognised():
    assert is_loopback("127.0.0.1") and is_loopback("::1") and is_loopback("localhost")
    assert not is_loopback("10.0.0.1") and not is_loopback("node-1")
