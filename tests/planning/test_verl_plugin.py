"""The doctor checks that verl has megasync's engine."""

import subprocess
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec

import pytest

from megasync.planning import doctor
from megasync.planning.finding import FAILURE, OK

# Not `verl`: without the package that is the folder of its examples.
needs_verl = pytest.mark.skipif(
    find_spec("verl.version") is None, reason="verl is not installed; run `megasync install verl`"
)


def test_without_verl_there_is_no_failure(monkeypatch):
    def version(package):
        raise PackageNotFoundError(package)

    monkeypatch.setattr(doctor, "version", version)
    (finding,) = doctor.check_verl()
    assert finding.status == OK
    assert finding.detail == "verl is not installed; the plugin is for verl 0.9.1"


@pytest.mark.extra
@needs_verl
def test_a_fresh_interpreter_has_the_engine():
    (finding,) = doctor.check_verl()
    assert finding.status == OK, finding.detail
    assert finding.detail == "verl 0.9.1 has the engine of megasync.integrations.verl.engine"


@pytest.mark.extra
@needs_verl
def test_a_plugin_that_verl_does_not_load_is_reported(monkeypatch):
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "none")
    (finding,) = doctor.check_verl()
    assert finding.status == FAILURE
    assert "Unknown backend: megasync" in finding.detail
    assert "VERL_USE_EXTERNAL_PLUGINS" in finding.fix


def test_the_reason_of_a_failure_is_the_last_line(monkeypatch):
    ended = subprocess.CompletedProcess([], 1, "", "Traceback\n  somewhere\nConfigError: verl 0.10.0 is installed\n")
    monkeypatch.setattr(doctor, "version", lambda package: "0.10.0")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: ended)
    (finding,) = doctor.check_verl()
    assert finding.status == FAILURE
    assert finding.detail == "verl 0.10.0 does not have the engine: ConfigError: verl 0.10.0 is installed"
    assert "install verl 0.9.1" in finding.fix
