"""The doctor reports what is there, and each failure comes with something to do."""

import os
import socket
from importlib.metadata import version

import pytest

from megasync.preflight import doctor
from megasync.preflight.doctor import FAILURE, OK, WARNING


def test_this_environment_is_healthy_and_what_is_not_ok_says_what_to_do():
    findings = doctor.examine()
    assert [finding for finding in findings if finding.status == FAILURE] == []
    for finding in findings:
        assert finding.subject and finding.detail
        assert (finding.status == OK) == (finding.fix == "")


def test_another_version_than_the_locks_is_a_failure(tmp_path):
    lock = tmp_path / "cpu.lock"
    lock.write_text(f"# comment\nnumpy==1.0.0\nrich=={version('rich')}\nno-such-package==1\n")
    (finding,) = doctor.check_versions(lock)
    assert finding.status == FAILURE and "setup.sh" in finding.fix
    assert "numpy is" in finding.detail and "==1.0.0" in finding.detail
    assert "no-such-package is missing" in finding.detail and "rich" not in finding.detail


def test_a_build_tag_is_no_other_version(tmp_path):
    lock = tmp_path / "cpu.lock"
    lock.write_text(f"torch=={version('torch').split('+')[0]}\n")
    (finding,) = doctor.check_versions(lock)
    assert finding.status == OK


def test_without_a_lock_the_projects_own_requirements_count(monkeypatch, tmp_path):
    declared = ["rich>=13", "no-such-package>=2; extra == 'gpu'", "not-wanted-here; extra == 'test'"]
    monkeypatch.setattr(doctor, "requires", lambda _: declared)
    (finding,) = doctor.check_versions(tmp_path / "absent.lock")
    assert finding.detail == "no-such-package is missing" and "megasync[gpu]" in finding.fix


def test_a_patch_for_another_version_is_a_failure(monkeypatch):
    import megasync_patches

    monkeypatch.setattr(megasync_patches, "version", lambda package: "99.0")
    findings = list(doctor.check_patches())
    assert findings and all(finding.status == FAILURE and "99.0" in finding.detail for finding in findings)


def test_every_patch_file_is_examined():
    import megasync_patches

    subjects = {finding.subject for finding in doctor.check_patches()}
    assert {f"patch {patch.name}" for patch in megasync_patches.registered()} <= subjects


def test_an_address_of_another_machine_has_no_ports():
    (finding,) = doctor.check_ports("192.0.2.1")
    assert finding.status == FAILURE and "192.0.2.1" in finding.detail


def test_free_ports_are_given_back():
    (finding,) = doctor.check_ports()
    assert finding.status == OK
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))


def test_ray_authentication_turned_off_is_a_warning(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    (finding,) = doctor.check_ray()
    assert finding.status == WARNING and "RAY_AUTH_MODE" in finding.fix


def test_a_token_may_be_there_or_makeable(monkeypatch, tmp_path):
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    (finding,) = doctor.check_ray()
    assert finding.status == OK and "will be made" in finding.detail
    (tmp_path / ".ray").touch()
    (finding,) = doctor.check_ray()
    assert finding.status == FAILURE and finding.fix
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    (finding,) = doctor.check_ray()
    assert finding.status == OK and "secret" not in finding.detail


def test_too_little_disk_is_a_failure(monkeypatch):
    monkeypatch.setattr(doctor, "DISK_BYTES", 10**18)
    disk = next(iter(doctor.check_disk()))
    assert disk.status == FAILURE and "run_root" in disk.fix


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_a_failure(monkeypatch, tmp_path):
    tmp_path.chmod(0o500)
    monkeypatch.chdir(tmp_path)
    assert any(finding.subject == "run folder" for finding in doctor.check_disk())


def test_the_servers_plugin_is_registered_and_its_absence_is_told(monkeypatch):
    found = {finding.subject: finding.status for finding in doctor.check_plugins()}
    assert found["plugin sglang.srt.plugins:megasync"] == doctor.OK
    monkeypatch.setattr(doctor, "entry_points", lambda group: [])
    (finding,) = doctor.check_plugins()
    assert finding.status == FAILURE and "by broadcast only" in finding.detail and finding.fix


class Broken:
    name, value, dist = "broken", "gone:plugin", None

    def load(self):
        raise ImportError("no module named gone")


def test_a_plugin_that_cannot_be_loaded_is_a_failure(monkeypatch):
    monkeypatch.setattr(doctor, "entry_points", lambda group: [Broken()] if group == doctor.SERVER_PLUGINS else [])
    finding = next(iter(doctor.check_plugins()))
    assert finding.status == FAILURE and "no module named gone" in finding.detail and finding.fix
