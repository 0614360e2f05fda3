"""The doctor reports the state of this machine, and a fix for each failure."""

import os
import sys
from importlib.metadata import PackageNotFoundError, version
from io import StringIO
from pathlib import Path
from types import ModuleType, SimpleNamespace

import psutil
import pytest
import torch
from rich.console import Console

from megasync.base import shared_memory
from megasync.base.files import ray_token
from megasync.config import Config
from megasync.planning import doctor
from megasync.planning.finding import FAILURE, OK, WARNING, Finding, check_ports
from megasync.planning.render import findings_table

PLUGINS = doctor.SERVER_PLUGINS


class BrokenPlugin:
    name, value, dist = "x", "gone:plugin", None

    def load(self):
        raise ImportError("no module named gone")


BROKEN = BrokenPlugin()


def test_the_server_plugin_is_registered():
    assert {finding.subject: finding.status for finding in doctor.check_plugins()}[f"plugin {PLUGINS}:megasync"] == OK


@pytest.mark.processes
def test_this_environment_has_no_failures_and_warnings_have_fixes():
    findings = doctor.examine()
    assert [finding for finding in findings if finding.status == FAILURE] == []
    for finding in findings:
        assert finding.subject and finding.detail
        assert (finding.status == OK) == (finding.fix == "")


def test_findings_are_not_truncated_on_a_narrow_terminal():
    text, path = StringIO(), f"/a/{'long' * 30}/path"
    findings = [Finding("a subject [1]", FAILURE, f"{path} is full", "free some space")]
    Console(file=text, width=60, color_system=None).print(findings_table(findings))
    shown = "".join(text.getvalue().split())
    assert path[-5:] in shown and shown.count("long") == 30 and "[1]" in shown


def no_room(*_: object) -> SimpleNamespace:
    return SimpleNamespace(available=10**9)


@pytest.mark.parametrize(
    ("place", "name", "value", "check", "subject", "status", "words"),
    [
        (doctor, "PYTHONS", ((99, 1),), doctor.check_python, "python", FAILURE, "with Python 99.1"),
        (os, "pidfd_open", None, doctor.check_python, "system", FAILURE, "5.3"),
        (os, "sched_getaffinity", lambda _: {0}, doctor.check_devices, "cpu", WARNING, "at least 2 cores"),
        (psutil, "virtual_memory", no_room, doctor.check_memory, "memory", WARNING, "stop other programs"),
        (doctor, "SHARED_MEMORY_BYTES", 10**18, doctor.check_memory, "shared memory", FAILURE, "--shm-size"),
        (shared_memory, "FOLDER", Path("/none"), doctor.check_memory, "shared memory", FAILURE, "--shm-size"),
        (doctor, "OPEN_FILES", 10**12, doctor.check_disk, "open files", FAILURE, "ulimit -n"),
        (doctor, "DISK_BYTES", 10**18, doctor.check_disk, "disk", FAILURE, "run_root"),
        (doctor, "writable", lambda _: False, doctor.check_disk, "run folder", FAILURE, "run_root"),
        (doctor, "entry_points", lambda group: [], doctor.check_plugins, f"plugin {PLUGINS}", FAILURE, "install cpu"),
        (
            doctor,
            "entry_points",
            lambda group: [BROKEN],
            doctor.check_plugins,
            f"plugin {PLUGINS}:x",
            FAILURE,
            "repair",
        ),
    ],
)
def test_a_requirement_that_is_not_met_has_a_fix(monkeypatch, place, name, value, check, subject, status, words):
    if value is None:
        monkeypatch.delattr(place, name)
    else:
        monkeypatch.setattr(place, name, value)
    found = next(finding for finding in check() if finding.subject == subject)
    assert found.status == status and words in found.fix


def test_a_gpu_used_by_another_process_is_a_warning(monkeypatch):
    memory = {0: (20 * 10**9, 80 * 10**9), 1: (79 * 10**9, 80 * 10**9)}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", memory.get)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "H100")
    _, busy, free = doctor.check_devices()
    assert busy.status == WARNING and "20 of 80 GB" in busy.detail and "CUDA_VISIBLE_DEVICES" in busy.fix
    assert free.status == OK


def test_a_version_that_differs_from_the_lock_is_a_failure(tmp_path):
    """A build tag is no difference."""
    lock = tmp_path / "cpu.lock"
    same = f"rich=={version('rich')}\ntorch=={version('torch').split('+')[0]}\n"
    lock.write_text(f"# comment\nnumpy==1.0.0\n{same}no-such-package==1\n")
    (finding,) = doctor.check_versions(lock)
    assert finding.status == FAILURE and "install cpu" in finding.fix
    assert "numpy is" in finding.detail and "==1.0.0" in finding.detail
    assert "no-such-package is missing" in finding.detail and not {"rich", "torch"} & set(finding.detail.split())


def test_without_a_lock_the_package_requirements_are_checked(monkeypatch, tmp_path):
    declared = ["rich>=13", "no-such-package>=2; extra == 'gpu'", "not-wanted-here; extra == 'test'"]
    monkeypatch.setattr(doctor, "requires", lambda _: declared)
    (finding,) = doctor.check_versions(tmp_path / "absent.lock")
    assert finding.detail == "no-such-package is missing" and "megasync[gpu]" in finding.fix


def test_a_patch_for_another_version_is_a_failure(monkeypatch):
    import megasync_patches

    monkeypatch.setattr(megasync_patches, "version", lambda package: "99.0")
    findings = [found for found in doctor.check_patches() if found.subject != "patch sglang_cpu_standins"]
    assert findings and all(found.status == FAILURE and "99.0" in found.detail and found.fix for found in findings)


@pytest.mark.parametrize(("package", "status"), [("verl", OK), ("sglang", FAILURE)])
def test_a_patch_of_an_optional_package_is_not_needed_without_it(monkeypatch, package, status):
    import megasync_patches

    def only_others(name):
        if name == package:
            raise PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(megasync_patches, "version", only_others)
    absent = [finding for finding in doctor.check_patches() if f"{package}, which is not" in finding.detail]
    absent += [finding for finding in doctor.check_patches() if f"{package} is not installed" in finding.detail]
    assert absent and {finding.status for finding in absent} == {status}


def test_every_patch_file_is_examined():
    import megasync_patches

    subjects = {finding.subject for finding in doctor.check_patches()}
    assert {f"patch {patch.name}" for patch in megasync_patches.registered()} <= subjects
    files = {path.stem for path in Path(megasync_patches.__path__[0]).iterdir() if path.stem[0] not in "_."}
    assert {subject.removeprefix("patch ").replace("-", "_") for subject in subjects} == files


def test_a_patch_that_is_no_longer_needed_is_reported(monkeypatch):
    import megasync_patches

    versions = {"megatron-core": "0.19.2"}
    monkeypatch.setattr(megasync_patches, "version", lambda package: versions.get(package) or version(package))
    listed = {finding.subject: finding for finding in doctor.check_patches()}
    assert listed["patch megatron-latent-te"].detail.startswith("not needed by megatron-core")
    assert listed["patch megatron-latent-te"].status == OK


@pytest.fixture
def gpu_environment(monkeypatch):
    """An environment for GPUs, on a machine without one."""
    monkeypatch.setattr(doctor, "environment_kind", lambda: "cuda")
    monkeypatch.setattr(doctor, "version", lambda package: "2.20.2")
    assert doctor.why_no_gpu() is not None


def test_transformer_engine_makes_an_environment_one_for_gpus(monkeypatch):
    assert doctor.environment_kind() == "cpu" and list(doctor.check_transformer_engine()) == []
    monkeypatch.setattr(doctor, "find_spec", lambda name: object())
    assert doctor.environment_kind() == "cuda"


def test_an_environment_for_gpus_without_a_gpu_is_described_as_such(gpu_environment):
    (whole,) = doctor.check_transformer_engine()
    assert (whole.status, whole.detail) == (OK, "2.20.2; imported only where there is a GPU")
    *_, gpu = doctor.check_devices()
    assert gpu.status == WARNING and gpu.detail == "no GPU: this machine has no GPU" and "cluster.address" in gpu.fix
    listed = {finding.subject: finding.detail for finding in doctor.check_patches()}
    assert listed["patch torch-cuda-calls"] == "not active: for cpu only"


def test_another_version_than_that_of_the_gpu_lock_is_a_warning(gpu_environment, monkeypatch, tmp_path):
    old, here = "python_version < '3'", "sys_platform == 'linux'"
    pins = [f"a==2.20.2 ; {old} \\", "    --hash=sha256:00", f"b==1.0 ; {here} \\", "    --hash=sha256:00"]
    (tmp_path / "gpu.lock").write_text("\n".join(pins))
    monkeypatch.setattr(doctor, "LOCKS", tmp_path)
    monkeypatch.setattr(doctor, "requires", lambda _: [])
    declared, tested = doctor.check_versions()
    assert declared.status == OK
    assert (tested.status, tested.detail) == (WARNING, "b is 2.20.2, not ==1.0") and "install gpu" in tested.fix


def test_a_missing_or_broken_transformer_engine_is_a_failure(gpu_environment, monkeypatch):
    def only_the_metapackage(package):
        if package == "transformer_engine_torch":
            raise PackageNotFoundError(package)
        return "2.20.2"

    monkeypatch.setattr(doctor, "version", only_the_metapackage)
    (absent,) = doctor.check_transformer_engine()
    assert absent.status == FAILURE and "transformer-engine-torch is not installed" in absent.detail
    monkeypatch.setattr(doctor, "version", lambda package: "2.20.2")
    monkeypatch.setattr(doctor, "why_no_gpu", lambda: None)
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    (broken,) = doctor.check_transformer_engine()
    assert broken.status == FAILURE and "transformer_engine" in broken.detail and broken.fix
    monkeypatch.setitem(sys.modules, "transformer_engine", ModuleType("transformer_engine"))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", ModuleType("transformer_engine.pytorch"))
    (whole,) = doctor.check_transformer_engine()
    assert (whole.status, whole.detail) == (OK, "2.20.2")


def test_an_address_of_another_machine_has_no_ports():
    (finding,) = check_ports("192.0.2.1")
    assert finding.status == FAILURE and "192.0.2.1" in finding.detail


def test_ray_authentication_turned_off_is_a_warning(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    (finding,) = doctor.check_ray()
    assert finding.status == WARNING and "RAY_AUTH_MODE" in finding.fix


def test_a_home_in_which_no_token_can_be_saved_stops_no_run_of_this_machine(monkeypatch, tmp_path):
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    (finding,) = doctor.check_ray()
    assert finding.status == OK and "will be created" in finding.detail and ray_token({}) == {}
    (tmp_path / ".ray").touch()
    (finding,) = doctor.check_ray()
    assert finding.status == WARNING and "a token of its own" in finding.detail and "RAY_AUTH_TOKEN" in finding.fix
    assert len(ray_token({})["RAY_AUTH_TOKEN"]) == 64 and ray_token({"RAY_AUTH_TOKEN": "x"}) == {}
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    (finding,) = doctor.check_ray()
    assert finding.status == OK and "secret" not in finding.detail


@pytest.mark.parametrize("config", [None, Config()], ids=["the machine", "a run"])
def test_verl_is_examined_without_a_run_only(monkeypatch, config):
    monkeypatch.setattr(doctor, "CHECKS", ())
    monkeypatch.setattr(doctor, "check_verl", lambda: [Finding(doctor.VERL_SUBJECT, OK, "examined")])
    subjects = {finding.subject for finding in doctor.examine(config)}
    assert (doctor.VERL_SUBJECT in subjects) is (config is None)


def test_proxies_are_named_without_their_addresses(monkeypatch):
    monkeypatch.setenv("https_proxy", "http://user:secret@proxy:3128")
    (finding,) = doctor.check_proxies()
    assert finding.status == OK and "https_proxy" in finding.detail and "secret" not in finding.detail


def test_a_temporary_folder_that_is_too_long_for_sockets_is_replaced_or_reported(monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / ("x" * 80)))
    (finding,) = doctor.check_socket_folder()
    assert finding.status == OK and finding.detail.startswith("/tmp, because")
    monkeypatch.setattr("megasync.base.files._SHORT_FOLDERS", ())
    (finding,) = doctor.check_socket_folder()
    assert finding.status == FAILURE and "RAY_TMPDIR" in finding.fix and "107 bytes" in finding.fix


def test_without_a_runs_packages_the_doctor_names_the_command_that_installs_them(monkeypatch):
    find = doctor.find_spec
    monkeypatch.setattr(doctor, "find_spec", lambda name: None if name == "torch" else find(name))
    findings = [*doctor.check_patches(), *doctor.check_devices()]
    assert [(f.subject, f.status) for f in findings] == [("patches", WARNING), ("cpu", OK), ("gpu", WARNING)]
    assert all("megasync install cpu" in str(finding.fix) for finding in findings if finding.status == WARNING)
