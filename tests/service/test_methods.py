"""The page about the client's methods says what `methods` says, and without the client there is an error that helps."""

import importlib
import sys

import pytest

from megasync.errors import ConfigError
from megasync.service.methods import METHODS, NO_TOKEN, PAGE, REFUSED, page


def test_the_page_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == page(), "run `python -m megasync.service.methods`"


def test_each_refused_method_names_a_route_with_a_reason_and_no_reason_is_left_over():
    named = {why for methods in METHODS.values() for why in methods.values() if why}
    assert named - {NO_TOKEN} == set(REFUSED) - {"POST create_custom_loss"}


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "tinker", None)
    monkeypatch.delitem(sys.modules, "megasync.service.wire", raising=False)
    with pytest.raises(ConfigError, match=r"needs the package tinker.*megasync install serve"):
        importlib.import_module("megasync.service.wire")
